"""Convolution with a few taps at given lags, as shifts of the input, and the moments of such branches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import use_triton
from .fft import compute_dtype, refuse_forward_mode, twins


def tap_conv(u: Tensor, values: Tensor, lags: Sequence[int], backend: str = "auto") -> Tensor:
    """Depthwise convolution y[t] = sum_j values[j] u[t - lags[j]], the size of u (B, C, L); values (C, T).

    Lags may be negative (look ahead) and reach past the ends, where u counts as zero.
    """
    refuse_forward_mode(u, values)
    return _tap_conv(u, values, list(lags), use_triton(u, backend))


def tap_conv_reference(u: Tensor, values: Tensor, lags: Sequence[int]) -> Tensor:
    """Compute `tap_conv` by rolling a padded input, differentiably."""
    L, reach = u.shape[-1], max(map(abs, lags), default=0)
    padded = F.pad(u, (reach, reach))
    y = torch.zeros_like(u)
    for value, lag in zip(values.unbind(1), lags, strict=True):
        y = y + value[:, None] * padded.roll(lag, -1)[..., reach : reach + L]
    return y


def tap_moments(
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    sizes: Sequence[int],
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Sum and sum of squares of each branch's output, over batch and the first `lengths` positions, as (2, N, C).

    Branch i has the next sizes[i] of the taps in values (C, sum of sizes) and lags. One branch is in memory
    at a time, in the backward pass too; in the forward pass not even one, with Triton.
    """
    refuse_forward_mode(u, values)
    return _tap_moments(u, values, list(lags), list(sizes), lengths, use_triton(u, backend))


def _overlap(u: Tensor, y: Tensor, lag: int) -> tuple[Tensor, Tensor]:
    """Return the parts of u and y in which y[t] meets u[t - lag]."""
    L = u.shape[-1]
    if lag >= 0:
        return u[..., : max(L - lag, 0)], y[..., lag:]
    return u[..., -lag:], y[..., : max(L + lag, 0)]


def _convolve(u: Tensor, values: Tensor, lags: Sequence[int]) -> Tensor:
    y = torch.zeros_like(u)
    for value, lag in zip(values.unbind(1), lags, strict=True):
        source, target = _overlap(u, y, lag)
        target.addcmul_(source, value[:, None])
    return y


def _cut(c: Tensor, lengths: Tensor | None) -> Tensor:
    """Zero everything from `lengths` on."""
    if lengths is None:
        return c
    return c * (torch.arange(c.shape[-1], device=c.device) < lengths[:, None])[:, None]


def _transpose(grad: Tensor, values: Tensor, lags: Sequence[int]) -> Tensor:
    return _convolve(grad, values, [-lag for lag in lags])


def _correlate(grad: Tensor, u: Tensor, lags: Sequence[int]) -> Tensor:
    """Return the gradient of each tap: the input it met, times the output's gradient. (C, T)."""
    result = u.new_empty(u.shape[1], len(lags))
    for j, lag in enumerate(lags):
        source, target = _overlap(u, grad, lag)
        result[:, j] = (source * target).sum((0, 2))
    return result


@torch.library.custom_op("mrconv::tap_conv", mutates_args=())
def _tap_conv(u: Tensor, values: Tensor, lags: list[int], triton: bool) -> Tensor:
    dtype = compute_dtype(u, values)
    if triton:
        from .taps_triton import convolve

        return convolve(u, values.to(dtype), lags, u.dtype)
    return _formatted(_convolve(u.to(dtype).contiguous(), values.to(dtype), lags).to(u.dtype), u)


