"""Parallel scans of linear recurrences.

They are written in plain torch instead of with torch's `associative_scan`: with a constant factor, a scan over pairs
(factor, input) does twice the work, and with varying factors only the factors and the states are saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def constant_scan(a: Tensor, b: Tensor) -> Tensor:
    """Return x with x[t] = a x[t-1] + b[t] for a (N,), b (..., L, N): O(L) work in O(log L) parallel steps.

    Two consecutive steps form one step with factor a^2. A scan of these joined steps gives every second x, from which
    the others follow.
    """
    if b.shape[-2] == 1:
        return b
    even, odd = b[..., ::2, :], b[..., 1::2, :]
    pairs = odd.shape[-2]
    odd = constant_scan(a * a, a * even[..., :pairs, :] + odd)
    even = torch.cat([even[..., :1, :], even[..., 1:, :] + a * odd[..., : even.shape[-2] - 1, :]], -2)
    both = torch.stack([even[..., :pairs, :], odd], -2).flatten(-3, -2)
    return torch.cat([both, even[..., pairs:, :]], -2)


def linear_scan(a: Tensor, b: Tensor) -> Tensor:
    """Return h with h_t = a_t h_{t-1} + b_t along dim 1, h_{-1} = 0: O(L) work in O(log L) parallel steps."""
    return _LinearScan.apply(a, b)


def _scan(a: Tensor, b: Tensor) -> Tensor:
    """Join neighbouring steps, scan the joined steps for every second h, and compute the others from these."""
    L = b.shape[1]
    if L == 1:
        return b.clone()
    even, odd, later = slice(0, L - L % 2, 2), slice(1, L, 2), slice(2, L, 2)
    seconds = _scan(a[:, odd] * a[:, even], torch.addcmul(b[:, odd], a[:, odd], b[:, even]))
    h = torch.empty_like(b)
    h[:, 0], h[:, odd] = b[:, 0], seconds
    h[:, later] = torch.addcmul(b[:, later], a[:, later], seconds[:, : (L - 1) // 2])
    return h


class _LinearScan(torch.autograd.Function):
    """`_scan` with a backward pass that is a scan from the end and needs only a and h."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        h = _scan(a, b)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        following = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
        db = linear_scan(following.flip(1), grads[0].flip(1)).flip(1)
        before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        return db * before, db
