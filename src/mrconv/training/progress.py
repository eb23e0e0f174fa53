"""The progress of a run: a line for each epoch, and within an epoch a live line, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from rich.console import Console
from rich.live import Live
from rich.text import Text

from mrconv._utils.duration import format_duration
from mrconv._utils.status_lines import StatusLines

from .scores import Score

REFRESH_SECONDS = 0.5  # of the live line
UPDATE_SECONDS = 5.0  # of the status that plain lines print: an update waits for the device


class EpochProgress(Callback):
    """Prints a line after each epoch, and shows the progress of the current epoch on standard error.

    This is a live line on a terminal, else a plain line whenever 30 seconds have passed without one.

    Lightning's RichProgressBar shows a bar for each loader, and prints no plain line per epoch if output is piped.
    """

    def __init__(self, metric: Score) -> None:
        self.metric, self.terminal = metric, sys.stderr.isatty()
        self.live: Live | None = None
        self.lines = StatusLines("")
        self.started = self.epoch_started = time.monotonic()
        self.first_step = self.examples = 0
        self.refreshed = self.examples_per_second = 0.0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start the clocks: a run resumed within an epoch has no start of that epoch."""
        self.started, self.first_step = time.monotonic(), trainer.global_step
        self.on_train_epoch_start(trainer, module)
        if trainer.is_global_zero and not self.terminal:
            self.lines.start()

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start the clock of the epoch."""
        self.epoch_started, self.examples = time.monotonic(), 0
        self.lines.status = f"{self._epoch(trainer)}: first step"

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refresh the live line, or the status of the plain lines."""
        self.examples += len(batch) * trainer.world_size
        due = time.monotonic() - self.refreshed > (REFRESH_SECONDS if self.terminal else UPDATE_SECONDS)
        if not due or not trainer.is_global_zero:
            return
        scores: Any = module.scores["fitted"]  # type: ignore[index]
        sums = (outputs["loss"], scores.total.sum_value, scores.count.sum_value)
        loss, total, count = torch.stack([each.double() for each in sums]).tolist()  # synchronises with the device
        now, steps = time.monotonic(), int(trainer.num_training_batches)
        epochs = (trainer.max_epochs or trainer.current_epoch + 1) - trainer.current_epoch
        left = self._seconds_left(trainer, now, epochs * steps - batch_idx - 1)
        self._show(
            f"{self._epoch(trainer)}: {batch_idx + 1}/{steps}, loss {loss:.4f}, "
            f"train {self.metric.text(total / count)}, {self._speed(now):,.0f} examples/s, {format_duration(left)} left"
        )
        self.refreshed = now

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Compute the epoch's examples per second, without the time of validation."""
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        self.examples_per_second = self._speed(time.monotonic())
        self.lines.status = f"{self._epoch(trainer)}: evaluation"

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Print the line of the epoch."""
        if not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        self._hide()
        now, metrics = time.monotonic(), trainer.callback_metrics
        done = trainer.current_epoch + 1
        remaining = ((trainer.max_epochs or done) - done) * int(trainer.num_training_batches)
        left = self._seconds_left(trainer, now, remaining)
        parts = [f"epoch {done:>3}/{trainer.max_epochs}", f"loss {float(metrics['train/loss']):.4f}"]
        for split in ("train", "val", "test"):
            if f"{split}/{self.metric.name}" in metrics:
                parts.append(f"{split} {self.metric.text(float(metrics[f'{split}/{self.metric.name}']))}")
        parts.append(f"{self.examples_per_second:,.0f} examples/s")
        if module.device.type == "cuda":
            parts.append(f"{torch.cuda.max_memory_allocated(module.device) / 2**30:.1f} GiB")
        parts.append(f"{format_duration(left)} left" if left else f"{format_duration(now - self.started)} in total")
        print(", ".join(parts), flush=True)
        self.lines.postpone()

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """End the plain lines."""
        self.lines.stop()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the live line, and end the plain ones, before the error is printed."""
        self._hide()
        self.lines.stop()

    def _epoch(self, trainer: pl.Trainer) -> str:
        return f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs or trainer.current_epoch + 1}"

    def _show(self, text: str) -> None:
        self.lines.status = text
        if not self.terminal:
            return
        if self.live is None:
            # Standard output may be a file, which rich would redirect to this console.
            self.live = Live(console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False)
            self.live.start()
        self.live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _hide(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _speed(self, now: float) -> float:
        return self.examples / max(1e-9, now - self.epoch_started)

    def _seconds_left(self, trainer: pl.Trainer, now: float, steps: int) -> float:
        """Return the estimated seconds for some steps, from the steps since this process started."""
        return steps * (now - self.started) / max(1, trainer.global_step - self.first_step)