@torch.library.custom_op("mrconv::tap_conv_backward", mutates_args=())
def _tap_conv_backward(grad: Tensor, u: Tensor, values: Tensor, lags: list[int], triton: bool) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(u, values)
    if triton:
        from .taps_triton import convolve, correlate

        du = convolve(grad, values.to(dtype), [-lag for lag in lags], u.dtype)
        return _formatted(du, u), correlate(grad, u, lags, dtype).to(values.dtype).contiguous()
    g, x = grad.to(dtype).contiguous(), u.to(dtype).contiguous()
    du = _transpose(g, values.to(dtype), lags).to(u.dtype)
    return _formatted(du, u), _correlate(g, x, lags).to(values.dtype)


@torch.library.custom_op("mrconv::tap_moments", mutates_args=())
def _tap_moments(
    u: Tensor, values: Tensor, lags: list[int], sizes: list[int], lengths: Tensor | None, triton: bool
) -> Tensor:
    dtype = compute_dtype(u, values)
    if triton:
        from .taps_triton import moments

        return moments(u, values.to(dtype), lags, sizes, lengths)
    x, sums = u.to(dtype).contiguous(), []
    for branch, own in _split(values.to(dtype), lags, sizes):
        c = _cut(_convolve(x, branch, own), lengths)
        sums.append(torch.stack([c.sum((0, 2)), c.square().sum((0, 2))]))
    return torch.stack(sums, 1)


@torch.library.custom_op("mrconv::tap_moments_backward", mutates_args=())
def _tap_moments_backward(
    grad: Tensor, u: Tensor, values: Tensor, lags: list[int], sizes: list[int], lengths: Tensor | None, triton: bool
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(u, values)
    x = u if triton else u.to(dtype).contiguous()
    du, dvalues = torch.zeros_like(x, dtype=dtype), []
    for i, (branch, own) in enumerate(_split(values.to(dtype), lags, sizes)):
        if triton:
            from .taps_triton import convolve, correlate

            dc = convolve(x, branch, own, dtype, 2 * grad[1, i], grad[0, i], lengths)
            convolve(dc, branch, [-lag for lag in own], dtype, add_to=du)
            dvalues.append(correlate(dc, x, own, dtype))
        else:
            dc = _cut(grad[0, i, :, None] + 2 * grad[1, i, :, None] * _convolve(x, branch, own), lengths)
            du += _transpose(dc, branch, own)
            dvalues.append(_correlate(dc, x, own))
    return _formatted(du.to(u.dtype), u), torch.cat(dvalues, 1).to(values.dtype).contiguous()


def _split(values: Tensor, lags: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yield each branch's values and lags."""
    start = 0
    for branch in values.split(list(sizes), 1):
        yield branch, lags[start : start + branch.shape[1]]
        start += branch.shape[1]


def _formatted(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the memory format that `empty_like` gives for another tensor."""
    if x.stride() == torch.empty_like(like, device="meta").stride():
        return x
    return torch.empty_like(like).copy_(x)


@_tap_conv.register_fake
def _(u, values, lags, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u)


@_tap_moments.register_fake
def _(u, values, lags, sizes, lengths, triton):  # type: ignore[no-untyped-def]
    return u.new_empty(2, len(sizes), u.shape[1], dtype=compute_dtype(u, values))


@_tap_conv_backward.register_fake
def _(grad, u, values, lags, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *twins(values)


@_tap_moments_backward.register_fake
def _(grad, u, values, lags, sizes, lengths, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *twins(values)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, values, ctx.lags, *rest, ctx.triton = inputs
    ctx.sizes, lengths = rest or (None, None)
    ctx.save_for_backward(u, values, lengths)


def _conv_backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, values, _ = ctx.saved_tensors
    return *_tap_conv_backward(grad, u, values, ctx.lags, ctx.triton), None, None


def _moments_backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, values, lengths = ctx.saved_tensors
    grads = _tap_moments_backward(grad, u, values, ctx.lags, ctx.sizes, lengths, ctx.triton)
    return *grads, None, None, None, None


_tap_conv.register_autograd(_conv_backward, setup_context=_setup)
_tap_moments.register_autograd(_moments_backward, setup_context=_setup)
