"""Convolution with a few taps at given lags, as shifts of the input; and branches of such taps, normalised.

The output of normalised branches is one convolution with all their taps, once a pass over the input, which keeps no
branch, has given the statistics. Going back, one correlation of the output's gradient g with the input gives
sum_t g c_b for all branches; then every dc_b = s_b g - a_b - q_b c_b is made, for a slice of the batch at a time, and
gives the gradients of its taps and of the input.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backends import use_triton
from ..branch_sum.statistics import mean_and_variance, normalised_backward, shifted, valid_count
from ..constants import integers_on
from ..fft_conv.op import bias_gradient, compute_dtype, refuse_forward_mode, twins
from ..registration import register_branch_sum

SLICE = 2**19  # elements of the input at a time without Triton: what a few of them need stays in cache


def tap_conv(
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    bias: Tensor | None = None,
    gelu: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Depthwise convolution y[t] = sum_j values[j] u[t - lags[j]] + bias, then GELU if asked for, the size of u.

    u (B, C, L), values (C, T), bias (C,). Lags may be negative (look ahead) and reach past the ends, where u is zero.
    """
    refuse_forward_mode(u, values, bias)
    return _tap_conv(u, values, bias, list(lags), gelu, use_triton(u, backend))


def tap_conv_reference(
    u: Tensor, values: Tensor, lags: Sequence[int], bias: Tensor | None = None, gelu: bool = False
) -> Tensor:
    """Compute `tap_conv` by rolling a padded input, differentiably."""
    L, reach = u.shape[-1], max(map(abs, lags), default=0)
    padded = F.pad(u, (reach, reach))
    y = torch.zeros_like(u)
    for value, lag in zip(values.unbind(1), lags, strict=True):
        y = y + value[:, None] * padded.roll(lag, -1)[..., reach : reach + L]
    y = y if bias is None else y + bias[:, None]
    return F.gelu(y) if gelu else y


