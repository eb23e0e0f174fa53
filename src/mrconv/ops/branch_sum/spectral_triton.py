"""Branches of dense kernels by FFT, on a GPU; by Triton and cuFFT.

The energies of short branches come from the input's power spectrum, minus the tails past the edge of the input, which
`tails_triton.py` computes. Tails of the longest branches are as long as the input; their outputs are computed instead,
by an inverse FFT, and transformed again in the backward pass. Kernels are placed on a circle of n positions, an
anticausal tap i at n - 1 - i, so that a product of spectra is a convolution in the input's time for both directions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import triton

from .._common import INTERPRETED, compute_dtype
from ..fft_conv.triton_kernels import aligned_length, pack, unpack
from . import spectral_kernels_triton as launch
from .tails_triton import TailPlan, Tails, tail_plan

SHORT, RELATIVE = 256, 1.4  # a branch is short if it has at most SHORT taps, and at most RELATIVE sqrt(B L)
SLICE_BYTES = 2**31  # of the outputs of long branches in memory at a time, about
WIDTH = 512  # frequencies per program, times branches
VECTOR = 1024  # positions that a program processes at a time, in sums over one kernel
SUM_TIME, SUM_CHANNELS = 16, 32  # of a tile that is summed over the batch
TILE_TIME, TILE_CHANNELS = 32, 64  # of a tile that is transposed
SPLITS = 16  # programs that sum the energy of one channel


@dataclass(frozen=True)
class Plan:
    """Constants of the branches, on a device; the kind of a short branch is 1, of a long one -index among these."""

    tails: TailPlan | None
    directions: tuple[int, ...]  # 0 without branches in this direction, 2 with short ones, else 1
    branches: Tensor  # (N, 5): first tap, taps that the input reaches, anticausal, kind, all taps
    long: Tensor  # indices of the long branches


@functools.lru_cache(maxsize=1024)
def _plan(sizes: tuple[int, ...], causal: int, L: int, limit: int, device: torch.device) -> Plan:
    starts = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    cut = tuple(min(size, L - (k >= causal)) for k, size in enumerate(sizes))
    short = tuple(k for k, size in enumerate(cut) if size <= limit)
    long = [k for k in range(len(sizes)) if k not in short]
    tails = tail_plan(short, cut, starts, causal, device) if short else None
    table = [
        (starts[k], size, int(k >= causal), 1 if k in short else -long.index(k), sizes[k]) for k, size in enumerate(cut)
    ]
    both = range(causal), range(causal, len(sizes))
    directions = tuple(2 if any(k in short for k in each) else int(len(each) > 0) for each in both)
    with torch.inference_mode(False):
        tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in (table, long)]
        return Plan(tails, directions, *tables)


class SpectralBranchesTriton:
    """Branches over u (B, C, L) with dense kernels (C, sum of sizes), the first `causal` of them causal."""

    heights = None

    def __init__(self, u: Tensor, kernels: Tensor, lengths: Tensor | None, sizes: Sequence[int], causal: int) -> None:
        dtype = compute_dtype(u, kernels)
        self.u, self.kernels, self.lengths, self.N = u, kernels.to(dtype).contiguous(), lengths, len(sizes)
        self.B, self.C, self.L = u.shape
        self.n = aligned_length(2 * self.L)
        limit = min(SHORT, int(RELATIVE * math.sqrt(self.B * self.L)))
        if dtype == torch.float64 and not INTERPRETED:
            limit = -1  # Triton has no products of float64 matrices on a GPU
        self.plan = _plan(tuple(sizes), causal, self.L, limit, u.device)
        self.longest = max(sizes)
        placed = self.kernels.new_empty(self.N, self.C, self.n)
        launch.place_kernel[triton.cdiv(self.n, VECTOR), self.C, self.N](
            self.kernels, self.plan.branches, placed, self.C, kernels.shape[1], self.n, WIDTH=VECTOR
        )
        self.weights = torch.view_as_real(torch.fft.rfft(placed))
        self.pairs = pack(u, self.n, dtype)
        self.spectrum = torch.fft.fft(self.pairs)
        self.sums = self._edge_sums()
        tails = self.plan.tails
        self.tails = None if tails is None else Tails(self.pairs, self.kernels, lengths, self.B, self.L, tails)
        self.masks = u if lengths is None else lengths

    @property
    def _masked(self) -> bool:
        return self.lengths is not None

    @property
    def _group(self) -> int:
        """The number of long branches, padded."""
        return triton.next_power_of_2(max(1, len(self.plan.long)))

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

    def _long_outputs(self, power: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield for some pairs at a time the first sequence, their spectra, and the long branches' outputs in time.

        Adds the power of these pairs to `power`.
        """
        G, R = len(self.plan.long), len(self.spectrum)
        size = max(1, SLICE_BYTES // max(1, G * self.C * self.n * self.spectrum.element_size()))
        for start in range(0, R, size):
            x = self.spectrum[start : start + size]
            out = x.new_empty(G, *x.shape)
            width = max(32, WIDTH // self._group)
            launch.product_kernel[triton.cdiv(self.n, width), self.C](
                torch.view_as_real(x), self.weights, self.plan.long, torch.view_as_real(out),
                self.weights if power is None else power, len(x), self.C, self.n, G,
                POWER=power is not None, GP=self._group, WIDTH=width,
            )  # fmt: skip
            yield 2 * start, x, torch.fft.ifft(out, norm="forward") if G else out

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return partial sums of c_b and of c_b^2, (P, 2, N, C), and half of the tails' derivatives, like kernels."""
        power = self.kernels.new_zeros(self.C, self.n)
        parts = self.kernels.new_zeros(SPLITS, 2, self.N, self.C)
        for b0, _, y in self._long_outputs(power):
            if len(y):
                launch.energy_kernel[self.C, len(y), SPLITS](
                    torch.view_as_real(y), self.plan.branches, self.plan.long, self.masks, parts, y.shape[1], self.C,
                    self.n, self.B, self.L, b0, self.N, MASKED=self._masked, WIDTH=WIDTH,
                )  # fmt: skip
        launch.moment_kernel[self.C, self.N](
            self.kernels, self.sums, self.weights, power, self.plan.branches, parts, self.C, self.L,
            self.kernels.shape[1], self.n, self.N, WIDTH=VECTOR,
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
            x, self.weights, scale, shift, x if skip is None else skip, len(x), self.C, self.n, self.N,
            SKIP=skip is not None, WIDTH=WIDTH,
        )  # fmt: skip
        unpack(torch.fft.ifft(self.spectrum, norm="forward"), y)
        return y

    def products(self, grad: Tensor) -> Tensor:
        """Return the sums over batch and time, (1, N + 2, C), of g c_b, of g and of g u."""
        self.g = torch.fft.fft(pack(grad, self.n, self.kernels.dtype))
        self.power = self.kernels.new_empty(self.C, self.n)
        self.cross = self.kernels.new_empty(self.C, self.n, 2)
        g, R = torch.view_as_real(self.g), len(self.g)
        launch.cross_kernel[triton.cdiv(self.n, WIDTH), self.C](
            torch.view_as_real(self.spectrum), g, self.power, self.cross, R, self.C, self.n, WIDTH=WIDTH
        )
        parts = self.kernels.new_empty(1, self.N + 2, self.C)
        launch.inner_kernel[self.C, self.N + 2](
            self.weights, self.cross, g, parts, R, self.C, self.n, self.N, WIDTH=VECTOR
        )
        return parts

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the kernels for dc_b = s_b g - a_b - q_b c_b; overwrites the spectra."""
        G, taps, plan = len(self.plan.long), self.kernels.shape[1], self.plan
        long_cross = self.cross.new_zeros(max(1, G), self.C, self.n, 2)
        first = 0 if self._masked else self.L
        width = max(32, WIDTH // self._group)
        for b0, x, y in self._long_outputs(None):
            t = y
            if G:
                launch.mask_kernel[self.C, y.shape[1], G](
                    torch.view_as_real(y), plan.branches, plan.long, self.masks, y.shape[1], self.C, self.n, self.B,
                    self.L, first, b0, MASKED=self._masked, WIDTH=VECTOR,
                )  # fmt: skip
                t = torch.fft.fft(y)
            g = self.g[b0 // 2 : b0 // 2 + len(x)]
            launch.input_gradient_kernel[triton.cdiv(self.n, width), self.C](
                *(torch.view_as_real(z) for z in (x, g, t)), self.weights, s, q, s if skip is None else skip,
                plan.branches, plan.long, long_cross, len(x), self.C, self.n, self.N, G,
                SKIP=skip is not None, GP=self._group, WIDTH=width,
            )  # fmt: skip
        du = torch.empty_like(self.u)
        self._write_input_gradient(du, q, a)
        launch.tap_spectrum_kernel[triton.cdiv(self.n // 2 + 1, VECTOR), self.C, self.N](
            self.weights, self.cross, self.power, long_cross, s, q, plan.branches, self.C, self.n, WIDTH=VECTOR
        )
        circles = torch.fft.irfft(torch.view_as_complex(self.weights), self.n, norm="forward")
        dkernels = torch.empty_like(self.kernels)
        launch.tap_gradient_kernel[triton.cdiv(self.longest, VECTOR), self.C, self.N](
            circles, self.sums, saved, a, q, plan.branches, dkernels, self.C, self.L, taps, self.n, WIDTH=VECTOR,
        )  # fmt: skip
        return du, dkernels

    def _write_input_gradient(self, du: Tensor, q: Tensor, a: Tensor) -> None:
        """Write the gradient of u, of which self.g is the spectrum except for the tails and the constants."""
        tails = q if self.tails is None else self.tails.input_gradient(q)
        steps = self.kernels.new_empty(2, self.C, self.L)
        launch.step_kernel[self.C, 2](
            self.kernels, a, self.plan.branches, steps, self.C, self.L, self.kernels.shape[1], self.N, WIDTH=VECTOR
        )
        y = torch.view_as_real(torch.fft.ifft(self.g, norm="forward"))
        launch.output_kernel[triton.cdiv(self.L, TILE_TIME), triton.cdiv(self.C, TILE_CHANNELS), len(y)](
            y, steps, tails, self.masks, du, self.B, self.C, self.L, self.n, tails.shape[-1], *du.stride(),
            CAUSAL=self.plan.directions[0], ANTICAUSAL=self.plan.directions[1], MASKED=self._masked, BL=TILE_TIME,
            BC=TILE_CHANNELS,
        )  # fmt: skip
