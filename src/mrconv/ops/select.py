"""Selection of an algorithm by measured cost.

`costs.json`, written by `benchmarks/costs.py`, holds picoseconds per element of the input for each kind of device,
precision, operation and algorithm. The costs of most algorithms are measured at several reaches of the kernel; those of
taps are the cost of a pass over the input and the cost of each tap. A selection depends on the kernels' reach and never
on the input's length, so that one compiled graph serves all lengths.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._common import Lags, use_triton

TOEPLITZ_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the input that the Toeplitz algorithm of `conv` takes."""
COSTS: dict[str, Any] = json.loads((resources.files(__package__) / "costs.json").read_text())


class Algorithm(enum.StrEnum):
    """The algorithms of `conv` (FFT, TOEPLITZ, TAPS) and of `branch_sum` (all but FFT and REFERENCE).

    MOVING_SUM also convolves with merged constant kernels (`moving_sum_conv`). REFERENCE is the paper's algorithm
    and reported by `MRConv.explain` for backend="reference".
    """

    REFERENCE = "reference"
    FFT = "fft"
    TOEPLITZ = "toeplitz"
    TAPS = "taps"
    SPECTRAL = "spectral"
    MOVING_SUM = "moving_sum"
    MOVING_MODES = "moving_modes"


@dataclass(frozen=True)
class Selection:
    """An algorithm, whether it runs in Triton, and the cost of every candidate in picoseconds per element."""

    algorithm: Algorithm
    triton: bool = False
    costs: Mapping[Algorithm, float] = field(default_factory=dict)


class BranchShape(NamedTuple):
    """The properties of a branch's kernel that a selection depends on; they are known before the kernel is computed.

    `values` is the number of values per channel: 1 for a constant kernel, else one for each lag. `modes` is M for a
    causal kernel of M Fourier modes that `ModeKernels` can represent, else 0.
    """

    lags: Lags
    values: int
    modes: int = 0


class Problem(NamedTuple):
    """The properties of a problem that an algorithm's cost depends on, besides device and precision.

    `operation` is a section of the cost table: "conv", "branch_sum" or "bidirectional_branch_sum".
    """

    operation: str
    reach: int
    taps: int = 0
    modes: int = 0


def cost(u: Tensor, triton: bool, algorithm: Algorithm, problem: Problem) -> float:
    """Return the picoseconds per element of u that an algorithm takes; infinity if the table has no entry."""
    device = "triton" if triton else u.device.type
    table = COSTS[device if device in COSTS else "cpu"]["half" if u.element_size() == 2 else "float32"]
    if algorithm is Algorithm.TAPS:  # the cost of taps does not depend on the direction
        section = "conv" if problem.operation == "conv" else "branch_sum"
        return table[section][algorithm]["pass"] + table[section][algorithm]["tap"] * problem.taps
    entry = table.get(problem.operation, {}).get(algorithm, {})
    if algorithm is Algorithm.MOVING_MODES:
        entry = entry.get(str(problem.modes), {})
    return _interpolate(entry, problem.reach, extrapolate=algorithm is Algorithm.TOEPLITZ)


def _interpolate(entry: Mapping[str, float], reach: int, extrapolate: bool) -> float:
    """Interpolate over the logarithm of the reach; beyond the last one, extrapolate linearly or hold the value."""
    if not entry:
        return math.inf
    reaches = [int(key) for key in entry]
    inside = min(max(reach, reaches[0]), reaches[-1])
    after = next(i for i, measured in enumerate(reaches) if measured >= inside)
    low, high = reaches[max(after - 1, 0)], reaches[after]
    part = 0.0 if low == high else math.log(inside / low) / math.log(high / low)
    value = entry[str(low)] * (1 - part) + entry[str(high)] * part
    return value * (reach / reaches[-1] if extrapolate and reach > reaches[-1] else 1)


