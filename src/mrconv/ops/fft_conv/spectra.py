"""Engines of the spectral algorithms: FFTs of batches and operations on their spectra, in plain torch.

An engine transforms a batch (B, C, L) into spectra (R, C, f) of R signals and back, and sums over signals. A signal is
one sequence here and a pair of sequences in `triton_kernels.py`. Inverse transforms of signals are not normalised: the
factor 1/n belongs to the weights. `BranchEngine` has the operations of branch sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fft import irfft, rfft
from torch.nn import functional as F

from ..masking.op import mask_sequences


def fast_length(n: int) -> int:
    """Return the smallest even length >= n whose only prime factors are 2, 3 and 5, for which FFTs are fast."""
    n = max(2, n + n % 2)
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest = rest // prime
        if rest == 1:
            return n
        n += 2


class TorchEngine:
    """Spectra of real sequences, one signal each."""

    slice_bytes = 2**24  # of one spectrum: above this size, allocation costs more than computation

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    fast_length = staticmethod(fast_length)

    def slices(self, B: int, C: int, n: int, copies: int = 1) -> Iterator[slice]:
        """Yield slices of the batch, small enough for `copies` spectra of length n to stay in cache."""
        step = max(1, self.slice_bytes // (copies * C * n * self.dtype.itemsize))
        return (slice(start, min(start + step, B)) for start in range(0, B, step))

    def weights(self, taps: Tensor, ahead: int, n: int) -> Tensor:
        """Return the spectrum (C, f) of taps (C, l) at lags -ahead .. l - ahead - 1, divided by n."""
        placed = F.pad(taps.to(self.dtype) / n, (0, n - taps.shape[1]))
        return rfft(placed.roll(-ahead, 1) if ahead else placed)

    def spectrum(self, x: Tensor, n: int, lengths: Tensor | None = None) -> Tensor:
        """Transform a batch (B, C, L), treated as zero from `lengths` on and padded to n, into signals (R, C, f)."""
        if lengths is not None:
            x = mask_sequences(x, lengths)
        return rfft(x.to(self.dtype), n)

    def inverse(self, X: Tensor, n: int) -> Tensor:
        """Transform signals (..., R, C, f) back into (..., R, C, n), times n."""
        return irfft(X, n, norm="forward")

    def scale_(self, X: Tensor, W: Tensor) -> Tensor:
        """Multiply signals by (C, f), in place."""
        return X.mul_(W)

    def cross_and_scale_(self, cross: Tensor | None, X: Tensor, G: Tensor, W: Tensor) -> Tensor:
        """Return cross plus the sum of conj(X) G over signals; multiply G by conj(W), in place."""
        total = (torch.conj_physical(X) * G).sum(0)
        G.mul_(torch.conj_physical(W))
        return total if cross is None else cross.add_(total)

    def taps(self, cross: Tensor, n: int, ahead: int, behind: int) -> Tensor:
        """Transform a sum over signals back into taps (C, l) at lags -ahead .. behind - 1."""
        circle = irfft(cross, n)
        return torch.cat([circle[:, n - ahead :], circle[:, :behind]], 1) if ahead else circle[:, :behind]

    def output(
        self, y: Tensor, out: Tensor, bias: Tensor | None = None, gelu: bool = False, lengths: Tensor | None = None
    ) -> None:
        """Write the first positions of signals in time to a batch, with bias (C,) and GELU; zero from `lengths` on."""
        y = y[..., : out.shape[-1]]
        if bias is not None and not gelu and lengths is None:
            torch.add(y, bias[:, None], out=out)
            return
        if bias is not None:
            y += bias[:, None]
        y = F.gelu(y) if gelu else y
        out.copy_(y if lengths is None else mask_sequences(y, lengths))


def spectral_engine(dtype: torch.dtype, triton: bool) -> TorchEngine:
    """Return the engine that computes in this dtype, with Triton or with plain torch."""
    if triton:
        from .triton_kernels import TritonEngine

        return TritonEngine(dtype)
    return TorchEngine(dtype)


@dataclass(frozen=True)
class Timeline:
    """A batch (B, C, L) in the time of one direction: reversed if `reverse`, else right-aligned if `ends` are given.

    `ends` (B,) are the lengths of the sequences; each is moved right by L - ends.
    """

    x: Tensor
    reverse: bool = False
    ends: Tensor | None = None

    def moved(self, x: Tensor, sign: int = 1) -> Tensor:
        """Return x (B, C, L) moved into this time or, with sign = -1, from this time back into its original one."""
        if self.ends is None or self.reverse:
            return x.flip(-1) if self.reverse else x
        index = (torch.arange(x.shape[-1], device=x.device) + sign * self.ends[:, None]) % x.shape[-1]
        return x.gather(-1, index[:, None].expand_as(x))

    def last(self, count: int, batch: slice) -> Tensor:
        """Return the last positions of some sequences in this time, (b, C, count)."""
        x, L = self.x[batch], self.x.shape[-1]
        if self.reverse:
            return x[..., :count].flip(-1)
        if self.ends is None:
            return x[..., L - count :]
        t = torch.arange(-count, 0, device=x.device) + self.ends[batch, None]
        index = (t % L)[:, None].expand(*x.shape[:2], count)
        return x.gather(-1, index)


def _sum_over_batch(x: Tensor) -> Tensor:
    """Return the sum over the first dimension in float64, a few sequences at a time in x's dtype, which is faster."""
    parts = (some.sum(0) for some in x.split(8))
    return functools.reduce(Tensor.add_, parts, x.new_zeros(x.shape[1:], dtype=torch.float64))


