"""Triton kernels of the spectral algorithms: a signal is a pair of real sequences in one complex sequence.

The kernels are real, so FFT(u_1 + i u_2) times a kernel's spectrum is the spectrum of y_1 + i y_2, and pairs are never
separated. The real part of the inverse FFT of sum conj(A) T over pairs is the sum over sequences. cuFFT computes the
FFTs; loading, products, sums over the batch and storing are one Triton kernel each.

cuFFT passes over memory twice for long FFTs. These are divided: n = 4 m, and the butterflies over four rows of m
positions are part of loading and storing; cuFFT transforms the rows. Frequency f = k + 4 i is then stored at k m + i.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._triton import gelu as gelu_of
from .._triton import narrow, offsets
from .spectra import TorchEngine, fast_length

# Tile sizes are the fastest of those tried on an H200.
TILE_TIME, TILE_CHANNELS = 32, 64  # of a tile that is transposed
ROWS_TIME, ROWS_CHANNELS = 16, 32  # of a tile that is transposed, for each of four rows
WIDTH = 512  # frequencies per program
PLACE_WIDTH = 1024  # positions per program that places a kernel
CHUNK = 4  # signals per program, which share a weight
MAX_PAIRS = 2**15  # per launch: half of what an axis of the grid holds
WHOLE, DIVIDED = 2**13, 2**15  # the longest FFT that cuFFT computes in one pass, and the longest to divide


def rows_of(n: int) -> int:
    """Return the number of rows that an FFT of length n is divided into: 1 or 4."""
    return 4 if WHOLE < n <= DIVIDED and n % 4 == 0 else 1


@triton.jit
def load_complex(x, start, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load complex numbers start .. start + WIDTH - 1 of n, as real and imaginary parts."""
    j = 2 * start + tl.arange(0, 2 * WIDTH)
    return tl.split(tl.reshape(tl.load(x + j, j < 2 * n, 0.0), [WIDTH, 2]))


