"""Branches normalised by the statistics of some sequences; the others are one convolution with the merged kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .._common import Taps
from ..conv import conv
from ..merge.op import merge
from ..select import Selection, bounds
from .op import (
    BranchSum,
    ConstantKernels,
    Kernels,
    ModeKernels,
    Normalization,
    PackedKernels,
    branch_sum_with_factors,
    select_for,
)


def subsampled_branch_sum(
    u: Tensor,
    kernels: Kernels,
    normalization: Normalization,
    sequences: int,
    selection: Selection | None = None,
    backend: str = "auto",
) -> BranchSum:
    """Return what `branch_sum` does, but normalise all sequences by the statistics of the first `sequences` of u.

    Branches are computed for those sequences only. Gradients flow through their statistics.
    """
    if not 1 <= sequences < len(u):
        raise ValueError(f"sequences must be from 1 to {len(u) - 1}, less than the batch; got {sequences}")
    taps = _as_taps(kernels)
    selection = selection or select_for(u, kernels, backend)
    lengths, skip = normalization.lengths, normalization.skip
    some = dataclasses.replace(normalization, lengths=None if lengths is None else lengths[:sequences])
    # as in a model, channels are last in memory: split and concatenated so, gradients and outputs stay contiguous
    counted, others = (x.transpose(1, 2) for x in u.transpose(1, 2).split([sequences, len(u) - sequences]))
    first, factors = branch_sum_with_factors(counted, kernels, some, selection)
    ends = [bounds(lags) for _, lags in taps if lags]
    ahead, behind = max((0, *(-low for low, _ in ends))), 1 + max((0, *(high for _, high in ends)))
    values, lags = merge(taps, ahead, behind, factors.scale, skip, backend)
    rest = conv(others, values, lags, factors.bias, backend=backend)
    return first._replace(y=torch.cat([first.y.transpose(1, 2), rest.transpose(1, 2)]).transpose(1, 2))


def _as_taps(kernels: Kernels) -> Sequence[Taps]:
    if isinstance(kernels, ModeKernels | ConstantKernels):
        raise TypeError(f"subsampled_branch_sum takes taps or packed kernels; got {type(kernels).__name__}")
    if not isinstance(kernels, PackedKernels):
        return kernels
    return [Taps(*kernel) for kernel in zip(kernels.values.split(list(kernels.sizes), 1), kernels.lags, strict=True)]
