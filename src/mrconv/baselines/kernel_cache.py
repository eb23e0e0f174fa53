"""A cache of a convolution's kernel, for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class KernelCache(nn.Module):
    """Base class of a module that can keep its kernel between calls instead of computing it from its parameters.

    The cache is discarded wherever parameters may change: in training mode, in a call with gradients enabled, and
    when weights are loaded.
    """

    _kernel: Tensor | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("_kernel", None, persistent=False)
        self._lead = 0

    def cache_kernel(self, kernel: Tensor, lead: int) -> None:
        """Keep a kernel (C, K) whose tap at index `lead` has lag 0."""
        self._kernel, self._lead = kernel.detach(), lead

    def cached_kernel(self, lead: int, behind: int, compute: Callable[[], Tensor]) -> Tensor:
        """Return the taps at lags -lead .. behind - 1 from the cache; call `compute` if it does not hold them all."""
        if torch.is_grad_enabled() and self._kernel is not None:
            self._kernel = None
        kernel, first = self._kernel, self._lead - lead
        if kernel is None or first < 0:
            return compute()
        taps = kernel[:, first : self._lead + behind]
        return taps if taps.shape[1] == lead + behind else compute()

    def train(self, mode: bool = True) -> Self:
        """Set training or eval mode."""
        if mode:
            self._kernel = None
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._kernel = None
        super()._load_from_state_dict(*args)
