"""Many convolution branches, each normalised by its batch statistics, as one convolution: forward and backward.

    y = sum_b w_b (c_b - mean_b) / sqrt(var_b + eps) + skip u,      c_b = k_b * u

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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fft import irfft, rfft
from torch.nn import functional as F

from .fft import compute_dtype, fast_length, per_tap, refuse_forward_mode, twins
from .statistics import mean_and_variance, normalised_backward, running_total, valid_count


def spectral_branch_sum(
    u: Tensor,
    forward: Sequence[Tensor],
    backward: Sequence[Tensor],
    weight: Tensor,
    skip: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, mean, var, count): the normalised branches' weighted sum, the statistics and what they are over.

    u (B, C, L) is zero from `lengths` (B,) on, and y means nothing there. `forward` and `backward` are kernels
    (C, l_b), tap 0 of the backward ones acting on t + 1; weight is (number of them, C), skip (C,). With `sync` the
    statistics are over all processes. mean and var (biased) carry no gradient.
    """
    kernels = [*forward, *backward]
    refuse_forward_mode(u, weight, skip, *kernels)
    sizes = [k.shape[1] for k in kernels]
    return _branch_sum(u, torch.cat(kernels, 1), weight, skip, lengths, sizes, len(forward), eps, sync)


@dataclass
class _Group:
    """Branches of one direction whose FFTs are done together, at the length the longest needs."""

    branches: slice
    kernels: Tensor  # (g, C, l), delayed, cut to what can meet the input, zero-padded
    fft: int

    def spectra(self) -> Tensor:
        return rfft(self.kernels, self.fft)

    def tail(self, v: Tensor, spectra: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs past the end, (g, B, C, l - 1), and the spectrum of the last l - 1 inputs."""
        length = self.kernels.shape[-1]
        last = rfft(v[..., v.shape[-1] - length + 1 :], self.fft)
        return irfft(spectra[:, None] * last, self.fft)[..., length - 1 : 2 * length - 2], last


class _Direction:
    """The input in one direction's own time, right-aligned, and that direction's kernels in groups."""

    def __init__(self, x: Tensor, kernels: Sequence[Tensor], first: int, lengths: Tensor | None, reverse: bool) -> None:
        self.reverse, delay, L = reverse, int(reverse), x.shape[-1]
        budget = L if x.is_cuda else L // 4  # of one group's work: launches cost more on a GPU, work on a CPU
        self.ends = None if reverse or lengths is None else lengths[:, None]  # to be moved to the right
        self.v = self._moved(x, 1)
        self.running = running_total(self.v.sum(0))  # S, (C, L)
        self.groups = []
        pending: list[Tensor] = []
        for i, kernel in enumerate(kernels):
            pending.append(kernel[:, : L - delay])
            if i + 1 == len(kernels) or (len(pending) + 1) * kernels[i + 1].shape[1] > budget:
                length = delay + max(k.shape[1] for k in pending)
                stacked = x.new_zeros(len(pending), x.shape[1], length)
                for row, k in zip(stacked, pending, strict=True):
                    row[:, delay : delay + k.shape[1]] = k
                members = slice(first + i + 1 - len(pending), first + i + 1)
                self.groups.append(_Group(members, stacked, fast_length(2 * length)))
                pending = []

    def restore(self, v: Tensor) -> Tensor:
        """Return a tensor (B, C, L) in this direction's time to the input's."""
        return self._moved(v, -1)

    def _moved(self, x: Tensor, way: int) -> Tensor:
        if self.ends is None:
            return x.flip(-1) if self.reverse else x
        index = (torch.arange(x.shape[-1], device=x.device) + way * self.ends) % x.shape[-1]
        return x.gather(-1, index[:, None].expand_as(x))


def _filled(x: Tensor, size: int) -> Tensor:
    """Return x (C, <= size) with zeros behind."""
    return x if x.shape[1] == size else F.pad(x, (0, size - x.shape[1]))


def _symmetric(half: Tensor, n: int) -> Tensor:
    """Spectrum of an even sequence on a circle of n, given at lags 0 .. l - 1."""
    length = half.shape[-1]
    return rfft(torch.cat([F.pad(half, (0, n - 2 * length + 1)), half[..., 1:].flip(-1)], -1), n).real


def _power(spectrum: Tensor) -> Tensor:
    return spectrum.real.square() + spectrum.imag.square()


class _Plan:
    """What forward and backward share: the input's spectrum and autocorrelation, and both directions."""

    def __init__(self, u: Tensor, packed: Tensor, lengths: Tensor | None, sizes: Sequence[int], forwards: int) -> None:
        dtype = compute_dtype(u, packed)
        self.x, self.L = u.to(dtype), u.shape[-1]
        self.kernels = list(packed.to(dtype).split(list(sizes), 1))
        self.forwards = forwards
        self.behind = min(max((k.shape[1] for k in self.kernels[:forwards]), default=1), self.L)
        self.ahead = min(max((k.shape[1] for k in self.kernels[forwards:]), default=0), self.L - 1)
        self.n = fast_length(2 * self.L)
        self.spectrum = rfft(self.x, self.n)
        self.correlation = irfft(_power(self.spectrum).sum(0), self.n)[..., : self.L]  # R, (C, L)
        self.directions = [_Direction(self.x, self.kernels[:forwards], 0, lengths, False)]
        if forwards < len(self.kernels):
            self.directions.append(_Direction(self.x, self.kernels[forwards:], forwards, lengths, True))

    def moments(self) -> Tensor:
        """Sum and sum of squares of every branch's output, (2, nb, C)."""
        found = []
        for direction in self.directions:
            for group in direction.groups:
                k, K = group.kernels, group.spectra()
                length = k.shape[-1]
                r = irfft(_power(K), group.fft)[..., :length]
                energy = 2 * (r * self.correlation[:, :length]).sum(-1) - r[..., 0] * self.correlation[:, 0]
                if length > 1:
                    energy -= group.tail(direction.v, K)[0].square_().sum((1, 3))
                found.append(torch.stack([(k * direction.running[:, self.L - length :].flip(1)).sum(-1), energy]))
        return torch.cat(found, 1)

    def own(self, b: int, kernel: Tensor) -> Tensor:
        """Return the part of a kernel over lags -ahead .. behind - 1 that is branch b's, zero where it has none."""
        size = self.kernels[b].shape[1]
        if b < self.forwards:
            return _filled(kernel[:, self.ahead : self.ahead + size], size)
        return _filled(kernel[:, max(self.ahead - size, 0) : self.ahead].flip(1), size)

    def merged(self, scale: Tensor, skip: Tensor | None) -> Tensor:
        """Spectrum of k_rep."""
        k_rep = self.x.new_zeros(self.x.shape[1], self.ahead + self.behind)
        for b, (s, kernel) in enumerate(zip(scale, self.kernels, strict=True)):
            if b < self.forwards:
                part = kernel[:, : self.behind]
                k_rep[:, self.ahead : self.ahead + part.shape[1]].addcmul_(s[:, None], part)
            else:
                part = kernel[:, : self.ahead].flip(1)
                k_rep[:, self.ahead - part.shape[1] : self.ahead].addcmul_(s[:, None], part)
        if skip is not None:
            k_rep[:, self.ahead] += skip
        return rfft(k_rep, self.n)


@torch.library.custom_op("mrconv::branch_sum", mutates_args=())
def _branch_sum(
    u: Tensor,
    packed: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    lengths: Tensor | None,
    sizes: list[int],
    forwards: int,
    eps: float,
    sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _Plan(u, packed, lengths, sizes, forwards)
    mean, var, count = mean_and_variance(plan.moments(), valid_count(u, lengths), sync)
    scale = weight * torch.rsqrt(var + eps)
    y = irfft(plan.spectrum.mul_(plan.merged(scale, skip)), plan.n)[..., plan.ahead : plan.ahead + plan.L]
    return (y - (scale * mean).sum(0)[:, None]).to(u.dtype), mean, var, count


@torch.library.custom_op("mrconv::branch_sum_backward", mutates_args=())
def _branch_sum_backward(
    grad: Tensor,
    u: Tensor,
    packed: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    lengths: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    sizes: list[int],
    forwards: int,
    eps: float,
    sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _Plan(u, packed, lengths, sizes, forwards)
    g = grad.to(plan.x.dtype)
    g_spectrum = rfft(F.pad(g, (plan.ahead, 0)), plan.n)
    dk_rep = irfft((plan.spectrum.conj() * g_spectrum).sum(0), plan.n)[..., : plan.ahead + plan.behind]
    own = torch.cat([plan.own(b, dk_rep) for b in range(len(sizes))], 1)  # what of dk_rep is each branch's
    inner = torch.stack([x.sum(1) for x in (own * packed).split(sizes, 1)])
    dweight, s, q, a = normalised_backward(inner, g.sum((0, 2)), weight, mean, var, count, eps, sync)

    du = g_spectrum.mul_(plan.merged(s, skip).conj())
    pulls = [_pull_back(plan, direction, q, a) for direction in plan.directions]
    even = sum(pull.even for pull in pulls)
    du += plan.spectrum.mul_(_symmetric(even, plan.n))  # type: ignore[arg-type]
    du = irfft(du, plan.n)[..., : plan.L]
    for direction, pull in zip(plan.directions, pulls, strict=True):
        du = du + direction.restore(pull.inputs)

    extra = [dk for pull in pulls for dk in pull.kernels]
    dkernels = torch.cat([_filled(dk, size) for dk, size in zip(extra, sizes, strict=True)], 1)
    dkernels.addcmul_(own, per_tap(s, sizes))
    return (
        du.to(u.dtype).contiguous(),
        dkernels.to(packed.dtype),
        dweight.to(weight.dtype),
        dk_rep[:, plan.ahead].to(weight.dtype).contiguous(),
    )


@dataclass
class _Pull:
    """The pull of -sum_b (a_b + q_b c_b) on input and kernels of one direction."""

    even: Tensor  # (C, L): what multiplies the input's spectrum, as an even sequence over lags
    inputs: Tensor  # (B, C, L): the constants' part and what the tails take back, in this direction's time
    kernels: list[Tensor]  # (C, <= l_b) each


def _pull_back(plan: _Plan, direction: _Direction, q: Tensor, a: Tensor) -> _Pull:
    L, R, v = plan.L, plan.correlation, direction.v
    even, steps, late = torch.zeros_like(R), torch.zeros_like(R), torch.zeros_like(v)
    kernels: list[Tensor] = []
    for group in direction.groups:
        k, K, m = group.kernels, group.spectra(), group.fft
        length = k.shape[-1]
        qs, as_ = q[group.branches, :, None], a[group.branches, :, None]
        even[:, :length] -= (qs * irfft(_power(K), m)[..., :length]).sum(0)
        steps[:, :length] -= (as_ * k).sum(0)
        around = irfft(K * _symmetric(R[:, :length], m), m)[..., :length]
        dk = -as_ * direction.running[:, L - length :].flip(1) - qs * around
        if length > 1:
            tail, last = group.tail(v, K)
            T = rfft(F.pad(tail, (length - 1, 0)), m)
            late[..., L - length + 1 :] += irfft((T * (qs * K.conj())[:, None]).sum(0), m)[..., : length - 1]
            dk = dk + qs * irfft((T * last.conj()).sum(1), m)[..., :length]
        delay = int(direction.reverse)
        sizes = [min(plan.kernels[b].shape[1], length - delay) for b in range(len(plan.kernels))[group.branches]]
        kernels += [row[:, delay : delay + size] for row, size in zip(dk, sizes, strict=True)]
    return _Pull(even, late.add_(running_total(steps).flip(-1)), kernels)


@_branch_sum.register_fake
def _(u, packed, weight, skip, lengths, sizes, forwards, eps, sync):  # type: ignore[no-untyped-def]
    dtype = compute_dtype(u, packed)
    mean, var = (u.new_empty(weight.shape, dtype=dtype) for _ in range(2))
    return twins(u)[0], mean, var, u.new_empty((), dtype=dtype)


@_branch_sum_backward.register_fake
def _(grad, u, packed, weight, skip, lengths, mean, var, count, sizes, forwards, eps, sync):  # type: ignore[no-untyped-def]
    return *twins(u, packed, weight), weight.new_empty(weight.shape[1])


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, packed, weight, skip, lengths, *ctx.rest = inputs
    ctx.save_for_backward(u, packed, weight, skip, lengths, *output[1:])


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    du, dpacked, dweight, dskip = _branch_sum_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return du, dpacked, dweight, dskip if ctx.needs_input_grad[3] else None, *([None] * 5)


_branch_sum.register_autograd(_backward, setup_context=_setup)
