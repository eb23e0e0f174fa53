"""The learning-rate schedule."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def rate_factor(step: int, warmup: int, total: int, cooldown: int | None = None) -> float:
    """Return the factor of the learning rate at a step: linear warm-up, then half a cosine to 0.

    With a cooldown the factor is 1 instead, and falls to 0 in the last `cooldown` steps, as 1 - sqrt(t) for t from 0 to
    1 (Hägele et al., 2024). The cooldown begins after the warm-up.
    """
    rise = step / warmup if step < warmup else 1.0
    start = warmup if cooldown is None else max(warmup, total - cooldown)
    t = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    return rise * (0.5 * (1 + math.cos(math.pi * t)) if cooldown is None else 1 - math.sqrt(t))


def rate_schedule(optimizer: Optimizer, warmup: int, total: int, cooldown: int | None = None) -> LambdaLR:
    """Return the schedule, which is stepped after every step of the optimizer."""
    return LambdaLR(optimizer, lambda step: rate_factor(step, warmup, total, cooldown))
