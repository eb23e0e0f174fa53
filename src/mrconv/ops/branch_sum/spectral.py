"""Many convolution branches, each normalised by its batch statistics, as one convolution: forward and backward.

    y = sum_b w_b (c_b - mean_b) / sqrt(var_b + eps) + skip u + bias,      c_b = k_b * u

Given the statistics this is one convolution with k_rep = sum_b w_b / sqrt(var_b + eps) k_b. They follow from the
input's autocorrelation R, which has no batch axis left, and from the tail that the truncation at L cuts off, which
depends on the last inputs only. With r_b the autocorrelation of k_b, of length l_b, and S the running sum of sum_b u_b:

    sum c_b      =  sum_tau k_b[tau] S[L-1-tau]
    sum c_b**2   =  sum_lag r_b[lag] R[lag]  -  tail_b,     tail_b by FFTs of length 2 l_b of the last l_b - 1 inputs

As the l_b double, all tails together cost about as much as two convolutions. Going back, with g the output's gradient,
dc_b = s_b g - a_b - q_b c_b with numbers per channel: the first term is the backward of one convolution, the last one,
summed over b, one more product with the input's spectrum, less the tails.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backends import use_triton
from ..fft_conv.op import compute_dtype, contiguous, refuse_forward_mode
from ..fft_conv.spectra import Extra, Reals, Timeline, engine
from ..registration import register_branch_sum
from .statistics import mean_and_variance, normalised_backward, running_total, shifted, valid_count


def spectral_branch_sum(
    u: Tensor,
    forward: Sequence[Tensor],
    backward: Sequence[Tensor],
    weight: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, mean, var, count): the normalised branches' weighted sum, the statistics and what they are over.

    u (B, C, L) is zero from `lengths` (B,) on, and y means nothing there. `forward` and `backward` are kernels
    (C, l_b), tap 0 of the backward ones acting on t + 1; weight is (number of them, C), skip and bias are (C,). With
    `sync` the statistics are over all processes. mean and var (biased) carry no gradient.
    """
    kernels = [*forward, *backward]
    refuse_forward_mode(u, weight, skip, bias, *kernels)
    sizes = [k.shape[1] for k in kernels]
    skip, lengths = contiguous(skip, lengths)
    return _branch_sum(
        u, torch.cat(kernels, 1), weight, skip, bias, lengths, sizes, len(forward), eps, sync, use_triton(u, backend)
    )


@dataclass
class _Group:
    """Some branches of one direction: their places in it, their kernels (g, C, l), and the length of their FFTs."""

    members: slice
    kernels: Tensor
    fft: int

    @property
    def length(self) -> int:
        return self.kernels.shape[-1]


