"""Zero the padding of sequences, crop or pad them and cast them, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common import reject_forward_mode, use_triton
from .._registration import eager_op


def mask_positions(x: Tensor, lengths: Tensor, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return x (B, L, D) as (B, length, D) in `dtype`: zero from `lengths` (B,) on, cropped or padded with zeros."""
    dtype = dtype or x.dtype
    if torch.compiler.is_exporting() or not use_triton(x, "auto"):
        return mask_positions_reference(x, lengths, length, dtype)
    reject_forward_mode(x)
    return _mask_positions(x, lengths.contiguous(), length, dtype)


def mask_sequences(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return x (B, C, L), zero from `lengths` (B,) on; x itself if there are no lengths."""
    return x if lengths is None else mask_positions(x.mT, lengths, x.shape[2]).mT


def mask_positions_reference(x: Tensor, lengths: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Compute `mask_positions` by plain torch."""
    padding = torch.arange(min(length, x.shape[1]), device=x.device) >= lengths[:, None]
    cropped = x[:, :length].to(dtype).masked_fill(padding[..., None], 0)
    return F.pad(cropped, (0, 0, 0, max(0, length - x.shape[1])))


@eager_op("mask_positions")
def _mask_positions(x: Tensor, lengths: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    from .triton_kernels import mask_positions

    return mask_positions(x, lengths, length, dtype)


@_mask_positions.register_fake
def _(x: Tensor, lengths: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], length, x.shape[2], dtype=dtype)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, lengths, _, _ = inputs
    ctx.length, ctx.dtype = x.shape[1], x.dtype
    ctx.save_for_backward(lengths)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _mask_positions(grad, *ctx.saved_tensors, ctx.length, ctx.dtype), None, None, None


_mask_positions.register_autograd(_backward, setup_context=_setup)
