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
) -> Tensor:
    """Return y = sum_i alpha_i BN_i(k_i * u) for u (B, C, L), kernels k_i, alpha (N, C) and a norm of N * C features.

    With `mask` (B, L), only the positions where it is true are normalised and counted.
    """
    c = torch.stack([conv_reference(u, *kernel) for kernel in kernels], 1)  # (B, N, C, L)
    if norm is not None:
        c = _batch_norm(norm, c.flatten(1, 2), mask).view_as(c)
    if alpha is not None:
        c = alpha[:, :, None] * c
    return c.sum(1)


def _batch_norm(norm: nn.BatchNorm1d, c: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return norm(c)
    valid = c.transpose(1, 2)[mask]
    return torch.zeros_like(c.transpose(1, 2)).masked_scatter(mask[..., None], norm(valid)).transpose(1, 2)
