"""Triton kernel of `mask_positions`."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._triton import narrow, offsets

TILE_TIME, TILE_CHANNELS = 32, 64


@triton.jit(do_not_specialize=["L", "length"])
def _mask_kernel(  # type: ignore[no-untyped-def]
    x, lengths, out, L, length, D, x_b, x_l, x_d, BL: tl.constexpr, BC: tl.constexpr
):
    blocks = tl.cdiv(length, BL)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    t = tl.program_id(0) % blocks * BL + tl.arange(0, BL)
    d = tl.program_id(1) * BC + tl.arange(0, BC)
    valid = (t < tl.minimum(tl.load(lengths + b), L))[:, None] & (d < D)[None, :]
    v = tl.load(x + b * x_b + offsets(t, d, x_l, x_d), valid, 0.0)
    if x.dtype.element_ty != out.dtype.element_ty:
        v = narrow(v.to(tl.float32) if x.dtype.element_ty != tl.float64 else v, out)
    inside = (t < length)[:, None] & (d < D)[None, :]
    tl.store(out + b * length * D + offsets(t, d, D, 1), v, inside)


def mask_positions(x: Tensor, lengths: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Compute `mask_positions`; x may have any strides."""
    B, L, D = x.shape
    out = x.new_empty(B, length, D, dtype=dtype)
    if out.numel():
        _mask_kernel[(B * triton.cdiv(length, TILE_TIME), triton.cdiv(D, TILE_CHANNELS))](
            x, lengths, out, L, length, D, *x.stride(), BL=TILE_TIME, BC=TILE_CHANNELS
        )
    return out
