"""Export targets: a model's function of whole sequences, of images, or of one position and a state."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.export import Dim

from ..example_inputs import random_inputs
from ..hub import Model
from ..vision.convnext import MRConvNeXt
from .formats import Runner, Signature
from .step_model import StepModel

Comparison = tuple[tuple[int, int], Tensor, tuple[Tensor, ...]]
"""Batch size and length of an input, the file's output for it, and the input as arguments of a model."""

BATCH = Dim("batch", min=1)


class ExportTarget:
    """A module to export, with the inputs to trace it and to compare its file with the original model."""

    module: nn.Module
    signature: Signature
    varying = False
    """Whether the length of the input may vary."""

    def __init__(self, original: Model, merged: Model, longest: int) -> None:
        config: Any = merged.config
        self.original, self.merged, self.longest, self.mixer = original, merged, longest, config.mixer

    def example(self) -> tuple[Tensor, ...]:
        """Return inputs to trace with."""
        raise NotImplementedError

    def comparisons(self, run: Runner) -> Iterator[Comparison]:
        """Run a file on random inputs of several sizes."""
        raise NotImplementedError

    def output(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return a model's output that corresponds to a file's."""
        dtype = next(model.parameters()).dtype
        return model(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))


class SequenceTarget(ExportTarget):
    """Whole sequences of 1 .. longest positions, or of exactly `longest`, with or without their lengths."""

    def __init__(self, original: Model, merged: Model, longest: int, fixed: bool, padded: bool) -> None:
        super().__init__(original, merged, longest)
        self.module, self.padded = merged, padded
        self.varying = longest > 1 and not fixed
        example = self.example()
        sizes = {0: BATCH, 1: Dim("length", min=1, max=longest)} if self.varying else {0: BATCH}
        dims = tuple({axis: size for axis, size in sizes.items() if axis < x.ndim} for x in example)
        self.signature = Signature([*inspect.signature(merged.forward).parameters][: len(example)], ["output"], dims)

    def example(self) -> tuple[Tensor, ...]:
        """Return two sequences, or two pairs of them, of the longest length."""
        return random_inputs(self.merged, 2, self.longest, self.padded)

    def comparisons(self, run: Runner) -> Iterator[Comparison]:
        """Run batches of 1, 2 and 3, of the longest length and, if it may vary, of shorter ones."""
        shorter = [(3, (self.longest + 1) // 2), (2, 1)] if self.varying else [(3, self.longest)]
        for size in ((1, self.longest), *shorter):
            inputs = random_inputs(self.merged, *size, self.padded)
            (output,) = run(*inputs)
            yield size, output, inputs


class ImageTarget(ExportTarget):
    """Batches of images of the model's size."""

    def __init__(self, original: Model, merged: MRConvNeXt) -> None:
        height, width = merged.grids(merged.image_size)[0]
        super().__init__(original, merged, height * width)
        self.module, self.signature = merged, Signature(["x"], ["output"], ({0: BATCH},))

    def example(self) -> tuple[Tensor, ...]:
        """Return two images."""
        return random_inputs(self.merged, 2)

    def comparisons(self, run: Runner) -> Iterator[Comparison]:
        """Run batches of one and of three images."""
        for batch in (1, 3):
            inputs = random_inputs(self.merged, batch)
            (output,) = run(*inputs)
            yield (batch, self.longest), output, inputs


class StepTarget(ExportTarget):
    """One position and the state before it -> its output and the state after it."""

    def __init__(self, original: Model, merged: Model) -> None:
        self.module = self.step = StepModel(merged)
        super().__init__(original, merged, 1)
        states = [f"state_{i}" for i in range(len(self.step.initial_state(1)))]
        dims = ({0: BATCH}, tuple({0: BATCH} for _ in states))
        self.signature = Signature(["x", *states], ["output", *(f"next_{name}" for name in states)], dims)

    def example(self) -> tuple[Tensor, ...]:
        """Return one position of two sequences, and a state."""
        return random_inputs(self.merged, 2, 1)[0][:, 0], *self.step.initial_state(2)

    def comparisons(self, run: Runner) -> Iterator[Comparison]:
        """Step from the initial state, and from the parallel form's state at a position past the window."""
        reach = max(layer.window for layer in self.step.layers)
        for batch, start in ((1, 0), (3, 0), (2, reach + 2)):
            (x,) = random_inputs(self.merged, batch, start + 3)
            first = self.step.state_after(self.merged, x[:, :start]) if start else self.step.initial_state(batch)
            state = list(first)
            for t in range(start, start + 3):
                output, *state = run(x[:, t].contiguous(), *state)
                yield (batch, t + 1), output, (x[:, : t + 1],)

    def output(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the output of a model at the last position."""
        whole = super().output(model, inputs)
        return whole[:, -1] if whole.ndim == 3 else whole
