"""Random inputs that a model takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hub import Model
from .model import TwoTowerClassifier
from .vision.convnext import MRConvNeXt


def random_inputs(model: Model, batch: int = 1, length: int | None = None, padded: bool = False) -> tuple[Tensor, ...]:
    """Return what `model(...)` takes: tokens or values of one sequence or two, and if `padded` their lengths; pictures.

    Without a length, of the one that the model was made for.
    """
    c: Any = model.config
    own = next(model.parameters())
    if isinstance(model, MRConvNeXt):
        return (torch.randn(batch, c.in_channels, *model.image_size, device=own.device, dtype=own.dtype),)
    length = length or c.l_max
    channels = c.d_input or c.d_model

    def sequence() -> Tensor:
        if c.vocab_size is not None:
            return torch.randint(c.vocab_size, (batch, length), device=own.device)
        return torch.randn(batch, length, channels, device=own.device, dtype=own.dtype)

    several = 2 if isinstance(model, TwoTowerClassifier) else 1
    ends = [torch.randint(1, length + 1, (batch,), device=own.device) for _ in range(several if padded else 0)]
    return *(sequence() for _ in range(several)), *ends
