"""Baselines that are one long convolution: their base class, the cache of kernels, and helpers for parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..kernels import resampled
from ..mixers import Mixer


class KeptKernel(nn.Module):
    """A convolution that may keep its kernel for inference.

    It lets go of it in training mode, in a pass with gradients and when weights are loaded: parameters change then.
    """

    kept: Tensor | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("kept", None, persistent=False)
        self.kept_lead = 0

    def keep(self, kernel: Tensor, lead: int) -> None:
        """Keep a kernel (C, K) with `lead` taps ahead of lag 0."""
        self.kept, self.kept_lead = kernel.detach(), lead

    def kernel_for(self, lead: int, behind: int, make: Callable[[], Tensor]) -> Tensor:
        """Return so much of the kernel that is kept, or one that is made."""
        if torch.is_grad_enabled() and self.kept is not None:
            self.kept = None
        kernel, first = self.kept, self.kept_lead - lead
        if kernel is None or first < 0:
            return make()
        taps = kernel[:, first : self.kept_lead + behind]
        return taps if taps.shape[1] == lead + behind else make()

    def train(self, mode: bool = True) -> Self:
        """Set the mode."""
        if mode:
            self.kept = None
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.kept = None
        super()._load_from_state_dict(*args)


class LongConvolution(KeptKernel, Mixer):
    """y = k * u + D u, with the kernels that a subclass makes in `kernel`."""

    reach: ClassVar[str] = "l_max"
    """Up to where the kernel goes: "l_max", or "input" for a kernel that never ends."""

    def __init__(self, d_model: int, l_max: int, bidirectional: bool = False, **factory: Any) -> None:
        super().__init__(d_model, l_max, bidirectional)
        self.D = parameter(normal(d_model), **factory)

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return (directions, d_model, length): taps into the past and, second, from u[t + 1] on into the future."""
        raise NotImplementedError

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Convolve with both kernels and the skip D as one."""
        L = x.shape[-1]
        taps = L if self.reach == "input" else min(L, resampled(self.l_max, rate))
        lead = taps if self.bidirectional else 0
        make = functools.partial(self._joined, taps, rate)
        kernel = self.kernel_for(lead, taps, make) if rate == 1 else make()
        inside = gelu and not torch.is_grad_enabled()  # its gradient needs what it was applied to
        y = ops.fft_conv(x, kernel, lead, gelu=inside)
        return F.gelu(y) if gelu and not inside else y

    def freeze(self) -> None:
        """Keep the kernel up to l_max, at rate 1."""
        self.keep(self._joined(self.l_max, 1.0), self.l_max if self.bidirectional else 0)

    def _joined(self, taps: int, rate: float) -> Tensor:
        """Return the kernel of the future, backwards, then that of the past with D at lag 0."""
        kernels = self.kernel(taps, rate)
        joined, lead = kernels[0], 0
        if self.bidirectional:
            joined, lead = torch.cat([kernels[1].flip(-1), joined], -1), taps
        return joined + F.pad(wide(self.D)[:, None], (lead, joined.shape[-1] - lead - 1))


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype to compute in: no less than float32."""
    return x.to(ops.compute_dtype(x))


def as_complex(x: Tensor) -> Tensor:
    """Return a parameter of pairs (..., 2) as complex numbers (...)."""
    return torch.view_as_complex(wide(x))


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw standard normal numbers, the same ones for every dtype and device they go to."""
    return torch.randn(*shape, dtype=dtype, device="cpu")


def parameter(x: Tensor, device: Any = None, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a parameter with these values, in torch's default dtype unless told otherwise.

    Complex numbers become pairs (..., 2), which optimizers and casts treat like any other.
    """
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return nn.Parameter(x.to(device=device, dtype=dtype or torch.get_default_dtype()))
