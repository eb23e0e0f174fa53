"""Number of kernels that a layer launches, by torch's profiler; needs a GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from ..layer import MRConv, reparameterize
from .shapes import Shape


def launches(step: Callable[[], Any]) -> tuple[Counter[str], float]:
    """Return how often a step launches each kernel, copy and fill, and the milliseconds that they take on the GPU.

    The step runs three times before, so that kernels are compiled and constants are on the device.
    """
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    return Counter({e.key: e.count for e in events}), sum(e.self_device_time_total for e in events) / 1e3


def layer_step(shape: Shape, dtype: torch.dtype, masked: bool, merged: bool) -> tuple[str, Callable[[], Any]]:
    """Return the algorithm of a layer, and a training step without optimizer or, if merged, a forward pass with GELU.

    Gradients are not allocated yet. If `masked`, the sequences have different lengths, which are on the GPU.
    """
    layer = MRConv(shape.channels, shape.length, **shape.options, device="cuda")
    u = torch.randn(shape.batch, shape.length, shape.channels, device="cuda").to(dtype)
    lengths = torch.arange(shape.length, shape.length - shape.batch, -1, device="cuda") if masked else None
    if merged:
        reparameterize(layer).to(dtype).requires_grad_(False)  # gradients would need another algorithm
        return layer.explain(u).algorithm, lambda: layer(u, lengths, gelu=True)
    grad = torch.randn_like(u)
    leaves = [u.requires_grad_(), *layer.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer(u, lengths).backward(grad)

    return layer.explain(u).algorithm, step


def host_ms(step: Callable[[], Any], rounds: int = 5) -> float:
    """Return the milliseconds that a step takes, launched op by op: the fastest of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3
