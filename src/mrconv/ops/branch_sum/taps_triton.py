"""Gradients of branches of taps, by the Triton kernels of `tap_conv`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton import allocate_branch_gradients
from ..tap_conv.triton_kernels import convolve, correlate_groups, partial_sums, tap_groups

MAX_TAPS = 16  # of a branch that one program handles: more do not fit into its registers; a power of 2
SCRATCH_BYTES = 256 * 2**20  # for the gradients of the branches' outputs, if the batch can be sliced that finely


def branch_gradients(
    g: Tensor,
    u: Tensor,
    values: Tensor,
    lags: Sequence[int],
    sizes: Sequence[int],
    factors: tuple[Tensor, Tensor, Tensor],
    skip: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of u and of values (T, C) for dc_b = s_b g - a_b - q_b c_b; factors are s, q and a."""
    s, q, a = (factor.contiguous() for factor in factors)
    scratch = allocate_branch_gradients(u, len(sizes), SCRATCH_BYTES, values.dtype)
    size = scratch.shape[1]
    du, parts = torch.empty_like(u), partial_sums(u, len(lags), values.dtype)
    owners = [i for i, n in enumerate(sizes) for _ in range(n)]
    groups = [(i, n) for i, taps in enumerate(sizes) for n in tap_groups(taps)]
    back = [-lag for lag in lags]
    slices = zip(*(x.split(size) for x in (u, g, du, parts)), strict=True)
    for i, (x, grad, target, sums) in enumerate(slices):
        dc = scratch[:, : x.shape[0]]
        end = None if lengths is None else lengths[i * size : i * size + size]
        if max(sizes) <= MAX_TAPS:
            correlate_groups(grad, x, lags, sizes, sums, None, (values, s, q, a), end, dc)
        else:
            convolve(x, values, lags, dc, sizes, None, -q, -a, s, grad, end)
            correlate_groups(dc, x, lags, [n for _, n in groups], sums, [owner for owner, _ in groups])
        convolve(dc, values, back, target, None, owners, mix=skip, g=grad)
    return du, parts.sum((0, 1))
