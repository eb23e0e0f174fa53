"""Branches on a circle: their spectra, the outputs of some of them in a window of time, and the gradients of both.

Signals are pairs of sequences on a circle of n positions, spectra (D, R, C, n) in D groups; weights are spectra of real
kernels, (members, C, n / 2 + 1). The first G members of each group are windowed: their outputs are computed. A table
has five numbers for each branch, as in `spectral_triton.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from torch.fft import irfft, rfft

import triton

from ..fft_conv.triton_kernels import (
    frequency,
    join_rows,
    load_complex,
    load_weight,
    rows_of,
    split_rows,
    store_complex,
    twiddle,
)

SLICE_BYTES = 2**31  # of outputs in memory at a time, about
WIDTH = 512  # frequencies per program, times branches
VECTOR = 1024  # positions that a program processes at a time, in sums over one kernel
SPLITS = 16  # programs that sum the energy of one channel


@triton.jit
def load_branch(branches, k):  # type: ignore[no-untyped-def]
    """Return a branch's first tap, its number of taps, and whether it is anticausal."""
    return tl.load(branches + 5 * k), tl.load(branches + 5 * k + 1), tl.load(branches + 5 * k + 2)


@triton.jit
def load_taps(kernels, c, taps, start, size, i):  # type: ignore[no-untyped-def]
    """Load taps i of a branch, zero outside."""
    return tl.load(kernels + c * taps + start + i, (i >= 0) & (i < size), 0.0)


