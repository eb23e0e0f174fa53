"""Averaged weights: an exponential moving average over the steps of training."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor, nn


class EMAWeightAveraging(WeightAveraging):
    """An exponential moving average of parameters and floating-point buffers; other buffers are copied.

    Lightning's class of this name also averages integer buffers, such as the tap positions of sparse kernels, and reads
    a counter from the device in every step.
    """

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average after an optimizer step; the first update copies, so that initial weights do not count."""
        if trainer.global_step <= self._latest_update_step:
            return
        assert self._average_model is not None
        weight = 1 - self.decay if self._latest_update_step else 1.0
        averages, values = _tensors(self._average_model.module), _tensors(pl_module)
        torch._foreach_lerp_(averages[True], values[True], weight)
        if averages[False]:
            torch._foreach_copy_(averages[False], values[False])
        self._latest_update_step = trainer.global_step


def _tensors(module: nn.Module) -> dict[bool, list[Tensor]]:
    """Return the parameters and buffers of a module by whether they are floating-point."""
    tensors = [*module.parameters(), *module.buffers()]
    return {floating: [x for x in tensors if x.is_floating_point() == floating] for floating in (True, False)}