@triton.jit
def store_complex(x, start, n, re, im, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store complex numbers at start .. start + WIDTH - 1 of n."""
    j = 2 * start + tl.arange(0, 2 * WIDTH)
    tl.store(x + j, tl.interleave(re, im), j < 2 * n)


@triton.jit
def load_weight(w, f, n):  # type: ignore[no-untyped-def]
    """Load a real kernel's spectrum, stored at 0 .. n / 2, at any frequencies below n."""
    far = f > n // 2
    k = 2 * tl.where(far, n - f, f)
    re = tl.load(w + k, f < n, 0.0)
    im = tl.load(w + k + 1, f < n, 0.0)
    return re, tl.where(far, -im, im)


@triton.jit
def frequency(i, n, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the frequency that is stored at position i; at least n if that is outside."""
    if ROWS == 1:
        return i
    m = n // ROWS
    return tl.where(i < n, i // m + ROWS * (i % m), n)


@triton.jit
def twiddle(i, n, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return cos and sin of 2 pi i / n."""
    angle = i.to(dtype) * (6.283185307179586 / n.to(dtype))
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _times(a, b, c, d):  # type: ignore[no-untyped-def]
    """Return (a + i b) (c + i d)."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _turn_rows(d, e, h, j, q, r, cos, sin):  # type: ignore[no-untyped-def]
    """Multiply three rows of complex numbers by cos + i sin, its square and its cube."""
    d, e = _times(d, e, cos, sin)
    cos2, sin2 = _times(cos, sin, cos, sin)
    h, j = _times(h, j, cos2, sin2)
    cos2, sin2 = _times(cos, sin, cos2, sin2)
    q, r = _times(q, r, cos2, sin2)
    return d, e, h, j, q, r


@triton.jit
def split_rows(a, b, d, e, cos, sin):  # type: ignore[no-untyped-def]
    """Return four rows for the FFT of two rows in time, a + i b and d + i e, followed by two rows of zeros."""
    re1, im1, re2, im2, re3, im3 = _turn_rows(a + e, b - d, a - d, b - e, a - e, b + d, cos, -sin)
    return a + d, b + e, re1, im1, re2, im2, re3, im3


@triton.jit
def join_rows(a, b, d, e, h, j, q, r, cos, sin):  # type: ignore[no-untyped-def]
    """Return the first two rows in time, given the inverse FFTs of four rows."""
    d, e, h, j, q, r = _turn_rows(d, e, h, j, q, r, cos, sin)
    return a + d + h + q, b + e + j + r, a - e - h + r, b + d - j - q


@triton.jit
def _load_pair(  # type: ignore[no-untyped-def]
    x, p, t, c, B, C, L, x_b, x_c, x_l, lengths, MASKED: tl.constexpr, dtype: tl.constexpr
):
    """Load positions t and channels c of the sequences of a pair, as (channels, positions); zero from lengths on."""
    at = offsets(t, c, x_l, x_c)
    first = (t < L)[:, None] & (c < C)[None, :]
    second = (t < L)[:, None] & (c < tl.where(2 * p + 1 < B, C, 0))[None, :]
    if MASKED:
        first = first & (t < tl.load(lengths + 2 * p))[:, None]
        second = second & (t < tl.load(lengths + 2 * p + 1, 2 * p + 1 < B, 0))[:, None]
    re = tl.load(x + 2 * p * x_b + at, first, 0.0).to(dtype)
    im = tl.load(x + (2 * p + 1) * x_b + at, second, 0.0).to(dtype)
    return tl.trans(re), tl.trans(im)


@triton.jit(do_not_specialize=["B", "C", "L"])
def _pack_kernel(  # type: ignore[no-untyped-def]
    x, out, lengths, B, C, L, n, x_b, x_c, x_l,
    MASKED: tl.constexpr, ROWS: tl.constexpr, FILLED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store pairs of sequences (B, C, L), padded to n; the last two of four rows are zero if FILLED is 2."""
    m = n // ROWS
    start = tl.program_id(0) * BL
    i = start + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    k = 2 * start + tl.arange(0, 2 * BL)
    inside = (c < C)[:, None] & (k < 2 * m)[None, :]
    at = out + ((p * C + c) * (2 * n))[:, None] + k[None, :]
    a, b = _load_pair(x, p, i, c, B, C, L, x_b, x_c, x_l, lengths, MASKED, dtype)
    if ROWS == 1:
        tl.store(at, tl.interleave(a, b), inside)
    else:
        d, e = _load_pair(x, p, tl.where(i < m, i + m, L), c, B, C, L, x_b, x_c, x_l, lengths, MASKED, dtype)
        cos, sin = twiddle(i, n, dtype)
        cos, sin = cos[None, :], sin[None, :]
        if FILLED == 2:
            re0, im0, re1, im1, re2, im2, re3, im3 = split_rows(a, b, d, e, cos, sin)
        else:
            h, j = _load_pair(x, p, tl.where(i < m, i + 2 * m, L), c, B, C, L, x_b, x_c, x_l, lengths, MASKED, dtype)
            q, r = _load_pair(x, p, tl.where(i < m, i + 3 * m, L), c, B, C, L, x_b, x_c, x_l, lengths, MASKED, dtype)
            re0, im0, re2, im2 = a + h + d + q, b + j + e + r, a + h - d - q, b + j - e - r
            re1, im1, re3, im3 = a - h + e - r, b - j - d + q, a - h - e + r, b - j + d - q
            re1, im1, re2, im2, re3, im3 = _turn_rows(re1, im1, re2, im2, re3, im3, cos, -sin)
        tl.store(at, tl.interleave(re0, im0), inside)
        tl.store(at + 2 * m, tl.interleave(re1, im1), inside)
        tl.store(at + 4 * m, tl.interleave(re2, im2), inside)
        tl.store(at + 6 * m, tl.interleave(re3, im3), inside)


@triton.jit
def load_signal(y, p, c, k, C, n, inside, BL: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load numbers k of the signals of pair p and channels c, as real and imaginary parts."""
    both = tl.load(y + ((p * C + c) * (2 * n))[:, None] + k[None, :], inside, 0.0)
    return tl.split(tl.reshape(both, [BC, BL, 2]))


@triton.jit
def _store_pair(  # type: ignore[no-untyped-def]
    re, im, out, bias, p, t, c, B, C, L, o_b, o_c, o_l, lengths,
    BIAS: tl.constexpr, GELU: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store positions t of a pair, given as (channels, positions), through the epilogue; zero from lengths on."""
    for odd in tl.static_range(2):
        if odd == 0:
            v = tl.trans(re)
        else:
            v = tl.trans(im)
        b = 2 * p + odd
        if BIAS:
            v += tl.load(bias + c, c < C, 0.0).to(v.dtype)[None, :]
        if GELU:
            v = gelu_of(v)
        if MASKED:
            v = tl.where((t < tl.load(lengths + b, b < B, 0))[:, None], v, 0.0)
        inside = (t < L)[:, None] & (c < tl.where(b < B, C, 0))[None, :]
        tl.store(out + b * o_b + offsets(t, c, o_l, o_c), narrow(v, out), inside)


@triton.jit(do_not_specialize=["B", "C", "L"])
def _output_kernel(  # type: ignore[no-untyped-def]
    y, out, bias, lengths, B, C, L, n, o_b, o_c, o_l,
    BIAS: tl.constexpr, GELU: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, FILLED: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the first L positions of pairs in time; the last two of four rows are not needed if FILLED is 2."""
    m = n // ROWS
    start = tl.program_id(0) * BL
    i = start + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.program_id(2).to(tl.int64)
    k = 2 * start + tl.arange(0, 2 * BL)
    inside = (c < C)[:, None] & (k < 2 * m)[None, :]
    a, b = load_signal(y, p, c, k, C, n, inside, BL, BC)
    if ROWS == 1:
        _store_pair(a, b, out, bias, p, i, c, B, C, L, o_b, o_c, o_l, lengths, BIAS, GELU, MASKED)
    else:
        d, e = load_signal(y + 2 * m, p, c, k, C, n, inside, BL, BC)
        h, j = load_signal(y + 4 * m, p, c, k, C, n, inside, BL, BC)
        q, r = load_signal(y + 6 * m, p, c, k, C, n, inside, BL, BC)
        cos, sin = twiddle(i, n, y.dtype.element_ty)
        cos, sin = cos[None, :], sin[None, :]
        t = tl.where(i < m, i, L)
        re, im, re2, im2 = join_rows(a, b, d, e, h, j, q, r, cos, sin)
        _store_pair(re, im, out, bias, p, t, c, B, C, L, o_b, o_c, o_l, lengths, BIAS, GELU, MASKED)
        _store_pair(re2, im2, out, bias, p, t + m, c, B, C, L, o_b, o_c, o_l, lengths, BIAS, GELU, MASKED)
        if FILLED > 2:
            d, e, h, j, q, r = _turn_rows(d, e, h, j, q, r, cos, sin)
            re, im = a - d + h - q, b - e + j - r
            _store_pair(re, im, out, bias, p, t + 2 * m, c, B, C, L, o_b, o_c, o_l, lengths, BIAS, GELU, MASKED)
            re, im = a + e - h - r, b - d - j + q
            _store_pair(re, im, out, bias, p, t + 3 * m, c, B, C, L, o_b, o_c, o_l, lengths, BIAS, GELU, MASKED)


@triton.jit(do_not_specialize=["R", "C"])
def _scale_kernel(x, w, R, C, n, ROWS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """x[r, c] *= w[c]."""
    start = tl.program_id(0) * WIDTH
    c, first = tl.program_id(1).to(tl.int64), tl.program_id(2) * CHUNK
    d, e = load_weight(w + c * (n + 2), frequency(start + tl.arange(0, WIDTH), n, ROWS), n)
    for r in range(first, min(first + CHUNK, R)):
        here = x + (r * C + c) * 2 * n
        a, b = load_complex(here, start, n, WIDTH)
        re, im = _times(a, b, d, e)
        store_complex(here, start, n, re, im, WIDTH)


@triton.jit(do_not_specialize=["R", "C"])
def _backward_kernel(  # type: ignore[no-untyped-def]
    x, g, w, cross, R, C, n, ADD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """cross[c] = sum_r conj(x[r, c]) g[r, c], added if ADD, in the order of frequencies; g[r, c] *= conj(w[c])."""
    start = tl.program_id(0) * WIDTH
    c = tl.program_id(1).to(tl.int64)
    i = start + tl.arange(0, WIDTH)
    f = frequency(i, n, ROWS)
    d, e = load_weight(w + c * (n + 2), f, n)
    at = cross + c * 2 * n + 2 * f
    re = tl.zeros([WIDTH], x.dtype.element_ty)
    im = tl.zeros([WIDTH], x.dtype.element_ty)
    if ADD:
        re = tl.load(at, i < n, 0.0)
        im = tl.load(at + 1, i < n, 0.0)
    for r in range(R):
        u, v = load_complex(x + (r * C + c) * 2 * n, start, n, WIDTH)
        here = g + (r * C + c) * 2 * n
        a, b = load_complex(here, start, n, WIDTH)
        re += u * a + v * b
        im += u * b - v * a
        a, b = _times(a, b, d, -e)
        store_complex(here, start, n, a, b, WIDTH)
    tl.store(at, re, i < n)
    tl.store(at + 1, im, i < n)


@triton.jit(do_not_specialize=["ahead", "behind"])
def _place_kernel(taps, out, ahead, behind, n, k_c, k_k, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the taps of a kernel, divided by n, on a circle of n positions."""
    c = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tap = tl.where(i < behind, i + ahead, i - n + ahead)
    v = tl.load(taps + c * k_c + tap.to(tl.int64) * k_k, (tap >= 0) & (i < n), 0.0).to(out.dtype.element_ty)
    tl.store(out + c * n + i, v / n, i < n)


@triton.jit(do_not_specialize=["ahead", "behind"])
def _taps_kernel(y, out, ahead, behind, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the real part of a complex circle of n positions, divided by n, from lag -ahead on."""
    c = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    at = tl.where(i < ahead, n - ahead + i, i - ahead)
    inside = i < ahead + behind
    tl.store(out + c * (ahead + behind) + i, tl.load(y + (c * n + at) * 2, inside, 0.0) / n, inside)


def aligned_length(n: int) -> int:
    """Return a fast FFT length >= n that keeps every signal aligned: a power of two unless that is much longer."""
    power = 1 << (max(n, 32) - 1).bit_length()
    return power if 4 * power <= 5 * n or n <= 32 else min(power, 16 * fast_length(-(-n // 16)))


def pack(x: Tensor, n: int, dtype: torch.dtype, rows: int = 1, lengths: Tensor | None = None) -> Tensor:
    """Return pairs of the sequences of x (B, C, L), padded to n and divided into rows: complex (pairs, C, n).

    Positions of x from `lengths` (B,) on are treated as zero.
    """
    B, C, L = x.shape
    R, m = -(-B // 2), n // rows
    out = torch.empty(R, C, n, 2, device=x.device, dtype=dtype)
    ends = x if lengths is None else lengths.contiguous()
    tile = (TILE_TIME, TILE_CHANNELS) if rows == 1 else (ROWS_TIME, ROWS_CHANNELS)
    for start in range(0, R, MAX_PAIRS):
        batch, pairs = slice(2 * start, 2 * (start + MAX_PAIRS)), out[start : start + MAX_PAIRS]
        some = x[batch]
        _pack_kernel[triton.cdiv(m, tile[0]), triton.cdiv(C, tile[1]), len(pairs)](
            some, pairs, ends[batch], len(some), C, L, n, *some.stride(),
            MASKED=lengths is not None, ROWS=rows, FILLED=2 if 2 * m >= L else 4, BL=tile[0], BC=tile[1],
        )  # fmt: skip
    return torch.view_as_complex(out)


def unpack(
    y: Tensor,
    out: Tensor,
    rows: int = 1,
    bias: Tensor | None = None,
    gelu: bool = False,
    lengths: Tensor | None = None,
) -> None:
    """Write the first positions of pairs in time, (pairs, C, n) in rows, to a batch (B, C, L); zero from lengths on."""
    _, C, L = out.shape
    n, real = y.shape[-1], torch.view_as_real(y)
    ends = out if lengths is None else lengths.contiguous()
    tile = (TILE_TIME, TILE_CHANNELS) if rows == 1 else (ROWS_TIME, ROWS_CHANNELS)
    for start in range(0, len(y), MAX_PAIRS):
        batch, pairs = slice(2 * start, 2 * (start + MAX_PAIRS)), real[start : start + MAX_PAIRS]
        some = out[batch]
        _output_kernel[triton.cdiv(min(n // rows, L), tile[0]), triton.cdiv(C, tile[1]), len(pairs)](
            pairs, some, real if bias is None else bias.contiguous(), ends[batch], len(some), C, L, n, *out.stride(),
            BIAS=bias is not None, GELU=gelu, MASKED=lengths is not None, ROWS=rows,
            FILLED=2 if 2 * n // rows >= L else 4, BL=tile[0], BC=tile[1],
        )  # fmt: skip


class TritonEngine(TorchEngine):
    """Spectra of pairs of real sequences, one signal each."""

    slice_bytes = 2**30

    fast_length = staticmethod(aligned_length)

    def slices(self, B: int, C: int, n: int, copies: int = 1) -> Iterator[slice]:
        """Yield slices of sequences, in pairs."""
        step = min(max(1, self.slice_bytes // (2 * copies * C * n * self.dtype.itemsize)), MAX_PAIRS)
        return (slice(2 * start, min(2 * (start + step), B)) for start in range(0, -(-B // 2), step))

    def spectrum(self, x: Tensor, n: int, lengths: Tensor | None = None) -> Tensor:
        """Transform pairs, treated as zero from `lengths` on, into (ceil(B / 2), C, n)."""
        rows = rows_of(n)
        packed = pack(x, n, self.dtype, rows, lengths)
        return torch.fft.fft(packed.unflatten(-1, (rows, n // rows))).flatten(-2)

    def inverse(self, X: Tensor, n: int) -> Tensor:
        """Transform signals back, times n; `output` joins the rows."""
        rows = rows_of(n)
        return torch.fft.ifft(X.unflatten(-1, (rows, n // rows)), norm="forward").flatten(-2)

    def weights(self, taps: Tensor, ahead: int, n: int) -> Tensor:
        """Return the spectrum (C, f) of taps (C, l) at lags -ahead .. l - ahead - 1, divided by n."""
        C, length = taps.shape
        placed = torch.empty(C, n, device=taps.device, dtype=self.dtype)
        _place_kernel[triton.cdiv(n, PLACE_WIDTH), C](
            taps, placed, ahead, length - ahead, n, *taps.stride(), WIDTH=PLACE_WIDTH
        )
        return torch.fft.rfft(placed)

    def scale_(self, X: Tensor, W: Tensor) -> Tensor:
        """Multiply signals by (C, f), in place."""
        R, C, n = X.shape
        _scale_kernel[triton.cdiv(n, WIDTH), C, triton.cdiv(R, CHUNK)](
            torch.view_as_real(X), torch.view_as_real(W), R, C, n, ROWS=rows_of(n), CHUNK=CHUNK, WIDTH=WIDTH
        )
        return X

    def cross_and_scale_(self, cross: Tensor | None, X: Tensor, G: Tensor, W: Tensor) -> Tensor:
        """Return cross plus the sum of conj(X) G over signals, at n frequencies; multiply G by conj(W), in place."""
        R, C, n = X.shape
        out = torch.view_as_complex(torch.empty(C, n, 2, device=X.device, dtype=self.dtype)) if cross is None else cross
        _backward_kernel[triton.cdiv(n, WIDTH), C](
            *(torch.view_as_real(z) for z in (X, G, W, out)), R, C, n,
            ADD=cross is not None, ROWS=rows_of(n), WIDTH=WIDTH,
        )  # fmt: skip
        return out

    def taps(self, cross: Tensor, n: int, ahead: int, behind: int) -> Tensor:
        """Transform a sum over signals (C, n) back into taps at lags -ahead .. behind - 1."""
        y = torch.view_as_real(torch.fft.ifft(cross, norm="forward"))
        taps = torch.empty(len(y), ahead + behind, device=y.device, dtype=self.dtype)
        _taps_kernel[triton.cdiv(ahead + behind, PLACE_WIDTH), len(y)](y, taps, ahead, behind, n, WIDTH=PLACE_WIDTH)
        return taps

    def output(
        self, y: Tensor, out: Tensor, bias: Tensor | None = None, gelu: bool = False, lengths: Tensor | None = None
    ) -> None:
        """Write pairs in time, from `inverse`, to a batch (B, C, L), with bias and GELU; zero from `lengths` on."""
        unpack(y, out, rows_of(y.shape[-1]), bias, gelu, lengths)