@triton.jit(do_not_specialize=["C", "taps"])
def _place_kernel(kernels, branches, members, out, C, taps, n, TURN: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store members on circles of n positions, (members, C, n); anticausal ones are in the input's time if TURN."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c, k = tl.program_id(1).to(tl.int64), tl.load(members + tl.program_id(2))
    start, size, anticausal = load_branch(branches, tl.maximum(k, 0))
    tap = tl.where((anticausal != 0) & TURN, n - 1 - i, i)
    v = load_taps(kernels, c, taps, start, tl.where(k < 0, 0, size), tap)
    tl.store(out + (tl.program_id(2) * C + c) * n + i, v, i < n)


@triton.jit(do_not_specialize=["R", "C", "G"])
def _product_kernel(  # type: ignore[no-untyped-def]
    x, w, out, power, R, C, n, G, x_d,
    POWER: tl.constexpr, ROWS: tl.constexpr, GP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store x[d, r, c] times the windowed members, out[g, d, r, c]; if POWER, add the sum of |x|^2 to power[c]."""
    start = tl.program_id(0) * WIDTH
    f = frequency(start + tl.arange(0, WIDTH), n, ROWS)
    c = tl.program_id(1).to(tl.int64)
    direction = tl.program_id(2)
    g = tl.arange(0, GP)[:, None]
    member = tl.where(g < G, direction * G + g, 0)
    d, e = load_weight(w + (member * C + c) * (n + 2), f[None, :], n)
    d, e = d / n, e / n
    j = 2 * start + tl.arange(0, 2 * WIDTH)[None, :]
    total = tl.zeros([WIDTH], x.dtype.element_ty)
    x += direction * x_d
    for r in range(R):
        a, b = load_complex(x + (r * C + c) * 2 * n, start, n, WIDTH)
        if POWER:
            total += a * a + b * b
        a, b = a[None, :], b[None, :]
        both = tl.interleave(a * d - b * e, a * e + b * d)
        row = ((g * tl.num_programs(2) + direction) * R + r) * C + c
        tl.store(out + row * 2 * n + j, both, (g < G) & (j < 2 * n))
    if POWER:
        tl.store(power + c * n + f, total + tl.load(power + c * n + f, f < n, 0.0), f < n)


@triton.jit
def _windowed(member, branches, members, G, groups):  # type: ignore[no-untyped-def]
    """Return the index of a windowed member among outputs, its branch, and whether that is causal."""
    k = tl.load(members + member)
    return member % G * groups + member // G, k, tl.load(branches + 5 * tl.maximum(k, 0) + 2) == 0


@triton.jit
def _ends(lengths, b, B, window, causal, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the ends of the windows of a pair of sequences, b and b + 1."""
    first, second = window, window
    if MASKED:
        first = tl.where(causal, tl.load(lengths + b).to(tl.int32), window)
        second = tl.where(causal, tl.load(lengths + b + 1, b + 1 < B, 0).to(tl.int32), window)
    return first, second


@triton.jit
def _load_window(y, start, n, first, second, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load positions in time, zero past the ends: those at `start` and, if there are four rows, those one row later."""
    m = n // ROWS
    t = start + tl.arange(0, WIDTH)
    a, b = load_complex(y, start, m, WIDTH)
    d, e = a, b
    if ROWS > 1:
        d, e = load_complex(y + 2 * m, start, m, WIDTH)
        h, j = load_complex(y + 4 * m, start, m, WIDTH)
        q, r = load_complex(y + 6 * m, start, m, WIDTH)
        cos, sin = twiddle(t, n, y.dtype.element_ty)
        a, b, d, e = join_rows(a, b, d, e, h, j, q, r, cos, sin)
    d, e = tl.where(t + m < first, d, 0.0), tl.where(t + m < second, e, 0.0)
    return tl.where(t < first, a, 0.0), tl.where(t < second, b, 0.0), d, e


@triton.jit(do_not_specialize=["R", "C", "B", "window", "b0", "G", "groups"])
def _energy_kernel(  # type: ignore[no-untyped-def]
    y, branches, members, lengths, parts, R, C, n, B, window, b0, N, G, groups,
    TAILS: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the sums of squares of the outputs in the window to parts[s, 1]; subtract them if they are TAILS."""
    c, s = tl.program_id(0).to(tl.int64), tl.program_id(2)
    g, k, causal = _windowed(tl.program_id(1), branches, members, G, groups)
    if k >= 0:
        total = tl.zeros([WIDTH], y.dtype.element_ty)
        blocks = tl.cdiv(tl.minimum(window, n // ROWS), WIDTH)
        for i in range(s, R * blocks, tl.num_programs(2)):
            r = (i // blocks).to(tl.int64)
            first, second = _ends(lengths, b0 + 2 * r, B, window, causal, MASKED)
            row = y + ((g * R + r) * C + c) * 2 * n
            a, b, d, e = _load_window(row, i % blocks * WIDTH, n, first, second, ROWS, WIDTH)
            total += a * a + b * b + d * d + e * e
        at = parts + ((2 * s + 1) * N + k).to(tl.int64) * C + c
        tl.store(at, tl.load(at) + tl.where(TAILS, -1, 1) * tl.sum(total, 0))


@triton.jit(do_not_specialize=["R", "C", "B", "window", "start", "b0", "G", "groups"])
def _mask_kernel(  # type: ignore[no-untyped-def]
    y, branches, members, lengths, R, C, n, B, window, start, b0, G, groups,
    MASKED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Zero the outputs past the window, from `start` on; rows in time become rows for the next FFT."""
    c, r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, _, causal = _windowed(tl.program_id(2), branches, members, G, groups)
    first, second = _ends(lengths, b0 + 2 * r, B, window, causal, MASKED)
    row, m = y + ((g * R + r) * C + c) * 2 * n, n // ROWS
    for at in range(start, m, WIDTH):
        if ROWS == 1:
            j = 2 * at + tl.arange(0, 2 * WIDTH)
            end = tl.where(j % 2 == 0, first, second)
            tl.store(row + j, tl.zeros([2 * WIDTH], y.dtype.element_ty), (j >= 2 * end) & (j < 2 * n))
        else:
            a, b, d, e = _load_window(row, at, n, first, second, ROWS, WIDTH)
            cos, sin = twiddle(at + tl.arange(0, WIDTH), n, y.dtype.element_ty)
            re0, im0, re1, im1, re2, im2, re3, im3 = split_rows(a, b, d, e, cos, sin)
            store_complex(row, at, m, re0, im0, WIDTH)
            store_complex(row + 2 * m, at, m, re1, im1, WIDTH)
            store_complex(row + 4 * m, at, m, re2, im2, WIDTH)
            store_complex(row + 6 * m, at, m, re3, im3, WIDTH)


@triton.jit(do_not_specialize=["R", "C", "G"])
def _input_gradient_kernel(  # type: ignore[no-untyped-def]
    x, g, t, w, merged, square, q, members, cross, R, C, n, G, x_d,
    TAILS: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr, GP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add conj(x) t, summed over signals, to cross, and store the gradient by the input, divided by n, in g.

    That is conj(merged) g - square x - sum_b q_b conj(K_b) t_b over windowed branches; merged has the factor 1 / n. For
    TAILS it is the last sum with the opposite sign.
    """
    start = tl.program_id(0) * WIDTH
    f = frequency(start + tl.arange(0, WIDTH), n, ROWS)
    c = tl.program_id(1).to(tl.int64)
    direction = tl.program_id(2)
    if not TAILS:
        near_re, near_im = load_weight(merged + c * (n + 2), f, n)
        energy = tl.zeros([WIDTH], x.dtype.element_ty)
        if SQUARE:
            energy += load_weight(square + c * (n + 2), f, n)[0] / n
    i = tl.arange(0, GP)[:, None]
    member = tl.where(i < G, direction * G + i, 0)
    k = tl.load(members + member, i < G, -1)
    d, e = load_weight(w + (member * C + c) * (n + 2), f[None, :], n)
    factor = tl.load(q + k * C + c, k >= 0, 0.0) / n
    d, e = factor * d, factor * e
    j = 2 * start + tl.arange(0, 2 * WIDTH)[None, :]
    inside = (i < G) & (j < 2 * n)
    at, there = cross + ((member * C + c) * n + f[None, :]) * 2, (i < G) & (f < n)[None, :]
    cross_re, cross_im = tl.load(at, there, 0.0), tl.load(at + 1, there, 0.0)
    for r in range(R):
        here = direction * x_d + (r * C + c) * 2 * n
        a, b = load_complex(x + here, start, n, WIDTH)
        row = ((i * tl.num_programs(2) + direction) * R + r) * C + c
        u, v = tl.split(tl.reshape(tl.load(t + row * 2 * n + j, inside, 0.0), [GP, WIDTH, 2]))
        re, im = tl.sum(u * d + v * e, 0), tl.sum(v * d - u * e, 0)
        if not TAILS:
            g_re, g_im = load_complex(g + here, start, n, WIDTH)
            re = g_re * near_re + g_im * near_im - energy * a - re
            im = g_im * near_re - g_re * near_im - energy * b - im
        a, b = a[None, :], b[None, :]
        cross_re += a * u + b * v
        cross_im += a * v - b * u
        store_complex(g + here, start, n, re, im, WIDTH)
    tl.store(at, cross_re, there)
    tl.store(at + 1, cross_im, there)


@triton.jit
def _real_part(x, f, n, inside):  # type: ignore[no-untyped-def]
    """Load the spectrum of the real part of a signal, at frequencies up to n / 2."""
    far = tl.where(f == 0, 0, n - f)
    re = tl.load(x + 2 * f, inside, 0.0) + tl.load(x + 2 * far, inside, 0.0)
    return 0.5 * re, 0.5 * (tl.load(x + 2 * f + 1, inside, 0.0) - tl.load(x + 2 * far + 1, inside, 0.0))


@triton.jit(do_not_specialize=["C", "windowed"])
def _tap_spectrum_kernel(  # type: ignore[no-untyped-def]
    w, cross, power, q, members, C, n, windowed, TAILS: tl.constexpr, WIDTH: tl.constexpr
):
    """Replace a member's spectrum by that of its gradient through -q_b c_b, without the constant, divided by n.

    Windowed members have the product with their outputs, conj(x) t; if these are TAILS, minus the product with power.
    """
    f = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c, member = tl.program_id(1).to(tl.int64), tl.program_id(2)
    inside = f <= n // 2
    k = tl.load(members + member)
    at = w + (member * C + c) * (n + 2) + 2 * f
    re, im = tl.zeros([WIDTH], w.dtype.element_ty), tl.zeros([WIDTH], w.dtype.element_ty)
    if TAILS:
        square = tl.load(power + c * (n + 2) + 2 * f, inside, 0.0)
        re, im = square * tl.load(at, inside, 0.0), square * tl.load(at + 1, inside, 0.0)
    if member < windowed:
        d, e = _real_part(cross + (member * C + c) * 2 * n, f, n, inside)
        sign = tl.where(TAILS, -1, 1)
        re += sign * d
        im += sign * e
    factor = -tl.load(q + k * C + c, k >= 0, 0.0) / n
    tl.store(at, factor * re, inside)
    tl.store(at + 1, factor * im, inside)


@dataclass(frozen=True)
class CirclePlan:
    """Branches on one circle of n positions.

    `members` are the indices of the branches, -1 for padding. The first `groups` times `windowed` have outputs; each
    group has its own signals.
    """

    n: int
    members: Tensor
    groups: int
    windowed: int


class Circle:
    """Kernels (C, taps) placed on a circle, and the outputs of some of them in a window of time.

    The window of `tails` is the first half of the circle; otherwise it is that of the input, 0 .. L - 1 or `lengths`.
    """

    def __init__(
        self, plan: CirclePlan, branches: Tensor, kernels: Tensor, u: Tensor, lengths: Tensor | None, tails: bool
    ) -> None:
        self.plan, self.n, self.branches, self.tails = plan, plan.n, branches, tails
        (self.B, self.C, L), self.masked = u.shape, lengths is not None and not tails
        self.window, self.lengths = plan.n // 2 if tails else L, branches if lengths is None else lengths
        self.outputs, self.rows = plan.groups * plan.windowed, 1 if tails else rows_of(plan.n)
        placed = kernels.new_empty(len(plan.members), self.C, self.n)
        _place_kernel[triton.cdiv(self.n, VECTOR), self.C, len(placed)](
            kernels, branches, plan.members, placed, *kernels.shape, self.n, TURN=not tails, WIDTH=VECTOR
        )
        self.weights = torch.view_as_real(rfft(placed))
        self.padded = triton.next_power_of_2(max(1, plan.windowed))
        self.width = max(32, WIDTH // self.padded)

    def transform(self, x: Tensor) -> Tensor:
        """Transform signals (..., n), divided into rows, into spectra."""
        return torch.fft.fft(x.unflatten(-1, (self.rows, -1))).flatten(-2)

    def inverse(self, x: Tensor) -> Tensor:
        """Transform spectra back into signals, divided into rows, times n."""
        return torch.fft.ifft(x.unflatten(-1, (self.rows, -1)), norm="forward").flatten(-2)

    def slices(self, spectrum: Tensor, power: Tensor | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the first of some pairs at a time, their spectra (groups, R, C, n), and the outputs in time.

        Adds the power of these pairs to `power`, (C, n). The outputs are (windowed, groups, R, C, n).
        """
        size = max(1, SLICE_BYTES // max(1, self.outputs * self.C * self.n * spectrum.element_size()))
        for start in range(0, spectrum.shape[1], size):
            x = spectrum[:, start : start + size]
            y = x.new_empty(self.plan.windowed, *x.shape)
            _product_kernel[triton.cdiv(self.n, self.width), self.C, len(x)](
                torch.view_as_real(x), self.weights, torch.view_as_real(y), self.weights if power is None else power,
                x.shape[1], self.C, self.n, self.plan.windowed, 2 * x.stride(0),
                POWER=power is not None, ROWS=self.rows, GP=self.padded, WIDTH=self.width,
            )  # fmt: skip
            yield start, x, self.inverse(y) if len(y) else y

    def add_energies(self, spectrum: Tensor, parts: Tensor, power: Tensor | None = None) -> None:
        """Add the energies of outputs to parts (P, 2, N, C), or subtract those of tails; `power` as in `slices`."""
        for start, _, y in self.slices(spectrum, power):
            if len(y):
                _energy_kernel[self.C, self.outputs, SPLITS](
                    torch.view_as_real(y), self.branches, self.plan.members, self.lengths, parts, y.shape[2], self.C,
                    self.n, self.B, self.window, 2 * start, parts.shape[2], self.plan.windowed, self.plan.groups,
                    TAILS=self.tails, MASKED=self.masked, ROWS=self.rows, WIDTH=WIDTH,
                )  # fmt: skip

    def gradients(
        self, spectrum: Tensor, g: Tensor, merged: Tensor, square: Tensor | None, power: Tensor, q: Tensor
    ) -> Tensor:
        """Write the spectrum of the input's gradient to g; return the gradients of the members, (members, C, n)."""
        plan, begin = self.plan, 0 if self.masked or self.rows > 1 else self.window
        cross = self.weights.new_zeros(max(1, self.outputs), self.C, self.n, 2)
        for start, x, y in self.slices(spectrum):
            R, t = x.shape[1], y
            if len(y):
                _mask_kernel[self.C, R, self.outputs](
                    torch.view_as_real(y), self.branches, plan.members, self.lengths, R, self.C, self.n, self.B,
                    self.window, begin, 2 * start, plan.windowed, plan.groups, MASKED=self.masked, ROWS=self.rows,
                    WIDTH=WIDTH,
                )  # fmt: skip
                t = self.transform(y)
            _input_gradient_kernel[triton.cdiv(self.n, self.width), self.C, len(x)](
                *(torch.view_as_real(z) for z in (x, g[:, start : start + R], t)), self.weights, merged,
                merged if square is None else square, q, plan.members, cross, R, self.C, self.n, plan.windowed,
                2 * x.stride(0), TAILS=self.tails, SQUARE=square is not None, ROWS=self.rows, GP=self.padded,
                WIDTH=self.width,
            )  # fmt: skip
        _tap_spectrum_kernel[triton.cdiv(self.n // 2 + 1, VECTOR), self.C, len(plan.members)](
            self.weights, cross, power, q, plan.members, self.C, self.n, self.outputs, TAILS=self.tails, WIDTH=VECTOR
        )
        return irfft(torch.view_as_complex(self.weights), self.n, norm="forward")
