"""Triton kernels of the spectral algorithm: sums over the batch, the merged kernel, and the gradients of taps.

Signals are pairs of sequences, spectra (R, C, n). A table has five numbers for each branch, as in `spectral_triton.py`.
"""

from __future__ import annotations

import triton.language as tl

import triton

from .._triton import narrow, offsets, widen
from ..fft_conv.triton_kernels import (
    frequency,
    join_rows,
    load_complex,
    load_signal,
    load_weight,
    store_complex,
    twiddle,
)
from .circle_triton import load_branch, load_taps


@triton.jit(do_not_specialize=["C", "taps", "N"])
def place_merged_kernel(  # type: ignore[no-untyped-def]
    kernels, factors, skip, branches, out, C, taps, n, N, SKIP: tl.constexpr, WIDTH: tl.constexpr
):
    """Store the sum of all kernels times factors (N, C), plus the skip, divided by n, on a circle of n positions."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c = tl.program_id(1).to(tl.int64)
    total = tl.zeros([WIDTH], out.dtype.element_ty)
    if SKIP:
        total += tl.where(i == 0, tl.load(skip + c).to(total.dtype), 0.0)
    for k in range(N):
        start, size, anticausal = load_branch(branches, k)
        tap = tl.where(anticausal != 0, n - 1 - i, i)
        total += tl.load(factors + k * C + c) * load_taps(kernels, c, taps, start, size, tap)
    tl.store(out + c * n + i, total / n, i < n)


@triton.jit(do_not_specialize=["B", "C", "L", "R", "first"])
def edge_kernel(  # type: ignore[no-untyped-def]
    x, lengths, out, B, C, L, m, R, first, x_b, x_c, x_l, MASKED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr
):
    """Store the inputs before the edge of each direction on circles of m positions, backwards in its time, in pairs.

    The j-th input before the edge is at -j, or -1 - j for causal branches, so that the outputs past the edge of a
    kernel of at most m / 2 taps are at 0, 1, ..., and other outputs from m / 2 on.
    """
    start = tl.program_id(0) * BL
    i = start + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    direction = first + tl.program_id(2) // R
    j = tl.where(direction != 0, (m - i) % m, m - 1 - i)
    re, im = tl.zeros([BC, BL], out.dtype.element_ty), tl.zeros([BC, BL], out.dtype.element_ty)
    for odd in tl.static_range(2):
        b = (2 * (tl.program_id(2) % R) + odd).to(tl.int64)
        end = tl.load(lengths + b, b < B, 0).to(tl.int32) if MASKED else L
        t = tl.where(direction != 0, j, end - 1 - j)
        inside = ((j >= 0) & (j < m // 2) & (t >= 0) & (t < L))[:, None] & (c < tl.where(b < B, C, 0))[None, :]
        v = tl.trans(tl.load(x + b * x_b + offsets(t, c, x_l, x_c), inside, 0.0).to(out.dtype.element_ty))
        if odd == 0:
            re = v
        else:
            im = v
    k = 2 * start + tl.arange(0, 2 * BL)
    row = (tl.program_id(2) * C + c.to(tl.int64)) * 2 * m
    tl.store(out + row[:, None] + k[None, :], tl.interleave(re, im), (c < C)[:, None] & (k < 2 * m)[None, :])


@triton.jit(do_not_specialize=["B", "C", "L"])
def edge_total_kernel(  # type: ignore[no-untyped-def]
    x, lengths, out, B, C, L, x_b, x_c, x_l, MASKED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr
):
    """Store the sums over the batch of the j-th inputs before the end and of the inputs after the start."""
    j = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BL, BC], tl.float64)
    sequence = x
    for b in range(B):
        end = tl.load(lengths + b).to(tl.int32) if MASKED else L
        t = tl.where(tl.program_id(2) == 0, end - 1 - j, j + 1)
        inside = ((t >= 0) & (t < L))[:, None] & (c < C)[None, :]
        total += widen(tl.load(sequence + offsets(t, c, x_l, x_c), inside, 0.0))
        sequence += x_b
    out += tl.program_id(2).to(tl.int64) * C * L
    tl.store(out + offsets(j, c, 1, L), total, (j < L)[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["L"])
def suffix_kernel(x, out, L, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sums of each position and all later ones."""
    line = tl.program_id(0).to(tl.int64) * L
    carry = tl.zeros([], tl.float64)
    for k in range(tl.cdiv(L, WIDTH)):
        i = (tl.cdiv(L, WIDTH) - 1 - k) * WIDTH + tl.arange(0, WIDTH)
        v = tl.load(x + line + i, i < L, 0.0)
        tl.store(out + line + i, narrow(tl.cumsum(v, 0, reverse=True) + carry, out), i < L)
        carry += tl.sum(v, 0)


