"""Training steps as CUDA graphs: one launch replaces thousands, which take the host longer than the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from mrconv.tasks import Batch

WARM_UP_STEPS = 2  # before a capture: they compile kernels and create FFT plans


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    outputs: tuple[Tensor, ...]


class GraphedStep:
    """A step that computes gradients of `model`, captured once for each shape of batch and then replayed.

    The next call overwrites the outputs. The warm-up steps leave buffers and random states unchanged.
    """

    def __init__(self, step: Callable[[Batch], tuple[Tensor, ...]], model: nn.Module) -> None:
        self.step, self.model = step, model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.gradients = [torch.zeros_like(p) for p in self.parameters]  # all graphs write to the same memory
        self.captured: dict[tuple[object, ...], _Captured] = {}
        self.pool: Any = None

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        """Run the step on a batch; set the gradients and return the outputs of the step."""
        key = tuple((name, x.shape, x.dtype) for name, x in _tensors(batch).items())
        if key not in self.captured:
            self.captured[key] = self._capture(batch)
        captured = self.captured[key]
        for name, x in _tensors(captured.batch).items():
            x.copy_(getattr(batch, name), non_blocking=True)
        captured.graph.replay()
        self._set_gradients()
        return captured.outputs

    def _set_gradients(self) -> None:
        """Point the parameters' gradients to the memory of the graphs again, in case they were replaced."""
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient

    def _capture(self, batch: Batch) -> _Captured:
        self._set_gradients()
        static_batch = Batch(**{name: x.clone() for name, x in _tensors(batch).items()})
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        random_state = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self._step_from_zero(static_batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that pins memory for a loader may call CUDA meanwhile
        with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
            outputs = self._step_from_zero(static_batch)
        self.pool = graph.pool()
        for b, before in buffers:
            b.copy_(before)
        torch.cuda.set_rng_state(random_state)
        return _Captured(graph, static_batch, outputs)

    def _step_from_zero(self, batch: Batch) -> tuple[Tensor, ...]:
        """Run the step with zeroed gradients; without autocast's cache, the graph includes the casts of weights."""
        torch._foreach_zero_(self.gradients)
        with torch.autocast(
            "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False
        ):
            return self.step(batch)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    return {f.name: x for f in fields(batch) if (x := getattr(batch, f.name)) is not None}
