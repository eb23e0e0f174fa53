"""Which op runs a kernel, by what each was measured to cost.

A kernel is `values` (C, T) and the `lags` they act at, y[t] = sum_j values[j] u[t - lags[j]]. Lags given as a
`range` are consecutive (a dense kernel); a tuple means a few taps here and there. Values (C, 1) at several consecutive
lags are a constant kernel. Choices depend on the kernel's reach and never on the input's length: one compiled graph
serves all lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .backends import use_triton
from .branch_sum.moving_sum import window_branch_sum
from .branch_sum.spectral import spectral_branch_sum
from .constants import integers_on
from .costs import cost
from .fft_conv.op import fft_conv, fft_conv_reference
from .tap_conv.op import tap_branch_sum, tap_conv, tap_conv_reference
from .toeplitz_conv.op import DTYPES, toeplitz_branch_sum, toeplitz_conv

Lags = range | tuple[int, ...]
Taps = tuple[Tensor, Lags]


@dataclass(frozen=True)
class Choice:
    """The op that runs, whether in Triton, and what each that could run costs: picoseconds per element, as measured."""

    op: str
    triton: bool
    costs: Mapping[str, float]


def _cheapest(u: Tensor, backend: str, ops: Sequence[str], reach: int, taps: int) -> Choice:
    triton = use_triton(u, backend)
    costs = {op: cost(u, triton, op, reach, taps) for op in ops}
    return Choice(min(costs, key=lambda op: costs[op]), triton, costs)


def choose_conv(u: Tensor, lags: Lags, backend: str = "auto") -> Choice:
    """Choose how `conv` runs: "fft", "toeplitz" (on a GPU) or, for scattered taps, "taps"."""
    reach = 1 + max(lags, default=0) - min(lags, default=0)
    ops = ["fft"] if lags else []
    if use_triton(u, backend) and u.dtype in DTYPES and lags:
        ops.append("toeplitz")
    if not isinstance(lags, range):
        ops.append("taps")
    return _cheapest(u, backend, ops, reach, len(lags))


def conv(
    u: Tensor, values: Tensor, lags: Lags, bias: Tensor | None = None, gelu: bool = False, backend: str = "auto"
) -> Tensor:
    """Depthwise convolution of u (B, C, L) with one kernel, plus bias (C,), then GELU if asked for, the size of u."""
    choice = choose_conv(u, lags, backend)
    if choice.op == "taps":
        return tap_conv(u, values, tuple(lags), bias, gelu, backend)
    if not isinstance(lags, range):
        ahead, behind = max(0, -min(lags)), 1 + max(0, *lags)
        values, lags = densify(values, lags, ahead, behind), range(-ahead, behind)
    kernel, lead = _around_zero(values, lags)
    if choice.op == "toeplitz":
        return toeplitz_conv(u, kernel, lead, bias, gelu)
    return fft_conv(u, kernel, lead, bias, gelu, backend)


def conv_reference(u: Tensor, values: Tensor, lags: Lags, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """Compute `conv` by plain differentiable torch."""
    if isinstance(lags, range):
        return fft_conv_reference(u, *_around_zero(values, lags), bias, gelu)
    return tap_conv_reference(u, values, lags, bias, gelu)


def _around_zero(values: Tensor, lags: range) -> tuple[Tensor, int]:
    """Return a dense kernel in ascending order of lags, padded to reach lag 0, and how far it looks ahead."""
    values, lags = _ascending(values, lags)
    return F.pad(values, (max(lags.start, 0), max(1 - lags.stop, 0))), max(-lags.start, 0)


def _ascending(values: Tensor, lags: range) -> tuple[Tensor, range]:
    """Return a dense kernel with every value written out, in ascending order of lags."""
    values = values.expand(-1, len(lags))
    return (values.flip(1), lags[::-1]) if lags.step < 0 else (values, lags)


def choose_branch_sum(u: Tensor, branches: Sequence[Taps], backend: str = "auto") -> Choice:
    """Choose how `branch_sum` runs.

    "spectral" or, in bfloat16 on a GPU, "toeplitz sum" take dense kernels and those of taps that look one way each, and
    are "both ways" if some look ahead; "windows" takes constant causal kernels, "tap sum" scattered taps. Kernels of
    one number each stay off Toeplitz products, whose rounding is more than that number's gradient; taps go over to
    them only where that saves a quarter of the time.
    """
    every = [lags for _, lags in branches if lags]
    least, most = [min(lags) for lags in every], [max(lags) for lags in every]
    ops = []
    if not any(isinstance(lags, range) for lags in every):
        ops.append("tap sum")
    elif use_triton(u, backend) and all(v.shape[1] == 1 and lags[0] == 0 for v, lags in branches):
        ops.append("windows")
    looks_ahead = [low < 0 for low in least]
    if looks_ahead == sorted(looks_ahead) and not any(low < 0 <= high for low, high in zip(least, most, strict=True)):
        rounds = all(values.shape[1] > 1 for values, _ in branches)
        ops += _written_out(u, backend, any(looks_ahead), rounds)
    reach = 1 + max((*most, *(-low for low in least)), default=0)
    choice = _cheapest(u, backend, ops, reach, sum(map(len, every)))
    near = "tap sum" in ops and choice.costs["tap sum"] < 4 / 3 * choice.costs[choice.op]
    return replace(choice, op="tap sum") if near and choice.op.startswith("toeplitz") else choice


def _written_out(u: Tensor, backend: str, both_ways: bool = False, rounds: bool = True) -> list[str]:
    """Return the ops that take branches with every tap written out; `rounds`: kernels and gradients may be rounded."""
    toeplitz = rounds and u.dtype == torch.bfloat16 and use_triton(u, backend)
    ops = ["spectral", "toeplitz sum"] if toeplitz else ["spectral"]
    return [f"{op} both ways" for op in ops] if both_ways else ops


def choose_wave_sum(u: Tensor, modes: int, reach: int, backend: str = "auto") -> Choice:
    """Choose how causal branches of a few modes each run: as "2 waves", "3 waves", ... or written out.

    Waves are taken even where the GPU needs a quarter longer for them than by FFT: a tenth of the kernels to launch.
    """
    written = _cheapest(u, backend, _written_out(u, backend), reach, 0)
    if not use_triton(u, backend):
        return written
    waves = _cheapest(u, backend, [f"{modes} waves"], reach, 0)
    more = 1.25 if written.op == "spectral" else 1.0
    op = waves.op if waves.costs[waves.op] <= more * written.costs[written.op] else written.op
    return Choice(op, True, {**written.costs, **waves.costs})


def branch_sum(
    u: Tensor,
    branches: Sequence[Taps],
    weight: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, mean, var, count): branches normalised by their batch statistics, weighted, added up, + skip u + bias.

    u (B, C, L) is zero from `lengths` (B,) on, where y and u's gradient mean nothing. weight is (number of branches,
    C), skip and bias are (C,). Dense branches start at lag 0 or, descending, at -1, those that descend last; scattered
    taps may be at any lags. mean and var (biased) are each branch's, over `count` elements of all processes if `sync`,
    and carry no gradient.
    """
    choice = choose_branch_sum(u, branches, backend)
    rest = (weight, skip, bias, lengths, eps, sync)
    if choice.op == "tap sum":
        values, lags = torch.cat([values for values, _ in branches], 1), [lag for _, at in branches for lag in at]
        return tap_branch_sum(u, values, lags, [len(at) for _, at in branches], *rest, backend)
    if choice.op == "windows":
        heights = torch.cat([values for values, _ in branches], 1).t().contiguous()
        return window_branch_sum(u, heights, [len(at) for _, at in branches], *rest)
    forwards = next((i for i, (_, lags) in enumerate(branches) if lags and lags[0] < 0), len(branches))
    kernels = [_from_zero(values, lags, i >= forwards) for i, (values, lags) in enumerate(branches)]
    if choice.op.startswith("toeplitz"):
        return toeplitz_branch_sum(u, kernels[:forwards], kernels[forwards:], *rest)
    return spectral_branch_sum(u, kernels[:forwards], kernels[forwards:], *rest, backend)


