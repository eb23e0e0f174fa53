"""Shapes that benchmarks measure; imports no torch, so that the command line reports a wrong name at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

MINIMUM, MAXIMUM = 256, 2**20


class Named(Protocol):
    """Anything that `--only` can select."""

    @property
    def name(self) -> str:
        """The name that `--only` matches."""


T = TypeVar("T", bound=Named)


@dataclass(frozen=True)
class Shape:
    """One layer and its input."""

    name: str
    batch: int
    length: int
    channels: int
    kernel: str
    kernel_size: int
    bidirectional: bool = False
    combine: str = "sum"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `MRConv`."""
        names = ("kernel", "kernel_size", "bidirectional", "combine")
        return {name: getattr(self, name) for name in names}

    def small(self) -> Shape:
        """Return the shape with an eighth of the batch."""
        return replace(self, batch=max(1, self.batch // 8))


@dataclass(frozen=True)
class ModelShape(Shape):
    """A stack of blocks and its input."""

    depth: int = 6
    block_norm: str = "batch"

    def small(self) -> ModelShape:
        """Return the shape with an eighth of the batch and at most two blocks."""
        return replace(self, batch=max(1, self.batch // 8), depth=min(2, self.depth))


@dataclass(frozen=True)
class Kind:
    """A layer that is measured at all lengths; kernel None is one dense FFT convolution."""

    name: str
    kernel: str | None = None
    kernel_size: int = 1


@dataclass(frozen=True)
class VisionShape:
    """Vision models of one size; `reduced` ones have one block per stage and take images of 64 x 64."""

    name: str
    size: str
    batch: int = 256
    reduced: bool = False

    def small(self) -> VisionShape:
        """Return the shape of reduced models with a batch of 2."""
        return replace(self, batch=2, reduced=True)


LAYERS = [
    Shape("ListOps l0=1", 50, 2048, 128, "fourier", 1),
    Shape("ListOps l0=2", 50, 2048, 128, "fourier", 2),
    Shape("Text", 16, 4096, 256, "fourier", 1),
    Shape("Image dilated", 50, 1024, 512, "dilated", 8),
    Shape("Image fourier", 50, 1024, 512, "fourier", 32),
    Shape("Pathfinder", 64, 1024, 256, "fourier+sparse", 16, True),
    Shape("Speech", 16, 16000, 128, "fourier", 32, True),
    Shape("Path-X", 16, 16384, 256, "fourier", 64, True, "concat"),
]

MODELS = [
    ModelShape("ListOps", 50, 2048, 128, "fourier", 2, depth=8),
    ModelShape("Text", 16, 4096, 256, "fourier", 1),
    ModelShape("Image", 50, 1024, 512, "dilated", 8, block_norm="layer"),
    ModelShape("Pathfinder", 64, 1024, 256, "fourier+sparse", 16, True),
    ModelShape("Path-X", 16, 16384, 256, "fourier", 64, True, "concat"),
]

STACKS = ("none", "ours", "branches", "dense", "longconv")
"""The mixers of `mrconv bench model`."""

LENGTHS = [ModelShape(f"{n}K", max(1, 64 // n), 1024 * n, 256, "fourier", 1, depth=1) for n in (1, 2, 4, 8, 16, 32, 64)]

VISION = [VisionShape("T", "tiny"), VisionShape("S", "small"), VisionShape("B", "base")]

KINDS = [
    Kind("fourier l0=1", "fourier", 1),
    Kind("fourier l0=32", "fourier", 32),
    Kind("dilated l0=8", "dilated", 8),
    Kind("dense"),
]


def lengths(device: str, small: bool) -> list[tuple[int, int, int]]:
    """Return (batch, length, channels) for lengths that are powers of 2, with a constant batch * length."""
    total, channels = (2**16, 8) if small else (2**20, 64 if device == "cuda" else 2)
    powers = [2**i for i in range(64) if MINIMUM <= 2**i <= min(MAXIMUM, total)]
    return [(total // length, length, channels) for length in powers]


def select(entries: Sequence[T], names: Iterable[str] | None) -> list[T]:
    """Return the entries whose names start with one of these, ignoring case; all if None."""
    if names is None:
        return list(entries)
    for name in names:
        if not any(entry.name.lower().startswith(name.lower()) for entry in entries):
            allowed = ", ".join(repr(entry.name) for entry in entries)
            raise ValueError(f"{name!r} must be the name, or the start of the name, of one of {allowed}")
    prefixes = tuple(name.lower() for name in names)
    return [entry for entry in entries if entry.name.lower().startswith(prefixes)]