def _cheapest(u: Tensor, triton: bool, candidates: Sequence[Algorithm], problem: Problem) -> Selection:
    costs = {algorithm: cost(u, triton, algorithm, problem) for algorithm in candidates}
    best = candidates[0]
    for algorithm in candidates:  # torch.compile cannot trace min(..., key=...) before torch 2.11
        if costs[algorithm] < costs[best]:
            best = algorithm
    return Selection(best, triton, costs)


def bounds(lags: Lags) -> tuple[int, int]:
    """Return the lowest and the highest lag; `min` would iterate over a range."""
    ends = (lags[0], lags[-1]) if isinstance(lags, range) else lags
    return min(ends), max(ends)


def select_conv(u: Tensor, lags: Lags, backend: str = "auto", *, constant: bool = False) -> Selection:
    """Select how `conv` runs: FFT, TOEPLITZ (on a GPU) or, for scattered taps, TAPS.

    If the kernel is a sum of `constant` kernels and needs no gradients, MOVING_SUM is a candidate on a GPU too.
    """
    if isinstance(lags, range) and not lags:
        raise ValueError("a dense kernel needs at least one lag; got an empty range")
    triton = use_triton(u, backend)
    lowest, highest = bounds(lags) if lags else (0, 0)
    reach = 1 + highest - lowest
    candidates = [Algorithm.FFT] if lags else []
    if triton and u.dtype in TOEPLITZ_DTYPES and lags:
        candidates.append(Algorithm.TOEPLITZ)
    if not isinstance(lags, range):
        candidates.append(Algorithm.TAPS)
    if triton and constant:
        candidates.append(Algorithm.MOVING_SUM)
    return _cheapest(u, triton, candidates, Problem("conv", reach, len(lags)))


def select_branch_sum(u: Tensor, branches: Sequence[BranchShape], backend: str = "auto") -> Selection:
    """Select how `branch_sum` runs.

    SPECTRAL and, in bfloat16 on a GPU, TOEPLITZ take dense kernels and scattered taps, causal ones before anticausal
    ones. TAPS takes scattered taps. On a GPU, MOVING_SUM takes constant causal kernels and MOVING_MODES causal kernels
    of a few modes.

    Toeplitz products need a clear advantage over taps (4/3), because they round. They do not take kernels of one value
    per channel: rounding exceeds that value's gradient.
    """
    triton = use_triton(u, backend)
    lags = [branch.lags for branch in branches if branch.lags]
    lowest, highest = zip(*map(bounds, lags), strict=True) if lags else ((), ())
    anticausal = [low < 0 for low in lowest]
    candidates = []
    if not any(isinstance(each, range) for each in lags):
        candidates.append(Algorithm.TAPS)
    elif triton and all(branch.values == 1 and branch.lags[0] == 0 for branch in branches):
        candidates.append(Algorithm.MOVING_SUM)
    if anticausal == sorted(anticausal) and not any(low < 0 <= high for low, high in zip(lowest, highest, strict=True)):
        candidates.append(Algorithm.SPECTRAL)
        if triton and u.dtype == torch.bfloat16 and all(branch.values > 1 for branch in branches):
            candidates.append(Algorithm.TOEPLITZ)
    operation = "bidirectional_branch_sum" if any(anticausal) else "branch_sum"
    reach = 1 + max((*highest, *(-low for low in lowest)), default=0)
    problem = Problem(operation, reach, sum(map(len, lags)), modes=branches[0].modes)
    best = _cheapest(u, triton, candidates, problem)
    costs, algorithm = dict(best.costs), best.algorithm
    if algorithm is Algorithm.TOEPLITZ and costs.get(Algorithm.TAPS, math.inf) < 4 / 3 * costs[algorithm]:
        algorithm = Algorithm.TAPS
    if triton and problem.modes and all(branch.modes == problem.modes for branch in branches):
        costs[Algorithm.MOVING_MODES] = cost(u, triton, Algorithm.MOVING_MODES, problem)
        if costs[Algorithm.MOVING_MODES] <= costs[algorithm]:
            algorithm = Algorithm.MOVING_MODES
    return Selection(algorithm, triton, costs)
