"""What the Triton kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from .constants import integers_on

MOST = 2**16 - 1
"""Programs that CUDA launches along the second and the third axis of a grid."""
SUMMED_TILE = 8, 128  # rows and columns that a program of `summed` adds at a time
SHARE, MOST_SHARES = 32, 64  # rows that are worth a program of their own, and programs along the rows


@triton.jit
def offsets(t, c, stride_l, stride_c):  # type: ignore[no-untyped-def]
    """Offsets of a tile of positions t and channels c, in 64 bits."""
    return t[:, None].to(tl.int64) * stride_l + c[None, :].to(tl.int64) * stride_c


@triton.jit
def widen(x):  # type: ignore[no-untyped-def]
    """Return x in float64, by way of float32 from anything shorter, which Triton's interpreter needs."""
    if x.dtype == tl.float64:
        return x
    return x.to(tl.float32).to(tl.float64)


@triton.jit
def narrow(x, like):  # type: ignore[no-untyped-def]
    """Return x, float64 or float32, in the dtype that a pointer points to, by way of float32 to anything shorter."""
    if like.dtype.element_ty == tl.float64:
        return x
    return x.to(tl.float32).to(like.dtype.element_ty)


@triton.jit
def gelu(x):  # type: ignore[no-untyped-def]
    """GELU in float32 or float64, exact."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit(do_not_specialize=["rows", "share"])
def _summed_kernel(x, out, rows, columns, share, BR: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, rows)
    total = tl.zeros([BR, BC], tl.float64)
    for start in range(begin, end, BR):
        row = start + tl.arange(0, BR)
        inside = (row < end)[:, None] & (c < columns)[None, :]
        total += widen(tl.load(x + offsets(row, c, columns, 1), inside, 0.0))
    tl.store(out + tl.program_id(1).to(tl.int64) * columns + c, tl.sum(total, 0), c < columns)


def summed(parts: Tensor) -> Tensor:
    """Sum over the first dimension, in float64. torch would make a copy of all parts in float64 first."""
    rows, shape = parts.shape[0], parts.shape[1:]
    shares = min(MOST_SHARES, triton.cdiv(rows, SHARE))
    out = parts.new_empty(shares, shape.numel(), dtype=torch.float64)
    grid = (triton.cdiv(shape.numel(), SUMMED_TILE[1]), shares)
    _summed_kernel[grid](
        parts.contiguous(), out, rows, shape.numel(), triton.cdiv(rows, shares), BR=SUMMED_TILE[0], BC=SUMMED_TILE[1]
    )
    return out.sum(0).view(shape)


def branch_gradients(u: Tensor, branches: int, most: int, dtype: torch.dtype) -> Tensor:
    """Return room for the branches' gradients (N, b, C, L) of as many sequences b as fit into so many bytes.

    It has u's memory format, and u's dtype if that is half precision.
    """
    B, C, L = u.shape
    dtype = u.dtype if u.element_size() == 2 else dtype
    size = max(1, min(B, most // max(1, branches * C * L * dtype.itemsize)))
    if u.stride(1) == 1:
        return u.new_empty(branches, size, L, C, dtype=dtype).transpose(2, 3)
    return u.new_empty(branches, size, C, L, dtype=dtype)


def tiles(x: Tensor, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the grid of programs that covers x (B, C, L) with tiles of so many positions and channels."""
    B, C, L = x.shape
    if B > MOST:
        raise ValueError(f"this kernel takes at most {MOST:,} sequences at once on a GPU; got {B:,}: split the batch")
    return triton.cdiv(L, rows), triton.cdiv(C, columns), B


def wide(dtype: torch.dtype) -> tl.dtype:
    """Return what tensors of a dtype are computed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def on_device(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Return numbers as a tensor where another is."""
    return integers_on(numbers, like, torch.int32)
