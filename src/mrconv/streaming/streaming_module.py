"""The streaming interface that layers, blocks and models share."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.types import Device

from .state import LayerState, State

AnyState = TypeVar("AnyState", bound=State)


class StreamingModule:
    """Mixin of a module that streams: a subclass defines `initial_state` and `stream`, and inherits the rest."""

    training: bool

    def initial_state(
        self, batch: int, *, rate: float | None = None, device: Device = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Return the state of `batch` sequences before their first input."""
        raise NotImplementedError

    def stream(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Process the next positions x (batch, T, ...); return their outputs and the state."""
        raise NotImplementedError

    def check_streamable(self) -> None:
        """Raise ValueError in training mode, where outputs depend on the statistics of whole sequences."""
        if self.training:
            raise ValueError(f"this {type(self).__name__} is in training mode: call .eval() to stream")

    def step(self, x: Tensor, state: AnyState) -> tuple[Tensor, AnyState]:
        """Process one position of each sequence, (batch, ...) without a length; return its output and the state.

        The state is updated in place. No gradients are computed.
        """
        y, state = self.stream(x.unsqueeze(1), state)
        return y[:, 0], state

    def prefill(self, x: Tensor, rate: float | None = None) -> tuple[Tensor, Any]:
        """Process a prompt x (batch, T, ...) from the initial state; return its outputs and the state after it."""
        state = self.initial_state(x.shape[0], rate=rate)
        if isinstance(state, LayerState):  # keep the inputs in their own dtype if it is more precise than the layer's
            state = state.with_input_dtype(torch.promote_types(state.inputs.dtype, x.dtype))
        return self.stream(x, state)
