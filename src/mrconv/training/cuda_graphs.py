"""Training steps as CUDA graphs: one launch in place of thousands, for which a host is too slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from mrconv.tasks import Batch

WARM_UP = 2  # steps before a capture, in which kernels are compiled and plans are made


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    outputs: tuple[Tensor, ...]


class GraphedStep:
    """A step that leaves gradients in `model`, captured once for each shape of batch and replayed after.

    What it returns is written over by the next call. Buffers and random numbers are as if there were no warm-up.
    """

    def __init__(self, step: Callable[[Batch], tuple[Tensor, ...]], model: nn.Module) -> None:
        self.step, self.model = step, model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.gradients = [torch.zeros_like(p) for p in self.trained]  # the same memory for all graphs
        self.captured: dict[tuple[object, ...], _Captured] = {}
        self.pool: Any = None

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        """Take a batch; return what the step returns, and leave the gradients."""
        key = tuple((name, x.shape, x.dtype) for name, x in _tensors(batch).items())
        if key not in self.captured:
            self.captured[key] = self._capture(batch)
        here = self.captured[key]
        for name, x in _tensors(here.batch).items():
            x.copy_(getattr(batch, name), non_blocking=True)
        here.graph.replay()
        self._hand_out()
        return here.outputs

    def _hand_out(self) -> None:
        """Make these the parameters' gradients, whatever was made of them since."""
        for p, gradient in zip(self.trained, self.gradients, strict=True):
            p.grad = gradient

    def _capture(self, batch: Batch) -> _Captured:
        self._hand_out()
        own = Batch(**{name: x.clone() for name, x in _tensors(batch).items()})
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        state = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._fresh(own)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # only this thread's calls: one that pins memory for a loader may go on meanwhile
        with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
            outputs = self._fresh(own)
        self.pool = graph.pool()
        for b, before in buffers:
            b.copy_(before)
        torch.cuda.set_rng_state(state)
        return _Captured(graph, own, outputs)

    def _fresh(self, batch: Batch) -> tuple[Tensor, ...]:
        """Run the step with gradients that begin at zero; casts of weights are part of it, none is kept from before."""
        torch._foreach_zero_(self.gradients)
        with torch.autocast(
            "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False
        ):
            return self.step(batch)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    return {f.name: x for f in fields(batch) if (x := getattr(batch, f.name)) is not None}
