"""First and second moments of convolution branches from the input's autocorrelation and its last samples.

BatchNorm needs each branch's batch statistics. Over the whole (untruncated) convolution these follow from the
input's autocorrelation R, which has no batch axis left; what the truncation at L removes depends on the
last samples only. With r_i the autocorrelation of kernel k_i of length l_i:

    sum c_i      =  sum_tau k_i[tau] S[L-1-tau],            S the running sum over time of sum_b u_b
    sum c_i**2   =  sum_lag r_i[lag] R[lag]  -  tail_i,     tail_i from the last l_i - 1 inputs

Both kinds of FFT have size 2 l_i, and the l_i double: all branches together cost about as much as two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fft import irfft, rfft
from torch.nn import functional as F

from .fft import compute_dtype, fast_length, twins


def spectral_moments(u: Tensor, kernels: Sequence[Tensor], delay: int = 0) -> Tensor:
    """Sum and sum of squares over (B, L) of each causal branch output c_i = kernels[i] * u, as (2, N, C).

    u (B, C, L); kernels[i] (C, l_i), whose tap 0 acts on u[t - delay]. No branch output is computed.
    """
    return _moments(u, torch.cat(list(kernels), 1), [k.shape[1] for k in kernels], delay)


def moments_reference(u: Tensor, kernels: Sequence[Tensor], delay: int = 0) -> Tensor:
    """Compute `spectral_moments` from every branch's output, differentiably."""
    n = 2 * u.shape[-1] + max(k.shape[1] for k in kernels)
    outputs = [irfft(rfft(u, n) * rfft(F.pad(k, (delay, 0)), n), n)[..., : u.shape[-1]] for k in kernels]
    return torch.stack([torch.stack([c.sum((0, 2)), c.square().sum((0, 2))]) for c in outputs], 1)


def _autocorrelation(u: Tensor, n: int) -> Tensor:
    """R[lag] = sum_bt u[t] u[t + lag] for lag < L. (C, L)."""
    spectrum = rfft(u, n)
    power = (spectrum.real.square() + spectrum.imag.square()).sum(0)
    return irfft(power, n)[..., : u.shape[-1]]


def _branches(packed: Tensor, sizes: Sequence[int], delay: int, L: int) -> Iterator[tuple[Tensor, int]]:
    """Yield each kernel with its delay, cut to the L taps that can meet the input, and its FFT length."""
    for kernel in packed.split(list(sizes), 1):
        k = F.pad(kernel, (delay, 0))[:, :L]
        yield k, fast_length(2 * k.shape[1])


def _tail(u: Tensor, spectrum: Tensor, length: int, m: int) -> tuple[Tensor, Tensor]:
    """Outputs L .. L+length-2 of the full convolution, (B, C, length-1), and the last inputs' spectrum."""
    last = rfft(u[..., u.shape[-1] - length + 1 :], m)
    return irfft(last * spectrum, m)[..., length - 1 : 2 * length - 2], last


@torch.library.custom_op("mrconv::moments", mutates_args=())
def _moments(u: Tensor, packed: Tensor, sizes: list[int], delay: int) -> Tensor:
    x, L = u.to(compute_dtype(u, packed)), u.shape[-1]
    R = _autocorrelation(x, fast_length(2 * L))
    S = x.sum(0).cumsum(-1)
    moments = []
    for k, m in _branches(packed.to(x.dtype), sizes, delay, L):
        l = k.shape[1]  # noqa: E741
        K = rfft(k, m)
        r = irfft(K.real.square() + K.imag.square(), m)[:, :l]
        energy = 2 * (r * R[:, :l]).sum(1) - r[:, 0] * R[:, 0]
        if l > 1:
            energy = energy - _tail(x, K, l, m)[0].square().sum((0, 2))
        moments.append(torch.stack([(k * S[:, L - l :].flip(1)).sum(1), energy]))
    return torch.stack(moments, 1)


@torch.library.custom_op("mrconv::moments_backward", mutates_args=())
def _moments_backward(grad: Tensor, u: Tensor, packed: Tensor, sizes: list[int], delay: int) -> tuple[Tensor, Tensor]:
    x, L = u.to(compute_dtype(u, packed)), u.shape[-1]
    n = fast_length(2 * L)
    R = _autocorrelation(x, n)
    S = x.sum(0).cumsum(-1)
    q = torch.zeros_like(R)  # sum_i g_i r_i: what multiplies u's spectrum
    steps = torch.zeros_like(R)  # sum_i of the first moments' pull on the input, in reversed time
    tails = torch.zeros_like(x, memory_format=torch.contiguous_format)
    dkernels = []
    for i, (k, m) in enumerate(_branches(packed.to(x.dtype), sizes, delay, L)):
        l = k.shape[1]  # noqa: E741
        g1, g2 = grad[0, i, :, None], 2 * grad[1, i, :, None]
        K = rfft(k, m)
        q[:, :l] += g2 * irfft(K.real.square() + K.imag.square(), m)[:, :l]
        steps[:, :l] += g1 * k
        window = F.pad(R[:, :l], (0, m - 2 * l + 1))  # R at the lags the kernel has, on its own circle
        window = torch.cat([window, R[:, 1:l].flip(1)], 1)
        dk = g1 * S[:, L - l :].flip(1) + g2 * irfft(K * rfft(window, m), m)[:, :l]
        if l > 1:
            tail, last = _tail(x, K, l, m)
            T = rfft(F.pad(tail, (l - 1, 0)), m)
            tails[..., L - l + 1 :] += g2 * irfft(K.conj() * T, m)[..., : l - 1]
            dk = dk - g2 * irfft((last.conj() * T).sum(0), m)[:, :l]
        dkernels.append(F.pad(dk, (0, sizes[i] + delay - l))[:, delay:])
    Q = rfft(torch.cat([F.pad(q, (0, n - 2 * L + 1)), q[:, 1:].flip(1)], 1), n).real
    du = irfft(rfft(x, n) * Q, n)[..., :L] - tails + steps.cumsum(-1).flip(-1)
    return du.to(u.dtype), torch.cat(dkernels, 1).to(packed.dtype)


@_moments.register_fake
def _(u: Tensor, packed: Tensor, sizes: list[int], delay: int) -> Tensor:
    return u.new_empty(2, len(sizes), u.shape[1], dtype=compute_dtype(u, packed))


@_moments_backward.register_fake
def _(grad: Tensor, u: Tensor, packed: Tensor, sizes: list[int], delay: int) -> tuple[Tensor, ...]:
    return twins(u, packed)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, packed, ctx.sizes, ctx.delay = inputs
    ctx.save_for_backward(u, packed)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return *_moments_backward(grad, *ctx.saved_tensors, ctx.sizes, ctx.delay), None, None


_moments.register_autograd(_backward, setup_context=_setup)
