"""Constants of the Toeplitz algorithm for a set of branches: strips, correlations and tables, on a device.

A branch is short up to SHORT_BRANCH taps, else long. Triton kernels read the tables, of int32 numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

import triton

from .._common import cached_on_device
from ..toeplitz_conv.correlation_triton import SQUARE, Correlations, correlations, int_table
from ..toeplitz_conv.triton_kernels import Tile, margins, reached

SHORT_BRANCH = 128
"""The largest number of taps of a branch whose statistics and gradients need no outputs."""
TILE = Tile(128, 128, 32, 4, 4)  # of the output and of the input's gradient: the fastest of those tried on an H200
BRANCH_TILE = Tile(128, 128, 64, 4, 3)  # of the branches' outputs


@triton.jit
def group(groups, n):  # type: ignore[no-untyped-def]
    """Return the first lag, the width and the start of strip n, and the range of chunks that it reaches."""
    at = groups + 7 * n
    return (
        tl.load(at + 2) * 16, tl.load(at + 3) * 16, tl.load(at + 4).to(tl.int64) * 16, tl.load(at + 5), tl.load(at + 6),
    )  # fmt: skip


@dataclass(frozen=True)
class Strips:
    """Strips of sums of branches, and the widths of all strips and of the widest."""

    groups: Tensor  # (groups, 7): first branch, number of branches; first lag, width, start; first and last chunk
    width: int
    widest: int
    reverse: bool


@dataclass(frozen=True)
class Plan:
    """Constants of the branches."""

    branches: Tensor  # (N, 5): first tap, number of taps, 1 if anticausal, index among the long branches or -1,
    #                          first tap among the short branches
    directions: int
    first: int  # direction 0: 0 if causal, 1 if anticausal
    longest: int  # number of taps
    long: tuple[int, ...]
    short_taps: int
    short: Tensor  # (directions, branches): the short branches of each direction, padded with -1
    edge: int  # the taps of the longest short branch, padded to a power of 2; 0 if there are none
    each: Strips  # of each long branch
    merged: Strips  # of the sum of all branches
    back: Strips  # of the sum of all branches and of each long branch, reversed
    energy: Strips  # of an even kernel, rounded, and of its rounding error
    lags: tuple[int, int]  # of the merged kernel, lowest and highest
    cross: Correlations  # of the input with the output's gradient, at all lags
    own: Correlations  # of the input with each long branch's outputs, at the branch's lags
    auto: Correlations  # of the input with itself, at the lags of short branches


def is_long(size: int) -> bool:
    """Return whether a branch of this many taps is long."""
    return size > SHORT_BRANCH


def _strips(
    kernels: Sequence[tuple[int, int, int, int]], device: torch.device, reverse: bool = False, tile: Tile = TILE
) -> Strips:
    """Return strips for groups (first branch, number of branches, lowest lag, highest lag)."""
    numbers, width = [], 0
    for first, count, low, high in kernels:
        low, high = (-high, -low) if reverse else (low, high)
        start, units = margins(low, high, tile)
        numbers.append((first, count, start, units, width, *reached(low, high, tile)))
        width += units
    return Strips(int_table(numbers, 7, device), width * 16, max((n[3] for n in numbers), default=0) * 16, reverse)


def plan_for(sizes: Sequence[int], causal: int, L: int, device: torch.device) -> Plan:
    """Return the plan for branches of these sizes, the first `causal` of them causal, and inputs of length L.

    Many lengths share a plan.
    """
    blocks = min(triton.cdiv(L, TILE.block), triton.cdiv(max(sizes), TILE.block) + 1)
    return _plan(tuple(sizes), causal, blocks, device)


@cached_on_device(maxsize=1024)
def _plan(sizes: tuple[int, ...], causal: int, blocks: int, device: torch.device) -> Plan:
    N, starts, reach = len(sizes), [0, *itertools.accumulate(sizes)], blocks * TILE.block
    lags = [(-min(size, reach), -1) if n >= causal else (0, min(size, reach) - 1) for n, size in enumerate(sizes)]
    lags = [pair if size else (0, 0) for pair, size in zip(lags, sizes, strict=True)]
    ends = min(0, *(low for low, _ in lags)), max(0, *(high for _, high in lags))
    long = tuple(n for n, size in enumerate(sizes) if is_long(size))
    few = [size if size <= SHORT_BRANCH else 0 for size in sizes]
    first, directions = int(causal == 0), 1 + (0 < causal < N)
    table = [
        (starts[n], sizes[n], int(n >= causal), long.index(n) if n in long else -1, sum(few[:n])) for n in range(N)
    ]
    short = [[n for n in range(N) if few[n] and table[n][2] == first + direction] for direction in range(directions)]
    most = max(map(len, short))
    edge = max(16, triton.next_power_of_2(max(few))) if most else 0
    each = [(n, 1, *lags[n]) for n in long]
    return Plan(
        branches=int_table(table, 5, device),
        directions=directions,
        first=first,
        longest=max(sizes),
        long=long,
        short_taps=sum(few),
        short=int_table([each + [-1] * (most - len(each)) for each in short], most, device)
        if most
        else int_table([], 1, device),
        edge=edge,
        each=_strips(each, device, tile=BRANCH_TILE),
        merged=_strips([(0, N, *ends)], device),
        back=_strips([(0, N, *ends), *each], device, True),
        energy=_strips([(0, 0, 1 - edge, edge - 1)] * 2 if edge else [], device),
        lags=ends,
        cross=correlations([ends], reach // SQUARE, device),
        own=correlations([lags[n] for n in long], reach // SQUARE, device),
        auto=correlations([(0, edge - 1)] if edge else [], reach // SQUARE, device),
    )
