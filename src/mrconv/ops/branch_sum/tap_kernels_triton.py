"""Triton kernels of `taps_triton.py`, with its symbols. Tensors are (B, C, L) with any strides."""

from __future__ import annotations

import triton.language as tl

import triton

from .._triton import cast, offsets, widen
from ..tap_conv.triton_kernels import FAR, add_taps


@triton.jit(do_not_specialize=["taps"])
def moments_kernel(  # type: ignore[no-untyped-def]
    sums, values, starts, pairs, masses, saved, out, C, taps, v_c, v_t,
    BT: tl.constexpr, TERMS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store m and h, and the terms v m and v h of the sums of c and of c^2, for one tap and some channels."""
    p = tl.program_id(0) % BT
    n = tl.program_id(0) // BT
    N = tl.num_programs(0) // BT
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    i = tl.load(starts + n) + p
    exists = i < tl.load(starts + n + 1)
    channels = c < tl.where(exists, C, 0)
    k = tl.arange(0, BT * TERMS)
    row = tl.load(pairs + i * BT * TERMS + k, k < tl.where(exists, BT * TERMS, 0), -1)
    inside = (row >= 0)[:, None] & channels[None, :]
    v = widen(tl.load(values + (i - p + k // TERMS)[:, None] * v_t + c[None, :] * v_c, inside, 0.0))
    v = tl.where((k % TERMS == 0)[:, None], v, -v)
    h = tl.sum(tl.load(sums + row[:, None] * C + c[None, :], inside, 0.0) * v, 0)
    k = tl.arange(0, TERMS)
    row = tl.load(masses + i * TERMS + k, k < tl.where(exists, TERMS, 0), -1)
    x = tl.load(sums + row[:, None] * C + c[None, :], (row >= 0)[:, None] & channels[None, :], 0.0)
    m = tl.sum(tl.where((k == 0)[:, None], x, -x), 0)
    tl.store(saved + i * C + c, m.to(saved.dtype.element_ty), channels)
    tl.store(saved + (taps + i) * C + c, h.to(saved.dtype.element_ty), channels)
    v = widen(tl.load(values + i * v_t + c * v_c, channels, 0.0))
    out += (p * 2 * N + n) * C + c
    tl.store(out, tl.where(exists, v * m, 0.0), c < C)
    tl.store(out + N * C, tl.where(exists, v * h, 0.0), c < C)


@triton.jit
def _sum_rows(x, row, parts, stride, C, c, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum over all parts of a row of x (parts, rows, C); zero for a negative row."""
    total = tl.zeros([32, BC], tl.float64)
    for start in range(0, parts, 32):
        part = start + tl.arange(0, 32)
        inside = (part < tl.where(row >= 0, parts, 0))[:, None] & (c < C)[None, :]
        total += widen(tl.load(x + part[:, None] * stride + row * C + c[None, :], inside, 0.0))
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["parts", "stride", "total", "center"])
def products_kernel(  # type: ignore[no-untyped-def]
    x, values, starts, positions, products, out, C, parts, stride, total, center, v_c, v_t,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store a tap's correlation, and its term of the sum of g c; after the branches, the sums of g and of g u."""
    p = tl.program_id(0) % BT
    n = tl.program_id(0) // BT
    rows = tl.num_programs(0) // BT
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    branch = n < rows - 2
    i = tl.load(starts + n, branch, 0) + p
    exists = i < tl.load(starts + n + 1, branch, 0)
    row = tl.where(n == rows - 2, total, center)
    row = tl.where(branch, tl.load(positions + i, exists, -1), tl.where(p == 0, row, -1))
    product = _sum_rows(x, row, parts, stride, C, c, BC)
    tl.store(products + i * C + c, product.to(products.dtype.element_ty), c < tl.where(exists, C, 0))
    v = widen(tl.load(values + i * v_t + c * v_c, c < tl.where(exists, C, 0), 0.0))
    tl.store(out + (p * rows + n) * C + c, tl.where(branch, v * product, product), c < C)


@triton.jit(do_not_specialize=["merged", "pairs", "center"])
def combine_kernel(  # type: ignore[no-untyped-def]
    values, s, q, a, skip, starts, first, second, owners, out, C, merged, pairs, center, v_c, v_t,
    BACKWARD: tl.constexpr, SKIP: tl.constexpr, MEMBERS: tl.constexpr, WIDE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store a row of the table that `Members` describe, for some channels."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    k = tl.load(starts + row) + tl.arange(0, MEMBERS)
    member = k < tl.load(starts + row + 1)
    inside = member[:, None] & (c < C)[None, :]
    channel = c[None, :] * v_c
    v = tl.load(values + tl.load(first + k, member, 0)[:, None] * v_t + channel, inside, 0.0).to(WIDE)
    at = tl.load(owners + k, member, 0)[:, None] * C + c[None, :]
    if row < merged:
        v *= tl.load(s + at, inside, 0.0).to(WIDE)
    if BACKWARD:
        if (row >= merged) & (row < merged + pairs):
            other = tl.load(values + tl.load(second + k, member, 0)[:, None] * v_t + channel, inside, 0.0).to(WIDE)
            v *= -other * tl.load(q + at, inside, 0.0).to(WIDE)
        if row == merged + pairs:
            v *= -tl.load(a + at, inside, 0.0).to(WIDE)
    total = tl.sum(v, 0)
    if SKIP:
        total += tl.load(skip + c, c < tl.where(row == center, C, 0), 0.0).to(WIDE)
    tl.store(out + row * C + c, total, c < C)


@triton.jit(do_not_specialize=["L"])
def rows_kernel(  # type: ignore[no-untyped-def]
    u, g, table, lags, starts, branches, rows, begins, after, counts, s, q, a, lengths, out, L,
    u_b, u_c, u_l, g_b, g_c, g_l, out_b, C: tl.constexpr, DENSE: tl.constexpr,
    OUTSIDE: tl.constexpr, SUMS: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    BT: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Store a tile of rows: q c + a outside of the sequence, or dc inside, or the sums of c and of c^2 inside."""
    if DENSE:  # constants save instructions
        u_c, u_l = 1, C
    tile = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    n = tl.load(branches + tile)
    tap = tl.load(starts + n)
    begin = tl.load(begins + tile) + tl.load(after + tile) * end
    k = tl.arange(0, BL)
    branch = add_taps(
        tl.zeros([BL, BC], WIDE), u + b * u_b, offsets(k, c, u_l, u_c), u_l, lags + tap, lags, table + tap * C, c, C,
        begin, 0, L, FAR, tl.load(starts + n + 1) - tap, False, BT, EVEN, WIDE, BL, UNROLL,
    )  # fmt: skip
    inside = (begin + k < end)[:, None] & (c < C)[None, :]
    if SUMS:
        branch = tl.where(inside, branch, 0.0)
        N = tl.num_programs(0) // tl.cdiv(L, BL)
        out += (b * tl.cdiv(L, BL) + begin // BL) * 2 * N * C + n * C + c
        tl.store(out, tl.sum(branch, 0), c < C)
        tl.store(out + N * C, tl.sum(branch * branch, 0), c < C)
    else:
        less = tl.load(a + n * C + c, c < C, 0.0).to(WIDE)
        dc = branch * tl.load(q + n * C + c, c < C, 0.0).to(WIDE)[None, :] + less[None, :]
        if not OUTSIDE:
            grad = cast(tl.load(g + b * g_b + offsets(begin + k, c, g_l, g_c), inside, 0.0), WIDE)
            dc = tl.where(inside, grad * tl.load(s + n * C + c, c < C, 0.0).to(WIDE)[None, :] - dc, 0.0)
        stored = (k < tl.load(counts + tile))[:, None] & (c < C)[None, :]
        target = out + b * out_b + offsets(tl.load(rows + tile) + k, c, C, 1)
        tl.store(target, dc.to(out.dtype.element_ty), stored)


@triton.jit(do_not_specialize=["L", "taps", "pairs", "row_taps"])
def input_gradient_kernel(  # type: ignore[no-untyped-def]
    g, u, rows, table, lags, deltas, row_lags, row_bases, lengths, du, L, taps, pairs, row_taps,
    g_b, g_c, g_l, u_b, u_c, u_l, rows_b, d_b, d_c, d_l, C: tl.constexpr, DENSE: tl.constexpr,
    OUTSIDE: tl.constexpr, BEYOND: tl.constexpr, BEFORE: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, TAPS: tl.constexpr, PAIRS: tl.constexpr, ROW_TAPS: tl.constexpr, BL: tl.constexpr,
    BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Store a tile of the gradient of u, from taps on g, on u and on the rows."""
    if DENSE:  # constants save instructions
        g_c, g_l, u_c, u_l = 1, C, 1, C
    begin = tl.program_id(0) * BL
    k = tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    end = L
    if MASKED:
        end = tl.load(lengths + b).to(tl.int32)
    total = tl.zeros([BL, BC], WIDE)
    total = add_taps(
        total, g + b * g_b, offsets(k, c, g_l, g_c), g_l, lags, lags, table, c, C, begin, 0, L, L, taps,
        False, TAPS, EVEN, WIDE, BL, UNROLL,
    )  # fmt: skip
    table += taps * C
    if OUTSIDE:
        total = add_taps(
            total, u + b * u_b, offsets(k, c, u_l, u_c), u_l, deltas, deltas, table, c, C, begin, 0, L, L, pairs,
            False, PAIRS, EVEN, WIDE, BL, UNROLL,
        )  # fmt: skip
    table += pairs * C
    total += tl.load(table + c, c < C, 0.0).to(WIDE)[None, :]
    table += C
    rows += b * rows_b
    at = offsets(k, c, C, 1)
    if BEYOND:
        total = add_taps(
            total, rows - end * C, at, C, row_lags, row_bases, table, c, C, begin, end, FAR, end, row_taps,
            True, ROW_TAPS, EVEN, WIDE, BL, UNROLL,
        )  # fmt: skip
    if BEFORE:
        total = add_taps(
            total, rows, at, C, row_lags, row_bases + row_taps, table, c, C, begin, -FAR, 0, end, row_taps,
            True, ROW_TAPS, EVEN, WIDE, BL, UNROLL,
        )  # fmt: skip
    if not OUTSIDE:
        total = add_taps(
            total, rows, at, C, row_lags, row_bases, table, c, C, begin, 0, end, end, row_taps,
            True, ROW_TAPS, EVEN, WIDE, BL, UNROLL,
        )  # fmt: skip
    inside = (begin + k < L)[:, None] & (c < C)[None, :]
    tl.store(du + b * d_b + offsets(begin + k, c, d_l, d_c), total.to(du.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["taps"])
def value_gradient_kernel(  # type: ignore[no-untyped-def]
    products, saved, s, q, a, owners, out, C, taps, WIDE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """Store the gradients of some values."""
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (i < taps)[:, None] & (c < C)[None, :]
    at = offsets(i, c, C, 1)
    owner = offsets(tl.load(owners + i, i < taps, 0), c, C, 1)
    total = tl.load(s + owner, inside, 0.0).to(WIDE) * tl.load(products + at, inside, 0.0)
    total -= tl.load(a + owner, inside, 0.0).to(WIDE) * tl.load(saved + at, inside, 0.0)
    total -= tl.load(q + owner, inside, 0.0).to(WIDE) * tl.load(saved + taps * C + at, inside, 0.0)
    tl.store(out + offsets(i, c, 1, taps), total.to(out.dtype.element_ty), inside)
