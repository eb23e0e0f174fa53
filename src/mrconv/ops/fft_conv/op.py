"""Long convolution by FFT with a kernel of taps at consecutive lags, and its hand-written backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fft import irfft, rfft
from torch.nn import functional as F

from ..backends import use_triton
from .spectra import Timeline, engine


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 if any tensor has it, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Refuse tangents: the ops know reverse-mode differentiation only, and would drop them without a word."""
    if forward_ad._current_level >= 0:
        for x in tensors:
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError("mrconv has no forward-mode differentiation (jvp, jacfwd): use reverse mode")


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return tensors as kernels that know no strides read them."""
    return tuple(x if x is None else x.contiguous() for x in tensors)


def twins(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return a contiguous, uninitialised tensor like each: what an op returns for fake tensors."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the gradient of a bias (C,) added to (B, C, L)."""
    return None if bias is None else grad.sum((0, 2), dtype=compute_dtype(grad)).to(bias.dtype)


def wanted(ctx: Any, first: int, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of optional inputs from `first` on, None for those that were None."""
    return tuple(g if ctx.needs_input_grad[first + i] else None for i, g in enumerate(grads))


def per_tap(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Repeat row i of (N, C) for each of sizes[i] taps: (C, sum of sizes)."""
    return torch.cat([row[:, None].expand(-1, size) for row, size in zip(rows.unbind(0), sizes, strict=True)], 1)


def fft_conv(
    u: Tensor,
    kernel: Tensor,
    lead: int = 0,
    bias: Tensor | None = None,
    gelu: bool = False,
    backend: str = "auto",
    spectrum: Tensor | None = None,
) -> Tensor:
    """Depthwise convolution y[t] = sum_j kernel[j] u[t + lead - j] + bias, then GELU if asked for, the size of u.

    u (B, C, L), kernel (C, K), bias (C,); the first `lead` taps look ahead, so that lead = 0 is causal. The kernel may
    be longer or shorter than u. Half precision is computed in float32; the result has u's dtype. `spectrum` is what
    `kernel_spectrum` gave for this kernel and an input of this length, to save its FFT.
    """
    refuse_forward_mode(u, kernel, bias)
    return _fft_conv(u, kernel, bias, spectrum, lead, gelu, use_triton(u, backend))


def kernel_spectrum(u: Tensor, kernel: Tensor, lead: int = 0, backend: str = "auto") -> Tensor:
    """Return a kernel's spectrum for inputs as long as u, as pairs of numbers."""
    return torch.view_as_real(_Plan(u, kernel, lead, use_triton(u, backend)).kernel)


def fft_conv_reference(
    u: Tensor, kernel: Tensor, lead: int = 0, bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Compute `fft_conv` by plain differentiable FFT calls of full length."""
    n = u.shape[-1] + kernel.shape[-1]
    y = irfft(rfft(u, n) * rfft(kernel, n), n)[..., lead : lead + u.shape[-1]]
    y = y if bias is None else y + bias[:, None]
    return F.gelu(y) if gelu else y


class _Plan:
    """Taps that can meet u, and an FFT length in which no needed output wraps around."""

    def __init__(self, u: Tensor, kernel: Tensor, lead: int, triton: bool, spectrum: Tensor | None = None) -> None:
        L, K = u.shape[-1], kernel.shape[-1] - lead
        self.ahead, self.behind = min(lead, L - 1), min(K, L)
        self.by = engine(compute_dtype(u, kernel), triton)
        self.n = self.by.fast_length(max(L + self.behind - 1, L + self.ahead))
        if spectrum is None:
            taps = kernel[:, lead - self.ahead : lead + self.behind].to(self.by.dtype)
            self.kernel = self.by.kernels(taps / self.n, self.n)
        else:
            if spectrum.shape != (kernel.shape[0], self.n // 2 + 1, 2):
                raise ValueError(f"spectrum {tuple(spectrum.shape)} is not this kernel's for an input of length {L}")
            self.kernel = torch.view_as_complex(spectrum)

    def slices(self, u: Tensor) -> Iterator[slice]:
        """Yield some sequences at a time."""
        return self.by.slices(u.shape[0], u.shape[1], self.n)


@torch.library.custom_op("mrconv::fft_conv", mutates_args=())
def _fft_conv(
    u: Tensor, kernel: Tensor, bias: Tensor | None, spectrum: Tensor | None, lead: int, gelu: bool, triton: bool
) -> Tensor:
    plan, y = _Plan(u, kernel, lead, triton, spectrum), torch.empty_like(u)
    by = plan.by
    for rows in plan.slices(u):
        spectrum = by.scale_(by.spectrum(Timeline(u), plan.n, rows=rows), plan.kernel)
        by.output(by.inverse(spectrum, plan.n), plan.ahead, y[rows], bias, gelu=gelu)
    return y


@torch.library.custom_op("mrconv::fft_conv_backward", mutates_args=())
def _fft_conv_backward(grad: Tensor, u: Tensor, kernel: Tensor, lead: int, triton: bool) -> tuple[Tensor, Tensor]:
    plan, du = _Plan(u, kernel, lead, triton), torch.empty_like(u)
    by, back = plan.by, torch.conj_physical(plan.kernel)
    cross = torch.zeros_like(plan.kernel)
    for rows in plan.slices(u):
        g = by.spectrum(Timeline(grad), plan.n, at=plan.ahead, rows=rows)
        cross += by.cross(by.spectrum(Timeline(u), plan.n, rows=rows), g)
        by.output(by.inverse(by.scale_(g, back), plan.n), 0, du[rows])
    dk = by.taps(cross, plan.n)[..., : plan.ahead + plan.behind]
    dk = F.pad(dk, (lead - plan.ahead, kernel.shape[-1] - lead - plan.behind))
    return du, dk.to(kernel.dtype).contiguous()


@_fft_conv.register_fake
def _(u, kernel, bias, spectrum, lead, gelu, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u)


@_fft_conv_backward.register_fake
def _(grad, u, kernel, lead, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *twins(kernel)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, kernel, bias, _, ctx.lead, ctx.gelu, ctx.triton = inputs
    ctx.save_for_backward(u, kernel, bias)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, kernel, bias = ctx.saved_tensors
    if ctx.gelu:
        grad = torch.ops.aten.gelu_backward(grad, _fft_conv(u, kernel, bias, None, ctx.lead, False, ctx.triton))
    du, dk = _fft_conv_backward(grad, u, kernel, ctx.lead, ctx.triton)
    return du, dk, bias_gradient(grad, bias), None, None, None, None


_fft_conv.register_autograd(_backward, setup_context=_setup)
