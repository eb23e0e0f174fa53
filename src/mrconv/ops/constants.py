"""Numbers that travel to a device once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def numbers_on(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers in float64 where another tensor is, not to be written to; the same ones are copied there once."""
    return _numbers_on(tuple(numbers), like.device)


@functools.lru_cache(maxsize=1024)
def _numbers_on(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device, dtype=torch.float64)


def integers_on(numbers: Sequence[int], like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return integers as a tensor where another is, not to be written to; the same ones are copied there once."""
    if torch.compiler.is_compiling() or type(like) not in (Tensor, nn.Parameter):  # traced: keep nothing
        return torch.tensor(numbers, device=like.device, dtype=dtype)
    return _integers_on(tuple(numbers), like.device, dtype)


@functools.lru_cache(maxsize=1024)
def _integers_on(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device, dtype=dtype)
