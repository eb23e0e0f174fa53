"""What a kernel parameterisation is, and the registry of those there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn


class IntegerBuffers(nn.Module):
    """A module that runs on the numbers in some of its buffers."""

    def integers(self, name: str) -> Any:
        """Return an integer buffer as nested tuples.

        Reading waits for the device, so the numbers are kept until the buffer changes; on meta those kept are all.
        """
        buffer = self.get_buffer(name)
        kept = self.__dict__.setdefault("_integers", {})
        key = (id(buffer), buffer._version)
        if not buffer.is_meta and kept.get(name, (None,))[0] != key:
            kept[name] = (key, _as_tuples(buffer.tolist()))
        return kept[name][1]

    # What `torch.compiler.assume_constant_result` sets; calling that here would import all of torch's compiler.
    integers._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Kernel(IntegerBuffers):
    """The kernels of one direction: parameters -> one kernel of shape (channels, l_i) per resolution.

    `lengths` are the l_i, `kernel_size` is l0. A subclass creates its parameters in `build`, draws them in
    `reset_parameters` such that each kernel's expected energy is 1 whatever its length, and makes the kernels from
    them in `forward`.
    """

    continuous: ClassVar[bool] = False
    """Whether the kernels can be sampled at another rate; if not, `forward` is only called with rate 1."""

    @property
    def positions(self) -> tuple[tuple[int, ...], ...] | None:
        """Where the taps of each resolution sit, if the kernels are a few taps: `forward` then gives those only."""
        return None

    def __init__(
        self,
        channels: int,
        lengths: Sequence[int],
        kernel_size: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.lengths, self.kernel_size = channels, tuple(lengths), kernel_size
        self.build(seed, device=device, dtype=dtype)
        self.reset_parameters()

    def build(self, seed: int, **factory: Any) -> None:
        """Create the parameters, empty, with `**factory` (device and dtype).

        `seed` settles whatever is drawn once and never trained.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw fresh parameters."""
        raise NotImplementedError

    def forward(self, rate: float = 1.0, delay: float = 0.0) -> list[Tensor]:
        """Return the kernels, each (channels, l_i) or, for tap kernels, (channels, number of its taps).

        A kernel that is constant over its length may be given as (channels, 1).

        At another rate kernel i has `resampled(l_i, rate)` taps, tap s being the kernel at time s / rate + delay,
        scaled so that its sum (the gain at DC) stays the same.
        """
        raise NotImplementedError

    wave_modes: int = 0
    """M, if the kernels are M waves each and `waves` gives them; 0 if not, or too many for that to be worth it."""

    def waves(self) -> Tensor:
        """Return the kernels at rate 1 as waves, (N, channels, 2 M - 1): p_0, p_1, r_1, p_2, ...

        Kernel i is p_0 + sum_m p_m cos(w_m tau) + r_m sin(w_m tau) at tap tau, with w_m = 2 pi m / l_i.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return what `print` shows of the kernel."""
        return f"{self.channels}, lengths={self.lengths}"


def _as_tuples(values: Any) -> Any:
    return tuple(map(_as_tuples, values)) if isinstance(values, list) else values


def resampled(length: int, rate: float) -> int:
    """Return the number of taps that a kernel of this length has at this rate."""
    return max(1, round(rate * length))


_REGISTRY: dict[str, type[Kernel]] = {}
_Class = TypeVar("_Class", bound=type[Kernel])


def register_kernel(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: make a parameterisation known to `MRConv` as `kernel=name`."""

    def register(cls: _Class) -> _Class:
        taken = _REGISTRY.get(name, cls)
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"kernel name {name!r} is taken by {taken.__module__}.{taken.__qualname__}")
        _REGISTRY[name] = cls
        return cls

    return register


def kernel_names() -> list[str]:
    """Return the names of all registered parameterisations."""
    return sorted(_REGISTRY)


def kernel_class(name: str) -> type[Kernel]:
    """Return the parameterisation registered under a name."""
    if not isinstance(name, str) or name not in _REGISTRY:
        near = difflib.get_close_matches(str(name), _REGISTRY, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"kernel must be one of {', '.join(kernel_names())}; got {name!r}{hint}")
    return _REGISTRY[name]
