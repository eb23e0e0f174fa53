"""Long convolution by FFT with a kernel of taps at consecutive lags, and its hand-written backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fft import irfft, rfft
from torch.nn import functional as F


def fast_length(n: int) -> int:
    """Return the smallest even length >= n whose only prime factors are 2, 3 and 5: FFTs like those."""
    n = max(2, n + n % 2)
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 2


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 if any tensor has it, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Refuse tangents: the ops know reverse-mode differentiation only, and would drop them without a word."""
    if forward_ad._current_level >= 0:
        for x in tensors:
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError("mrconv has no forward-mode differentiation (jvp, jacfwd): use reverse mode")


def twins(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return a contiguous, uninitialised tensor like each: what an op returns for fake tensors."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def per_tap(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Repeat row i of (N, C) for each of sizes[i] taps: (C, sum of sizes)."""
    return torch.cat([row[:, None].expand(-1, size) for row, size in zip(rows.unbind(0), sizes, strict=True)], 1)


def fft_conv(u: Tensor, kernel: Tensor, lead: int = 0) -> Tensor:
    """Depthwise convolution y[t] = sum_j kernel[j] u[t + lead - j], the size of u.

    u (B, C, L), kernel (C, K); the first `lead` taps look ahead, so that lead = 0 is causal. The kernel may
    be longer or shorter than u. Half precision is computed in float32; the result has u's dtype.
    """
    refuse_forward_mode(u, kernel)
    return _fft_conv(u, kernel, lead)


def fft_conv_reference(u: Tensor, kernel: Tensor, lead: int = 0) -> Tensor:
    """Compute `fft_conv` by plain differentiable FFT calls of full length."""
    n = u.shape[-1] + kernel.shape[-1]
    return irfft(rfft(u, n) * rfft(kernel, n), n)[..., lead : lead + u.shape[-1]]


def _plan(u: Tensor, kernel: Tensor, lead: int) -> tuple[Tensor, Tensor, int, int, int]:
    """Cut taps that can never meet u; choose an FFT length in which no needed output wraps around."""
    L, K = u.shape[-1], kernel.shape[-1] - lead
    ahead, behind = min(lead, L - 1), min(K, L)
    n = fast_length(max(L + behind - 1, L + ahead))
    dtype = compute_dtype(u, kernel)
    return u.to(dtype), kernel[:, lead - ahead : lead + behind].to(dtype), ahead, behind, n


@torch.library.custom_op("mrconv::fft_conv", mutates_args=())
def _fft_conv(u: Tensor, kernel: Tensor, lead: int) -> Tensor:
    x, k, ahead, _, n = _plan(u, kernel, lead)
    y = irfft(rfft(x, n) * rfft(k, n), n)[..., ahead : ahead + u.shape[-1]]
    return y.to(u.dtype, memory_format=torch.contiguous_format, copy=True)


@torch.library.custom_op("mrconv::fft_conv_backward", mutates_args=())
def _fft_conv_backward(grad: Tensor, u: Tensor, kernel: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    x, k, ahead, behind, n = _plan(u, kernel, lead)
    spectrum = rfft(F.pad(grad.to(x.dtype), (ahead, 0)), n)
    du = irfft(rfft(k, n).conj() * spectrum, n)[..., : u.shape[-1]]
    dk = irfft((rfft(x, n).conj() * spectrum).sum(0), n)[..., : ahead + behind]
    dk = F.pad(dk, (lead - ahead, kernel.shape[-1] - lead - behind))
    return du.to(u.dtype).contiguous(), dk.to(kernel.dtype).contiguous()


@_fft_conv.register_fake
def _(u: Tensor, kernel: Tensor, lead: int) -> Tensor:
    return twins(u)[0]


@_fft_conv_backward.register_fake
def _(grad: Tensor, u: Tensor, kernel: Tensor, lead: int) -> tuple[Tensor, ...]:
    return twins(u, kernel)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, kernel, ctx.lead = inputs
    ctx.save_for_backward(u, kernel)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, kernel = ctx.saved_tensors
    return *_fft_conv_backward(grad, u, kernel, ctx.lead), None


_fft_conv.register_autograd(_backward, setup_context=_setup)