def tap_branch_sum(
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    sizes: Sequence[int],
    weight: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `spectral_branch_sum` does, for branches of taps.

    Branch i has the next sizes[i] of the taps in values (C, sum of sizes) and lags.
    """
    refuse_forward_mode(u, values, weight, skip, bias)
    triton = use_triton(u, backend)
    return _tap_sum(u, values, weight, skip, bias, lengths, list(lags), list(sizes), eps, sync, triton)


def _overlap(u: Tensor, y: Tensor, lag: int) -> tuple[Tensor, Tensor]:
    """Return the parts of u and y in which y[t] meets u[t - lag]."""
    L = u.shape[-1]
    if lag >= 0:
        return u[..., : max(L - lag, 0)], y[..., lag:]
    return u[..., -lag:], y[..., : max(L + lag, 0)]


def _add_taps(y: Tensor, u: Tensor, values: Tensor, lags: Sequence[int]) -> Tensor:
    """Add the convolution of u with values (T, C) to y."""
    for value, lag in zip(values.unbind(0), lags, strict=True):
        source, target = _overlap(u, y, lag)
        target.addcmul_(source, value[:, None])
    return y


def _correlate(g: Tensor, u: Tensor, lags: Sequence[int], out: Tensor, product: Tensor) -> None:
    """Add each tap's gradient, the input it met times the output's gradient, to out (T, C); product is overwritten."""
    for row, lag in zip(out.unbind(0), lags, strict=True):
        source, target = _overlap(u, g, lag)
        row += torch.mul(source, target, out=_overlap(u, product, lag)[1]).sum((0, 2))


class _Scratch:
    """Tensors that are used again for the next slice: allocating them anew can cost more than filling them."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def like(self, x: Tensor, name: str = "") -> Tensor:
        """Return a tensor like x, with anything in it."""
        if name not in self.kept or self.kept[name].shape != x.shape:
            self.kept[name] = torch.empty_like(x)
        return self.kept[name]


def _slices(u: Tensor, dtype: torch.dtype, *tensors: Tensor) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Yield slices of batch and of channels, and those parts of the tensors, in a dtype and in u's format."""
    B, C, L = u.shape
    channels = min(C, max(1, SLICE // L))
    batch = max(1, SLICE // (L * channels))
    for start in range(0, B, batch):
        for first in range(0, C, channels):
            at = slice(start, start + batch), slice(first, first + channels)
            yield *at, [_formatted(x[at].to(dtype), u[at]) for x in tensors]


def _cut(c: Tensor, lengths: Tensor | None) -> Tensor:
    """Zero everything from `lengths` on, in place."""
    if lengths is not None:
        c *= (torch.arange(c.shape[-1], device=c.device) < lengths[:, None])[:, None]
    return c


def _split(values: Tensor, lags: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yield each branch's values and lags."""
    start = 0
    for branch in values.split(list(sizes)):
        yield branch, lags[start : start + len(branch)]
        start += len(branch)


def _convolved(
    u: Tensor, values: Tensor, lags: Sequence[int], shift: Tensor | None, triton: bool, gelu: bool = False
) -> Tensor:
    """Return the convolution of u with values (T, C), plus shift (C,), through GELU if asked for, like u."""
    y = torch.empty_like(u)
    if triton:
        from .triton_kernels import convolve

        return convolve(u, values, lags, y, shift=shift, gelu=gelu)
    start = values.new_zeros(u.shape[1]) if shift is None else shift
    for batch, channels, (x,) in _slices(u, values.dtype, u):
        part = torch.empty_like(x).copy_(start[channels, None])
        part = _add_taps(part, x, values[:, channels], lags)
        y[batch, channels] = F.gelu(part) if gelu else part
    return y


def _correlated(g: Tensor, u: Tensor, lags: Sequence[int], dtype: torch.dtype, triton: bool) -> Tensor:
    """Return sum g[t] u[t - lag] over batch and time for each lag, and in the last row that of g: (T + 1, C)."""
    if triton:
        from .triton_kernels import correlate

        return correlate(g, u, lags, dtype)
    out = torch.zeros(len(lags) + 1, u.shape[1], dtype=dtype, device=u.device)
    scratch = _Scratch()
    for _, channels, (pull, x) in _slices(u, dtype, g, u):
        _correlate(pull, x, lags, out[:-1, channels], scratch.like(x))
        out[-1, channels] += pull.sum((0, 2))
    return out


def _moments(
    u: Tensor, values: Tensor, lags: Sequence[int], sizes: Sequence[int], lengths: Tensor | None, triton: bool
) -> Tensor:
    """Return the sum and the sum of squares of every branch's output, (2, N, C)."""
    if triton:
        from .triton_kernels import moments

        return moments(u, values, lags, sizes, lengths)
    sums, scratch = values.new_zeros(2, len(sizes), u.shape[1]), _Scratch()
    for batch, channels, (x,) in _slices(u, values.dtype, u):
        c = scratch.like(x)
        for i, (own, at) in enumerate(_split(values[:, channels], lags, sizes)):
            _cut(_add_taps(c.zero_(), x, own, at), None if lengths is None else lengths[batch])
            sums[0, i, channels] += c.sum((0, 2))
            sums[1, i, channels] += c.square_().sum((0, 2))
    return sums


def _pulled_back(
    g: Tensor,
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    sizes: Sequence[int],
    factors: tuple[Tensor, Tensor, Tensor],
    skip: Tensor | None,
    lengths: Tensor | None,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of u and of values (T, C), from skip * g and every dc_b = s_b g - a_b - q_b c_b."""
    if triton:
        from .triton_kernels import pull_back

        return pull_back(g, u, values, lags, sizes, *factors, skip, lengths)
    du, dvalues, scratch = torch.empty_like(u), torch.zeros_like(values), _Scratch()
    for batch, channels, (pull, x) in _slices(u, values.dtype, g, u):
        total = scratch.like(x, "du").zero_()
        if skip is not None:
            torch.mul(pull, skip[channels, None], out=total)
        parts = zip(
            _split(values[:, channels], lags, sizes),
            dvalues[:, channels].split(list(sizes)),
            *(factor[:, channels, None] for factor in factors),
            strict=True,
        )
        dc, product = scratch.like(x, "dc"), scratch.like(x, "product")
        for (own, at), out, s, q, a in parts:
            _add_taps(dc.zero_(), x, own, at).mul_(-q).addcmul_(pull, s).sub_(a)
            _cut(dc, None if lengths is None else lengths[batch])
            _add_taps(total, dc, own, [-lag for lag in at])
            _correlate(dc, x, at, out, product)
        du[batch, channels] = total
    return du, dvalues


class _Plan(NamedTuple):
    """How taps, with the skip at lag 0 as the last of them, make one kernel."""

    lags: tuple[int, ...]  # those there are, each once
    place: tuple[int, ...]  # of each tap among those
    members: tuple[tuple[int, ...], ...]  # the taps at each
    owners: tuple[int, ...]  # each tap's branch
    branches: tuple[tuple[int, ...], ...]  # each branch's taps


@functools.lru_cache(maxsize=256)
def _plan(lags: tuple[int, ...], sizes: tuple[int, ...], skip: bool) -> _Plan:
    every = (*lags, 0) if skip else lags
    union = tuple(sorted(set(every)))
    members: dict[int, list[int]] = {lag: [] for lag in union}
    for j, lag in enumerate(every):
        members[lag].append(j)
    owners = tuple(i for i, n in enumerate(sizes) for _ in range(n))
    branches = tuple(tuple(j for j, owner in enumerate(owners) if owner == i) for i in range(len(sizes)))
    place = tuple(union.index(lag) for lag in every)
    return _Plan(union, place, tuple(tuple(members[lag]) for lag in union), owners, branches)


def _take(x: Tensor, rows: Sequence[int]) -> Tensor:
    return x.index_select(0, integers_on(rows, x))


def _add_up(x: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Add up rows of x by groups, in a fixed order."""
    width, nothing = max(map(len, groups), default=0), len(x)
    rows = [j for group in groups for j in (*group, *[nothing] * (width - len(group)))]
    return _take(F.pad(x, (0, 0, 0, 1)), rows).view(len(groups), width, x.shape[1]).sum(1)


def _rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).t().contiguous()


@torch.library.custom_op("mrconv::tap_conv", mutates_args=())
def _tap_conv(u: Tensor, values: Tensor, bias: Tensor | None, lags: list[int], gelu: bool, triton: bool) -> Tensor:
    return _convolved(u, _rows(values, compute_dtype(u, values)), lags, bias, triton, gelu)


@torch.library.custom_op("mrconv::tap_conv_backward", mutates_args=())
def _tap_conv_backward(grad: Tensor, u: Tensor, values: Tensor, lags: list[int], triton: bool) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(u, values)
    du = _convolved(grad, _rows(values, dtype), [-lag for lag in lags], None, triton)
    dvalues = _correlated(grad, u, lags, dtype, triton)[:-1]
    return _formatted(du, u), dvalues.t().to(values.dtype).contiguous()


@torch.library.custom_op("mrconv::tap_branch_sum", mutates_args=())
def _tap_sum(
    u: Tensor,
    values: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    lags: list[int],
    sizes: list[int],
    eps: float,
    sync: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, plan = _rows(values, compute_dtype(u, values)), _plan(tuple(lags), tuple(sizes), skip is not None)
    sums = _moments(u, rows, lags, sizes, lengths, triton)
    mean, var, count = mean_and_variance(sums, valid_count(u, lengths), sync)
    scale = weight.to(rows.dtype) * torch.rsqrt(var + eps)
    taps = rows * _take(scale, plan.owners)
    if skip is not None:
        taps = torch.cat([taps, skip[None].to(taps.dtype)])
    y = _convolved(u, _add_up(taps, plan.members), plan.lags, shifted(bias, scale, mean), triton)
    return y, mean, var, count


@torch.library.custom_op("mrconv::tap_branch_sum_backward", mutates_args=())
def _tap_sum_backward(
    grad: Tensor,
    u: Tensor,
    values: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    lags: list[int],
    sizes: list[int],
    eps: float,
    sync: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, plan = _rows(values, compute_dtype(u, values)), _plan(tuple(lags), tuple(sizes), skip is not None)
    products = _correlated(grad, u, plan.lags, rows.dtype, triton)  # sum_bt of g u at each lag, and of g
    inner = _add_up(rows * _take(products, plan.place[: len(lags)]), plan.branches)
    dweight, *factors = normalised_backward(inner, products[-1], weight.to(rows.dtype), mean, var, count, eps, sync)
    s, q, a = factors
    du, drows = _pulled_back(grad, u, rows, lags, sizes, (s, q, a), skip, lengths, triton)
    dskip = products.new_zeros(u.shape[1]) if skip is None else products[plan.place[-1]]
    return (
        _formatted(du, u),
        drows.t().to(values.dtype).contiguous(),
        dweight.to(weight.dtype),
        dskip.to(weight.dtype, copy=True),
        products[-1].to(weight.dtype, copy=True),
    )


def _formatted(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the memory format that `empty_like` gives for another tensor."""
    if x.stride() == torch.empty_like(like, device="meta").stride():
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


@_tap_conv.register_fake
def _(u, values, bias, lags, gelu, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u)


@_tap_conv_backward.register_fake
def _(grad, u, values, lags, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *twins(values)


def _conv_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.lags, ctx.gelu, ctx.triton = inputs
    ctx.save_for_backward(*tensors)


def _conv_backward(ctx, grad):  # type: ignore[no-untyped-def]
    u, values, bias = ctx.saved_tensors
    if ctx.gelu:
        grad = torch.ops.aten.gelu_backward(grad, _tap_conv(u, values, bias, ctx.lags, False, ctx.triton))
    du, dvalues = _tap_conv_backward(grad, u, values, ctx.lags, ctx.triton)
    return du, dvalues, bias_gradient(grad, bias), None, None, None


_tap_conv.register_autograd(_conv_backward, setup_context=_conv_setup)
register_branch_sum(_tap_sum, _tap_sum_backward)
