"""The learning-rate schedule."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine_factor(step: int, warmup: int, total: int) -> float:
    """Return the factor of the learning rate at a step: linear warm-up, then half a cosine to 0."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def cosine_with_warmup(optimizer: Optimizer, warmup: int, total: int) -> LambdaLR:
    """Return the schedule, which is stepped after every step of the optimizer."""
    return LambdaLR(optimizer, lambda step: cosine_factor(step, warmup, total))
