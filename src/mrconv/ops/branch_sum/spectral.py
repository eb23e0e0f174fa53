"""Branches of dense kernels, by FFT: the statistics come from the input's power spectrum.

The statistics follow from the input's autocorrelation R, summed over the batch, and from the tail that the truncation
of the outputs at L removes, which depends on the last inputs only. With r_b the autocorrelation of k_b, of length l_b,
and S the cumulative sum over time of u summed over the batch:

    sum c_b      =  sum_tau k_b[tau] S[L-1-tau]
    sum c_b**2   =  sum_lag r_b[lag] R[lag]  -  tail_b,     tail_b by FFTs of length 2 l_b of the last l_b - 1 inputs

As the l_b double, all tails together cost about as much as two convolutions. Given the statistics, the output is one
convolution with k_rep = sum_b w_b / sqrt(var_b + eps) k_b. In the backward pass, with g the output's gradient,
dc_b = s_b g - a_b - q_b c_b: the first term is the backward of one convolution; the last one, summed over b, is one
more product with the input's spectrum, minus the tails.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common import compute_dtype
from ..fft_conv.spectra import Addend, BranchEngine, Timeline
from .statistics import cumulative_sum


@dataclass
class _Group:
    """Some branches of one direction: their indices in it, their kernels (g, C, l), and the length of their FFTs."""

    members: slice
    kernels: Tensor
    fft: int

    @property
    def length(self) -> int:
        return self.kernels.shape[-1]


class _Direction:
    """The input in one direction's time, right-aligned, and that direction's kernels, delayed by one if reversed.

    The kernels are cut to the input's length and grouped. The energy of `tails` comes from the input's power spectrum
    minus the outputs past the end. The longest kernels have tails as long as the input; they are `direct`: their
    outputs are computed.
    """

    def __init__(
        self, engine: BranchEngine, line: Timeline, kernels: Sequence[Tensor], branches: slice, n: int
    ) -> None:
        self.engine, self.line, self.branches, self.n, self.delay = engine, line, branches, n, int(line.reverse)
        _, C, L = line.x.shape
        self.cumulative = cumulative_sum(engine.total(line)).flip(1).to(engine.dtype)  # S[L-1], S[L-2], ..., (C, L)
        self.sizes = [k.shape[1] for k in kernels]
        lengths = [min(self.delay + size, L) for size in self.sizes]
        members, first = [], 0
        for i in range(len(kernels)):
            if i + 1 == len(kernels) or (i + 2 - first) * self.sizes[i + 1] > L // 4:
                members.append(slice(first, i + 1))
                first = i + 1
        ffts = [engine.fast_length(2 * max(lengths[each]) - 1 - self.delay) for each in members]
        short = len(members)
        while short and ffts[short - 1] == n and line.ends is None:
            short -= 1

        def group(some: slice, fft: int) -> _Group:
            stacked = kernels[0].new_zeros(some.stop - some.start, C, max(lengths[some]))
            for padded, k, length in zip(stacked, kernels[some], lengths[some], strict=True):
                padded[:, self.delay : length] = k[:, : length - self.delay]
            return _Group(some, stacked, fft)

        self.direct = [group(*each) for each in zip(members[short:], ffts[short:], strict=True)]
        self.tails = [group(*each) for each in zip(members[:short], ffts[:short], strict=True)]

    @property
    def parts(self) -> list[_Group]:
        """Groups that contain every branch once."""
        return [*self.tails, *self.direct]

    def concatenated(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors like the parts' kernels (g, C, l) in the layout of the original kernels, (C, taps)."""
        branches = zip((branch for part in parts for branch in part), self.sizes, strict=True)
        return torch.cat([_padded(x[:, self.delay : self.delay + size], size) for x, size in branches], 1)

    def past_the_end(self, group: _Group, weights: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield some sequences at a time, the spectrum of their last l - 1 inputs, and the outputs past the end.

        The outputs are at positions l - 1 .. 2 l - 3 of the signals in time (g, R, C, m).
        """
        B, C, _ = self.line.x.shape
        for batch in self.engine.slices(B, C, group.fft, 1 + len(group.kernels)):
            last = self.engine.spectrum(self.line.last(group.length - 1, batch), group.fft)
            yield batch, last, self.engine.inverse(self.engine.product(last, weights), group.fft)

    def outputs(self, group: _Group, spectrum: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield spectra of some sequences at a time, and a direct group's outputs at positions 0 .. L - 1."""
        B, C, _ = self.line.x.shape
        weights = self.in_input_time(self.engine.kernels(group.kernels, self.n)) / self.n
        for batch in self.engine.slices(B, C, self.n, 1 + len(group.kernels)):
            some = spectrum[batch]
            yield some, self.engine.inverse(self.engine.product(some, weights), self.n)

    def in_input_time(self, spectrum: Tensor) -> Tensor:
        """Convert a spectrum between this direction's time and the input's time."""
        return torch.conj_physical(spectrum) if self.line.reverse else spectrum


def _padded(x: Tensor, size: int) -> Tensor:
    """Return x (C, <= size) padded with zeros to (C, size)."""
    return x if x.shape[1] == size else F.pad(x, (0, size - x.shape[1]))


def _circular(half: Tensor, n: int) -> Tensor:
    """Return an even sequence, given at lags 0 .. l - 1, as a periodic sequence of length n."""
    return torch.cat([F.pad(half, (0, n - 2 * half.shape[-1] + 1)), half[..., 1:].flip(-1)], -1)


def _square(spectrum: Tensor) -> Tensor:
    return spectrum.real.square() + spectrum.imag.square()


LARGEST_POWER = 1e24
"""Largest power in float32; a sum of products with the power spectra of kernels may be 1e14 times as large."""


class SpectralBranches:
    """Branches over u (B, C, L) with dense kernels (C, sum of sizes), the first `causal` of them causal.

    On a CPU, inputs whose power could overflow in float32 are computed in float64.
    """

    heights = None

    def __init__(self, u: Tensor, kernels: Tensor, lengths: Tensor | None, sizes: Sequence[int], causal: int) -> None:
        dtype = compute_dtype(u, kernels)
        self.u, self.L = u, u.shape[-1]
        self.behind = min(max(sizes[:causal], default=1), self.L)
        self.ahead = min(max(sizes[causal:], default=0), self.L - 1)
        x = self._transform(dtype)
        if dtype == torch.float32 and u.device.type == "cpu" and self.power.max() > LARGEST_POWER:
            dtype, x = torch.float64, self._transform(torch.float64)
        each = kernels.to(dtype).split(list(sizes), 1)
        both = (False, slice(causal)), (True, slice(causal, len(sizes)))
        self.directions = [
            _Direction(self.engine, Timeline(x, reverse, lengths), each[branches], branches, self.n)
            for reverse, branches in both
            if each[branches]
        ]

    def _transform(self, dtype: torch.dtype) -> Tensor:
        """Compute the input's spectrum and power spectrum in a dtype; return the input in it."""
        self.engine, x = BranchEngine(dtype), self.u.to(dtype).contiguous()
        self.n = self.engine.fast_length(2 * self.L)
        self.spectrum = self.engine.spectrum(x, self.n)
        self.power = self.engine.power(self.spectrum)  # (C, n / 2 + 1)
        return x

    @functools.cached_property
    def correlation(self) -> Tensor:
        """The input's autocorrelation R, (C, L)."""
        return self.engine.circle(self.power.to(self.spectrum.dtype), self.n)[..., : self.L]

    def power_for(self, group: _Group, delay: int) -> Tensor:
        """Return the spectrum of R at the lags that a group's kernels span, (C, m / 2 + 1)."""
        if group.fft == self.n:
            return self.power
        return self.engine.kernels(_circular(self.correlation[:, : group.length - delay], group.fft), group.fft).real

    def moments(self) -> tuple[Tensor, None]:
        """Return the sums of c_b and of c_b^2, (1, 2, N, C)."""
        moments = []
        for direction in self.directions:
            sums = [(part.kernels * direction.cumulative[:, : part.length]).sum(-1) for part in direction.parts]
            moments.append(torch.stack([torch.cat(sums), self._energy(direction)]))
        return torch.cat(moments, 1)[None], None

    def _energy(self, direction: _Direction) -> Tensor:
        """Return the sum of c_b^2 of one direction's branches, (N, C)."""
        engine = self.engine
        energy = self.power.new_zeros(len(direction.sizes), self.power.shape[0])
        for group in direction.tails:
            power = _square(engine.kernels(group.kernels, group.fft)).mul_(self.power_for(group, direction.delay))
            energy[group.members] = (2 * power.sum(-1) - power[..., 0] - power[..., -1]) / group.fft
        for group in direction.tails:
            if group.length > 1:
                K = engine.kernels(group.kernels, group.fft) / group.fft
                for _, _, y in direction.past_the_end(group, K):
                    energy[group.members] -= engine.energy(y, group.length - 1, 2 * group.length - 2)
        for group in direction.direct:
            for _, y in direction.outputs(group, self.spectrum):
                energy[group.members] += engine.energy(y, 0, self.L)
        return energy

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b c_b + shift_b) + skip u, as one convolution; overwrites the input's spectrum."""
        y, engine = torch.empty_like(self.u), self.engine
        signals = engine.inverse(engine.scale_(self.spectrum, self._merged(scale, skip)), self.n)
        engine.write(signals, self.ahead, y, shift.sum(0))
        return y

    def _merged(self, scale: Tensor, skip: Tensor | None) -> Tensor:
        """Return the spectrum of k_rep, divided by n."""
        k_rep = self.power.new_zeros(scale.shape[1], self.ahead + self.behind)
        for direction in self.directions:
            factors = scale[direction.branches, :, None]
            for part in direction.parts:
                total = (factors[part.members] * part.kernels).sum(0)
                if direction.delay:
                    k_rep[:, self.ahead - part.length + 1 : self.ahead] += total[:, 1:].flip(1)
                else:
                    k_rep[:, self.ahead : self.ahead + part.length] += total
        if skip is not None:
            k_rep[:, self.ahead] += skip
        return self.engine.kernels(k_rep / self.n, self.n)

    def products(self, grad: Tensor) -> Tensor:
        """Return the sums over batch and time, (1, N + 2, C), of g c_b, of g and of g u."""
        engine, g = self.engine, grad.to(self.engine.dtype).contiguous()
        self.g = engine.spectrum(F.pad(g, (self.ahead, 0)) if self.ahead else g, self.n)
        dk_rep = engine.circle(engine.cross(self.spectrum, self.g), self.n)[..., : self.ahead + self.behind]
        self.dk = [self._taps_of(direction, dk_rep) for direction in self.directions]
        inner = [
            (dk[:, : part.length] * part.kernels).sum(-1)
            for dk, direction in zip(self.dk, self.directions, strict=True)
            for part in direction.parts
        ]
        g_sum, g_u = engine.total(Timeline(g)).sum(1).to(dk_rep.dtype), dk_rep[:, self.ahead]
        return torch.cat([*inner, g_sum[None], g_u[None]])[None]

    def _taps_of(self, direction: _Direction, kernel: Tensor) -> Tensor:
        """Return one direction's taps of a kernel at lags -ahead .. behind - 1, in that direction's time."""
        if direction.delay:
            return F.pad(kernel[:, : self.ahead].flip(1), (1, 0))
        return kernel[:, self.ahead :]

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the kernels for dc_b = s_b g - a_b - q_b c_b; overwrites the spectra."""
        engine, addends, dkernels = self.engine, [], []
        factor, back = torch.zeros_like(self.power), torch.conj_physical(self._merged(s, skip))
        signals = engine.scale_(self.g, back)
        for dk_rep, direction in zip(self.dk, self.directions, strict=True):
            branches = direction.branches
            gradient = _DirectionGradient(self, direction, q[branches], a[branches])
            factor += gradient.add_energy(signals)
            addends.append(gradient.addend())
            for part, dk in zip(direction.parts, gradient.dk, strict=True):
                dk.addcmul_(s[branches][part.members, :, None], dk_rep[:, : part.length])
            dkernels.append(direction.concatenated(gradient.dk))
        signals = engine.add_(signals, self.spectrum, factor / self.n)
        del self.spectrum, self.g
        du = torch.empty_like(self.u)
        engine.write(engine.inverse(signals, self.n), 0, du, addends=addends)
        return du, torch.cat(dkernels, 1)


class _DirectionGradient:
    """The vjp of one direction's branches with dc_b = -(a_b + q_b c_b); `dk` holds the gradients of its parts."""

    def __init__(self, branches: SpectralBranches, direction: _Direction, q: Tensor, a: Tensor) -> None:
        self.branches, self.direction, self.q, power = branches, direction, q, branches.power
        self.steps, self.dk = power.new_zeros(power.shape[0], branches.L), []
        for part in direction.parts:
            constant = a[part.members, :, None]
            self.steps[:, : part.length] -= (constant * part.kernels).sum(0)
            self.dk.append(-constant * direction.cumulative[:, : part.length])

    def add_energy(self, du: Tensor) -> Tensor:
        """Add the gradients of the energies without tails; return the factor of the input's spectrum in du.

        The gradients through direct branches are added to the spectrum du.
        """
        direction, branches, engine = self.direction, self.branches, self.branches.engine
        L, n, tails = branches.L, branches.n, direction.tails
        even, factor = self.steps.new_zeros(self.steps.shape), torch.zeros_like(branches.power)
        for group, dk in zip(tails, self.dk[: len(tails)], strict=True):
            K, qs, length = engine.kernels(group.kernels, group.fft), self.q[group.members, :, None], group.length
            square = (qs * _square(K)).sum(0)
            if group.fft == n:
                factor -= square
            else:
                even[:, :length] -= engine.circle(square.to(K.dtype), group.fft)[..., :length]
            power = branches.power_for(group, direction.delay)
            dk.addcmul_(qs, engine.circle(K.mul_(power), group.fft)[..., :length], value=-1)
        if any(group.fft != n for group in tails):
            factor += engine.kernels(_circular(even, n), n).real
        for group, dk in zip(direction.direct, self.dk[len(tails) :], strict=True):
            qs, K, start = self.q[group.members, :, None], engine.kernels(group.kernels, n), 0
            back, inner = -torch.conj_physical(direction.in_input_time(qs * K)) / n, torch.zeros_like(K)
            for some, y in direction.outputs(group, branches.spectrum):
                T = engine.forward_again(engine.keep_(y, 0, L), n)
                inner += engine.cross(some, T)
                for t, w in zip(T, back, strict=True):
                    engine.add_(du[start : start + len(some)], t, w)
                start += len(some)
            dk.addcmul_(qs, engine.circle(direction.in_input_time(inner), n)[..., : group.length], value=-1)
        return factor

    def addend(self) -> Addend:
        """Return the gradient of u through the tails and the constants a_b, and add the tails' part to `dk`."""
        direction, engine, L = self.direction, self.branches.engine, self.branches.L
        late = self.steps.new_zeros(self.branches.u.shape)
        for group, dk in zip(direction.tails, self.dk, strict=False):
            length, m = group.length, group.fft
            if length > 1:
                qs, K = self.q[group.members, :, None], engine.kernels(group.kernels, m) / m
                back, inner = torch.conj_physical(qs * K), torch.zeros_like(K)
                for batch, last, y in direction.past_the_end(group, K):
                    T = engine.forward_again(engine.keep_(y, length - 1, 2 * length - 2), m)
                    inner += engine.cross(last, T)
                    du = engine.inverse(engine.combine_(T, back), m)
                    late[batch, :, L - length + 1 :] += du[..., : length - 1]
                dk[..., :length].addcmul_(qs, engine.circle(inner, m)[..., :length])
        return Addend(direction.line, late, cumulative_sum(self.steps).flip(-1))
