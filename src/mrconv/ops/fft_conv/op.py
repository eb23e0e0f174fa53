"""Long depthwise convolution by FFT with a dense kernel, and its backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common import bias_gradient, compute_dtype, empty_contiguous, reject_forward_mode, use_triton
from .._registration import eager_op
from ..masking.op import mask_sequences
from .spectra import spectral_engine


def fft_conv(
    u: Tensor,
    kernel: Tensor,
    lead: int = 0,
    bias: Tensor | None = None,
    gelu: bool = False,
    backend: str = "auto",
    spectrum: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute y[t] = sum_j kernel[j] u[t + lead - j] + bias per channel, with GELU if `gelu`; y is like u.

    u is (B, C, L), kernel (C, K), bias (C,). The first `lead` taps act on later inputs; lead = 0 is causal. The kernel
    may be longer or shorter than u. Half precision is computed in float32; the output has u's dtype. `spectrum` is the
    result of `kernel_spectrum` for this kernel and this input length; it saves the kernel's FFT. Positions from
    `lengths` (B,) on are treated as zero in u and are zero in y.
    """
    reject_forward_mode(u, kernel, bias)
    return _fft_conv(u, kernel, bias, spectrum, lengths, lead, gelu, use_triton(u, backend))


def kernel_spectrum(u: Tensor, kernel: Tensor, lead: int = 0, backend: str = "auto") -> Tensor:
    """Return a kernel's spectrum (C, f, 2) for inputs as long as u, as real and imaginary parts."""
    return torch.view_as_real(_Plan(u, kernel, lead, use_triton(u, backend)).kernel)


class _Plan:
    """The taps that overlap u, their spectrum, and an FFT length for which no needed output wraps around."""

    def __init__(self, u: Tensor, kernel: Tensor, lead: int, triton: bool, spectrum: Tensor | None = None) -> None:
        L, K = u.shape[-1], kernel.shape[-1] - lead
        self.ahead, self.behind = min(lead, L - 1), min(K, L)
        self.engine = spectral_engine(compute_dtype(u, kernel), triton)
        self.n = self.engine.fast_length(max(L + self.behind - 1, L + self.ahead))
        if spectrum is None:
            taps = kernel[:, lead - self.ahead : lead + self.behind]
            self.kernel = self.engine.weights(taps, self.ahead, self.n)
        else:
            if spectrum.shape != (kernel.shape[0], self.n // 2 + 1, 2):
                raise ValueError(f"spectrum {tuple(spectrum.shape)} is not this kernel's for an input of length {L}")
            self.kernel = torch.view_as_complex(spectrum)

    def slices(self, u: Tensor) -> Iterator[slice]:
        """Yield slices of the batch that fit into cache."""
        return self.engine.slices(u.shape[0], u.shape[1], self.n)


@eager_op("fft_conv")
def _fft_conv(
    u: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    spectrum: Tensor | None,
    lengths: Tensor | None,
    lead: int,
    gelu: bool,
    triton: bool,
) -> Tensor:
    plan, y = _Plan(u, kernel, lead, triton, spectrum), torch.empty_like(u)
    engine = plan.engine
    for some in plan.slices(u):
        ends = None if lengths is None else lengths[some]
        signals = engine.inverse(engine.scale_(engine.spectrum(u[some], plan.n, ends), plan.kernel), plan.n)
        engine.output(signals, y[some], bias, gelu, ends)
    return y


@eager_op("fft_conv_backward")
def fft_conv_backward(grad: Tensor, u: Tensor, kernel: Tensor, lead: int, triton: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of u and of the kernel, also for `toeplitz_conv`."""
    plan, du = _Plan(u, kernel, lead, triton), torch.empty_like(u)
    engine, n, ahead, behind = plan.engine, plan.n, plan.ahead, plan.behind
    if u.numel() == 0:
        return du, torch.zeros_like(kernel, memory_format=torch.contiguous_format)
    cross = None
    for some in plan.slices(u):
        g = engine.spectrum(grad[some], n)
        cross = engine.cross_and_scale_(cross, engine.spectrum(u[some], n), g, plan.kernel)
        engine.output(engine.inverse(g, n), du[some])
    assert cross is not None
    dk = engine.taps(cross, n, ahead, behind)
    dk = F.pad(dk, (lead - ahead, kernel.shape[-1] - lead - behind)) if dk.shape != kernel.shape else dk
    return du, dk.to(kernel.dtype).contiguous()


@_fft_conv.register_fake
def _(u, kernel, bias, spectrum, lengths, lead, gelu, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u)


@fft_conv_backward.register_fake
def _(grad, u, kernel, lead, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *empty_contiguous(kernel)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, kernel, bias, _, lengths, ctx.lead, ctx.gelu, ctx.triton = inputs
    ctx.save_for_backward(u, kernel, bias, lengths)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, kernel, bias, lengths = ctx.saved_tensors
    u, grad = mask_sequences(u, lengths), mask_sequences(grad, lengths)
    if ctx.gelu:
        grad = torch.ops.aten.gelu_backward(grad, _fft_conv(u, kernel, bias, None, None, ctx.lead, False, ctx.triton))
    du, dk = fft_conv_backward(grad, u, kernel, ctx.lead, ctx.triton)
    dbias = bias_gradient(grad, bias) if ctx.needs_input_grad[2] else None
    return mask_sequences(du, lengths), dk, dbias, None, None, None, None, None


_fft_conv.register_autograd(_backward, setup_context=_setup)
