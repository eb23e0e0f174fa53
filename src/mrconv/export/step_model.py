"""A merged causal model as a function of one position and its state, with a graph that is the same at every step.

The state of a layer is the inputs it sees, oldest first; a step drops one, appends one, and adds up the taps.
That moves O(reach) numbers a step, where `MRConv.step` needs O(log^2 reach) for a dense kernel and writes into its
state: but its tiles would be another graph at every time.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..hub import Model
from ..layer import MRConv
from ..model import Backbone
from ..ops import compute_dtype
from ..streaming.state import BackboneState, LayerState, PooledState
from ..streaming.streaming_module import StreamingModule


class WindowedConv(nn.Module):
    """A merged MRConv that keeps the last `memory` inputs in a plain window, and writes to no tensor."""

    kernel: Tensor
    bias: Tensor
    places: Tensor | None
    skip: Tensor | None

    def __init__(self, layer: MRConv) -> None:
        super().__init__()
        values, lags, bias = layer.merged_kernel()
        self.d_model, self.heads, self.groups, self.rate = layer.d_model, layer.heads, layer.groups, layer.rate
        self.memory = 1 + max(lags)
        places = [self.memory - 1 - lag for lag in lags]
        everything = places == [*range(self.memory)][::-1]
        dtype = compute_dtype(values)
        kernel = values.detach().to(dtype).t().reshape(len(lags), 1, self.heads, -1)  # (taps, 1, H, M)
        self.register_buffer("kernel", kernel.flip(0) if everything else kernel)
        self.register_buffer("bias", bias.detach().to(dtype))
        self.register_buffer("places", None if everything else torch.tensor(places, device=values.device))
        self.register_buffer("skip", None if layer.D is None else layer.D.detach().to(dtype))

    def stream(self, u: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Take one position u (B, 1, d_model) in."""
        state.inputs = torch.cat([state.inputs[:, 1:], u], 1)
        seen = (state.inputs if self.places is None else state.inputs[:, self.places]).to(self.kernel.dtype)
        y = (seen.unflatten(2, (self.groups, 1, -1)) * self.kernel).sum(1)  # (B, G, H, M)
        y = (y + self.bias.view(self.heads, -1)).flatten(1)
        if self.skip is not None:
            x = u[:, 0].to(y.dtype).unflatten(1, (self.groups, 1, -1)).expand(-1, -1, self.heads, -1)
            y = y + self.skip * x.flatten(1)
        return y[:, None].to(u.dtype), state


class Step(nn.Module):
    """`forward(x, *state)` of one position x, (B,) tokens or (B, d_input) values -> (output, *state)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        if not isinstance(model, StreamingModule):
            raise ValueError(f"a {type(model).__name__} needs whole sequences: it has no step to export")
        self.model: Any = copy.deepcopy(model)
        self.layers: list[WindowedConv] = []
        for block in self._backbone(self.model).block_list:
            if not isinstance(block.layer, MRConv):
                mixer = getattr(model.config, "mixer", None)
                raise ValueError(f"a step is exported of MRConv only; mixer={mixer!r} has no such form")
            block.layer.check_streamable()
            self.layers.append(WindowedConv(block.layer))
            block.layer = self.layers[-1]  # type: ignore[assignment]
        self.pooled = getattr(model, "pool", None) == "mean"

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Move on by one position."""
        inputs = state[:-2] if self.pooled else state
        layers = [LayerState(0, layer.rate, x) for layer, x in zip(self.layers, inputs, strict=True)]
        backbone = BackboneState([*layers])
        if self.pooled:
            pooled = PooledState(backbone, state[-2].clone(), state[-1].clone())
            y, _ = self.model.stream(x.unsqueeze(1), pooled)
            state = (pooled.total, pooled.count)
        else:
            y, _ = self.model.stream(x.unsqueeze(1), backbone)
            state = ()
        return y[:, 0], *(layer.inputs for layer in layers), *state

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """Return the state before the first position: zeros."""
        own = next(self.parameters())
        state = [own.new_zeros(batch, layer.memory, layer.d_model) for layer in self.layers]
        if self.pooled:
            total = own.new_zeros(batch, self.model.config.d_model, dtype=torch.float64)
            state += [total, total[:, 0].clone()]
        return tuple(state)

    @torch.no_grad()
    def state_after(self, model: Model, x: Tensor) -> tuple[Tensor, ...]:
        """Return the state after positions x (B, T, ...), from the parallel form of the model this is a step of."""
        backbone = self._backbone(model)
        state: list[Tensor] = []

        def keep(layer: WindowedConv, u: Tensor) -> None:
            state.append(F.pad(u, (0, 0, layer.memory, 0))[:, -layer.memory :].contiguous())

        hooks = [
            block.layer.register_forward_pre_hook(lambda _, given, own=own: keep(own, given[0]))
            for block, own in zip(backbone.block_list, self.layers, strict=True)
        ]
        h = backbone(x)
        for hook in hooks:
            hook.remove()
        if self.pooled:
            state += [h.double().sum(1), h.new_full(h.shape[:1], h.shape[1], dtype=torch.float64)]
        return tuple(state)

    @staticmethod
    def _backbone(model: Any) -> Backbone:
        return getattr(model, "backbone", model)