@triton.jit(do_not_specialize=["C", "L", "taps", "N"])
def moment_kernel(  # type: ignore[no-untyped-def]
    kernels, sums, w, power, branches, parts, C, L, taps, n, N, WIDTH: tl.constexpr
):
    """Store the sum of a branch's outputs and, if it is on the short circle, add its energy without the edge."""
    c, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, size, anticausal = load_branch(branches, k)
    total = tl.zeros([WIDTH], tl.float64)
    for first in range(0, size, WIDTH):
        i = first + tl.arange(0, WIDTH)
        v = tl.load(kernels + c * taps + start + i, i < size, 0.0)
        total += widen(v * tl.load(sums + (anticausal * C + c) * L + i, i < size, 0.0))
    tl.store(parts + k * C + c, narrow(tl.sum(total, 0), parts))
    member = tl.load(branches + 5 * k + 3)
    if member >= 0:
        energy = tl.zeros([WIDTH], w.dtype.element_ty)
        for first in range(0, n, WIDTH):
            f = first + tl.arange(0, WIDTH)
            d, e = load_weight(w + (member * C + c) * (n + 2), f, n)
            energy += (d * d + e * e) * load_weight(power + c * (n + 2), f, n)[0]
        at = parts + (N + k) * C + c
        tl.store(at, tl.load(at) + tl.sum(energy, 0) / n)


