"""Errors of outputs relative to those in float64, and how large they may be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

COPIES = 4
FACTOR = 32
"""How many times the rounding error of a model another form of it may have."""
MOST = 0.1
"""Largest error that can be allowed: a wrong result has errors of about 1."""


def relative_error(output: Tensor, exact: Tensor) -> float:
    """Return the largest difference relative to the largest exact output; infinity for NaN."""
    difference, scale = (x.abs().max() for x in (output.to(exact.dtype) - exact, exact))
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a model may output zeros only
    return float((difference / scale).nan_to_num(nan=torch.inf))


@torch.no_grad()
def rounded_copies(model: M) -> list[M]:
    """Return the model and copies whose weights have random errors as large as those of rounding."""
    copies = [copy.deepcopy(model) for _ in range(COPIES)]
    for parameter in (parameter for each in copies for parameter in each.parameters()):
        parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randn_like(parameter))
    return [model, *copies]


def allowed_error(limit: float, models: Sequence[M], run: Callable[[M], Tensor], exact: Tensor) -> float:
    """Return how large an error may be: the limit, or a multiple of the rounding errors of `rounded_copies`.

    Errors of rounding may grow from layer to layer, so that a correct result in float32 has a large error. One model's
    error is a random number; several are needed to know how large it can be.
    """
    return max(limit, min(FACTOR * max(relative_error(run(model), exact) for model in models), MOST))
