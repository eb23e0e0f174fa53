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

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import use_triton
from .fft import compute_dtype, per_tap, refuse_forward_mode, twins, wanted
from .spectra import Extra, Reals, Timeline, engine
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
    return _branch_sum(
        u, torch.cat(kernels, 1), weight, skip, bias, lengths, sizes, len(forward), eps, sync, use_triton(u, backend)
    )


@functools.lru_cache(maxsize=256)
def _places(sizes: tuple[int, ...], delay: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where kernels of these sizes, side by side, are among rows of `length`, delayed: columns of either in the other.

    The first (rows, length) are columns of those side by side, the second of the rows put end to end; one past the last
    where there is none.
    """
    with torch.inference_mode(False):
        size = torch.tensor(sizes, device=device)
        first = size.cumsum(0) - size
        tap = torch.arange(length, device=device) - delay
        of_rows = torch.where((tap >= 0) & (tap < size[:, None]), first[:, None] + tap, sum(sizes))
        row = torch.repeat_interleave(torch.arange(len(sizes), device=device), size, output_size=sum(sizes))
        tap = torch.arange(sum(sizes), device=device) - first[row] + delay
        return of_rows, torch.where(tap < length, row * length + tap, len(sizes) * length)


class _Group:
    """Some branches of one direction in one tensor (g, C, l), delayed, cut to what can meet the input, zero-padded."""

    def __init__(
        self, by: Reals, packed: Tensor, sizes: Sequence[int], first: int, count: int, delay: int, L: int
    ) -> None:
        self.branches = slice(first, first + count)
        own = tuple(sizes[self.branches])
        start = sum(sizes[:first])
        self.columns = slice(start, start + sum(own))
        self.length = min(delay + max(own), L)
        self.fft = by.fast_length(2 * self.length - 1 - delay)
        of_rows, self._of_packed = _places(own, delay, self.length, packed.device)
        kernels = F.pad(packed[:, self.columns], (0, 1)).index_select(1, of_rows.flatten())
        self.kernels = kernels.view(-1, count, self.length).transpose(0, 1).contiguous()

    def pack(self, rows: Tensor) -> Tensor:
        """Return rows (g, C, l) side by side, as the kernels came."""
        flat = F.pad(rows.transpose(0, 1).flatten(1), (0, 1))
        return flat.index_select(1, self._of_packed)


class _Direction:
    """The input in one direction's own time, right-aligned, and that direction's kernels in groups.

    `powers` have their energy from the input's power, less the `tails`; the longest kernels, whose tails would be as
    much work, are `direct`: their outputs are made.
    """

    def __init__(
        self, by: Reals, line: Timeline, packed: Tensor, sizes: Sequence[int], first: int, count: int, n: int
    ) -> None:
        self.by, self.line, self.delay, self.n = by, line, int(line.reverse), n
        B, _, L = line.x.shape
        self.branches = slice(first, first + count)
        self.running = running_total(by.total(line)).flip(1).to(by.dtype)  # S[L-1], S[L-2], ..., (C, L)
        self.every, pending = [], 0
        for b in range(first, first + count):
            pending += 1
            if b + 1 == first + count or (pending + 1) * sizes[b + 1] > L // 4:
                self.every.append(_Group(by, packed, sizes, b + 1 - pending, pending, self.delay, L))
                pending = 0
        short = len(self.every)
        while short and self.every[short - 1].fft == n and line.ends is None:
            short -= 1
        self.tails, self.direct = self.every[:short], self.every[short:]
        self.powers = self.tails
        if self.tails and by.powers_together(count, B):
            self.powers = [_Group(by, packed, sizes, first, self.tails[-1].branches.stop - first, self.delay, L)]
            self.powers[0].fft = n

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
        packed = packed.to(dtype)
        self.directions = [
            _Direction(self.by, Timeline(u, reverse, lengths), packed, sizes, first, count, self.n)
            for reverse, first, count in ((False, 0, forwards), (True, forwards, len(sizes) - forwards))
            if count
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
            sums, squares = [], []
            for group in [*direction.powers, *direction.direct]:
                sums.append((group.kernels * direction.running[:, : group.length]).sum(-1))
            for group in direction.powers:
                each = _square(self.by.kernels(group.kernels, group.fft)).mul_(self.power_for(group, direction.delay))
                squares.append((2 * each.sum(-1) - each[..., 0] - each[..., -1]) / group.fft)
            energy = torch.cat([*squares, *(torch.zeros_like(group.kernels[..., 0]) for group in direction.direct)])
            first = direction.branches.start
            for group in direction.every:
                part = energy[group.branches.start - first : group.branches.stop - first]
                if group in direction.direct:
                    for _, y in direction.outputs(group, self.spectrum):
                        part += self.by.energy(y, 0, self.L)
                elif group.length > 1:
                    K = self.by.kernels(group.kernels, group.fft) / group.fft
                    for _, _, y in direction.past_the_end(group, K):
                        part -= self.by.energy(y, group.length - 1, 2 * group.length - 2)
            found.append(torch.stack([torch.cat(sums), energy]))
        return torch.cat(found, 1)

    def merged(self, scale: Tensor, skip: Tensor | None) -> Tensor:
        """Spectrum of k_rep over n."""
        k_rep = scale.new_zeros(scale.shape[1], self.ahead + self.behind)
        for direction in self.directions:
            for group in [*direction.powers, *direction.direct]:
                own = (scale[group.branches, :, None] * group.kernels).sum(0)
                if direction.delay:
                    k_rep[:, self.ahead - group.length + 1 : self.ahead] += own[:, 1:].flip(1)
                else:
                    k_rep[:, self.ahead : self.ahead + group.length] += own
        if skip is not None:
            k_rep[:, self.ahead] += skip
        return self.by.kernels(k_rep / self.n, self.n)

    def own(self, kernel: Tensor) -> Tensor:
        """Return what of a kernel over lags -ahead .. behind - 1 is each branch's, side by side."""
        parts = []
        for direction in self.directions:
            mine = F.pad(kernel[:, : self.ahead].flip(1), (1, 0)) if direction.delay else kernel[:, self.ahead :]
            for group in [*direction.powers, *direction.direct]:
                rows = mine[:, : group.length].expand(len(group.kernels), -1, -1)
                parts.append(group.pack(rows))
        return torch.cat(parts, 1)


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
    own = plan.own(dk_rep)
    inner = torch.stack([x.sum(1) for x in (own * packed).split(sizes, 1)])
    g_sum = by.total(line).sum(1).to(inner.dtype)
    dweight, s, q, a = normalised_backward(inner, g_sum, weight, mean, var, count, eps, sync)

    dkernels = per_tap(s, sizes).mul_(own)
    extras, even, back = [], torch.zeros_like(plan.power), torch.conj_physical(plan.merged(s, skip))
    rows = by.scale_(g, back)
    for direction in plan.directions:
        extra, spectrum = _pull_back(plan, direction, q, a, dkernels, rows)
        extras.append(extra)
        even += spectrum
    du = torch.empty_like(u)
    by.output(by.inverse(by.add_(rows, plan.spectrum, even / plan.n), plan.n), 0, du, extras=extras)
    dskip = dk_rep[:, plan.ahead].to(weight.dtype).contiguous()
    return du, dkernels.to(packed.dtype), dweight.to(weight.dtype), dskip, g_sum.to(weight.dtype)


def _pull_back(
    plan: _Plan, direction: _Direction, q: Tensor, a: Tensor, dkernels: Tensor, du: Tensor
) -> tuple[Extra, Tensor]:
    """Return the pull of -sum_b (a_b + q_b c_b) on the input, and add that on the kernels.

    The former is the constants' part, with what the tails take back, and what multiplies the input's spectrum; that of
    branches that are direct is added to the spectrum du.
    """
    by, L = plan.by, plan.L
    even, steps = (plan.power.new_zeros(plan.power.shape[0], L) for _ in range(2))
    spectrum = torch.zeros_like(plan.power)
    for group in direction.powers:
        k, m, length = group.kernels, group.fft, group.length
        K = by.kernels(k, m)
        qs = q[group.branches, :, None]
        square = (qs * _square(K)).sum(0)
        if m == plan.n:
            spectrum -= square
        else:
            even[:, :length] -= by.taps(square.to(K.dtype), m)[..., :length]
        around = by.taps(K.mul_(plan.power_for(group, direction.delay)), m)[..., :length]
        dkernels[:, group.columns] -= group.pack(qs * around)
    if any(group.fft != plan.n for group in direction.powers):
        spectrum += by.kernels(_circular(even, plan.n), plan.n).real
    for group in [*direction.powers, *direction.direct]:
        as_ = a[group.branches, :, None]
        steps[:, : group.length] -= (as_ * group.kernels).sum(0)
        dkernels[:, group.columns] -= group.pack(as_ * direction.running[:, : group.length])
    for group in direction.direct:
        qs, K, start = q[group.branches, :, None], by.kernels(group.kernels, plan.n), 0
        back, inner = -torch.conj_physical(direction.seen(qs * K)) / plan.n, torch.zeros_like(K)
        for some, y in direction.outputs(group, plan.spectrum):
            T = by.forward_again(by.keep_(y, 0, L), plan.n)
            inner += by.cross(some, T)
            for t, w in zip(T, back, strict=True):
                by.add_(du[start : start + len(some)], t, w)
            start += len(some)
        dkernels[:, group.columns] -= group.pack(qs * by.taps(direction.seen(inner), plan.n)[..., : group.length])
    late = by.zeros(steps, *plan.u.shape)
    for group in direction.tails:
        length, m = group.length, group.fft
        if length > 1:
            qs, K = q[group.branches, :, None], by.kernels(group.kernels, m) / m
            back, inner = torch.conj_physical(qs * K), torch.zeros_like(K)
            for rows, last, y in direction.past_the_end(group, K):
                T = by.forward_again(by.keep_(y, length - 1, 2 * length - 2), m)
                inner += by.cross(last, T)
                pull = by.inverse(by.combine_(T, back), m)
                late[by.row_slice(rows), :, L - length + 1 :] += pull[..., : length - 1]
            dkernels[:, group.columns] += group.pack(qs * by.taps(inner, m)[..., :length])
    return Extra(direction.line, late, running_total(steps).flip(-1)), spectrum


@_branch_sum.register_fake
def _(u, packed, weight, skip, bias, lengths, sizes, forwards, eps, sync, triton):  # type: ignore[no-untyped-def]
    dtype = compute_dtype(u, packed)
    mean, var = (u.new_empty(weight.shape, dtype=dtype) for _ in range(2))
    return torch.empty_like(u), mean, var, u.new_empty((), dtype=dtype)


@_branch_sum_backward.register_fake
def _(grad, u, packed, weight, skip, bias, lengths, mean, var, count, sizes, forwards, eps, sync, triton):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *twins(packed, weight), *(weight.new_empty(weight.shape[1]) for _ in range(2))


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, packed, weight, skip, bias, lengths, *ctx.rest = inputs
    ctx.save_for_backward(u, packed, weight, skip, bias, lengths, *output[1:])


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    *grads, dskip, dbias = _branch_sum_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return *grads, *wanted(ctx, 3, dskip, dbias), *([None] * 6)


_branch_sum.register_autograd(_backward, setup_context=_setup)
