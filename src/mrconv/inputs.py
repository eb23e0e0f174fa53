"""Random inputs that a model takes."""

from __future__ import annotations

import torch
from torch import Tensor

from .hub import Model
from .model import TwoTowerClassifier


def random_inputs(model: Model, batch: int, length: int, padded: bool = False) -> tuple[Tensor, ...]:
    """Return what `model(...)` takes: tokens or values of one sequence or two, and if `padded` their lengths."""
    c, own = model.config, next(model.parameters())
    channels = c.d_input or c.d_model

    def sequence() -> Tensor:
        if c.vocab_size is not None:
            return torch.randint(c.vocab_size, (batch, length), device=own.device)
        return torch.randn(batch, length, channels, device=own.device, dtype=own.dtype)

    several = 2 if isinstance(model, TwoTowerClassifier) else 1
    ends = [torch.randint(1, length + 1, (batch,), device=own.device) for _ in range(several if padded else 0)]
    return *(sequence() for _ in range(several)), *ends
