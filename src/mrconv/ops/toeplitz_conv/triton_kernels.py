"""The Triton kernels behind `toeplitz.py`: a depthwise convolution as products of matrices on the tensor cores.

Time is cut into blocks; a row is one block of one sequence. For one channel, a program owns a tile of rows and adds up
rows-of-u [rows, chunk] @ Toeplitz [chunk, block] over the chunks of time that its rows need. Rows want time contiguous,
so u goes into a scratch (C, B, time) before and the result out of one after, unless it has that order already.

An element of the Toeplitz matrix is the kernel at lag t - s. So that a line of it is an aligned window of memory, the
kernel is written out several times, each copy one step later than the last: line s reads copy s % copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

import triton

from ..backends import INTERPRETED
from ..triton_tools import offsets


class Tile(NamedTuple):
    """What one program does: a product of [rows, chunk] and [chunk, block], added up over chunks."""

    rows: int
    block: int
    chunk: int
    warps: int
    stages: int
    registers: int = 255  # at most, per thread: fewer let more programs run at a time


TILE = Tile(128, 128, 64, 8, 3, 128)  # the best of those tried on an H200, as is
TILE_FLOAT32 = Tile(128, 64, 32, 8, 3)  # twice the bytes a number, three products for one
COPIES = 4  # of the kernel, one step apart: loads of 8 bytes
COPY_TIME, COPY_CHANNELS, COPY_WARPS = 64, 64, 4  # tile of the transposing copies
STRIP_BLOCK = 1024  # lags at a time where the copies are written


@triton.jit(do_not_specialize=["L", "time_blocks"])
def _rows_kernel(  # type: ignore[no-untyped-def]
    u, x, C, L, time_blocks, u_b, u_c, u_l, x_b, x_c,
    TO_ROWS: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Copy u (B, C, L) into x, which is contiguous in time and padded with zeros to whole tiles; or x into u."""
    channel_blocks = tl.cdiv(C, BC)
    i = tl.program_id(0)
    c = (i % channel_blocks) * BC + tl.arange(0, BC)
    t = (i // channel_blocks % time_blocks) * BL + tl.arange(0, BL)
    b = (i // channel_blocks // time_blocks).to(tl.int64)
    real = (c < C)[None, :]
    inside = (t < L)[:, None] & real
    there = u + b * u_b + offsets(t, c, u_l, u_c)
    here = x + b * x_b + c[None, :].to(tl.int64) * x_c + t[:, None]
    if TO_ROWS:
        tl.store(here, tl.load(there, inside, 0.0), real)
    else:
        tl.store(there, tl.load(here, real, 0.0), inside)


@triton.jit(do_not_specialize=["low", "high", "shift", "units"])
def _strip_kernel(  # type: ignore[no-untyped-def]
    kernel, strip, scale, k_c, k_k, low, high, shift, units,
    COPIES: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Write one copy of one channel: strip[c, r, i] = kernel[c, i + shift - r] / scale[c], zero outside low .. high."""
    c = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    row = kernel + c * k_c
    largest = tl.zeros([BL], tl.float32)
    for start in range(low, high, BL):
        j = start + tl.arange(0, BL)
        largest = tl.maximum(largest, tl.abs(tl.load(row + j.to(tl.int64) * k_k, j < high, 0.0).to(tl.float32)))
    bits = tl.max(largest, 0).to(tl.int32, bitcast=True) & 0x7F800000  # the power of 2 below: scaling is exact
    factor = tl.where(bits == 0, 0x3F800000, bits).to(tl.float32, bitcast=True)
    tl.store(scale + c, factor, r == 0)
    width = units * 16
    for start in range(0, width, BL):
        i = start + tl.arange(0, BL)
        j = i + shift - r
        v = tl.load(row + j.to(tl.int64) * k_k, (j >= low) & (j < high), 0.0).to(tl.float32) / factor
        tl.store(strip + (c * COPIES + r) * width + i, v.to(strip.dtype.element_ty), i < width)


@triton.jit
def _gelu(x):  # type: ignore[no-untyped-def]
    """Return x Phi(x) with Phi to 1e-7: Abramowitz and Stegun 7.1.26 for erfc, which has no branches as tl.erf does."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * p * tl.exp(-z * z)
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def rows_of(tile, rows_a_block, B, blocks, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return of each row of a tile its block of time, its sequence and whether it is one; and the first, last block."""
    row = tile * ROWS + tl.arange(0, ROWS)
    block = row // rows_a_block
    b = row % rows_a_block
    earliest = tile * ROWS // rows_a_block
    latest = tl.minimum((tile * ROWS + ROWS - 1) // rows_a_block, blocks - 1)
    return block, b, (b < B) & (block < blocks), earliest, latest


@triton.jit
def add_products(  # type: ignore[no-untyped-def]
    total, x, strip, width, origin, begin, end, block, real, earliest, latest, chunks,
    COPIES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add to total [rows, BLOCK] the rows of x [rows, 1] times the kernel, given as a strip with lag 0 at `origin`.

    Chunks are counted from the start of a row's own block: from `begin` to `end` the kernel reaches; of `chunks` is x.
    """
    s = tl.arange(0, CHUNK)
    t = tl.arange(0, BLOCK)
    own = block * (BLOCK // CHUNK)
    here = x + s[None, :]
    line = (s % COPIES) * width - (s // COPIES) * COPIES
    lags = strip + line[:, None] + (origin + t)[None, :]
    begin = tl.maximum(begin, -latest * (BLOCK // CHUNK))
    end = tl.minimum(end, chunks - earliest * (BLOCK // CHUNK))
    for k in tl.range(begin, end, num_stages=STAGES):
        at = own + k
        inside = real & (at >= 0) & (at < chunks)
        v = tl.load(here + (at * CHUNK)[:, None], inside[:, None], 0.0)
        toeplitz = tl.load(lags - k * CHUNK)  # never outside the strip: see `margins`
        if WIDE:
            v, toeplitz = v.to(tl.float32), toeplitz.to(tl.float32)
        total = tl.dot(v, toeplitz, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["B", "rows_a_block", "blocks", "tiles", "chunks", "begin", "end", "origin", "units"])
def _conv_kernel(  # type: ignore[no-untyped-def]
    x, strip, scale, bias, y, B, rows_a_block, blocks, tiles, chunks, begin, end, origin, units, x_b, x_c, y_b, y_c,
    SCALED: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One channel, ROWS rows (blocks of time of the sequences), BLOCK positions each; x is chunks * CHUNK long."""
    c = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) % tiles  # the latest, which look back on most, start first
    block, b, real, earliest, latest = rows_of(tile, rows_a_block, B, blocks, ROWS)
    here = x + c * x_c + (b.to(tl.int64) * x_b)[:, None]
    total = add_products(
        tl.zeros([ROWS, BLOCK], tl.float32), here, strip + c * (COPIES * units * 16), units * 16, origin * 16,
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
    """How the rows of x (B, C, time), L positions of them real, are cut into tiles."""

    rows_a_block: int
    blocks: int
    tiles: int
    chunks: int


def grid_of(B: int, L: int, tile: Tile) -> Grid:
    """Whole blocks in a tile if that wastes few rows: then few look further back than they must."""
    blocks, padded = triton.cdiv(L, tile.block), triton.next_power_of_2(B)
    rows_a_block = padded if padded <= tile.rows and 3 * padded <= 4 * B else B
    return Grid(rows_a_block, blocks, triton.cdiv(rows_a_block * blocks, tile.rows), triton.cdiv(L, tile.chunk))


def products(dtype: torch.dtype, tile: Tile) -> dict[str, int | str | bool]:
    """Return the options of a kernel that calls `add_products`."""
    precision = "tf32x3" if dtype == torch.float32 else "tf32"  # of float32 factors; others are as they are
    return {
        "COPIES": COPIES, "WIDE": INTERPRETED, "PRECISION": "ieee" if INTERPRETED else precision, "ROWS": tile.rows,
        "BLOCK": tile.block, "CHUNK": tile.chunk, "STAGES": tile.stages, "num_warps": tile.warps,
        "maxnreg": tile.registers,
    }  # fmt: skip


def margins(low: int, high: int, tile: Tile) -> tuple[int, int]:
    """Return the first lag and the width of a strip, in sixteens, for a kernel at lags low .. high.

    Lags that a program reads: up to a chunk more than the kernel reaches, over a block, to either side.
    """
    first = (low - tile.block - tile.chunk) // 16
    return first, triton.cdiv(high + tile.block + tile.chunk, 16) - first


def reached(low: int, high: int, tile: Tile) -> tuple[int, int]:
    """Return the first and, plus one, the last chunk that lags low .. high reach, from a block's first."""
    return -((high + tile.chunk - 1) // tile.chunk), (tile.block - 1 - low) // tile.chunk + 1


def conv(u: Tensor, kernel: Tensor, lead: int, bias: Tensor | None, gelu: bool) -> Tensor:
    """y[t] = sum_j kernel[j] u[t + lead - j] + bias, through GELU if asked, in u's dtype and memory format."""
    L, y = u.shape[2], torch.empty_like(u)
    if u.numel() == 0:
        return y
    tile = TILE_FLOAT32 if u.dtype == torch.float32 else TILE
    ahead, behind = min(lead, L - 1), min(kernel.shape[1] - lead, L)
    first, units = margins(-ahead, behind - 1, tile)
    strip = u.new_empty(kernel.shape[0], COPIES, units * 16)
    scale = u.new_empty(kernel.shape[0], dtype=torch.float32)
    _strip_kernel[(kernel.shape[0], COPIES)](
        kernel, strip, scale, *kernel.stride(), lead - ahead, lead + behind, lead + first * 16, units,
        COPIES=COPIES, BL=STRIP_BLOCK,
    )  # fmt: skip
    x, out = (z if _has_rows(z, tile.chunk) else scratch(z, tile.chunk) for z in (u, y))
    if x is not u:
        copy_rows(u, x, True)
    conv_rows(x, strip, scale, bias, out, L, -ahead, behind - 1, gelu, tile)
    if out is not y:
        copy_rows(y, out, False)
    return y


def conv_rows(
    x: Tensor, strip: Tensor, scale: Tensor | None, bias: Tensor | None, out: Tensor, L: int, low: int, high: int,
    gelu: bool, tile: Tile,
) -> None:  # fmt: skip
    """Convolve x into out, (B, C, time) both, by the strip of a kernel at lags low .. high."""
    B, C, _ = x.shape
    grid = grid_of(B, L, tile)
    _conv_kernel[(grid.tiles * C,)](
        x, strip, strip if scale is None else scale, strip if bias is None else bias.contiguous(), out, B, *grid,
        *reached(low, high, tile), -margins(low, high, tile)[0], strip.shape[2] // 16, *x.stride()[:2],
        *out.stride()[:2],
        SCALED=scale is not None, BIAS=bias is not None, GELU=gelu, **products(x.dtype, tile),
    )  # fmt: skip


def _has_rows(z: Tensor, chunk: int) -> bool:
    """Tell whether z (B, C, L) can be read and written in whole, aligned chunks of time as it lies."""
    whole = z.stride(2) == 1 and z.shape[2] % chunk == 0
    return whole and z.stride(0) % 16 == 0 and z.stride(1) % 16 == 0 and z.data_ptr() % 16 == 0


def scratch(z: Tensor, chunk: int) -> Tensor:
    """Return room for z as (B, C, time) with strides of (C, B, time), time padded to whole tiles and chunks."""
    B, C, L = z.shape
    return z.new_empty(C, B, triton.cdiv(L, max(chunk, COPY_TIME)) * max(chunk, COPY_TIME)).transpose(0, 1)


def copy_rows(u: Tensor, x: Tensor, to_rows: bool) -> None:
    """Copy u (B, C, L) into x, (B, C, time) as `scratch` makes it, or the other way."""
    (B, C, L), time_blocks = u.shape, x.shape[2] // COPY_TIME
    _rows_kernel[(triton.cdiv(C, COPY_CHANNELS) * time_blocks * B,)](
        u, x, C, L, time_blocks, *u.stride(), *x.stride()[:2],
        TO_ROWS=to_rows, BL=COPY_TIME, BC=COPY_CHANNELS, num_warps=COPY_WARPS,
    )  # fmt: skip
