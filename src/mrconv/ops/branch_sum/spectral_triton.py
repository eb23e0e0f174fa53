"""Branches of dense kernels by FFT, on a GPU; by Triton and cuFFT.

Long branches lie on a circle of n >= 2 L positions, an anticausal tap i at n - 1 - i, so that a product of spectra is a
convolution in the input's time for both directions. Their outputs are computed by an inverse FFT, and transformed again
in the backward pass.

Other branches lie on a circle of m positions, at least twice as many as they have taps. Their energies come from the
input's autocorrelation at lags below m / 2, minus the tails past the edge of the input. The tails of short branches
come from matrices (`tails_triton.py`). Those of the rest are outputs too, on the same circle, whose inputs are those
next to the edges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fft import rfft

import triton

from .._common import INTERPRETED, cached_on_device, compute_dtype
from ..fft_conv.triton_kernels import (
    ROWS_CHANNELS,
    ROWS_TIME,
    TILE_CHANNELS,
    TILE_TIME,
    aligned_length,
    pack,
    unpack,
)
from . import circle_triton
from . import spectral_kernels_triton as launch
from .circle_triton import VECTOR, Circle, CirclePlan
from .tails_triton import TailPlan, Tails, tail_plan

SHORT, RELATIVE = 256, 1.4  # a branch is short if it has at most SHORT taps, and at most RELATIVE sqrt(B L)
LONG = 4  # a branch that is not short is long if the circles of its tails and of the input differ by less than this
WIDTH = 512  # frequencies per program
SUM_TIME, SUM_CHANNELS = 16, 32  # of a tile that is summed over the batch


@dataclass(frozen=True)
class Plan:
    """Constants of the branches, on a device."""

    tails: TailPlan | None
    directions: tuple[int, ...]  # 0 without branches in this direction, 2 with short ones, else 1
    branches: Tensor  # (N, 5): first tap, taps that the input reaches, anticausal, member (long: -1 - member), all taps
    long: CirclePlan
    short: CirclePlan | None


@cached_on_device(maxsize=1024)
def _plan(sizes: tuple[int, ...], causal: int, L: int, limit: int, device: torch.device) -> Plan:
    n, N = aligned_length(2 * L), len(sizes)
    starts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    cut = tuple(min(size, L - (k >= causal)) for k, size in enumerate(sizes))
    short = tuple(k for k in range(N) if cut[k] <= limit)
    medium = [k for k in range(N) if k not in short and LONG * aligned_length(2 * cut[k]) <= n]
    long = [k for k in range(N) if k not in short and k not in medium]
    both = [[k for k in medium if (k >= causal) == anticausal] for anticausal in (False, True)]
    both = [each for each, count in zip(both, (causal, N - causal), strict=True) if count]
    windowed = max(map(len, both))
    edges = [k for each in both for k in (*each, *[-1] * (windowed - len(each)))]
    near = [*edges, *short]
    table = [
        (starts[k], cut[k], int(k >= causal), -1 - long.index(k) if k in long else near.index(k), sizes[k])
        for k in range(N)
    ]
    directions = tuple(
        2 if any(k in short for k in each) else int(len(each) > 0) for each in (range(causal), range(causal, N))
    )
    tails = tail_plan(short, cut, starts, causal, device) if short else None
    m = aligned_length(2 * max((cut[k] for k in near if k >= 0), default=1))
    tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in (table, long or [-1], near)]
    circles = CirclePlan(n, tables[1], 1, len(long)), CirclePlan(m, tables[2], len(both), windowed) if near else None
    return Plan(tails, directions, tables[0], *circles)


class SpectralBranchesTriton:
    """Branches over u (B, C, L) with dense kernels (C, sum of sizes), the first `causal` of them causal."""

    heights = None

    def __init__(self, u: Tensor, kernels: Tensor, lengths: Tensor | None, sizes: Sequence[int], causal: int) -> None:
        dtype = compute_dtype(u, kernels)
        self.u, self.kernels, self.lengths, self.N = u, kernels.to(dtype).contiguous(), lengths, len(sizes)
        self.B, self.C, self.L = u.shape
        limit = min(SHORT, int(RELATIVE * math.sqrt(self.B * self.L)))
        if dtype == torch.float64 and not INTERPRETED:
            limit = -1  # Triton has no products of float64 matrices on a GPU
        self.plan = _plan(tuple(sizes), causal, self.L, limit, u.device)
        self.n, self.longest = self.plan.long.n, max(sizes)
        self.masks = u if lengths is None else lengths
        shared = self.plan.branches, self.kernels, u, lengths
        self.long, self.short = Circle(self.plan.long, *shared, tails=False), None
        self.spectrum = self._spectrum(u)
        self.tails, self.edges = None, None
        if self.plan.short is not None:
            self.short = Circle(self.plan.short, *shared, tails=True)
            edges = self._edges(self.plan.short)
            self.edges = self.short.transform(edges) if self.short.outputs else None
            if self.plan.tails is not None:
                self.tails = Tails(edges, self.kernels, self.B, self.plan.tails)
        self.sums = self._edge_sums()

    @property
    def _masked(self) -> bool:
        return self.lengths is not None

    def _spectrum(self, x: Tensor) -> Tensor:
        """Return the spectra of pairs of sequences of x (B, C, L) on the long circle, (R, C, n)."""
        return self.long.transform(pack(x, self.n, self.kernels.dtype, self.long.rows))

    def _edges(self, circle: CirclePlan) -> Tensor:
        """Return pairs of the inputs next to the edges, (directions, R, C, m)."""
        R, groups, m = len(self.spectrum), circle.groups, circle.n
        edges = self.spectrum.new_empty(groups, R, self.C, m)
        launch.edge_kernel[triton.cdiv(m, TILE_TIME), triton.cdiv(self.C, TILE_CHANNELS), groups * R](
            self.u, self.masks, torch.view_as_real(edges), self.B, self.C, self.L, m, R,
            int(self.plan.directions[0] == 0), *self.u.stride(), MASKED=self._masked, BL=TILE_TIME, BC=TILE_CHANNELS,
        )  # fmt: skip
        return edges

    def _edge_sums(self) -> Tensor:
        """Return the sums over batch and time of the inputs that each tap multiplies, (2, C, L)."""
        totals = torch.empty(2, self.C, self.L, device=self.u.device, dtype=torch.float64)
        launch.edge_total_kernel[triton.cdiv(self.L, SUM_TIME), triton.cdiv(self.C, SUM_CHANNELS), 2](
            self.u, totals if self.lengths is None else self.lengths, totals, self.B, self.C, self.L, *self.u.stride(),
            MASKED=self._masked, BL=SUM_TIME, BC=SUM_CHANNELS,
        )  # fmt: skip
        sums = self.kernels.new_empty(2, self.C, self.L)
        launch.suffix_kernel[(2 * self.C,)](totals, sums, self.L, WIDTH=VECTOR)
        return sums

    def _merged(self, factors: Tensor, skip: Tensor | None) -> Tensor:
        """Return the spectrum of the sum of all kernels times factors (N, C), plus the skip, divided by n."""
        placed = self.kernels.new_empty(self.C, self.n)
        launch.place_merged_kernel[triton.cdiv(self.n, VECTOR), self.C](
            self.kernels, factors, factors if skip is None else skip, self.plan.branches, placed, *self.kernels.shape,
            self.n, self.N, SKIP=skip is not None, WIDTH=VECTOR,
        )  # fmt: skip
        return torch.view_as_real(rfft(placed))

    def _resized(self, spectrum: Tensor, m: int) -> Tensor:
        """Return the spectrum (C, m / 2 + 1, 2) of a sequence on a circle of m positions, given a real one (C, n).

        The sequence is real and even, and cut at the lags that branches on the short circle span.
        """
        n, out = spectrum.shape[1], spectrum.new_empty(self.C, m)
        launch.resize_kernel[triton.cdiv(m, VECTOR), self.C](
            torch.view_as_real(rfft(spectrum)), out, n, m, min(n, m) // 2, WIDTH=VECTOR
        )
        return torch.view_as_real(rfft(out))

    def _short_power(self, power: Tensor) -> Tensor:
        """Return the power spectrum of the short circle, that of the input's autocorrelation."""
        return power if self.short is None else self._resized(power, self.short.n)

    def _square(self, q: Tensor) -> Tensor | None:
        """Return sum_b q_b |K_b|^2 over the branches on the short circle, on the long one."""
        if self.short is None:
            return None
        m, members = self.short.n, self.short.plan.members
        square = q.new_empty(self.C, m)
        launch.square_kernel[triton.cdiv(m, WIDTH), self.C](
            self.short.weights, q, members, square, self.C, m, len(members), WIDTH=WIDTH
        )
        return self._resized(square, self.n)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return partial sums of c_b and of c_b^2, (P, 2, N, C), and half of the tails' derivatives, like kernels."""
        power = self.kernels.new_zeros(self.C, self.n)
        parts = self.kernels.new_zeros(circle_triton.SPLITS, 2, self.N, self.C)
        self.long.add_energies(self.spectrum[None], parts, power)
        short = self.long if self.short is None else self.short
        if self.edges is not None:
            short.add_energies(self.edges, parts)
        launch.moment_kernel[self.C, self.N](
            self.kernels, self.sums, short.weights, self._short_power(power), self.plan.branches, parts, self.C,
            self.L, self.kernels.shape[1], short.n, self.N, WIDTH=VECTOR,
        )  # fmt: skip
        saved = torch.zeros_like(self.kernels)
        if self.tails is not None:
            self.tails.write_derivatives(parts[1, 1], saved)
        return parts, saved

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b c_b + shift_b) + skip u, as one convolution; overwrites the input's spectrum."""
        y = torch.empty_like(self.u)
        x = torch.view_as_real(self.spectrum)
        launch.merge_kernel[triton.cdiv(self.n, WIDTH), self.C](
            x, self._merged(scale, skip), shift, len(x), self.C, self.n, self.N, ROWS=self.long.rows, WIDTH=WIDTH
        )
        unpack(self.long.inverse(self.spectrum), y, self.long.rows)
        return y

    def products(self, grad: Tensor) -> Tensor:
        """Return the sums over batch and time, (1, N + 2, C), of g c_b, of g and of g u."""
        self.g = self._spectrum(grad)
        self.power = self.kernels.new_empty(self.C, self.n)
        cross = self.kernels.new_empty(self.C, self.n, 2)
        g, R = torch.view_as_real(self.g), len(self.g)
        launch.cross_kernel[triton.cdiv(self.n, WIDTH), self.C](
            torch.view_as_real(self.spectrum), g, self.power, cross, R, self.C, self.n, ROWS=self.long.rows, WIDTH=WIDTH
        )
        self.dk = torch.view_as_real(torch.fft.ifft(torch.view_as_complex(cross), norm="forward"))
        parts = self.kernels.new_empty(1, self.N + 2, self.C)
        launch.inner_kernel[self.C, self.N + 2](
            self.kernels, self.dk, g, self.plan.branches, parts, R, *self.kernels.shape, self.n, self.N, WIDTH=VECTOR
        )
        return parts

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the kernels for dc_b = s_b g - a_b - q_b c_b; overwrites the spectra."""
        merged, power = self._merged(s, skip), self._short_power(self.power)
        long = self.long.gradients(self.spectrum[None], self.g[None], merged, self._square(q), power, q)
        short = long
        if self.short is not None:
            edges = self.spectrum[None, :0] if self.edges is None else self.edges
            short = self.short.gradients(edges, edges, merged, None, power, q)
        du = torch.empty_like(self.u)
        self._write_input_gradient(du, q, a)
        dkernels = torch.empty_like(self.kernels)
        launch.tap_gradient_kernel[triton.cdiv(self.longest, VECTOR), self.C, self.N](
            long, short, self.dk, self.sums, saved, s, a, q, self.plan.branches, dkernels, self.C, self.L,
            self.kernels.shape[1], self.n, short.shape[-1], WIDTH=VECTOR,
        )  # fmt: skip
        return du, dkernels

    def _write_input_gradient(self, du: Tensor, q: Tensor, a: Tensor) -> None:
        """Write the gradient of u, of which self.g is the spectrum except for the tails and the constants."""
        tails = q if self.tails is None else self.tails.input_gradient(q)
        steps = self.kernels.new_empty(2, self.C, self.L)
        launch.step_kernel[self.C, 2](
            self.kernels, a, self.plan.branches, steps, self.C, self.L, self.kernels.shape[1], self.N, WIDTH=VECTOR
        )
        y, rows = torch.view_as_real(self.long.inverse(self.g)), self.long.rows
        edges = y
        if self.short is not None and self.edges is not None:
            edges = torch.view_as_real(self.short.inverse(self.edges))
        causal, anticausal = self.plan.directions
        time, channels = (TILE_TIME, TILE_CHANNELS) if rows == 1 else (ROWS_TIME, ROWS_CHANNELS)
        launch.output_kernel[triton.cdiv(min(self.L, self.n // rows), time), triton.cdiv(self.C, channels), len(y)](
            y, steps, tails, edges, self.masks, du, self.B, self.C, self.L, self.n, edges.shape[-2], tails.shape[-1],
            *du.stride(), CAUSAL=causal, ANTICAUSAL=anticausal, EDGES=self.edges is not None, MASKED=self._masked,
            ROWS=rows, BL=time, BC=channels,
        )  # fmt: skip
