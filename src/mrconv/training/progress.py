"""A line for every epoch: loss, score, examples per second, memory, time left."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from .metrics import Score


class EpochLines(Callback):
    """Prints a line after every epoch and, on a terminal, where an epoch stands."""

    def __init__(self, metric: Score, every: float = 0.5) -> None:
        self.metric, self.every, self.shown = metric, every, 0.0
        self.started = self.epoch_started = time.monotonic()
        self.first_step = self.examples = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin to count."""
        self.started, self.first_step = time.monotonic(), trainer.global_step

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin to count an epoch."""
        self.epoch_started, self.examples = time.monotonic(), 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show where the epoch stands."""
        self.examples += len(batch) * trainer.world_size
        now = time.monotonic()
        if trainer.is_global_zero and sys.stderr.isatty() and now - self.shown > self.every:
            self.shown = now
            total = int(trainer.num_training_batches)
            rate = self.examples / max(1e-9, now - self.epoch_started)
            loss = float(outputs["loss"])  # waits for the device, twice a second
            text = (
                f"epoch {trainer.current_epoch + 1}: {batch_idx + 1}/{total}, loss {loss:.4f}, {rate:,.0f} examples/s"
            )
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Print the epoch's line."""
        if not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
        now, found = time.monotonic(), trainer.callback_metrics
        done = trainer.current_epoch + 1
        a_step = (now - self.started) / max(1, trainer.global_step - self.first_step)  # since it began or went on
        left = a_step * ((trainer.max_epochs or done) - done) * int(trainer.num_training_batches)
        parts = [f"epoch {done:>3}/{trainer.max_epochs}", f"loss {float(found['train/loss']):.4f}"]
        for name in ("train", "val", "test"):
            if f"{name}/{self.metric.name}" in found:
                parts.append(f"{name} {self.metric.text(float(found[f'{name}/{self.metric.name}']))}")
        parts.append(f"{self.examples / (now - self.epoch_started):,.0f} examples/s")
        if module.device.type == "cuda":
            parts.append(f"{torch.cuda.max_memory_allocated(module.device) / 2**30:.1f} GiB")
        parts.append(f"{_duration(left)} left" if left else f"{_duration(now - self.started)} in all")
        print(", ".join(parts), flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
