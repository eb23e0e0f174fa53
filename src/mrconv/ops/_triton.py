"""Helpers that the Triton kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

import triton

from ._common import INTERPRETED, constants

MAX_GRID = 2**16 - 1
"""The largest number of programs along the second and the third axis of a CUDA grid."""
_COMPILED = tl.constexpr(not INTERPRETED)
PARTS_TILE, ELEMENTS_TILE = 8, 128  # parts and elements that a program of `sum_parts` adds at a time
PARTS_PER_PROGRAM, MAX_PROGRAMS = 32, 64  # along the parts


@triton.jit
def offsets(t, c, stride_l, stride_c):  # type: ignore[no-untyped-def]
    """Return the offsets of a tile of positions t and channels c, in 64 bits."""
    return t[:, None].to(tl.int64) * stride_l + c[None, :].to(tl.int64) * stride_c


@triton.jit
def cast(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast x to float32 or float64; bfloat16 in 1 instruction per number, where Triton takes 1.5."""
    if x.dtype == tl.bfloat16 and dtype == tl.float32 and _COMPILED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            args=[x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return x.to(dtype)


@triton.jit
def widen(x):  # type: ignore[no-untyped-def]
    """Cast x to float64; half precision is cast to float32 first, as Triton's interpreter requires."""
    if x.dtype == tl.float64:
        return x
    return x.to(tl.float32).to(tl.float64)


@triton.jit
def narrow(x, like):  # type: ignore[no-untyped-def]
    """Cast x, float64 or float32, to the dtype of a pointer; half precision goes through float32."""
    if like.dtype.element_ty == tl.float64:
        return x
    return x.to(tl.float32).to(like.dtype.element_ty)


@triton.jit
def gelu(x):  # type: ignore[no-untyped-def]
    """Return the exact GELU of x in float32 or float64."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def add_parts(parts, first, size, P, c, C, BP: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum over P parts of `size` elements of those at `first` + c, c < C, in float64."""
    total = tl.zeros([BP, BC], tl.float64)
    for start in range(0, P, BP):
        p = start + tl.arange(0, BP)
        at = parts + p.to(tl.int64)[:, None] * size + (first + c)[None, :]
        total += widen(tl.load(at, (p < P)[:, None] & (c < C)[None, :], 0.0))
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["parts", "share"])
def _sum_parts_kernel(x, out, parts, elements, share, BP: tl.constexpr, BE: tl.constexpr):  # type: ignore[no-untyped-def]
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, parts)
    total = tl.zeros([BP, BE], tl.float64)
    for start in range(begin, end, BP):
        part = start + tl.arange(0, BP)
        inside = (part < end)[:, None] & (e < elements)[None, :]
        total += widen(tl.load(x + offsets(part, e, elements, 1), inside, 0.0))
    tl.store(out + tl.program_id(1).to(tl.int64) * elements + e, tl.sum(total, 0), e < elements)


def sum_parts(x: Tensor) -> Tensor:
    """Return the sum over the first dimension in float64, without torch's copy of x in float64."""
    return _partial_sums(x).sum(0)


def sum_parts_into(out: Tensor, x: Tensor) -> None:
    """Write the sum over the first dimension of x to out, float64; both are contiguous."""
    parts, elements = x.shape[0], out.numel()
    _sum_parts_kernel[triton.cdiv(elements, ELEMENTS_TILE), 1](
        x, out, parts, elements, parts, BP=PARTS_TILE, BE=ELEMENTS_TILE
    )


def fold_parts(x: Tensor, limit: int = 512) -> Tensor:
    """Return x, contiguous, or fewer parts of the same sum over the first dimension if there are more than `limit`."""
    return x.contiguous() if len(x) <= limit else _partial_sums(x)


def _partial_sums(x: Tensor) -> Tensor:
    """Return sums in float64 over some parts each, at most MAX_PROGRAMS of them."""
    parts, shape = x.shape[0], x.shape[1:]
    programs = min(MAX_PROGRAMS, triton.cdiv(parts, PARTS_PER_PROGRAM))
    out = x.new_empty(programs, shape.numel(), dtype=torch.float64)
    _sum_parts_kernel[triton.cdiv(shape.numel(), ELEMENTS_TILE), programs](
        x.contiguous(), out, parts, shape.numel(), triton.cdiv(parts, programs), BP=PARTS_TILE, BE=ELEMENTS_TILE
    )
    return out.view(programs, *shape)


def allocate_branch_gradients(u: Tensor, branches: int, max_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor (N, b, C, L) for the branches' gradients of b sequences, as many as fit.

    It takes at most `max_bytes`, if b > 1. It has u's memory format, and u's dtype if that is half precision.
    """
    B, C, L = u.shape
    dtype = u.dtype if u.element_size() == 2 else dtype
    size = max(1, min(B, max_bytes // max(1, branches * C * L * dtype.itemsize)))
    if u.stride(1) == 1:
        return u.new_empty(branches, size, L, C, dtype=dtype).transpose(2, 3)
    return u.new_empty(branches, size, C, L, dtype=dtype)


def tiles(x: Tensor, time: int, channels: int) -> tuple[int, int, int]:
    """Return the grid of programs that covers x (B, C, L) with tiles of `time` positions and `channels` channels."""
    B, C, L = x.shape
    if B > MAX_GRID:
        raise ValueError(
            f"this kernel takes at most {MAX_GRID:,} sequences at once on a GPU; got {B:,}: split the batch"
        )
    return triton.cdiv(L, time), triton.cdiv(C, channels), B


def wide(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype to compute in: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def int32_constants(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Return numbers as a cached int32 tensor on the device of `like`."""
    return constants(numbers, like, torch.int32)