def _from_zero(values: Tensor, lags: Lags, ahead: bool) -> Tensor:
    """Return a kernel with every value written out, from lag 0 on or, if it looks ahead, from -1 on backwards."""
    if isinstance(lags, range):
        return values.expand(-1, len(lags))
    places = tuple(-1 - lag if ahead else lag for lag in lags)
    return densify(values, places, 0, 1 + max(places, default=0))


def branch_sum_reference(
    u: Tensor,
    branches: Sequence[Taps],
    weight: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `branch_sum` with all branches' outputs, by plain differentiable torch."""
    c = torch.stack([conv_reference(u, *branch) for branch in branches])  # (nb, B, C, L)
    ends = torch.full(u.shape[:1], u.shape[2], device=u.device) if lengths is None else lengths
    mask = (torch.arange(u.shape[2], device=u.device) < ends[:, None])[:, None].to(u.dtype)
    count = mask.sum()
    mean = (c * mask).sum((1, 3)) / count
    centred = c - mean[:, None, :, None]
    var = (centred.square() * mask).sum((1, 3)) / count
    y = (weight * torch.rsqrt(var + eps))[:, None, :, None] * centred
    y = y.sum(0) + (0 if skip is None else skip[:, None] * u) + (0 if bias is None else bias[:, None])
    return y, mean, var, count


def merge(branches: Sequence[Taps], ahead: int, behind: int) -> Taps:
    """Add up kernels into one: at lags -ahead .. behind - 1 if they are dense, else at the lags they have."""
    dense = [(values, lags) for values, lags in branches if isinstance(lags, range)]
    if len(dense) == len(branches):
        return _add_up([_ascending(*branch) for branch in dense], range(-ahead, behind)), range(-ahead, behind)
    values = torch.cat([values for values, _ in branches], 1)
    every = [lag for _, lags in branches for lag in lags]
    union = tuple(sorted(set(every)))
    place = {lag: j for j, lag in enumerate(union)}
    index = integers_on([place[lag] for lag in every], values)
    return values.new_zeros(values.shape[0], len(union)).index_add(1, index, values), union


def _add_up(kernels: Sequence[tuple[Tensor, range]], lags: range) -> Tensor:
    """Add up kernels of ascending lags, piece by piece between the places where one begins or ends."""
    ends = sorted({lags.start, lags.stop, *(end for _, own in kernels for end in (own.start, own.stop))})
    pieces: dict[int, list[Tensor]] = {start: [] for start in ends[:-1]}
    for values, own in kernels:
        inside = [end for end in ends if own.start <= end <= own.stop]
        sizes = [stop - start for start, stop in itertools.pairwise(inside)]
        for start, piece in zip(inside, values.split(sizes, 1), strict=False):
            pieces[start].append(piece)
    parts = []
    for start, stop in itertools.pairwise(ends):
        found = pieces[start] or [kernels[0][0].new_zeros(len(kernels[0][0]), stop - start)]
        parts.append(sum(found[1:], found[0]))
    return torch.cat(parts, 1)


def densify(values: Tensor, lags: Lags, ahead: int, behind: int) -> Tensor:
    """Return the kernel (C, ahead + behind) at all lags -ahead .. behind - 1."""
    if isinstance(lags, range):
        return values
    index = integers_on([lag + ahead for lag in lags], values)
    return values.new_zeros(values.shape[0], ahead + behind).index_add(1, index, values)
