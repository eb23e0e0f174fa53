"""The engine of the spectral algorithms in Triton: a signal is a pair of real sequences in one complex sequence.

The kernels are real, so FFT(u_1 + i u_2) times a kernel's spectrum is the spectrum of y_1 + i y_2, and pairs are never
separated. The real part of the inverse FFT of sum conj(A) T over pairs is the sum over sequences. cuFFT computes the
FFTs; loading, products, sums over the batch and storing are one Triton kernel each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._triton import gelu as gelu_of
from .._triton import narrow, offsets, widen
from .spectra import NO_EPILOGUE, Addend, Epilogue, Timeline, TorchEngine, fast_length

# Tile sizes are the fastest of those tried on an H200.
TILE_TIME, TILE_CHANNELS = 32, 64  # of a tile that is transposed
SUM_TIME, SUM_CHANNELS = 16, 32  # of a tile that is summed over the batch
WIDTH = 512  # frequencies per program
CHUNK = 4  # signals per program, which share a weight
MAX_PAIRS = 2**15  # per launch: half of what an axis of the grid holds
SPLITS = 16  # programs per channel that compute its energy


@triton.jit
def _complex(x, start, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load complex numbers start .. start + WIDTH - 1 of n, as real and imaginary parts."""
    j = 2 * start + tl.arange(0, 2 * WIDTH)
    return tl.split(tl.reshape(tl.load(x + j, j < 2 * n, 0.0), [WIDTH, 2]))


@triton.jit
def _weight(w, f, n):  # type: ignore[no-untyped-def]
    """Load a real kernel's spectrum, stored at 0 .. n / 2, at any frequencies below n."""
    far = f > n // 2
    k = 2 * tl.where(far, n - f, f)
    re = tl.load(w + k, f < n, 0.0)
    im = tl.load(w + k + 1, f < n, 0.0)
    return re, tl.where(far, -im, im)


