"""Configurations: one flat dataclass per model, every value in it, JSON in and out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

C = TypeVar("C", bound="Config")


@dataclass(kw_only=True)
class Config:
    """Options with names."""

    merged: bool = False

    @classmethod
    def make(cls: type[C], options: Mapping[str, Any]) -> C:
        """Build from names and values; an unknown name is refused with the nearest right one."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"
                raise TypeError(f"{cls.__name__} has no option {name!r}{hint}")
        return cls(**options)


@dataclass(kw_only=True)
class LayerConfig(Config):
    """The arguments of `MRConv`, which explains them."""

    d_model: int
    l_max: int
    kernel: str = "fourier"
    kernel_size: int = 1
    bidirectional: bool = False
    combine: str = "sum"
    decay: float | Sequence[float] | None = None
    norm: str | None = None
    heads: int = 1
    groups: int = 1
    backend: str = "auto"
    eps: float = 1e-5
    momentum: float | None = 0.1
    sync_stats: bool = False
    rate: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Make a pair that went through JSON a pair again."""
        if isinstance(self.decay, list):
            self.decay = tuple(self.decay)

    def layer(self) -> dict[str, Any]:
        """Return the part that is `MRConv`'s, without d_model and l_max."""
        names = [field.name for field in dataclasses.fields(LayerConfig)]
        return {name: getattr(self, name) for name in names if name not in ("d_model", "l_max")}


@dataclass(kw_only=True)
class BackboneConfig(LayerConfig):
    """A stack of blocks.

    depth: number of blocks. vocab_size: for token input, or d_input: channels of real-valued input; with neither, the
    input already has d_model channels. block_norm: "batch" or "layer", before each block's layer (prenorm) or after
    its residual. mask_padding: hide positions past `lengths` from every layer and statistic, not only the pooling.
    mixer: "mrconv", or one of `mrconv.baselines.mixer_names()` in its place, with its own mixer_options.
    """

    depth: int
    mixer: str = "mrconv"
    mixer_options: dict[str, Any] | None = None
    vocab_size: int | None = None
    d_input: int | None = None
    dropout: float = 0.0
    block_norm: str = "batch"
    prenorm: bool = False
    mask_padding: bool = False


@dataclass(kw_only=True)
class ClassifierConfig(BackboneConfig):
    """One class for a sequence. pool: "mean" over the valid positions, or the "last" of them."""

    n_classes: int
    pool: str = "mean"


@dataclass(kw_only=True)
class TwoTowerConfig(ClassifierConfig):
    """One class for a pair of sequences."""

    n_classes: int = 2


@dataclass(kw_only=True)
class LabellerConfig(BackboneConfig):
    """One class for every position."""

    n_classes: int


@dataclass(kw_only=True)
class RegressorConfig(BackboneConfig):
    """Real numbers for a sequence, or with per_position for every position."""

    n_outputs: int = 1
    pool: str = "mean"
    per_position: bool = False


@dataclass(kw_only=True)
class LanguageModelConfig(BackboneConfig):
    """The next token at every position."""

    block_norm: str = "layer"
    prenorm: bool = True


@dataclass(kw_only=True)
class VisionConfig(Config):
    """A hierarchy of stages over feature maps, as ConvNeXt has it.

    image_size: height and width of the pictures (one number: both) that the kernels are laid out for. patch_size: side
    of the first patches; every stage after the first halves the map. depths, dims, kernel_sizes: blocks, channels and
    l0 of each stage. mixer: "mrconv", "conv" (ConvNeXt's own 7x7 depthwise convolution), or one of
    `mrconv.baselines.mixer_names()` with its own mixer_options. drop_path: of the last block, rising linearly from 0 at
    the first. layer_scale: initial weight of every block's output. dropout: before the head. global_pool: "avg", or ""
    for the normalised map itself in the place of a prediction, which needs n_classes 0. The rest as `MRConv`.
    """

    n_classes: int = 1000
    in_channels: int = 3
    image_size: int | Sequence[int] = 224
    patch_size: int = 4
    depths: Sequence[int] = (3, 3, 9, 3)
    dims: Sequence[int] = (96, 192, 384, 768)
    kernel_sizes: Sequence[int] = (196, 49, 28, 28)
    mixer: str = "mrconv"
    mixer_options: dict[str, Any] | None = None
    kernel: str = "fourier"
    norm: str = "batch"
    backend: str = "auto"
    momentum: float | None = 0.1
    sync_stats: bool = False
    drop_path: float = 0.0
    layer_scale: float = 1e-6
    dropout: float = 0.0
    global_pool: str = "avg"
    seed: int | None = None

    def layer(self) -> dict[str, Any]:
        """Return the part that is `MRConv`'s and the same in all stages."""
        names = ("kernel", "norm", "backend", "momentum", "sync_stats", "merged")
        return {name: getattr(self, name) for name in names} | {"bidirectional": True}
