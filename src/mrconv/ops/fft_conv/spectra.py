"""Batches in frequency: what the spectral ops are written in, by plain torch here and by Triton in `spectra_triton`.

An engine turns a batch (B, C, L) into rows of spectra and back, and adds up over rows. Its rows are sequences here,
and pairs of sequences in Triton. Inverse transforms of batches are not normalised: 1/n belongs into the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fft import irfft, rfft
from torch.nn import functional as F


def fast_length(n: int) -> int:
    """Return the smallest even length >= n whose only prime factors are 2, 3 and 5: FFTs like those."""
    n = max(2, n + n % 2)
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest = rest // prime
        if rest == 1:
            return n
        n += 2


@dataclass(frozen=True)
class Timeline:
    """A batch (B, C, L) in the time of one direction: backwards if `reverse`, else moved right by L - ends."""

    x: Tensor
    reverse: bool = False
    ends: Tensor | None = None

    def moved(self, x: Tensor, way: int = 1) -> Tensor:
        """Return x (B, C, L) in this time, or with way = -1 from this time back in its own."""
        if self.ends is None or self.reverse:
            return x.flip(-1) if self.reverse else x
        index = (torch.arange(x.shape[-1], device=x.device) + way * self.ends[:, None]) % x.shape[-1]
        return x.gather(-1, index[:, None].expand_as(x))

    def rows(self, rows: slice) -> Timeline:
        """Return some of the sequences."""
        return Timeline(self.x[rows], self.reverse, None if self.ends is None else self.ends[rows])


@dataclass(frozen=True)
class Extra:
    """Something to add to an output: rows of sequences (R, C, L) and one for all (C, L), in a direction's time."""

    line: Timeline
    rows: Tensor
    table: Tensor


class Reals:
    """Spectra of real sequences, one row each."""

    slice_bytes = 2**24  # of one spectrum: beyond this, allocating costs more than computing

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    fast_length = staticmethod(fast_length)

    def powers_together(self, branches: int, B: int) -> bool:
        """Tell whether all branches' spectra had better be as long as the input's: fewer launches, more work."""
        return False

    def slices(self, B: int, C: int, n: int, copies: int = 1) -> Iterator[slice]:
        """Yield slices of rows, small enough for `copies` spectra of length n to stay near the processor."""
        step = max(1, self.slice_bytes // (copies * C * n * self.dtype.itemsize))
        return (slice(start, min(start + step, B)) for start in range(0, B, step))

    def spectrum(self, line: Timeline, n: int, first: int = 0, at: int = 0, rows: slice = slice(None)) -> Tensor:
        """Transform x[first:] of a timeline's rows, placed at `at` among n, into (R, C, f)."""
        line = line.rows(rows)
        x = line.moved(line.x.to(self.dtype))[..., first:]
        return rfft(F.pad(x, (at, 0)) if at else x, n)

    def kernels(self, k: Tensor, n: int) -> Tensor:
        """Transform kernels (..., C, l) into (..., C, f)."""
        return rfft(k, n)

    def taps(self, spectrum: Tensor, n: int) -> Tensor:
        """Transform (..., C, f) back into (..., C, n), normalised."""
        return irfft(spectrum, n)

    def inverse(self, X: Tensor, n: int) -> Tensor:
        """Transform rows back: (..., R, C, f) to (..., R, C, n) times n."""
        return irfft(X, n, norm="forward")

    def forward_again(self, y: Tensor, n: int) -> Tensor:
        """Transform rows in time (..., R, C, n) once more."""
        return rfft(y, n)

    def cross(self, A: Tensor, T: Tensor) -> Tensor:
        """Sum conj(A) T over rows: A (R, C, f), T (..., R, C, f)."""
        return (torch.conj_physical(A) * T).sum(-3)

    def power(self, A: Tensor) -> Tensor:
        """Sum |A|^2 over rows: (C, f)."""
        return (A.real.square() + A.imag.square()).sum(0)

    def scale_(self, X: Tensor, W: Tensor) -> Tensor:
        """Multiply rows by (C, f), in place."""
        return X.mul_(W)

    def product(self, X: Tensor, W: Tensor) -> Tensor:
        """Return rows (R, C, f) times each of (g, C, f): (g, R, C, f)."""
        return X * W[:, None]

    def add_(self, X: Tensor, other: Tensor, W: Tensor) -> Tensor:
        """Add other rows times (C, f) to rows, in place; what is in the others is lost."""
        return X.add_(other.mul_(W))

    def combine_(self, T: Tensor, W: Tensor) -> Tensor:
        """Return sum_g T_g W_g for T (g, R, C, f) and W (g, C, f); what is in T is lost."""
        total = T[0].mul_(W[0])
        for t, w in zip(T[1:], W[1:], strict=True):
            total += t.mul_(w)
        return total

    def keep_(self, y: Tensor, start: int, stop: int) -> Tensor:
        """Zero all but some positions of rows in time, in place."""
        y[..., :start] = 0
        y[..., stop:] = 0
        return y

    def energy(self, y: Tensor, start: int, stop: int) -> Tensor:
        """Sum the squares at some positions of rows in time (g, R, C, n): (g, C)."""
        return y[..., start:stop].square().sum((1, 3))

    def total(self, line: Timeline) -> Tensor:
        """Sum a timeline over the batch: (C, L), in float64."""
        if line.ends is None or line.reverse:
            return line.moved(line.x.sum(0, dtype=torch.float64))
        return line.moved(line.x).sum(0, dtype=torch.float64)

    def zeros(self, like: Tensor, *shape: int) -> Tensor:
        """Return rows of zeros."""
        return like.new_zeros(*shape, dtype=self.dtype)

    def row_slice(self, rows: slice) -> slice:
        """Return the rows that hold some sequences."""
        return rows

    def output(
        self,
        y: Tensor,
        at: int,
        out: Tensor,
        bias: Tensor | None = None,
        extras: Sequence[Extra] = (),
        gelu: bool = False,
    ) -> None:
        """Write rows in time, from `at` on, to a batch (B, C, L), after a bias (C,), extras and GELU; rows are lost."""
        y = y[..., at : at + out.shape[-1]]
        if bias is not None:
            y += bias[:, None]
        for extra in extras:
            y += extra.line.moved(extra.rows.add_(extra.table), -1)
        out.copy_(F.gelu(y) if gelu else y)


def engine(dtype: torch.dtype, triton: bool) -> Reals:
    """Return what transforms batches: Triton's way, or plain torch's."""
    if triton:
        from .triton_kernels import Pairs

        return Pairs(dtype)
    return Reals(dtype)