@triton.jit
def _store(x, start, n, re, im, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    j = 2 * start + tl.arange(0, 2 * WIDTH)
    tl.store(x + j, tl.interleave(re, im), j < 2 * n)


@triton.jit(do_not_specialize=["B", "C", "L", "first", "at"])
def _pack_kernel(  # type: ignore[no-untyped-def]
    x, ends, out, B, C, L, n, first, at, x_b, x_c, x_l,
    REVERSE: tl.constexpr, MOVED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BL
    j = start + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.program_id(2).to(tl.int64)
    i = j - at + first
    there = (j >= at) & (i < L)
    t = i
    if REVERSE:
        t = L - 1 - i
    if MOVED:
        t = i - L + tl.load(ends + 2 * p).to(tl.int32)
    wide = out.dtype.element_ty
    inside = (there & (t >= 0))[:, None] & (c < C)[None, :]
    re = tl.load(x + 2 * p * x_b + offsets(t, c, x_l, x_c), inside, 0.0).to(wide)
    if MOVED:
        t = i - L + tl.load(ends + 2 * p + 1, 2 * p + 1 < B, 0).to(tl.int32)
    inside = (there & (t >= 0))[:, None] & (c < tl.where(2 * p + 1 < B, C, 0))[None, :]
    im = tl.load(x + (2 * p + 1) * x_b + offsets(t, c, x_l, x_c), inside, 0.0).to(wide)
    both = tl.interleave(tl.trans(re), tl.trans(im))
    k = 2 * start + tl.arange(0, 2 * BL)
    base = (p * C + c) * (2 * n)
    tl.store(out + base[:, None] + k[None, :], both, (c < C)[:, None] & (k < 2 * n)[None, :])


@triton.jit
def _part(y, p, c, i, odd, C, n, inside):  # type: ignore[no-untyped-def]
    """Load real or imaginary parts, as (positions, channels)."""
    base = (p * C + c) * (2 * n)
    return tl.load(y + base[None, :] + (2 * i + odd)[:, None], inside, 0.0)


@triton.jit(do_not_specialize=["B", "C", "L", "at"])
def _output_kernel(  # type: ignore[no-untyped-def]
    y, out, bias, ends, causal, causal_shared, anticausal, anticausal_shared, B, C, L, n, at, o_b, o_c, o_l,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, ANTICAUSAL: tl.constexpr, MOVED: tl.constexpr, GELU: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BL
    t = start + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    p = tl.program_id(2).to(tl.int64)
    k = 2 * (start + at) + tl.arange(0, 2 * BL)
    both = tl.load(y + ((p * C + c) * (2 * n))[:, None] + k[None, :], (c < C)[:, None] & (k < 2 * n)[None, :], 0.0)
    re, im = tl.split(tl.reshape(both, [BC, BL, 2]))
    for odd in tl.static_range(2):
        if odd == 0:
            v = tl.trans(re)
        else:
            v = tl.trans(im)
        b = 2 * p + odd
        inside = (t < L)[:, None] & (c < tl.where(b < B, C, 0))[None, :]
        if BIAS:
            v += tl.load(bias + c, c < C, 0.0).to(v.dtype)[None, :]
        if CAUSAL:
            i = t
            if MOVED:
                i = t + L - tl.load(ends + b, b < B, 0).to(tl.int32)
            here = inside & (i < L)[:, None]
            v += _part(causal, p, c, i, odd, C, L, here)
            v += tl.load(causal_shared + (c.to(tl.int64) * L)[None, :] + i[:, None], here, 0.0)
        if ANTICAUSAL:
            i = L - 1 - t
            v += _part(anticausal, p, c, i, odd, C, L, inside)
            v += tl.load(anticausal_shared + (c.to(tl.int64) * L)[None, :] + i[:, None], inside, 0.0)
        if GELU:
            v = gelu_of(v)
        tl.store(out + b * o_b + offsets(t, c, o_l, o_c), narrow(v, out), inside)


@triton.jit(do_not_specialize=["R", "C", "G"])
def _product_kernel(x, w, out, R, C, G, n, CHUNK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[g, r, c] = x[r, c] w[g, c]."""
    start = tl.program_id(0) * WIDTH
    f = start + tl.arange(0, WIDTH)
    c, first = tl.program_id(1).to(tl.int64), tl.program_id(2) * CHUNK
    for g in range(G):
        d, e = _weight(w + (g * C + c) * (n + 2), f, n)
        for r in range(first, min(first + CHUNK, R)):
            a, b = _complex(x + (r * C + c) * 2 * n, start, n, WIDTH)
            _store(out + ((g * R + r) * C + c) * 2 * n, start, n, a * d - b * e, a * e + b * d, WIDTH)


@triton.jit(do_not_specialize=["R", "C", "G"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    x, w, out, R, C, G, n, ADD: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):
    """out[r, c] = sum_g x[g, r, c] w[g, c], added to out if ADD."""
    start = tl.program_id(0) * WIDTH
    f = start + tl.arange(0, WIDTH)
    c, first = tl.program_id(1).to(tl.int64), tl.program_id(2) * CHUNK
    for r in range(first, min(first + CHUNK, R)):
        a, b = _complex(x + (r * C + c) * 2 * n, start, n, WIDTH)
        d, e = _weight(w + c * (n + 2), f, n)
        re, im = a * d - b * e, a * e + b * d
        for g in range(1, G):
            a, b = _complex(x + ((g * R + r) * C + c) * 2 * n, start, n, WIDTH)
            d, e = _weight(w + (g * C + c) * (n + 2), f, n)
            re += a * d - b * e
            im += a * e + b * d
        if ADD:
            a, b = _complex(out + (r * C + c) * 2 * n, start, n, WIDTH)
            re += a
            im += b
        _store(out + (r * C + c) * 2 * n, start, n, re, im, WIDTH)


@triton.jit(do_not_specialize=["R", "C"])
def _cross_kernel(x, y, out, R, C, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[g, c] at 0 .. n / 2 = spectrum of the real part of the inverse FFT of sum_r conj(x[r, c]) y[g, r, c]."""
    f = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    c, g = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    inside = f <= n // 2
    near, far = 2 * f, 2 * tl.where(f == 0, 0, n - f)
    re = tl.zeros([WIDTH], x.dtype.element_ty)
    im = tl.zeros([WIDTH], x.dtype.element_ty)
    for r in range(R):
        px = x + (r * C + c) * 2 * n
        py = y + ((g * R + r) * C + c) * 2 * n
        a, b = tl.load(px + near, inside, 0.0), tl.load(px + near + 1, inside, 0.0)
        d, e = tl.load(py + near, inside, 0.0), tl.load(py + near + 1, inside, 0.0)
        re += a * d + b * e
        im += a * e - b * d
        a, b = tl.load(px + far, inside, 0.0), tl.load(px + far + 1, inside, 0.0)
        d, e = tl.load(py + far, inside, 0.0), tl.load(py + far + 1, inside, 0.0)
        re += a * d + b * e
        im -= a * e - b * d
    at = out + (g * C + c) * (n + 2) + near
    tl.store(at, 0.5 * re, inside)
    tl.store(at + 1, 0.5 * im, inside)


@triton.jit(do_not_specialize=["R", "C", "start", "stop"])
def _energy_kernel(y, out, R, C, n, start, stop, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[s, g, c] = the part of the sum of |y[g, :, c, start:stop]|^2 that program s computes."""
    c, g, s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    total = tl.zeros([2 * WIDTH], y.dtype.element_ty)
    blocks = tl.cdiv(stop - start, WIDTH)
    for k in range(s, R * blocks, tl.num_programs(2)):
        r = (k // blocks).to(tl.int64)
        j = 2 * (start + (k % blocks) * WIDTH) + tl.arange(0, 2 * WIDTH)
        v = tl.load(y + ((g * R + r) * C + c) * 2 * n + j, j < 2 * stop, 0.0)
        total += v * v
    tl.store(out + (s * tl.num_programs(1) + g) * C + c, tl.sum(total, 0))


@triton.jit(do_not_specialize=["B", "C", "L"])
def _total_kernel(  # type: ignore[no-untyped-def]
    x, ends, out, B, C, L, x_b, x_c, x_l,
    REVERSE: tl.constexpr, MOVED: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BL + tl.arange(0, BL)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BL, BC], tl.float64)
    sequence = x
    for b in range(B):
        t = i
        if REVERSE:
            t = L - 1 - i
        if MOVED:
            t = i - L + tl.load(ends + b).to(tl.int32)
        inside = ((t >= 0) & (i < L))[:, None] & (c < C)[None, :]
        total += widen(tl.load(sequence + offsets(t, c, x_l, x_c), inside, 0.0))
        sequence += x_b
    inside = (i < L)[:, None] & (c < C)[None, :]
    tl.store(out + offsets(i, c, 1, L), total, inside)


class TritonEngine(TorchEngine):
    """Spectra of pairs of real sequences, one signal each."""

    slice_bytes = 2**26

    @staticmethod
    def fast_length(n: int) -> int:
        """Return a fast FFT length that keeps every signal aligned: a power of two unless that is much longer."""
        power = 1 << (max(n, 32) - 1).bit_length()
        return power if 4 * power <= 5 * n or n <= 32 else min(power, 16 * fast_length(-(-n // 16)))

    def powers_together(self, branches: int, B: int) -> bool:
        """Return whether all branches' spectra should be as long as the input's: if the batch is twice as large."""
        return 2 * branches <= B

    @property
    def _complex(self) -> torch.dtype:
        return torch.complex128 if self.dtype == torch.float64 else torch.complex64

    def slices(self, B: int, C: int, n: int, copies: int = 1) -> Iterator[slice]:
        """Yield slices of sequences, in pairs."""
        step = min(max(1, self.slice_bytes // (2 * copies * C * n * self.dtype.itemsize)), MAX_PAIRS)
        return (slice(2 * start, min(2 * (start + step), B)) for start in range(0, -(-B // 2), step))

    def spectrum(self, line: Timeline, n: int, first: int = 0, at: int = 0, batch: slice = slice(None)) -> Tensor:
        """Transform pairs into (ceil(B / 2), C, n)."""
        line = line.select(batch)
        B, C, L = line.x.shape
        R, moved = -(-B // 2), line.ends is not None and not line.reverse
        out = torch.empty(R, C, n, 2, device=line.x.device, dtype=self.dtype)
        for start in range(0, R, MAX_PAIRS):
            some, pairs = line.select(slice(2 * start, 2 * (start + MAX_PAIRS))), out[start : start + MAX_PAIRS]
            _pack_kernel[triton.cdiv(n, TILE_TIME), triton.cdiv(C, TILE_CHANNELS), len(pairs)](
                some.x, some.ends if moved else pairs, pairs, len(some.x), C, L, n, first, at, *some.x.stride(),
                REVERSE=line.reverse, MOVED=moved, BL=TILE_TIME, BC=TILE_CHANNELS,
            )  # fmt: skip
        return torch.fft.fft(torch.view_as_complex(out))

    def inverse(self, X: Tensor, n: int) -> Tensor:
        """Transform signals back, times n."""
        return torch.fft.ifft(X, norm="forward")

    def forward_again(self, y: Tensor, n: int) -> Tensor:
        """Transform signals in time into spectra."""
        return torch.fft.fft(y)

    def _weights(self, W: Tensor) -> Tensor:
        """Return spectra of real kernels, at n / 2 + 1 frequencies, as real and imaginary parts."""
        return torch.view_as_real(W.to(self._complex).contiguous())

    def cross(self, A: Tensor, T: Tensor) -> Tensor:
        """Sum conj(A) T over sequences, at n / 2 + 1 frequencies."""
        R, C, n = A.shape
        out = torch.empty(*T.shape[:-3], C, n // 2 + 1, device=A.device, dtype=A.dtype)
        _cross_kernel[triton.cdiv(n // 2 + 1, WIDTH // 2), C, T.numel() // A.numel()](
            torch.view_as_real(A), torch.view_as_real(T), torch.view_as_real(out), R, C, n, WIDTH=WIDTH // 2
        )
        return out

    def power(self, A: Tensor) -> Tensor:
        """Sum |A|^2 over sequences, at n / 2 + 1 frequencies."""
        return self.cross(A, A).real

    def scale_(self, X: Tensor, W: Tensor) -> Tensor:
        """Multiply signals by (C, f), in place."""
        return self.combine_(X[None], W[None])

    def product(self, X: Tensor, W: Tensor) -> Tensor:
        """Return signals times each of (g, C, f)."""
        R, C, n = X.shape
        out = torch.empty(len(W), *X.shape, device=X.device, dtype=X.dtype)
        _product_kernel[triton.cdiv(n, WIDTH), C, triton.cdiv(R, CHUNK)](
            torch.view_as_real(X), self._weights(W), torch.view_as_real(out), R, C, len(W), n, CHUNK=CHUNK, WIDTH=WIDTH
        )
        return out

    def add_(self, X: Tensor, other: Tensor, W: Tensor) -> Tensor:
        """Add other signals times (C, f) to signals, in place."""
        return self._combine(other[None], W[None], X, True)

    def combine_(self, T: Tensor, W: Tensor) -> Tensor:
        """Return sum_g T_g W_g, stored in T[0]."""
        return self._combine(T, W, T[0], False)

    def _combine(self, T: Tensor, W: Tensor, out: Tensor, add: bool) -> Tensor:
        G, R, C, n = T.shape
        _combine_kernel[triton.cdiv(n, WIDTH), C, triton.cdiv(R, CHUNK)](
            torch.view_as_real(T), self._weights(W), torch.view_as_real(out), R, C, G, n,
            ADD=add, CHUNK=CHUNK, WIDTH=WIDTH,
        )  # fmt: skip
        return out

    def energy(self, y: Tensor, start: int, stop: int) -> Tensor:
        """Sum the squares at positions start .. stop - 1 of signals in time."""
        G, R, C, n = y.shape
        parts = torch.empty(SPLITS, G, C, device=y.device, dtype=self.dtype)
        _energy_kernel[C, G, SPLITS](torch.view_as_real(y), parts, R, C, n, start, stop, WIDTH=WIDTH)
        return parts.sum(0)

    def total(self, line: Timeline) -> Tensor:
        """Sum a timeline over the batch, in float64."""
        B, C, L = line.x.shape
        moved = line.ends is not None and not line.reverse
        out = torch.empty(C, L, device=line.x.device, dtype=torch.float64)
        _total_kernel[triton.cdiv(L, SUM_TIME), triton.cdiv(C, SUM_CHANNELS)](
            line.x, line.ends if moved else out, out, B, C, L, *line.x.stride(),
            REVERSE=line.reverse, MOVED=moved, BL=SUM_TIME, BC=SUM_CHANNELS,
        )  # fmt: skip
        return out

    def zeros(self, like: Tensor, *shape: int) -> Tensor:
        """Return zeros for all sequences (B, C, L), as signals."""
        B, *rest = shape
        return torch.zeros(-(-B // 2), *rest, device=like.device, dtype=self._complex)

    def signals(self, batch: slice) -> slice:
        """Return the slice of pairs that hold these sequences."""
        return slice(batch.start // 2, -(-batch.stop // 2))

    def output(self, y: Tensor, at: int, out: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> None:
        """Write pairs in time, from position `at` on, through the epilogue, to a batch (B, C, L)."""
        bias, addends, gelu = epilogue.bias, epilogue.addends, epilogue.gelu
        if len(y) > MAX_PAIRS:
            for start in range(0, len(y), MAX_PAIRS):
                pairs, batch = slice(start, start + MAX_PAIRS), slice(2 * start, 2 * (start + MAX_PAIRS))
                some = [Addend(addend.line.select(batch), addend.signals[pairs], addend.shared) for addend in addends]
                self.output(y[pairs], at, out[batch], Epilogue(bias, some, gelu))
            return
        B, C, L = out.shape
        causal = next((addend for addend in addends if not addend.line.reverse), None)
        anticausal = next((addend for addend in addends if addend.line.reverse), None)
        ends = None if causal is None else causal.line.ends
        real = torch.view_as_real(y)
        tensors = [
            (real, real) if addend is None else (torch.view_as_real(addend.signals), addend.shared.contiguous())
            for addend in (causal, anticausal)
        ]
        _output_kernel[triton.cdiv(L, TILE_TIME), triton.cdiv(C, TILE_CHANNELS), y.shape[0]](
            real, out, real if bias is None else bias.contiguous(), real if ends is None else ends, *tensors[0],
            *tensors[1], B, C, L, y.shape[-1], at, *out.stride(), BIAS=bias is not None, CAUSAL=causal is not None,
            ANTICAUSAL=anticausal is not None, MOVED=ends is not None, GELU=gelu, BL=TILE_TIME, BC=TILE_CHANNELS,
        )  # fmt: skip
