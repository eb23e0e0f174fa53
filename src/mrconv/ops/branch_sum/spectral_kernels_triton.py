"""Triton kernels of the spectral algorithm: products of spectra, sums over the batch, and the gradients of taps.

Signals are pairs of sequences, spectra (R, C, n); weights are spectra of real kernels, (N, C, n / 2 + 1). A table has
five numbers for each branch: first tap, taps that the input reaches, whether it is anticausal, its kind (1 if it is
short, else -index among the long branches), and all taps.
"""

from __future__ import annotations

import triton.language as tl

import triton

from .._triton import narrow, offsets, widen
from ..fft_conv.triton_kernels import load_complex, load_weight, store_complex


@triton.jit
def _branch(branches, k):  # type: ignore[no-untyped-def]
    """Return a branch's first tap, its number of taps, and whether it is anticausal."""
    return tl.load(branches + 5 * k), tl.load(branches + 5 * k + 1), tl.load(branches + 5 * k + 2)


@triton.jit(do_not_specialize=["C", "taps"])
def place_kernel(kernels, branches, out, C, taps, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the kernels on circles of n positions, (N, C, n)."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c, k = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, size, anticausal = _branch(branches, k)
    tap = tl.where(anticausal != 0, n - 1 - i, i)
    tl.store(out + (k * C + c) * n + i, tl.load(kernels + c * taps + start + tap, tap < size, 0.0), i < n)


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


@triton.jit(do_not_specialize=["R", "C", "G"])
def product_kernel(  # type: ignore[no-untyped-def]
    x, w, long, out, power, R, C, n, G, POWER: tl.constexpr, GP: tl.constexpr, WIDTH: tl.constexpr
):
    """Store x times the spectra of the long branches, out[g, r, c]; if POWER, add the sum of |x|^2 to power[c]."""
    start = tl.program_id(0) * WIDTH
    f = start + tl.arange(0, WIDTH)
    c = tl.program_id(1).to(tl.int64)
    g = tl.arange(0, GP)[:, None]
    k = tl.load(long + g, g < G, 0)
    d, e = load_weight(w + (k * C + c) * (n + 2), f[None, :], n)
    d, e = d / n, e / n
    j = 2 * start + tl.arange(0, 2 * WIDTH)[None, :]
    total = tl.zeros([WIDTH], x.dtype.element_ty)
    for r in range(R):
        a, b = load_complex(x + (r * C + c) * 2 * n, start, n, WIDTH)
        if POWER:
            total += a * a + b * b
        a, b = a[None, :], b[None, :]
        both = tl.interleave(a * d - b * e, a * e + b * d)
        tl.store(out + ((g * R + r) * C + c) * 2 * n + j, both, (g < G) & (j < 2 * n))
    if POWER:
        tl.store(power + c * n + f, total + tl.load(power + c * n + f, f < n, 0.0), f < n)


@triton.jit(do_not_specialize=["R", "C", "B", "L", "b0"])
def energy_kernel(  # type: ignore[no-untyped-def]
    y, branches, long, lengths, parts, R, C, n, B, L, b0, N, MASKED: tl.constexpr, WIDTH: tl.constexpr
):
    """Add the sums of squares of the long branches' outputs to parts[s, 1]."""
    c, g, s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    k = tl.load(long + g)
    masked = tl.load(branches + 5 * k + 2) == 0
    total = tl.zeros([2 * WIDTH], y.dtype.element_ty)
    blocks = tl.cdiv(L, WIDTH)
    for i in range(s, R * blocks, tl.num_programs(2)):
        r = (i // blocks).to(tl.int64)
        j = 2 * (i % blocks) * WIDTH + tl.arange(0, 2 * WIDTH)
        end = tl.zeros([2 * WIDTH], tl.int32) + L
        if MASKED:
            b = b0 + 2 * r + j % 2
            end = tl.where(masked, tl.load(lengths + b, b < B, 0).to(tl.int32), end)
        v = tl.load(y + ((g * R + r) * C + c) * 2 * n + j, j < 2 * end, 0.0)
        total += v * v
    at = parts + ((2 * s + 1) * N + k).to(tl.int64) * C + c
    tl.store(at, tl.load(at) + tl.sum(total, 0))


@triton.jit(do_not_specialize=["C", "L", "taps", "N"])
def moment_kernel(  # type: ignore[no-untyped-def]
    kernels, sums, w, power, branches, parts, C, L, taps, n, N, WIDTH: tl.constexpr
):
    """Store the sum of a branch's outputs and, if it is short, its energy without the edge."""
    c, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, size, anticausal = _branch(branches, k)
    total = tl.zeros([WIDTH], tl.float64)
    for first in range(0, size, WIDTH):
        i = first + tl.arange(0, WIDTH)
        v = tl.load(kernels + c * taps + start + i, i < size, 0.0)
        total += widen(v * tl.load(sums + (anticausal * C + c) * L + i, i < size, 0.0))
    tl.store(parts + k * C + c, narrow(tl.sum(total, 0), parts))
    if tl.load(branches + 5 * k + 3) > 0:
        energy = tl.zeros([WIDTH], w.dtype.element_ty)
        for first in range(0, n, WIDTH):
            f = first + tl.arange(0, WIDTH)
            d, e = load_weight(w + (k * C + c) * (n + 2), f, n)
            energy += (d * d + e * e) * tl.load(power + c * n + f, f < n, 0.0)
        tl.store(parts + (N + k) * C + c, tl.sum(energy, 0) / n)


@triton.jit
def _merged(w, factors, skip, c, f, C, n, N, SKIP: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the spectrum of the sum of all kernels times factors (N, C), plus the skip."""
    re = tl.zeros([WIDTH], w.dtype.element_ty)
    im = tl.zeros([WIDTH], w.dtype.element_ty)
    if SKIP:
        re += tl.load(skip + c).to(re.dtype)
    for k in range(N):
        d, e = load_weight(w + (k * C + c) * (n + 2), f, n)
        factor = tl.load(factors + k * C + c)
        re += factor * d
        im += factor * e
    return re, im


@triton.jit(do_not_specialize=["R", "C", "N"])
def merge_kernel(x, w, scale, shift, skip, R, C, n, N, SKIP: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply x[r, c] by the spectrum of the merged kernel, divided by n; add the shifts at frequency 0."""
    start = tl.program_id(0) * WIDTH
    c = tl.program_id(1).to(tl.int64)
    f = start + tl.arange(0, WIDTH)
    d, e = _merged(w, scale, skip, c, f, C, n, N, SKIP, WIDTH)
    d, e = d / n, e / n
    total = tl.zeros([], x.dtype.element_ty)
    for k in range(N):
        total += tl.load(shift + k * C + c)
    constant = tl.where(f == 0, total, 0.0)
    for r in range(R):
        here = x + (r * C + c) * 2 * n
        a, b = load_complex(here, start, n, WIDTH)
        store_complex(here, start, n, a * d - b * e + constant, a * e + b * d + constant, WIDTH)


@triton.jit(do_not_specialize=["R", "C"])
def cross_kernel(x, g, power, cross, R, C, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store power[c] = sum_r |x[r, c]|^2 and cross[c] = sum_r conj(x[r, c]) g[r, c]."""
    start = tl.program_id(0) * WIDTH
    f = start + tl.arange(0, WIDTH)
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
    store_complex(cross + c * 2 * n, start, n, re, im, WIDTH)


@triton.jit(do_not_specialize=["R", "C", "N"])
def inner_kernel(w, cross, g, parts, R, C, n, N, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sums of g c_b for branches b < N, of g for b = N and of g u for b = N + 1."""
    c, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros([WIDTH], w.dtype.element_ty)
    if k == N:
        for first in range(0, R, WIDTH):
            r = first + tl.arange(0, WIDTH)
            at = g + (r.to(tl.int64) * C + c) * 2 * n
            total += tl.load(at, r < R, 0.0) + tl.load(at + 1, r < R, 0.0)
        tl.store(parts + k * C + c, tl.sum(total, 0))
    else:
        for first in range(0, n, WIDTH):
            f = first + tl.arange(0, WIDTH)
            a, b = load_complex(cross + c * 2 * n, first, n, WIDTH)
            if k < N:
                d, e = load_weight(w + (k * C + c) * (n + 2), f, n)
                total += a * d + b * e
            else:
                total += a
        tl.store(parts + k * C + c, tl.sum(total, 0) / n)


@triton.jit(do_not_specialize=["R", "C", "B", "L", "first", "b0"])
def mask_kernel(y, branches, long, lengths, R, C, n, B, L, first, b0, MASKED: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zero the long branches' outputs past the end."""
    c, r, g = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    causal = tl.load(branches + 5 * tl.load(long + g) + 2) == 0
    for start in range(first, n, WIDTH):
        j = 2 * start + tl.arange(0, 2 * WIDTH)
        end = tl.zeros([2 * WIDTH], tl.int32) + L
        if MASKED:
            b = b0 + 2 * r + j % 2
            end = tl.where(causal, tl.load(lengths + b, b < B, 0).to(tl.int32), end)
        tl.store(y + ((g * R + r) * C + c) * 2 * n + j, tl.zeros([2 * WIDTH], y.dtype.element_ty),
                 (j >= 2 * end) & (j < 2 * n))  # fmt: skip


@triton.jit(do_not_specialize=["R", "C", "N", "G"])
def input_gradient_kernel(  # type: ignore[no-untyped-def]
    x, g, t, w, s, q, skip, branches, long, cross, R, C, n, N, G,
    SKIP: tl.constexpr, GP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Replace g by the spectrum of du, divided by n, and add conj(x) t, summed over signals, to cross.

    That is conj(sum_b s_b K_b + skip) g - sum_short q_b |K_b|^2 x - sum_long q_b conj(K_b) t_b.
    """
    start = tl.program_id(0) * WIDTH
    f = start + tl.arange(0, WIDTH)
    c = tl.program_id(1).to(tl.int64)
    near_re, near_im = _merged(w, s, skip, c, f, C, n, N, SKIP, WIDTH)
    energy = tl.zeros([WIDTH], x.dtype.element_ty)
    for k in range(N):
        if tl.load(branches + 5 * k + 3) > 0:
            d, e = load_weight(w + (k * C + c) * (n + 2), f, n)
            energy += tl.load(q + k * C + c) * (d * d + e * e)
    i = tl.arange(0, GP)[:, None]
    k = tl.load(long + i, i < G, 0)
    d, e = load_weight(w + (k * C + c) * (n + 2), f[None, :], n)
    factor = tl.load(q + k * C + c, i < G, 0.0)
    d, e = factor * d, factor * e
    j = 2 * start + tl.arange(0, 2 * WIDTH)[None, :]
    inside = (i < G) & (j < 2 * n)
    at = cross + (i * C + c) * 2 * n + j
    cross_re, cross_im = tl.split(tl.reshape(tl.load(at, inside, 0.0), [GP, WIDTH, 2]))
    for r in range(R):
        here = (r * C + c) * 2 * n
        a, b = load_complex(x + here, start, n, WIDTH)
        re, im = load_complex(g + here, start, n, WIDTH)
        re, im = re * near_re + im * near_im - energy * a, im * near_re - re * near_im - energy * b
        both = tl.load(t + ((i * R + r) * C + c) * 2 * n + j, inside, 0.0)
        u, v = tl.split(tl.reshape(both, [GP, WIDTH, 2]))
        re -= tl.sum(u * d + v * e, 0)
        im -= tl.sum(v * d - u * e, 0)
        a, b = a[None, :], b[None, :]
        cross_re += a * u + b * v
        cross_im += a * v - b * u
        store_complex(g + here, start, n, re / n, im / n, WIDTH)
    tl.store(at, tl.interleave(cross_re, cross_im), inside)


@triton.jit
def _real_part(x, f, n, inside):  # type: ignore[no-untyped-def]
    """Load the spectrum of the real part of a signal, at frequencies up to n / 2."""
    far = tl.where(f == 0, 0, n - f)
    re = tl.load(x + 2 * f, inside, 0.0) + tl.load(x + 2 * far, inside, 0.0)
    return 0.5 * re, 0.5 * (tl.load(x + 2 * f + 1, inside, 0.0) - tl.load(x + 2 * far + 1, inside, 0.0))


@triton.jit(do_not_specialize=["C"])
def tap_spectrum_kernel(  # type: ignore[no-untyped-def]
    w, cross, power, long_cross, s, q, branches, C, n, WIDTH: tl.constexpr
):
    """Replace a kernel's spectrum by that of its gradient, without edge and constant, divided by n."""
    f = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c, k = tl.program_id(1).to(tl.int64), tl.program_id(2)
    inside = f <= n // 2
    at = w + (k * C + c) * (n + 2) + 2 * f
    index = tl.load(branches + 5 * k + 3)  # 1 for a short branch, else -index among the long ones
    if index > 0:
        far = tl.where(f == 0, 0, n - f)
        square = 0.5 * (tl.load(power + c * n + f, inside, 0.0) + tl.load(power + c * n + far, inside, 0.0))
        d, e = square * tl.load(at, inside, 0.0), square * tl.load(at + 1, inside, 0.0)
    else:
        d, e = _real_part(long_cross + (-index * C + c) * 2 * n, f, n, inside)
    a, b = _real_part(cross + c * 2 * n, f, n, inside)
    s, q = tl.load(s + k * C + c), tl.load(q + k * C + c)
    tl.store(at, (s * a - q * d) / n, inside)
    tl.store(at + 1, (s * b - q * e) / n, inside)


@triton.jit(do_not_specialize=["C", "L", "taps", "N"])
def step_kernel(kernels, a, branches, out, C, L, taps, N, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store minus the cumulative sums of a_b k_b over the branches of a direction: the constants' part of du."""
    c, anticausal = tl.program_id(0).to(tl.int64), tl.program_id(1)
    carry = tl.zeros([], tl.float64)
    for first in range(0, L, WIDTH):
        i = first + tl.arange(0, WIDTH)
        total = tl.zeros([WIDTH], tl.float64)
        for k in range(N):
            start, size, other = _branch(branches, k)
            if (other == anticausal) & (size > first):
                v = tl.load(kernels + c * taps + start + i, i < size, 0.0)
                total += widen(tl.load(a + k * C + c) * v)
        line = out + (anticausal * C + c) * L
        tl.store(line + i, narrow(-(tl.cumsum(total, 0) + carry), out), i < L)
        carry += tl.sum(total, 0)


@triton.jit(do_not_specialize=["C", "L", "taps"])
def tap_gradient_kernel(  # type: ignore[no-untyped-def]
    circles, sums, tails, a, q, branches, out, C, L, taps, n, WIDTH: tl.constexpr
):
    """Store the gradient of a branch's taps: from its circle, the constants and, if it is short, its tail."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c, k = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, size, anticausal = _branch(branches, k)
    length = tl.load(branches + 5 * k + 4)  # of the whole kernel: taps beyond `size` act on nothing
    if tl.program_id(0) * WIDTH < length:
        inside = i < size
        v = tl.load(circles + (k * C + c) * n + tl.where(anticausal != 0, n - 1 - i, i), inside, 0.0)
        v -= tl.load(a + k * C + c) * tl.load(sums + (anticausal * C + c) * L + i, inside, 0.0)
        if tl.load(branches + 5 * k + 3) > 0:
            v += tl.load(q + k * C + c) * tl.load(tails + c * taps + start + i, inside, 0.0)
        tl.store(out + c * taps + start + i, v, i < length)


@triton.jit(do_not_specialize=["B", "C", "L", "reach"])
def output_kernel(  # type: ignore[no-untyped-def]
    y, steps, tails, lengths, out, B, C, L, n, reach, o_b, o_c, o_l,
    CAUSAL: tl.constexpr, ANTICAUSAL: tl.constexpr, MASKED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the input's gradient: pairs in time, plus the constants' part and the tails' part in each direction.

    CAUSAL and ANTICAUSAL are 0 without branches in this direction, 2 with short ones, else 1.
    """
    start = tl.program_id(0) * BL
    t = start + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.program_id(2).to(tl.int64)
    k = 2 * start + tl.arange(0, 2 * BL)
    both = tl.load(y + ((p * C + c) * (2 * n))[:, None] + k[None, :], (c < C)[:, None] & (k < 2 * n)[None, :], 0.0)
    re, im = tl.split(tl.reshape(both, [BC, BL, 2]))
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
            v += tl.load(steps + channel * L + j, inside & (j >= 0), 0.0)
            if CAUSAL == 2:
                v += tl.load(tails + (b * C + channel) * reach + j, inside & (j >= 0) & (j < reach), 0.0)
        if ANTICAUSAL:
            j = t[:, None]
            v += tl.load(steps + (C + channel) * L + j - 1, inside & (j >= 1), 0.0)
            if ANTICAUSAL == 2:
                first = tl.where(CAUSAL == 2, B, 0)
                v += tl.load(tails + ((first + b) * C + channel) * reach + j, inside & (j < reach), 0.0)
        tl.store(out + b * o_b + offsets(t, c, o_l, o_c), narrow(v, out), inside)
