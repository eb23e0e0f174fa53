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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import use_triton
from .fft import compute_dtype, refuse_forward_mode, twins, wanted
from .spectra import Extra, Reals, Timeline, engine
from .statistics import mean_and_variance, normalised_backward, running_total, shifted, valid_count

if TYPE_CHECKING:
    from .products import Products


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
    way = "triton" if use_triton(u, backend) else "torch"
    return _normalised(u, forward, backward, weight, skip, bias, lengths, eps, sync, way)


def product_branch_sum(
    u: Tensor,
    forward: Sequence[Tensor],
    backward: Sequence[Tensor],
    weight: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `spectral_branch_sum` does, by products on the tensor cores (`products.py`); by Triton.

    u is float32 or bfloat16; in bfloat16, the factors of products are rounded to it, and sums are float32. There is no
    padding: of short sequences most would lie past the end, which is too much to take off again.
    """
    if not products_take(u, *forward, *backward):
        found = ", ".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (u, *forward, *backward)))
        raise TypeError(f"product_branch_sum takes u in float32 or bfloat16 and kernels up to float32, got {found}")
    use_triton(u, "triton")
    return _normalised(u, forward, backward, weight, skip, bias, None, eps, sync, "products")


def products_take(u: Tensor, *kernels: Tensor) -> bool:
    """Tell whether `product_branch_sum` computes in their dtypes."""
    return u.dtype in (torch.float32, torch.bfloat16) and compute_dtype(u, *kernels) == torch.float32


def _normalised(
    u: Tensor,
    forward: Sequence[Tensor],
    backward: Sequence[Tensor],
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    eps: float,
    sync: bool,
    way: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = [*forward, *backward]
    refuse_forward_mode(u, weight, skip, bias, *kernels)
    sizes = [k.shape[1] for k in kernels]
    packed = torch.cat(kernels, 1)
    return _branch_sum(u, packed, weight, skip, bias, lengths, sizes, len(forward), eps, sync, way)[:4]


def grouped(sizes: Sequence[int], L: int) -> list[slice]:
    """Return slices of branches that had better go together: no more than a quarter of the input, all of one size."""
    members, first = [], 0
    for i in range(len(sizes)):
        if i + 1 == len(sizes) or (i + 2 - first) * sizes[i + 1] > L // 4:
            members.append(slice(first, i + 1))
            first = i + 1
    return members


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
        members = grouped(self.sizes, L)
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
        return side_by_side(found, self.sizes)

    def totals(self, scale: Tensor) -> Iterator[Tensor]:
        """Yield the scaled kernels (nb, C, 1) x (nb, C, l), added up part by part."""
        return ((scale[part.members] * part.kernels).sum(0) for part in self.parts)

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


def side_by_side(rows: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return rows (C, <= size) as one, each with zeros behind."""
    missing = [size - row.shape[1] for row, size in zip(rows, sizes, strict=True)]
    return torch.cat([F.pad(row, (0, n)) if n else row for row, n in zip(rows, missing, strict=True)], 1)


def _circular(half: Tensor, n: int) -> Tensor:
    """An even sequence on a circle of n, given at lags 0 .. l - 1."""
    return torch.cat([F.pad(half, (0, n - 2 * half.shape[-1] + 1)), half[..., 1:].flip(-1)], -1)


def _square(spectrum: Tensor) -> Tensor:
    return spectrum.real.square() + spectrum.imag.square()


class Reach:
    """How far kernels reach, and what that makes of one that holds all; a plan has `directions` that give `totals`.

    A direction has its `branches` among all, and a `delay` of one if it runs in reversed time.
    """

    directions: Sequence[Any]

    def __init__(self, L: int, sizes: Sequence[int], forwards: int) -> None:
        self.L = L
        self.behind = min(max(sizes[:forwards], default=1), L)
        self.ahead = min(max(sizes[forwards:], default=0), L - 1)

    def k_rep(self, scale: Tensor, skip: Tensor | None) -> Tensor:
        """Return the sum of all kernels and the skip, (C, ahead + behind)."""
        k_rep = scale.new_zeros(scale.shape[1], self.ahead + self.behind)
        for direction in self.directions:
            for total in direction.totals(scale[direction.branches, :, None]):
                if direction.delay:
                    n = min(total.shape[1] - 1, self.ahead)
                    k_rep[:, self.ahead - n : self.ahead] += total[:, 1 : n + 1].flip(1)
                else:
                    n = min(total.shape[1], self.behind)
                    k_rep[:, self.ahead : self.ahead + n] += total[:, :n]
        if skip is not None:
            k_rep[:, self.ahead] += skip
        return k_rep

    def seen_by(self, direction: Any, kernel: Tensor) -> Tensor:
        """Return what of a kernel over lags -ahead .. behind - 1 is one direction's, in its time."""
        if direction.delay:
            return F.pad(kernel[:, : self.ahead].flip(1), (1, 0))
        return kernel[:, self.ahead :]


class _Plan(Reach):
    """What forward and backward share: the input's spectrum and power, and both directions."""

    def __init__(
        self, u: Tensor, packed: Tensor, lengths: Tensor | None, sizes: Sequence[int], forwards: int, triton: bool
    ) -> None:
        dtype = compute_dtype(u, packed)
        super().__init__(u.shape[-1], sizes, forwards)
        self.by, self.u = engine(dtype, triton), u
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

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return y."""
        y = torch.empty_like(self.u)
        rows = self.by.inverse(self.by.scale_(self.spectrum, self.merged(scale, skip)), self.n)
        self.by.output(rows, self.ahead, y, shift)
        return y

    def seen(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take in y's gradient g; return sum g c_b (nb, C), sum g (C,) and the gradient of the skip (C,)."""
        line = Timeline(grad)
        self.g = self.by.spectrum(line, self.n, at=self.ahead)
        dk_rep = self.by.taps(self.by.cross(self.spectrum, self.g), self.n)[..., : self.ahead + self.behind]
        self.own = [self.seen_by(direction, dk_rep) for direction in self.directions]
        inner = [
            (x[:, : part.length] * part.kernels).sum(-1)
            for x, direction in zip(self.own, self.directions, strict=True)
            for part in direction.parts
        ]
        return torch.cat(inner), self.by.total(line).sum(1).to(dk_rep.dtype), dk_rep[:, self.ahead]

    def pulled(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the kernels, side by side, for dc_b = s_b g - a_b - q_b c_b."""
        by, extras, even = self.by, [], torch.zeros_like(self.power)
        rows, dkernels = by.scale_(self.g, torch.conj_physical(self.merged(s, skip))), []
        for x, direction in zip(self.own, self.directions, strict=True):
            of = direction.branches
            extra, spectrum, dk = _pull_back(self, direction, q[of], a[of], rows)
            extras.append(extra)
            even += spectrum
            for part, each in zip(direction.parts, dk, strict=True):
                each.addcmul_(s[of][part.members, :, None], x[:, : part.length])
            dkernels.append(direction.side_by_side(dk))
        rows = by.add_(rows, self.spectrum, even / self.n)
        del self.spectrum, self.g
        du = torch.empty_like(self.u)
        by.output(by.inverse(rows, self.n), 0, du, extras=extras)
        return du, torch.cat(dkernels, 1)

    def merged(self, scale: Tensor, skip: Tensor | None) -> Tensor:
        """Spectrum of k_rep over n."""
        return self.by.kernels(self.k_rep(scale, skip) / self.n, self.n)


def lags_seen(sizes: Sequence[int], forwards: int) -> int:
    """Return how many lags, from 0 on, kernels of these sizes see of the input's autocorrelation."""
    return max([1, *sizes[:forwards], *(size + 1 for size in sizes[forwards:])])


def _plan(
    u: Tensor,
    packed: Tensor,
    lengths: Tensor | None,
    sizes: list[int],
    forwards: int,
    way: str,
    correlated: Tensor | None = None,
) -> _Plan | Products:
    if way == "products":
        from .products import Products

        return Products(u, packed, sizes, forwards, correlated)
    return _Plan(u, packed, lengths, sizes, forwards, way == "triton")


@torch.library.custom_op("mrconv::dense_branch_sum", mutates_args=())
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
    way: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    plan = _plan(u, packed, lengths, sizes, forwards, way)
    mean, var, count = mean_and_variance(plan.moments(), valid_count(u, lengths), sync)
    scale = weight * torch.rsqrt(var + eps)
    y = plan.output(scale, skip, shifted(bias, scale, mean))
    return y, mean, var, count, u.new_empty(0) if isinstance(plan, _Plan) else plan.R


@torch.library.custom_op("mrconv::dense_branch_sum_backward", mutates_args=())
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
    correlated: Tensor,
    sizes: list[int],
    forwards: int,
    eps: float,
    sync: bool,
    way: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    plan = _plan(u, packed, lengths, sizes, forwards, way, correlated)
    inner, g_sum, dskip = plan.seen(grad)
    dweight, s, q, a = normalised_backward(inner, g_sum, weight, mean, var, count, eps, sync)
    du, dkernels = plan.pulled(s, q, a, skip)
    dweight, dskip, g_sum = (x.to(weight.dtype, copy=True) for x in (dweight, dskip, g_sum))
    return du, dkernels.to(packed.dtype), dweight, dskip, g_sum


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


@_branch_sum.register_fake
def _(u, packed, weight, skip, bias, lengths, sizes, forwards, eps, sync, way):  # type: ignore[no-untyped-def]
    dtype = compute_dtype(u, packed)
    mean, var = (u.new_empty(weight.shape, dtype=dtype) for _ in range(2))
    correlated = (
        u.new_empty(u.shape[1], lags_seen(sizes, forwards), dtype=dtype) if way == "products" else u.new_empty(0)
    )
    return torch.empty_like(u), mean, var, u.new_empty((), dtype=dtype), correlated


@_branch_sum_backward.register_fake
def _(grad, u, packed, weight, skip, bias, lengths, mean, var, count, correlated, sizes, forwards, eps, sync, way):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), *twins(packed, weight), *(weight.new_empty(weight.shape[1]) for _ in range(2))


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, packed, weight, skip, bias, lengths, *ctx.rest = inputs
    ctx.save_for_backward(u, packed, weight, skip, bias, lengths, *output[1:])


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    *grads, dskip, dbias = _branch_sum_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return *grads, *wanted(ctx, 3, dskip, dbias), *([None] * 6)


_branch_sum.register_autograd(_backward, setup_context=_setup)