@triton.jit(do_not_specialize=["R", "C", "N"])
def merge_kernel(x, w, shift, R, C, n, N, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply x[r, c] by the spectrum w[c] of the merged kernel; add the shifts at frequency 0."""
    start = tl.program_id(0) * WIDTH
    c = tl.program_id(1).to(tl.int64)
    f = frequency(start + tl.arange(0, WIDTH), n, ROWS)
    d, e = load_weight(w + c * (n + 2), f, n)
    total = tl.zeros([], x.dtype.element_ty)
    for k in range(N):
        total += tl.load(shift + k * C + c)
    constant = tl.where(f == 0, total, 0.0)
    for r in range(R):
        here = x + (r * C + c) * 2 * n
        a, b = load_complex(here, start, n, WIDTH)
        store_complex(here, start, n, a * d - b * e + constant, a * e + b * d + constant, WIDTH)


@triton.jit(do_not_specialize=["R", "C"])
def cross_kernel(x, g, power, cross, R, C, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store power[c] = sum_r |x[r, c]|^2 and cross[c] = sum_r conj(x[r, c]) g[r, c]."""
    start = tl.program_id(0) * WIDTH
    f = frequency(start + tl.arange(0, WIDTH), n, ROWS)
    c = tl.program_id(1).to(tl.int64)
    total = tl.zeros([WIDTH], x.dtype.element_ty)
    re = tl.zeros([WIDTH], x.dtype.element_ty)
    im = tl.zeros([WIDTH], x.dtype.element_ty)
    for r in range(R):
        a, b = load_complex(x + (r * C + c) * 2 * n, start, n, WIDTH)
        d, e = load_complex(g + (r * C + c) * 2 * n, start, n, WIDTH)
        total += a * a + b * b
        re += a * d + b * e
        im += a * e - b * d
    tl.store(power + c * n + f, total, f < n)
    tl.store(cross + 2 * (c * n + f), re, f < n)
    tl.store(cross + 2 * (c * n + f) + 1, im, f < n)


@triton.jit(do_not_specialize=["R", "C", "taps", "N"])
def inner_kernel(kernels, dk, g, branches, parts, R, C, taps, n, N, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sums of g c_b for branches b < N, of g for b = N and of g u for b = N + 1; dk / n is that of k_rep."""
    c, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros([WIDTH], g.dtype.element_ty)
    if k == N:
        for first in range(0, R, WIDTH):
            r = first + tl.arange(0, WIDTH)
            at = g + (r.to(tl.int64) * C + c) * 2 * n
            total += tl.load(at, r < R, 0.0) + tl.load(at + 1, r < R, 0.0)
        tl.store(parts + k * C + c, tl.sum(total, 0))
    elif k > N:
        tl.store(parts + k * C + c, tl.load(dk + c * 2 * n) / n)
    else:
        start, size, anticausal = load_branch(branches, k)
        for first in range(0, size, WIDTH):
            i = first + tl.arange(0, WIDTH)
            at = tl.where(anticausal != 0, n - 1 - i, i)
            v = tl.load(kernels + c * taps + start + i, i < size, 0.0)
            total += v * tl.load(dk + 2 * (c * n + at), i < size, 0.0)
        tl.store(parts + k * C + c, tl.sum(total, 0) / n)


@triton.jit(do_not_specialize=["C", "M"])
def square_kernel(w, q, members, out, C, n, M, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store sum_b q_b |K_b|^2 over all members, (C, n)."""
    f = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c = tl.program_id(1).to(tl.int64)
    total = tl.zeros([WIDTH], w.dtype.element_ty)
    for member in range(M):
        k = tl.load(members + member)
        d, e = load_weight(w + (member * C + c) * (n + 2), f, n)
        total += tl.load(q + k * C + c, k >= 0, 0.0) * (d * d + e * e)
    tl.store(out + c * n + f, total, f < n)


@triton.jit(do_not_specialize=["lags"])
def resize_kernel(x, out, n, m, lags, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store an even sequence at lags below `lags` on a circle of m positions, given as the FFT of n real numbers."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c = tl.program_id(1).to(tl.int64)
    lag = tl.minimum(i, m - i)
    tl.store(out + c * m + i, tl.load(x + c * (n + 2) + 2 * lag, (i < m) & (lag < lags), 0.0) / n, i < m)


@triton.jit(do_not_specialize=["C", "L", "taps", "N"])
def step_kernel(kernels, a, branches, out, C, L, taps, N, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store minus the cumulative sums of a_b k_b over the branches of a direction: the constants' part of du."""
    c, anticausal = tl.program_id(0).to(tl.int64), tl.program_id(1)
    carry = tl.zeros([], tl.float64)
    for first in range(0, L, WIDTH):
        i = first + tl.arange(0, WIDTH)
        total = tl.zeros([WIDTH], tl.float64)
        for k in range(N):
            start, size, other = load_branch(branches, k)
            if (other == anticausal) & (size > first):
                v = tl.load(kernels + c * taps + start + i, i < size, 0.0)
                total += widen(tl.load(a + k * C + c) * v)
        line = out + (anticausal * C + c) * L
        tl.store(line + i, narrow(-(tl.cumsum(total, 0) + carry), out), i < L)
        carry += tl.sum(total, 0)


@triton.jit(do_not_specialize=["C", "L", "taps"])
def tap_gradient_kernel(  # type: ignore[no-untyped-def]
    long, short, dk, sums, tails, s, a, q, branches, out, C, L, taps, n, m, WIDTH: tl.constexpr
):
    """Store the gradient of a branch's taps: from dk / n, its circle, the constants and, if it is short, its tail."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c, k = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, size, anticausal = load_branch(branches, k)
    length = tl.load(branches + 5 * k + 4)  # of the whole kernel: taps beyond `size` act on nothing
    if tl.program_id(0) * WIDTH < length:
        inside = i < size
        at = tl.where(anticausal != 0, n - 1 - i, i)
        v = tl.load(s + k * C + c) * tl.load(dk + 2 * (c * n + at), inside, 0.0) / n
        v -= tl.load(a + k * C + c) * tl.load(sums + (anticausal * C + c) * L + i, inside, 0.0)
        member = tl.load(branches + 5 * k + 3)
        if member >= 0:
            v += tl.load(short + (member * C + c) * m + i, inside, 0.0)
            v += tl.load(q + k * C + c) * tl.load(tails + c * taps + start + i, inside, 0.0)
        else:
            v += tl.load(long + ((-1 - member) * C + c) * n + at, inside, 0.0)
        tl.store(out + c * taps + start + i, v, i < length)


@triton.jit
def _store_gradient(  # type: ignore[no-untyped-def]
    re, im, t, c, p, steps, tails, edges, lengths, out, B, C, L, m, reach, o_b, o_c, o_l,
    CAUSAL: tl.constexpr, ANTICAUSAL: tl.constexpr, EDGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the input's gradient at positions t, given as (channels, positions), plus what each direction adds."""
    for odd in tl.static_range(2):
        if odd == 0:
            v = tl.trans(re)
        else:
            v = tl.trans(im)
        b = 2 * p + odd
        inside = (t < L)[:, None] & (c < tl.where(b < B, C, 0))[None, :]
        channel = c.to(tl.int64)[None, :]
        if CAUSAL:
            end = tl.load(lengths + b, b < B, 0).to(tl.int32) if MASKED else L
            j = (end - 1 - t)[:, None]
            before = inside & (j >= 0)
            v += tl.load(steps + channel * L + j, before, 0.0)
            if CAUSAL == 2:
                v += tl.load(tails + (b * C + channel) * reach + j, before & (j < reach), 0.0)
            if EDGES:
                v += tl.load(edges + ((p * C + channel) * m + m - 1 - j) * 2 + odd, before & (j < m // 2), 0.0)
        if ANTICAUSAL:
            j = t[:, None]
            v += tl.load(steps + (C + channel) * L + j - 1, inside & (j >= 1), 0.0)
            if ANTICAUSAL == 2:
                first = tl.where(CAUSAL == 2, B, 0)
                v += tl.load(tails + ((first + b) * C + channel) * reach + j, inside & (j < reach), 0.0)
            if EDGES:
                row = (tl.where(CAUSAL > 0, tl.num_programs(2), 0) + p) * C + channel
                v += tl.load(edges + (row * m + (m - j) % m) * 2 + odd, inside & (j < m // 2), 0.0)
        tl.store(out + b * o_b + offsets(t, c, o_l, o_c), narrow(v, out), inside)


@triton.jit(do_not_specialize=["B", "C", "L", "reach"])
def output_kernel(  # type: ignore[no-untyped-def]
    y, steps, tails, edges, lengths, out, B, C, L, n, m, reach, o_b, o_c, o_l, CAUSAL: tl.constexpr,
    ANTICAUSAL: tl.constexpr, EDGES: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, BL: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Store the input's gradient: pairs in time, plus the constants' part and the tails' parts in each direction.

    CAUSAL and ANTICAUSAL are 0 without branches in this direction, 2 with short ones, else 1. With EDGES, there are
    pairs around the edges on circles of m positions, in the layout of `edge_kernel`.
    """
    start = tl.program_id(0) * BL
    i = start + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.program_id(2).to(tl.int64)
    k = 2 * start + tl.arange(0, 2 * BL)
    length = n // ROWS
    inside = (c < C)[:, None] & (k < 2 * length)[None, :]
    a, b = load_signal(y, p, c, k, C, n, inside, BL, BC)
    t = tl.where(i < length, i, L)
    if ROWS > 1:
        d, e = load_signal(y + 2 * length, p, c, k, C, n, inside, BL, BC)
        h, j = load_signal(y + 4 * length, p, c, k, C, n, inside, BL, BC)
        q, r = load_signal(y + 6 * length, p, c, k, C, n, inside, BL, BC)
        cos, sin = twiddle(i, n, y.dtype.element_ty)
        a, b, d, e = join_rows(a, b, d, e, h, j, q, r, cos[None, :], sin[None, :])
        _store_gradient(
            d, e, t + length, c, p, steps, tails, edges, lengths, out, B, C, L, m, reach, o_b, o_c, o_l,
            CAUSAL, ANTICAUSAL, EDGES, MASKED,
        )  # fmt: skip
    _store_gradient(
        a, b, t, c, p, steps, tails, edges, lengths, out, B, C, L, m, reach, o_b, o_c, o_l,
        CAUSAL, ANTICAUSAL, EDGES, MASKED,
    )  # fmt: skip
