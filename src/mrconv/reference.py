"""The paper's algorithm as printed: N convolutions, N BatchNorms and a weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .ops import Taps, conv_reference


def branch_sum(
    u: Tensor,
    kernels: Sequence[Taps],
    alpha: Tensor | None,
    norm: nn.BatchNorm1d | None,
    mask: Tensor | None = None,
    sequences: int | None = None,
) -> Tensor:
    """Return y = sum_i alpha_i BN_i(k_i * u) for u (B, C, L), kernels k_i, alpha (N, C) and a norm of N * C features.

    With `mask` (B, L), only the positions where it is true are normalised and counted; with `sequences`, the batch
    statistics of all are those of the first ones.
    """
    c = torch.stack([conv_reference(u, *kernel) for kernel in kernels], 1)  # (B, N, C, L)
    if norm is not None:
        c = _batch_norm(norm, c.flatten(1, 2), mask, sequences).view_as(c)
    if alpha is not None:
        c = alpha[:, :, None] * c
    return c.sum(1)


def _batch_norm(norm: nn.BatchNorm1d, c: Tensor, mask: Tensor | None, sequences: int | None) -> Tensor:
    if sequences is not None and norm.training:
        return _subsampled_batch_norm(norm, c, mask, sequences)
    if mask is None:
        return norm(c)
    valid = c.transpose(1, 2)[mask]
    return torch.zeros_like(c.transpose(1, 2)).masked_scatter(mask[..., None], norm(valid)).transpose(1, 2)


def _subsampled_batch_norm(norm: nn.BatchNorm1d, c: Tensor, mask: Tensor | None, sequences: int) -> Tensor:
    first = c[:sequences].transpose(1, 2)
    counted = first.flatten(0, 1) if mask is None else first[mask[:sequences]]
    norm(counted)  # updates the running statistics
    mean, var = counted.mean(0), counted.var(0, correction=0)
    return (norm.weight * (c.transpose(1, 2) - mean) * torch.rsqrt(var + norm.eps) + norm.bias).transpose(1, 2)
