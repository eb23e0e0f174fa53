"""Triton kernels of a depthwise convolution as products of matrices on the tensor cores.

Time is divided into blocks. For one channel, a program computes a tile of time blocks of several sequences: it sums
u [blocks, chunk] @ Toeplitz [chunk, block] over the chunks of time that its blocks depend on. Time must be contiguous:
an input or output with another layout is copied to or from a scratch tensor (C, B, time). These copies also zero the
padding of sequences of different lengths.

An element of the Toeplitz matrix is the kernel at lag t - s. The kernel is stored in a strip of several copies, each
shifted by one, so that every line of the matrix is an aligned piece of memory: line s reads copy s % copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

import triton

from .._common import INTERPRETED
from .._triton import offsets
from .correlation_triton import correlation_at


class Tile(NamedTuple):
    """The size of one program: a product of [blocks, chunk] and [chunk, block], summed over chunks."""

    blocks: int  # time blocks
    block: int  # positions of a time block
    chunk: int
    warps: int
    stages: int
    registers: int = 255  # limit per thread: fewer let more programs run at a time


TILE = Tile(128, 128, 64, 8, 3, 128)  # the fastest of those tried on an H200
TILE_FLOAT32 = Tile(128, 64, 32, 8, 3)  # twice the bytes per number, three products for one
COPIES = 4  # of the kernel, shifted by one: loads of 8 bytes
COPY_TIME, COPY_CHANNELS, COPY_WARPS = 64, 64, 4  # tile of the transposing copies
STRIP_BLOCK = 1024  # lags that are written to a strip at a time


@triton.jit(do_not_specialize=["L", "time_blocks"])
def _copy_kernel(  # type: ignore[no-untyped-def]
    u, x, lengths, C, L, time_blocks, u_b, u_c, u_l, x_b, x_c,
    MASKED: tl.constexpr, TO_SCRATCH: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Copy u (B, C, L) to x, contiguous in time and padded with zeros to whole tiles; or x to u.

    Copies are zero from `lengths` on, if MASKED.
    """
    channel_blocks = tl.cdiv(C, BC)
    i = tl.program_id(0)
    c = (i % channel_blocks) * BC + tl.arange(0, BC)
    t = (i // channel_blocks % time_blocks) * BL + tl.arange(0, BL)
    b = (i // channel_blocks // time_blocks).to(tl.int64)
    real = (c < C)[None, :]
    inside = (t < L)[:, None] & real
    valid = inside
    if MASKED:
        valid = inside & (t < tl.load(lengths + b))[:, None]
    there = u + b * u_b + offsets(t, c, u_l, u_c)
    here = x + b * x_b + c[None, :].to(tl.int64) * x_c + t[:, None]
    if TO_SCRATCH:
        tl.store(here, tl.load(there, valid, 0.0), real)
    else:
        v = tl.load(here, real, 0.0)
        if MASKED:
            v = tl.where(valid, v, 0.0)
        tl.store(there, v, inside)


@triton.jit(do_not_specialize=["low", "high", "shift", "units"])
def _strip_kernel(  # type: ignore[no-untyped-def]
    kernel, strip, scale, k_c, k_k, low, high, shift, units,
    COPIES: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Write one copy of one channel: strip[c, r, i] = kernel[c, i + shift - r] / scale[c], zero outside low .. high."""
    c = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    taps = kernel + c * k_c
    largest = tl.zeros([BL], tl.float32)
    for start in range(low, high, BL):
        j = start + tl.arange(0, BL)
        largest = tl.maximum(largest, tl.abs(tl.load(taps + j.to(tl.int64) * k_k, j < high, 0.0).to(tl.float32)))
    bits = tl.max(largest, 0).to(tl.int32, bitcast=True) & 0x7F800000  # the largest power of 2 below: scaling is exact
    factor = tl.where(bits == 0, 0x3F800000, bits).to(tl.float32, bitcast=True)
    tl.store(scale + c, factor, r == 0)
    width = units * 16
    for start in range(0, width, BL):
        i = start + tl.arange(0, BL)
        j = i + shift - r
        v = tl.load(taps + j.to(tl.int64) * k_k, (j >= low) & (j < high), 0.0).to(tl.float32) / factor
        tl.store(strip + (c * COPIES + r) * width + i, v.to(strip.dtype.element_ty), i < width)


@triton.jit
def _gelu(x):  # type: ignore[no-untyped-def]
    """Return GELU(x) with an error of 1e-7: Abramowitz and Stegun 7.1.26 for erfc, branchless unlike tl.erf."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * p * tl.exp(-z * z)
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def time_blocks(tile, B, blocks, tiles, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each line's time block and sequence, whether the line exists, and the tile's first and last block.

    If the lines do not fill all tiles, the first tile, which has the least work in a causal convolution, lacks some.
    """
    begin = tile * BLOCKS - (tiles * BLOCKS - B * blocks)
    index = begin + tl.arange(0, BLOCKS)
    real = index >= 0
    index = tl.maximum(index, 0)
    return index // B, index % B, real, tl.maximum(begin, 0) // B, (begin + BLOCKS - 1) // B


@triton.jit
def add_products(  # type: ignore[no-untyped-def]
    total, x, strip, width, origin, begin, end, block, real, earliest, latest, chunks,
    COPIES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the sequences at pointers x [blocks, 1], convolved with a kernel, to total [blocks, BLOCK].

    The kernel is a strip with lag 0 at `origin`. Chunks are counted from the start of each time block: the kernel
    reaches chunks `begin` to `end`, and x has `chunks` in total.
    """
    s = tl.arange(0, CHUNK)
    t = tl.arange(0, BLOCK)
    first = block * (BLOCK // CHUNK)
    here = x + s[None, :]
    line = (s % COPIES) * width - (s // COPIES) * COPIES
    lags = strip + line[:, None] + (origin + t)[None, :]
    begin = tl.maximum(begin, -latest * (BLOCK // CHUNK))
    end = tl.minimum(end, chunks - earliest * (BLOCK // CHUNK))
    for k in tl.range(begin, end, num_stages=STAGES):
        at = first + k
        inside = real & (at >= 0) & (at < chunks)
        v = tl.load(here + (at * CHUNK)[:, None], inside[:, None], 0.0)
        toeplitz = tl.load(lags - k * CHUNK)  # always inside the strip: see `margins`
        if WIDE:
            v, toeplitz = v.to(tl.float32), toeplitz.to(tl.float32)
        total = tl.dot(v, toeplitz, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["B", "blocks", "tiles", "chunks", "begin", "end", "origin", "units"])
def _conv_kernel(  # type: ignore[no-untyped-def]
    x, strip, scale, bias, y, B, blocks, tiles, chunks, begin, end, origin, units, x_b, x_c, y_b, y_c,
    SCALED: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCKS time blocks of one channel, BLOCK positions each; x is chunks * CHUNK long."""
    c = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles  # the latest blocks have the most work: start them first
    block, b, real, earliest, latest = time_blocks(tile, B, blocks, tiles, BLOCKS)
    here = x + c * x_c + (b.to(tl.int64) * x_b)[:, None]
    total = add_products(
        tl.zeros([BLOCKS, BLOCK], tl.float32), here, strip + c * (COPIES * units * 16), units * 16, origin * 16,
        begin, end, block, real, earliest, latest, chunks, COPIES, WIDE, PRECISION, BLOCK, CHUNK, STAGES,
    )  # fmt: skip
    if SCALED:
        total *= tl.load(scale + c)
    if BIAS:
        total += tl.load(bias + c).to(tl.float32)
    if GELU:
        total = _gelu(total)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    out = y + c * y_c + (b.to(tl.int64) * y_b)[:, None] + at
    tl.store(out, total.to(y.dtype.element_ty), real[:, None] & (at < chunks * CHUNK))


class Grid(NamedTuple):
    """The division of the time blocks of x (B, C, time), with L valid positions, into tiles."""

    blocks: int
    tiles: int
    chunks: int


def grid_of(B: int, L: int, tile: Tile) -> Grid:
    """Return the grid: the lines of a tile are the first time block of all sequences, then the second one, ..."""
    blocks = triton.cdiv(L, tile.block)
    return Grid(blocks, triton.cdiv(B * blocks, tile.blocks), triton.cdiv(L, tile.chunk))


def product_options(dtype: torch.dtype, tile: Tile) -> dict[str, int | str | bool]:
    """Return the options of a kernel that calls `add_products`."""
    precision = "tf32x3" if dtype == torch.float32 else "tf32"  # applies to float32 factors only
    return {
        "COPIES": COPIES, "WIDE": INTERPRETED, "PRECISION": "ieee" if INTERPRETED else precision, "BLOCKS": tile.blocks,
        "BLOCK": tile.block, "CHUNK": tile.chunk, "STAGES": tile.stages, "num_warps": tile.warps,
        "maxnreg": tile.registers,
    }  # fmt: skip


def margins(low: int, high: int, tile: Tile) -> tuple[int, int]:
    """Return the first lag and the width of a strip, in units of 16, for a kernel at lags low .. high.

    A program reads up to a block and a chunk more than the kernel's lags, on either side.
    """
    first = (low - tile.block - tile.chunk) // 16
    return first, triton.cdiv(high + tile.block + tile.chunk, 16) - first


def reached(low: int, high: int, tile: Tile) -> tuple[int, int]:
    """Return the range of chunks, counted from a block's first, that lags low .. high reach."""
    return -((high + tile.chunk - 1) // tile.chunk), (tile.block - 1 - low) // tile.chunk + 1


def conv(
    u: Tensor, kernel: Tensor, lead: int, bias: Tensor | None, gelu: bool, lengths: Tensor | None = None
) -> Tensor:
    """Return y[t] = sum_j kernel[j] u[t + lead - j] + bias, with GELU if `gelu`, in u's dtype and memory format.

    u and y are zero from `lengths` (B,) on.
    """
    y = torch.empty_like(u)
    if u.numel() == 0:
        return y
    tile = TILE_FLOAT32 if u.dtype == torch.float32 else TILE
    x = u if lengths is None and _is_time_contiguous(u, tile.chunk) else time_contiguous(u, tile.chunk, lengths)
    _write(x, kernel, lead, y, tile, bias, gelu, lengths)
    return y


def gradients(grad: Tensor, u: Tensor, kernel: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of u and, in float32, of the kernel; all factors of products have u's dtype."""
    (L, K), du = (u.shape[2], kernel.shape[1]), torch.empty_like(u)
    if u.numel() == 0:
        return du, torch.zeros_like(kernel, dtype=torch.float32)
    x, g = time_contiguous(u, TILE.chunk), time_contiguous(grad.to(u.dtype), TILE.chunk)
    _write(g, kernel.flip(1), K - 1 - lead, du, TILE)
    low, high = _lags(K, lead, L)
    dkernel = correlation_at(x.transpose(0, 1), g.transpose(0, 1), low, high)
    return du, pad(dkernel, (lead + low, K - 1 - lead - high))


def _lags(K: int, lead: int, L: int) -> tuple[int, int]:
    """Return the lowest and the highest lag of K taps at which they overlap an input of length L."""
    return -min(lead, L - 1), min(K - lead, L) - 1


def time_contiguous(u: Tensor, chunk: int, lengths: Tensor | None = None) -> Tensor:
    """Return a copy of u (B, C, L) in a tensor of `time_contiguous_empty`, zero from `lengths` (B,) on."""
    x = time_contiguous_empty(u, chunk)
    copy_time_contiguous(u, x, True, lengths)
    return x


def _write(
    x: Tensor, kernel: Tensor, lead: int, y: Tensor, tile: Tile, bias: Tensor | None = None, gelu: bool = False,
    lengths: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the convolution of x, which is contiguous in time, to y (B, C, L), zero from `lengths` (B,) on."""
    L, C = y.shape[2], len(kernel)
    low, high = _lags(kernel.shape[1], lead, L)
    first, units = margins(low, high, tile)
    strip, scale = x.new_empty(C, COPIES, units * 16), x.new_empty(C, dtype=torch.float32)
    _strip_kernel[(C, COPIES)](
        kernel, strip, scale, *kernel.stride(), lead + low, lead + high + 1, lead + first * 16, units,
        COPIES=COPIES, BL=STRIP_BLOCK,
    )  # fmt: skip
    out = y if lengths is None and _is_time_contiguous(y, tile.chunk) else time_contiguous_empty(y, tile.chunk)
    conv_time_contiguous(x, strip, scale, bias, out, L, low, high, gelu, tile)
    if out is not y:
        copy_time_contiguous(y, out, False, lengths)


def conv_time_contiguous(
    x: Tensor, strip: Tensor, scale: Tensor | None, bias: Tensor | None, out: Tensor, L: int, low: int, high: int,
    gelu: bool, tile: Tile,
) -> None:  # fmt: skip
    """Write the convolution of x with a kernel at lags low .. high, given as a strip, to out; both (B, C, time)."""
    B, C, _ = x.shape
    grid = grid_of(B, L, tile)
    _conv_kernel[(grid.tiles * C,)](
        x, strip, strip if scale is None else scale, strip if bias is None else bias.contiguous(), out, B, *grid,
        *reached(low, high, tile), -margins(low, high, tile)[0], strip.shape[2] // 16, *x.stride()[:2],
        *out.stride()[:2],
        SCALED=scale is not None, BIAS=bias is not None, GELU=gelu, **product_options(x.dtype, tile),
    )  # fmt: skip


def _is_time_contiguous(z: Tensor, chunk: int) -> bool:
    """Return whether z (B, C, L) can be read and written in whole, aligned chunks of time."""
    chunked = z.stride(2) == 1 and z.shape[2] % chunk == 0
    return chunked and z.stride(0) % 16 == 0 and z.stride(1) % 16 == 0 and z.data_ptr() % 16 == 0


def time_contiguous_empty(z: Tensor, chunk: int) -> Tensor:
    """Return an uninitialised (B, C, time) for z with strides of (C, B, time), time padded to tiles and chunks."""
    B, C, L = z.shape
    return z.new_empty(C, B, triton.cdiv(L, max(chunk, COPY_TIME)) * max(chunk, COPY_TIME)).transpose(0, 1)


def copy_time_contiguous(u: Tensor, x: Tensor, to_scratch: bool, lengths: Tensor | None = None) -> None:
    """Copy u (B, C, L) to x, (B, C, time) of `time_contiguous_empty`, if `to_scratch`, else x to u.

    The copy is zero from `lengths` (B,) on.
    """
    (B, C, L), time_blocks = u.shape, x.shape[2] // COPY_TIME
    _copy_kernel[(triton.cdiv(C, COPY_CHANNELS) * time_blocks * B,)](
        u, x, u if lengths is None else lengths.contiguous(), C, L, time_blocks, *u.stride(), *x.stride()[:2],
        MASKED=lengths is not None, TO_SCRATCH=to_scratch, BL=COPY_TIME, BC=COPY_CHANNELS, num_warps=COPY_WARPS,
    )  # fmt: skip
