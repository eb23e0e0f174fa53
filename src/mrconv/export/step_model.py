"""A merged causal model as a function of one position and its state, with the same graph at every step.

The state of a layer is the window of inputs that its output depends on, oldest first. A step drops the oldest input,
appends the new one and sums the taps, which moves O(reach) numbers. `MRConv.step` needs O(log^2 reach) for a dense
kernel, but it updates its state in place, and its tiles are a different graph at every position.
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
    """A merged MRConv whose state is the window of its last inputs; no tensor is modified in place."""

    kernel: Tensor
    bias: Tensor
    index: Tensor | None
    skip: Tensor | None

    def __init__(self, layer: MRConv) -> None:
        super().__init__()
        values, lags, bias = layer.merged_kernel()
        self.d_model, self.heads, self.groups, self.rate = layer.d_model, layer.heads, layer.groups, layer.rate
        self.window = 1 + max(lags)
        index = [self.window - 1 - lag for lag in lags]
        dense = index == [*range(self.window)][::-1]
        dtype = compute_dtype(values)
        kernel = values.detach().to(dtype).t().reshape(len(lags), 1, self.heads, -1)  # (taps, 1, H, M)
        self.register_buffer("kernel", kernel.flip(0) if dense else kernel)
        self.register_buffer("bias", bias.detach().to(dtype))
        self.register_buffer("index", None if dense else torch.tensor(index, device=values.device))
        self.register_buffer("skip", None if layer.D is None else layer.D.detach().to(dtype))

    def stream(self, u: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Process one position u (B, 1, d_model)."""
        state.inputs = torch.cat([state.inputs[:, 1:], u], 1)
        taps = (state.inputs if self.index is None else state.inputs[:, self.index]).to(self.kernel.dtype)
        y = (taps.unflatten(2, (self.groups, 1, -1)) * self.kernel).sum(1)  # (B, G, H, M)
        y = (y + self.bias.view(self.heads, -1)).flatten(1)
        if self.skip is not None:
            x = u[:, 0].to(y.dtype).unflatten(1, (self.groups, 1, -1)).expand(-1, -1, self.heads, -1)
            y = y + self.skip * x.flatten(1)
        return y[:, None].to(u.dtype), state


class StepModel(nn.Module):
    """`forward(x, *state)` of one position x, (B,) tokens or (B, d_input) values -> (output, *next_state)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        if not isinstance(model, StreamingModule):
            raise ValueError(f"step=True needs a model that streams; a {type(model).__name__} needs whole sequences")
        self.model: Any = copy.deepcopy(model)
        self.layers: list[WindowedConv] = []
        for block in _backbone(self.model).block_list:
            if not isinstance(block.layer, MRConv):
                raise ValueError(f"step=True needs mixer='mrconv'; got mixer={getattr(model.config, 'mixer', None)!r}")
            block.layer.check_streamable()
            self.layers.append(WindowedConv(block.layer))
            block.layer = self.layers[-1]  # type: ignore[assignment]
        self.pooled = getattr(model, "pool", None) == "mean"

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the output of one position and the state after it."""
        windows = state[:-2] if self.pooled else state
        layers = [LayerState(0, layer.rate, x) for layer, x in zip(self.layers, windows, strict=True)]
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
        """Return the state before the first position, which is zero."""
        parameter = next(self.parameters())
        state = [parameter.new_zeros(batch, layer.window, layer.d_model) for layer in self.layers]
        if self.pooled:
            total = parameter.new_zeros(batch, self.model.config.d_model, dtype=torch.float64)
            state += [total, total[:, 0].clone()]
        return tuple(state)

    @torch.no_grad()
    def state_after(self, model: Model, x: Tensor) -> tuple[Tensor, ...]:
        """Return the state after positions x (B, T, ...), computed by the parallel form of the same model."""
        backbone, state = _backbone(model), list[Tensor]()

        def keep(window: int, u: Tensor) -> None:
            state.append(F.pad(u, (0, 0, window, 0))[:, -window:].contiguous())

        hooks = [
            block.layer.register_forward_pre_hook(lambda _, inputs, window=layer.window: keep(window, inputs[0]))
            for block, layer in zip(backbone.block_list, self.layers, strict=True)
        ]
        h = backbone(x)
        for hook in hooks:
            hook.remove()
        if self.pooled:
            state += [h.double().sum(1), h.new_full(h.shape[:1], h.shape[1], dtype=torch.float64)]
        return tuple(state)


def _backbone(model: Any) -> Backbone:
    return getattr(model, "backbone", model)
