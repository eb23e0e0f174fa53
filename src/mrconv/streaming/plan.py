"""Streaming: the layer's output step by step or chunk by chunk, the same as `forward` gives for the whole sequence."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..kernels import FourierKernel, FourierSparseKernel
from ..ops import Lags, compute_dtype
from .algorithms import Ring, Sliding, Tapped, Tiled
from .state import LayerState, State
from .state_space import branch_gains, sliding_ssm

if TYPE_CHECKING:
    from ..layer import MRConv

FEW = 3  # steps per resolution that are as fast one by one

AnyState = TypeVar("AnyState", bound=State)
T = TypeVar("T")


class Streams:
    """A module that can stream: `initial_state`, `stream` for chunks, and from these `step` and `prefill`."""

    def initial_state(
        self,
        batch: int,
        *,
        rate: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return the state of `batch` sequences before their first input."""
        raise NotImplementedError

    def stream(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Take the next positions x (batch, T, ...); return their outputs and the state."""
        raise NotImplementedError

    def step(self, x: Tensor, state: AnyState) -> tuple[Tensor, AnyState]:
        """Take one position of each sequence, (batch, ...) without the length; return its output and the state.

        The state is written to and returned; there are no gradients.
        """
        y, state = self.stream(x.unsqueeze(1), state)
        return y[:, 0], state

    def prefill(self, x: Tensor, rate: float | None = None) -> tuple[Tensor, Any]:
        """Run a prompt x (batch, T, ...); return its outputs and the state after it."""
        state = self.initial_state(x.shape[0], rate=rate)
        if isinstance(state, LayerState):  # it keeps inputs: none may be rounded to a dtype of the layer
            with torch.inference_mode(False):
                state.inputs = state.inputs.to(torch.promote_types(state.inputs.dtype, x.dtype))
        return self.stream(x, state)


class Plan:
    """How a layer streams, with everything that is made from its parameters.

    Dense kernels run as tiles at any length. With others, a chunk longer than `block` runs as `forward` does, behind
    the inputs that it still sees; a shorter one from the ring and the modes.
    """

    def __init__(self, layer: MRConv, rate: float) -> None:
        self.groups, self.heads = layer.groups, layer.heads
        self.tapped: Tapped | None = None
        self.sliding: Sliding | None = None
        self.tiled: Tiled | None = None
        self.reach = 1
        kernel = None if layer.merged else layer.directions[0].kernel
        if type(kernel) is FourierKernel or type(kernel) is FourierSparseKernel:
            bias = self._slide(layer, kernel, rate)
        else:
            values, lags, bias = layer.merged_kernel(rate)
            self._place(values.detach().to(compute_dtype(values)), lags)
        self.dtype = compute_dtype(bias if layer.D is None else layer.D)
        self.bias = bias.detach().to(self.dtype).reshape(self.heads, -1)
        skip = layer.D
        self.skip = None if skip is None else skip.detach().to(self.dtype).reshape(self.groups, self.heads, -1)
        self.block = max(64, self.reach // 8)

    def _place(self, values: Tensor, lags: Lags) -> None:
        if isinstance(lags, range):
            self.tiled = Tiled(values, self.heads)
        elif lags:
            self.tapped = Tapped(values, lags, self.heads)
            self.reach = max(lags) + 1

    def _slide(self, layer: MRConv, kernel: FourierKernel | FourierSparseKernel, rate: float) -> Tensor:
        branches = layer.directions[0]
        fourier = kernel if isinstance(kernel, FourierKernel) else kernel.fourier
        ssm = sliding_ssm(branches, fourier, rate)
        if isinstance(kernel, FourierSparseKernel):
            beta = kernel.beta.detach().double()  # (2, N, C)
            taps = kernel.sparse.taps.detach().double() * (beta[1] * branch_gains(branches, beta)[0])[..., None]
            offsets = torch.tensor(branches.offsets)[:, None]
            lags = (torch.tensor(kernel.sparse.positions) + offsets).flatten()
            inside = (lags < branches.l_max).nonzero()[:, 0]
            values = taps.transpose(0, 1).flatten(1)[:, inside.to(taps.device)]
            self._place(values.to(compute_dtype(kernel.beta)), tuple(lags[inside].tolist()))
            ssm = dataclasses.replace(ssm, C=ssm.C * beta[0][:, None])
        self.sliding, self.reach = Sliding(ssm, self.heads), max(self.reach, ssm.reach)
        return ssm.bias

    def shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state's tensors, without the batch."""
        if self.tiled is not None:
            return {"inputs": (self.tiled.size, d_model), "future": (self.tiled.size, self.heads * d_model)}
        shapes: dict[str, tuple[int, ...]] = {"inputs": (self.reach + self.block, d_model)}
        if self.sliding is not None:
            shapes["modes"] = (2, *self.sliding.ssm.A.shape, d_model, 2)
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

    def check(self, state: LayerState, u: Tensor) -> None:
        """Refuse a state of another layer, batch or device."""
        names = ("inputs", "modes", "future")
        found = {name: x for name in names if (x := getattr(state, name)) is not None}
        if {name: tuple(x.shape[1:]) for name, x in found.items()} != self.shapes(u.shape[2]):
            raise ValueError("the state is of another layer, or from before merging: make one by initial_state()")
        if state.inputs.shape[0] != u.shape[0] or state.inputs.device != u.device:
            raise ValueError(
                f"the state is of {state.inputs.shape[0]} sequences on {state.inputs.device}; got an input of "
                f"{u.shape[0]} on {u.device}"
            )

    def run(self, layer: MRConv, u: Tensor, state: LayerState) -> Tensor:
        """Return the outputs (B, T, heads * d_model) of inputs u (B, T, d_model), writing to the state."""
        T, time, ring = u.shape[1], state.time, Ring(state.inputs)
        if self.tiled is None and self.block < T:
            return self._with_history(layer, u, state, ring)
        shape = (*u.shape[:2], self.groups, 1, -1)
        x = u.to(compute_dtype(u, self.bias))
        y = self.bias if self.skip is None else self.skip * x.reshape(shape) + self.bias
        if self.tiled is not None:
            assert state.future is not None
            y = y + self.tiled.outputs(state.inputs, state.future, time, u, self.groups)
        else:
            ring.write(time, u)
        if self.tapped is not None:
            y = y + self.tapped.outputs(ring, time, T, self.groups)
        if self.sliding is not None:
            assert state.modes is not None
            y = y + self._slid(self.sliding, state.modes, ring, time, T)
        return y.expand(*shape[:3], self.heads, -1).flatten(2).to(u.dtype)

    def _slid(self, sliding: Sliding, modes: Tensor, ring: Ring, time: int, length: int) -> Tensor:
        if length <= FEW * len(sliding.ssm.widths):
            steps = [sliding.step(modes, ring, t, self.groups) for t in range(time, time + length)]
            return torch.cat(steps, 1)
        y = sliding.outputs(modes, ring, time, length, self.groups)
        sliding.advance(modes, ring, time, length, anew=False)
        return y

    def _with_history(self, layer: MRConv, u: Tensor, state: LayerState, ring: Ring) -> Tensor:
        """Run a long chunk as `forward` does, behind the inputs that its outputs still see."""
        seen = min(state.time, self.reach - 1)
        before = ring.read(state.time - seen, seen).to(u.dtype)
        y = layer.convolve(torch.cat([before, u], 1), None, state.rate)[:, seen:]
        ring.write(state.time, u)
        if self.sliding is not None:
            assert state.modes is not None
            self.sliding.advance(state.modes, ring, state.time, u.shape[1], anew=True)
        return y


_MADE: weakref.WeakKeyDictionary[nn.Module, dict[float, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def made(module: Any, rate: float, make: Callable[[Any, float], T], fresh: bool = False) -> T:
    """Return what a module streams with at a rate, made again if `fresh` or if a parameter has changed."""
    tensors = (*module.parameters(), *module.buffers())
    key = [(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
    kept = _MADE.setdefault(module, {})
    if fresh or rate not in kept or kept[rate][0] != key:
        with torch.inference_mode(False), torch.no_grad():
            kept[rate] = (key, make(module, rate))
    return kept[rate][1]


def plan(layer: MRConv, rate: float, fresh: bool = False) -> Plan:
    """Return how a layer streams at a rate."""
    return made(layer, rate, Plan, fresh)


def check_streams(layer: MRConv) -> None:
    """Refuse a layer whose output at a time is not settled by the inputs up to then."""
    if layer.bidirectional:
        raise ValueError("bidirectional=True: the layer needs the future of its input and cannot stream")
    if layer.uses_batch_statistics:
        raise ValueError("norm='batch' in training mode needs whole sequences: call .eval() to stream")


def check_settled(module: nn.Module) -> None:
    """Refuse a block or model in training mode: its statistics and dropout are those of whole sequences."""
    if module.training:
        raise ValueError(f"this {type(module).__name__} is in training mode: call .eval() to stream")
