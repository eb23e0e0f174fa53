"""Random example inputs for any model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hub import Model
from .model import TwoTowerClassifier
from .vision.convnext import MRConvNeXt


def random_inputs(model: Model, batch: int = 1, length: int | None = None, padded: bool = False) -> tuple[Tensor, ...]:
    """Return random arguments for `model(...)`: images, or one sequence (two for a two-tower model).

    Args:
        model: determines number, shape, dtype and device of the inputs.
        batch: number of examples.
        length: length of the sequences; None means the model's l_max.
        padded: also return random lengths (batch,) for each input sequence.
    """
    config: Any = model.config
    parameter = next(model.parameters())
    factory: Any = {"device": parameter.device, "dtype": parameter.dtype}
    if isinstance(model, MRConvNeXt):
        return (torch.randn(batch, config.in_channels, *model.image_size, **factory),)
    length = length or config.l_max

    def sequence() -> Tensor:
        if config.vocab_size is not None:
            return torch.randint(config.vocab_size, (batch, length), device=parameter.device)
        return torch.randn(batch, length, config.d_input or config.d_model, **factory)

    count = 2 if isinstance(model, TwoTowerClassifier) else 1
    sequences = [sequence() for _ in range(count)]
    lengths = [torch.randint(1, length + 1, (batch,), device=parameter.device) for _ in range(count if padded else 0)]
    return *sequences, *lengths