@dataclass(frozen=True)
class Addend:
    """Terms to add to an output in a direction's time: signals (R, C, L), and one (C, L) for the whole batch."""

    line: Timeline
    signals: Tensor
    shared: Tensor


class BranchEngine(TorchEngine):
    """Operations of branch sums on sequences in the time of a direction."""

    def kernels(self, k: Tensor, n: int) -> Tensor:
        """Transform kernels (..., C, l) into (..., C, f)."""
        return rfft(k, n)

    def circle(self, spectrum: Tensor, n: int) -> Tensor:
        """Transform (..., C, f) back into (..., C, n), normalised."""
        return irfft(spectrum, n)

    def forward_again(self, y: Tensor, n: int) -> Tensor:
        """Transform signals in time (..., R, C, n) into spectra."""
        return rfft(y, n)

    def cross(self, A: Tensor, T: Tensor) -> Tensor:
        """Sum conj(A) T over signals: A (R, C, f), T (..., R, C, f)."""
        total = T.new_zeros(*T.shape[:-3], *T.shape[-2:])
        for r, a in enumerate(torch.conj_physical(A)):
            total.addcmul_(T[..., r, :, :], a)
        return total

    def power(self, A: Tensor) -> Tensor:
        """Sum |A|^2 over signals: (C, f)."""
        return (A.real.square() + A.imag.square()).sum(0)

    def product(self, X: Tensor, W: Tensor) -> Tensor:
        """Return signals (R, C, f) times each of (g, C, f): (g, R, C, f)."""
        return X * W[:, None]

    def add_(self, X: Tensor, other: Tensor, W: Tensor) -> Tensor:
        """Add other signals times (C, f) to signals, in place; overwrites the others."""
        return X.add_(other.mul_(W))

    def combine_(self, T: Tensor, W: Tensor) -> Tensor:
        """Return sum_g T_g W_g for T (g, R, C, f) and W (g, C, f); overwrites T."""
        total = T[0].mul_(W[0])
        for t, w in zip(T[1:], W[1:], strict=True):
            total += t.mul_(w)
        return total

    def keep_(self, y: Tensor, start: int, stop: int) -> Tensor:
        """Zero all positions of signals in time except start .. stop - 1, in place."""
        y[..., :start] = 0
        y[..., stop:] = 0
        return y

    def energy(self, y: Tensor, start: int, stop: int) -> Tensor:
        """Sum the squares at positions start .. stop - 1 of signals in time (g, R, C, n): (g, C)."""
        return y[..., start:stop].square().sum((1, 3))

    def total(self, line: Timeline) -> Tensor:
        """Sum a timeline over the batch: (C, L), in float64."""
        if line.ends is None or line.reverse:
            return line.moved(_sum_over_batch(line.x))
        return _sum_over_batch(line.moved(line.x))

    def write(
        self, y: Tensor, at: int, out: Tensor, shift: Tensor | None = None, addends: Sequence[Addend] = ()
    ) -> None:
        """Write sequences in time, from position `at` on, plus a shift (C,) and addends, to a batch; overwrites y."""
        y = y[..., at : at + out.shape[-1]]
        if shift is not None:
            y += shift[:, None]
        for addend in addends:
            y += addend.line.moved(addend.signals.add_(addend.shared), -1)
        out.copy_(y)