class _Direction:
    """The input in one direction's own time, right-aligned, and that direction's kernels, delayed by one if reversed.

    They are cut to what can meet the input, and in groups: `powers` have their energy from the input's power, less the
    `tails`; the longest, whose tails would be as much work, are `direct`: their outputs are made.
    """

    def __init__(self, by: Reals, line: Timeline, kernels: Sequence[Tensor], branches: slice, n: int) -> None:
        self.by, self.line, self.branches, self.n, self.delay = by, line, branches, n, int(line.reverse)
        B, C, L = line.x.shape
        self.running = running_total(by.total(line)).flip(1).to(by.dtype)  # S[L-1], S[L-2], ..., (C, L)
        self.sizes = [k.shape[1] for k in kernels]
        lengths = [min(self.delay + size, L) for size in self.sizes]
        members, first = [], 0
        for i in range(len(kernels)):
            if i + 1 == len(kernels) or (i + 2 - first) * self.sizes[i + 1] > L // 4:
                members.append(slice(first, i + 1))
                first = i + 1
        ffts = [by.fast_length(2 * max(lengths[each]) - 1 - self.delay) for each in members]
        short = len(members)
        while short and ffts[short - 1] == n and line.ends is None:
            short -= 1

        def group(own: slice, fft: int) -> _Group:
            stacked = kernels[0].new_zeros(own.stop - own.start, C, max(lengths[own]))
            for row, k, length in zip(stacked, kernels[own], lengths[own], strict=True):
                row[:, self.delay : length] = k[:, : length - self.delay]
            return _Group(own, stacked, fft)

        self.direct = [group(*each) for each in zip(members[short:], ffts[short:], strict=True)]
        if short and by.powers_together(len(kernels), B):
            whole = group(slice(0, members[short - 1].stop), n)
            self.powers = [whole]
            self.tails = [
                _Group(own, whole.kernels[own, :, : max(lengths[own])], fft)
                for own, fft in zip(members[:short], ffts[:short], strict=True)
            ]
        else:
            self.powers = self.tails = [group(*each) for each in zip(members[:short], ffts[:short], strict=True)]

    @property
    def parts(self) -> list[_Group]:
        """Every branch in one group."""
        return [*self.powers, *self.direct]

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors like the parts' kernels as the kernels came."""
        rows = [row for part in parts for row in part]
        found = [row[:, self.delay : self.delay + size] for row, size in zip(rows, self.sizes, strict=True)]
        return torch.cat([_filled(x, size) for x, size in zip(found, self.sizes, strict=True)], 1)

    def past_the_end(self, group: _Group, weights: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield some sequences at a time, the spectrum of their last l - 1 inputs, and the outputs past the end.

        Those are at l - 1 .. 2 l - 3 of the rows in time (g, R, C, m).
        """
        B, C, L = self.line.x.shape
        for rows in self.by.slices(B, C, group.fft, 1 + len(group.kernels)):
            last = self.by.spectrum(self.line, group.fft, first=L - group.length + 1, rows=rows)
            yield rows, last, self.by.inverse(self.by.product(last, weights), group.fft)

    def outputs(self, group: _Group, spectrum: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the spectra of some sequences at a time, and the outputs of a group that is direct: at 0 .. L - 1."""
        B, C, _ = self.line.x.shape
        weights = self.seen(self.by.kernels(group.kernels, self.n)) / self.n
        for rows in self.by.slices(B, C, self.n, 1 + len(group.kernels)):
            some = spectrum[self.by.row_slice(rows)]
            yield some, self.by.inverse(self.by.product(some, weights), self.n)

    def seen(self, spectrum: Tensor) -> Tensor:
        """Return a spectrum in this direction's time as that in the other's: of the input's own, if reversed."""
        return torch.conj_physical(spectrum) if self.line.reverse else spectrum


def _filled(x: Tensor, size: int) -> Tensor:
    """Return x (C, <= size) with zeros behind."""
    return x if x.shape[1] == size else F.pad(x, (0, size - x.shape[1]))


def _circular(half: Tensor, n: int) -> Tensor:
    """An even sequence on a circle of n, given at lags 0 .. l - 1."""
    return torch.cat([F.pad(half, (0, n - 2 * half.shape[-1] + 1)), half[..., 1:].flip(-1)], -1)


def _square(spectrum: Tensor) -> Tensor:
    return spectrum.real.square() + spectrum.imag.square()


class _Plan:
    """What forward and backward share: the input's spectrum and power, and both directions."""

    def __init__(
        self, u: Tensor, packed: Tensor, lengths: Tensor | None, sizes: Sequence[int], forwards: int, triton: bool
    ) -> None:
        dtype = compute_dtype(u, packed)
        self.by, self.u, self.L = engine(dtype, triton), u, u.shape[-1]
        self.behind = min(max(sizes[:forwards], default=1), self.L)
        self.ahead = min(max(sizes[forwards:], default=0), self.L - 1)
        self.n = self.by.fast_length(2 * self.L)
        self.spectrum = self.by.spectrum(Timeline(u), self.n)
        self.power = self.by.power(self.spectrum)  # (C, n / 2 + 1)
        kernels = packed.to(dtype).split(list(sizes), 1)
        both = (False, slice(forwards)), (True, slice(forwards, len(sizes)))
        self.directions = [
            _Direction(self.by, Timeline(u, reverse, lengths), kernels[branches], branches, self.n)
            for reverse, branches in both
            if kernels[branches]
        ]

    @functools.cached_property
    def correlation(self) -> Tensor:
        """The input's autocorrelation R, (C, L)."""
        return self.by.taps(self.power.to(self.spectrum.dtype), self.n)[..., : self.L]

    def power_for(self, group: _Group, delay: int) -> Tensor:
        """Spectrum of as much of R as a group's kernels see, (C, m / 2 + 1)."""
        if group.fft == self.n:
            return self.power
        return self.by.kernels(_circular(self.correlation[:, : group.length - delay], group.fft), group.fft).real

    def moments(self) -> Tensor:
        """Sum and sum of squares of every branch's output, (2, nb, C)."""
        found = []
        for direction in self.directions:
            sums = [(part.kernels * direction.running[:, : part.length]).sum(-1) for part in direction.parts]
            energy = torch.zeros_like(torch.cat(sums))
            for group in direction.powers:
                each = _square(self.by.kernels(group.kernels, group.fft)).mul_(self.power_for(group, direction.delay))
                energy[group.members] = (2 * each.sum(-1) - each[..., 0] - each[..., -1]) / group.fft
            for group in direction.tails:
                if group.length > 1:
                    K = self.by.kernels(group.kernels, group.fft) / group.fft
                    for _, _, y in direction.past_the_end(group, K):
                        energy[group.members] -= self.by.energy(y, group.length - 1, 2 * group.length - 2)
            for group in direction.direct:
                for _, y in direction.outputs(group, self.spectrum):
                    energy[group.members] += self.by.energy(y, 0, self.L)
            found.append(torch.stack([torch.cat(sums), energy]))
        return torch.cat(found, 1)

    def merged(self, scale: Tensor, skip: Tensor | None) -> Tensor:
        """Spectrum of k_rep over n."""
        k_rep = scale.new_zeros(scale.shape[1], self.ahead + self.behind)
        for direction in self.directions:
            own = scale[direction.branches, :, None]
            for part in direction.parts:
                total = (own[part.members] * part.kernels).sum(0)
                if direction.delay:
                    k_rep[:, self.ahead - part.length + 1 : self.ahead] += total[:, 1:].flip(1)
                else:
                    k_rep[:, self.ahead : self.ahead + part.length] += total
        if skip is not None:
            k_rep[:, self.ahead] += skip
        return self.by.kernels(k_rep / self.n, self.n)

    def seen_by(self, direction: _Direction, kernel: Tensor) -> Tensor:
        """Return what of a kernel over lags -ahead .. behind - 1 is one direction's, in its time."""
        if direction.delay:
            return F.pad(kernel[:, : self.ahead].flip(1), (1, 0))
        return kernel[:, self.ahead :]


@torch.library.custom_op("mrconv::branch_sum", mutates_args=())
def _branch_sum(
    u: Tensor,
    packed: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    sizes: list[int],
    forwards: int,
    eps: float,
    sync: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _Plan(u, packed, lengths, sizes, forwards, triton)
    mean, var, count = mean_and_variance(plan.moments(), valid_count(u, lengths), sync)
    scale = weight * torch.rsqrt(var + eps)
    y = torch.empty_like(u)
    rows = plan.by.inverse(plan.by.scale_(plan.spectrum, plan.merged(scale, skip)), plan.n)
    plan.by.output(rows, plan.ahead, y, shifted(bias, scale, mean))
    return y, mean, var, count


@torch.library.custom_op("mrconv::branch_sum_backward", mutates_args=())
def _branch_sum_backward(
    grad: Tensor,
    u: Tensor,
    packed: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    sizes: list[int],
    forwards: int,
    eps: float,
    sync: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    plan = _Plan(u, packed, lengths, sizes, forwards, triton)
    by, line = plan.by, Timeline(grad)
    g = by.spectrum(line, plan.n, at=plan.ahead)
    dk_rep = by.taps(by.cross(plan.spectrum, g), plan.n)[..., : plan.ahead + plan.behind]
    own = [plan.seen_by(direction, dk_rep) for direction in plan.directions]
    inner = [
        (x[:, : part.length] * part.kernels).sum(-1)
        for x, direction in zip(own, plan.directions, strict=True)
        for part in direction.parts
    ]
    g_sum = by.total(line).sum(1).to(dk_rep.dtype)
    dweight, s, q, a = normalised_backward(torch.cat(inner), g_sum, weight, mean, var, count, eps, sync)

    extras, even, back = [], torch.zeros_like(plan.power), torch.conj_physical(plan.merged(s, skip))
    rows, dkernels = by.scale_(g, back), []
    for x, direction in zip(own, plan.directions, strict=True):
        of = direction.branches
        extra, spectrum, dk = _pull_back(plan, direction, q[of], a[of], rows)
        extras.append(extra)
        even += spectrum
        for part, each in zip(direction.parts, dk, strict=True):
            each.addcmul_(s[of][part.members, :, None], x[:, : part.length])
        dkernels.append(direction.side_by_side(dk))
    rows = by.add_(rows, plan.spectrum, even / plan.n)
    del plan.spectrum, g
    du = torch.empty_like(u)
    by.output(by.inverse(rows, plan.n), 0, du, extras=extras)
    dskip = dk_rep[:, plan.ahead].to(weight.dtype).contiguous()
    return du, torch.cat(dkernels, 1).to(packed.dtype), dweight.to(weight.dtype), dskip, g_sum.to(weight.dtype)


def _pull_back(
    plan: _Plan, direction: _Direction, q: Tensor, a: Tensor, du: Tensor
) -> tuple[Extra, Tensor, list[Tensor]]:
    """Return the pull of -sum_b (a_b + q_b c_b): on the input, and on the kernels of the direction's parts.

    The former is the constants' part, with what the tails take back, and what multiplies the input's spectrum; that of
    branches that are direct is added to the spectrum du.
    """
    by, L, n = plan.by, plan.L, plan.n
    even, steps = (plan.power.new_zeros(plan.power.shape[0], L) for _ in range(2))
    spectrum, dk = torch.zeros_like(plan.power), []
    for part in direction.parts:
        constant = a[part.members, :, None]
        steps[:, : part.length] -= (constant * part.kernels).sum(0)
        dk.append(-constant * direction.running[:, : part.length])
    for group, each in zip(direction.powers, dk[: len(direction.powers)], strict=True):
        K, qs, length = by.kernels(group.kernels, group.fft), q[group.members, :, None], group.length
        square = (qs * _square(K)).sum(0)
        if group.fft == n:
            spectrum -= square
        else:
            even[:, :length] -= by.taps(square.to(K.dtype), group.fft)[..., :length]
        around = by.taps(K.mul_(plan.power_for(group, direction.delay)), group.fft)[..., :length]
        each.addcmul_(qs, around, value=-1)
    if any(group.fft != n for group in direction.powers):
        spectrum += by.kernels(_circular(even, n), n).real
    for group, each in zip(direction.direct, dk[len(direction.powers) :], strict=True):
        qs, K, start = q[group.members, :, None], by.kernels(group.kernels, n), 0
        back, inner = -torch.conj_physical(direction.seen(qs * K)) / n, torch.zeros_like(K)
        for some, y in direction.outputs(group, plan.spectrum):
            T = by.forward_again(by.keep_(y, 0, L), n)
            inner += by.cross(some, T)
            for t, w in zip(T, back, strict=True):
                by.add_(du[start : start + len(some)], t, w)
            start += len(some)
        each.addcmul_(qs, by.taps(direction.seen(inner), n)[..., : group.length], value=-1)
    late = by.zeros(steps, *plan.u.shape)
    for i, group in enumerate(direction.tails):
        length, m = group.length, group.fft
        if length > 1:
            each = dk[i] if direction.powers is direction.tails else dk[0][group.members]
            qs, K = q[group.members, :, None], by.kernels(group.kernels, m) / m
            back, inner = torch.conj_physical(qs * K), torch.zeros_like(K)
            for rows, last, y in direction.past_the_end(group, K):
                T = by.forward_again(by.keep_(y, length - 1, 2 * length - 2), m)
                inner += by.cross(last, T)
                pull = by.inverse(by.combine_(T, back), m)
                late[by.row_slice(rows), :, L - length + 1 :] += pull[..., : length - 1]
            each[..., :length].addcmul_(qs, by.taps(inner, m)[..., :length])
    return Extra(direction.line, late, running_total(steps).flip(-1)), spectrum, dk


register_branch_sum(_branch_sum, _branch_sum_backward)
