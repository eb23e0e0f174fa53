"""What a kernel parameterisation is, and the registry of those there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._utils.registry import Registry


class IntegerBuffers(nn.Module):
    """A module that runs on the numbers in some of its buffers."""

    def integers(self, name: str) -> Any:
        """Return an integer buffer as nested tuples.

        Reading waits for the device, so the numbers are kept until the buffer changes; those kept are all there are on
        meta and in `torch.export`, which has no values to read.
        """
        buffer = self.get_buffer(name)
        kept = self.__dict__.setdefault("_integers", {})
        key = (id(buffer), buffer._version)
        unread = buffer.is_meta or torch.compiler.is_exporting()
        if not unread and kept.get(name, (None,))[0] != key:
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
        """Return the kernels: each (channels, l_i), (channels, 1) if constant, or (channels, taps) if at positions.

        At another rate kernel i has `resampled(l_i, rate)` taps, tap s being the kernel at time s / rate + delay,
        scaled so that its sum (the gain at DC) stays the same.
        """
        raise NotImplementedError

    @property
    def constant(self) -> bool:
        """Whether every kernel is constant over its length; `forward` then returns (channels, 1) for each."""
        return False

    @property
    def moving_modes(self) -> int:
        """M, if every kernel is M Fourier modes and M is small enough to compute them as moving sums; else 0."""
        return 0

    def mode_coefficients(self) -> Tensor:
        """Return the kernels at rate 1 as modes, (N, channels, 2 M - 1): p_0, p_1, r_1, p_2, ...

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


KERNELS: Registry[Kernel] = Registry("kernel")
register_kernel = KERNELS.register
"""Class decorator: make a parameterisation known to `MRConv` as `kernel=name`."""
kernel_names = KERNELS.names
kernel_class = KERNELS.get
