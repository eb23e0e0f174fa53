"""The interface of kernel parameterisations, and their registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._utils.registry import Registry


class CachedIntegerBuffers(nn.Module):
    """A module with integer buffers whose values are also needed in Python, as shapes or lags."""

    def integers(self, name: str) -> Any:
        """Return an integer buffer as nested tuples.

        Reading a buffer synchronises with the device, so the values are cached until the buffer changes. On the meta
        device and in `torch.export`, where a buffer has no values, the cached ones are returned.
        """
        buffer = self.get_buffer(name)
        cache = self.__dict__.setdefault("_integers", {})
        key = (id(buffer), buffer._version)
        unreadable = buffer.is_meta or torch.compiler.is_exporting()
        if not unreadable and cache.get(name, (None,))[0] != key:
            cache[name] = (key, _as_tuples(buffer.tolist()))
        return cache[name][1]

    # The effect of `torch.compiler.assume_constant_result`, which would import all of torch's compiler.
    integers._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Kernel(CachedIntegerBuffers):
    """The kernels of one direction: parameters -> one kernel of shape (channels, l_i) per resolution.

    `lengths` are the l_i, `kernel_size` is l0. A subclass creates its parameters in `build`, initialises them in
    `reset_parameters` such that the expected energy of every kernel is 1, and computes the kernels in `forward`.
    """

    continuous: ClassVar[bool] = False
    """Whether the kernels can be sampled at another rate; if not, `forward` is only called with rate 1."""

    @property
    def positions(self) -> tuple[tuple[int, ...], ...] | None:
        """The positions of each resolution's taps, if the kernels are scattered taps; None if they are dense."""
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
        """Create the parameters, uninitialised, with `**factory` (device and dtype).

        `seed` determines values that are drawn once and never trained, such as tap positions.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        raise NotImplementedError

    def forward(self, rate: float = 1.0, delay: float = 0.0) -> list[Tensor]:
        """Return a kernel per resolution: (channels, l_i), (channels, 1) if constant, (channels, taps) if scattered.

        At another rate kernel i has `resampled(l_i, rate)` taps. Tap s is the kernel at time s / rate + delay, scaled
        so that the sum of the taps (the gain at DC) stays the same.
        """
        raise NotImplementedError

    @property
    def constant(self) -> bool:
        """Whether every kernel is constant over its length; `forward` then returns (channels, 1) for each."""
        return False

    @classmethod
    def packed(cls, directions: Sequence[Kernel], counts: Sequence[int]) -> Tensor | None:
        """Return the first taps of the dense kernels of all directions at rate 1, (channels, sum of counts).

        `counts` has a number for each kernel of all directions. None if the class has no faster way than `forward`.
        """
        return None

    def constant_values(self, rate: float = 1.0) -> tuple[Tensor, list[float]]:
        """Return `forward` of constant kernels as values (N, channels, ...) and a factor for each resolution.

        Kernel i is factors[i] times the first of values[i, c], so that a parameter can be used as it is stored.
        """
        kernels = self(rate)
        return torch.stack(kernels), [1.0] * len(kernels)

    @property
    def moving_modes(self) -> int:
        """M, if every kernel is M Fourier modes and M is small enough to compute them as moving sums; else 0."""
        return 0

    def mode_values(self) -> tuple[Tensor, Sequence[float]]:
        """Return the kernels at rate 1 as modes: values (N, channels, M, 2), and a factor for each of N * M * 2.

        With p_m and r_m the values times their factors, kernel i is sum_m p_m cos(w_m tau) + r_m sin(w_m tau) at tap
        tau, with w_m = 2 pi m / l_i.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the description that `print` shows."""
        return f"{self.channels}, lengths={self.lengths}"


def _as_tuples(values: Any) -> Any:
    return tuple(map(_as_tuples, values)) if isinstance(values, list) else values


def resampled(length: int, rate: float) -> int:
    """Return the number of taps at this rate of a kernel that has this length at rate 1."""
    return max(1, round(rate * length))


KERNELS: Registry[Kernel] = Registry("kernel")
register_kernel = KERNELS.register
"""Class decorator: register a parameterisation as `kernel=name` of `MRConv`."""
kernel_names = KERNELS.names
kernel_class = KERNELS.get
