"""Streaming of one convolution, step by step or chunk by chunk, equal to its output for the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import Lags, compute_dtype
from .ring_buffer import RingBuffer, TapConvolution
from .sliding_fourier import SlidingFourier
from .state import LayerState
from .streamed_kernel import StreamedKernel
from .tiled import TiledConvolution

STEPS_PER_RESOLUTION = 3  # chunks up to this length run as single steps, which are as fast


class ConvolutionStreamer:
    """The algorithms that stream a convolution y = k * u + bias + skip u, and the tensors they need.

    A dense kernel runs as tiles for chunks of any length. For other kernels a chunk of up to `block` inputs reads the
    ring buffer and the modes; a longer chunk runs the parallel convolution on the inputs that it depends on.
    """

    def __init__(self, kernel: StreamedKernel, skip: Tensor | None, heads: int, groups: int) -> None:
        self.heads, self.groups = heads, groups
        self.taps: TapConvolution | None = None
        self.modes: SlidingFourier | None = None
        self.tiles: TiledConvolution | None = None
        self.reach = 1
        if kernel.taps is not None:
            self._add_taps(*kernel.taps)
        if kernel.modes is not None:
            self.modes, self.reach = SlidingFourier(kernel.modes, heads), max(self.reach, kernel.modes.reach)
        self.dtype = compute_dtype(kernel.bias if skip is None else skip)
        self.bias = kernel.bias.detach().to(self.dtype).reshape(heads, -1)
        self.skip = None if skip is None else skip.detach().to(self.dtype).reshape(groups, heads, -1)
        self.block = max(64, self.reach // 8)

    def _add_taps(self, values: Tensor, lags: Lags) -> None:
        values = values.detach().to(compute_dtype(values))
        if isinstance(lags, range):
            self.tiles = TiledConvolution(values, self.heads)
        elif lags:
            self.taps = TapConvolution(values, lags, self.heads)
            self.reach = max(lags) + 1

    def shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state's tensors, without the batch."""
        if self.tiles is not None:
            return {"inputs": (self.tiles.size, d_model), "future": (self.tiles.size, self.heads * d_model)}
        shapes: dict[str, tuple[int, ...]] = {"inputs": (self.reach + self.block, d_model)}
        if self.modes is not None:
            shapes["modes"] = (2, *self.modes.ssm.A.shape, d_model, 2)
        return shapes

    def initial_state(self, d_model: int, batch: int, rate: float, device: Any, dtype: torch.dtype) -> LayerState:
        """Return the state before the first input."""
        dtypes = {"inputs": dtype, "modes": torch.float64, "future": self.dtype}
        with torch.inference_mode(False):
            tensors = {
                name: torch.zeros(batch, *shape, device=device, dtype=dtypes[name])
                for name, shape in self.shapes(d_model).items()
            }
        return LayerState(0, rate, **tensors)

    def check_state(self, state: LayerState, d_model: int) -> None:
        """Reject the state of another layer."""
        tensors = {name: x for name in ("inputs", "modes", "future") if (x := getattr(state, name)) is not None}
        if {name: tuple(x.shape[1:]) for name, x in tensors.items()} != self.shapes(d_model):
            raise ValueError(
                "the state belongs to another layer, or to this one before merging: create one with initial_state()"
            )

    def stream(self, u: Tensor, state: LayerState, parallel: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs (B, T, heads * d_model) of the next inputs u (B, T, d_model); update the state in place.

        Args:
            u: the inputs.
            state: checked by `check_state`.
            parallel: the same convolution of a whole sequence (B, L, d_model), used for long chunks.
        """
        if self.tiles is None and self.block < u.shape[1]:
            y = self._long_chunk(u, state, parallel)
        else:
            y = self._short_chunk(u, state)
        state.time += u.shape[1]
        return y

    def _short_chunk(self, u: Tensor, state: LayerState) -> Tensor:
        T, time, ring = u.shape[1], state.time, RingBuffer(state.inputs)
        shape = (*u.shape[:2], self.groups, 1, -1)
        x = u.to(compute_dtype(u, self.bias))
        y = self.bias if self.skip is None else self.skip * x.reshape(shape) + self.bias
        if self.tiles is not None:
            assert state.future is not None
            y = y + self.tiles.outputs(state.inputs, state.future, time, u, self.groups)
        else:
            ring.write(time, u)
        if self.taps is not None:
            y = y + self.taps.outputs(ring, time, T, self.groups)
        if self.modes is not None:
            assert state.modes is not None
            y = y + self._fourier_outputs(self.modes, state.modes, ring, time, T)
        return y.expand(*shape[:3], self.heads, -1).flatten(2).to(u.dtype)

    def _fourier_outputs(
        self, fourier: SlidingFourier, modes: Tensor, ring: RingBuffer, time: int, length: int
    ) -> Tensor:
        """Return the Fourier part's outputs for inputs that the ring already holds; update the modes in place."""
        if length <= STEPS_PER_RESOLUTION * len(fourier.ssm.widths):
            steps = [fourier.step(modes, ring, t, self.groups) for t in range(time, time + length)]
            return steps[0] if length == 1 else torch.cat(steps, 1)
        y = fourier.outputs(modes, ring, time, length, self.groups)
        fourier.advance(modes, ring, time, length, recompute=False)
        return y

    def _long_chunk(self, u: Tensor, state: LayerState, parallel: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the parallel convolution on the chunk and the earlier inputs that its outputs depend on."""
        time, ring = state.time, RingBuffer(state.inputs)
        history = min(time, self.reach - 1)
        before = ring.read(time - history, history).to(u.dtype)
        y = parallel(torch.cat([before, u], 1))[:, history:]
        ring.write(time, u)
        if self.modes is not None:
            assert state.modes is not None
            self.modes.advance(state.modes, ring, time, u.shape[1], recompute=True)
        return y
