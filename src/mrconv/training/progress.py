"""Where a run stands: a line for every epoch, and on a terminal one that is written over."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from mrconv.tasks.base import Count

from .scores import Score


class LiveLine:
    """A line on standard error that is written over, at most so often; on a terminal only."""

    def __init__(self, every: float = 0.5) -> None:
        self.every, self.shown, self.there = every, 0.0, False

    def due(self, now: float) -> bool:
        """Whether it is time to write it."""
        return now - self.shown > self.every and sys.stderr.isatty()

    def show(self, text: str, now: float) -> None:
        """Write it over what it was, cut to the terminal's width."""
        self.shown, self.there = now, True
        sys.stderr.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take it away."""
        if self.there:
            self.there = False
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


@contextmanager
def preparing(task: str) -> Iterator[Count]:
    """Show how much of a task's data is prepared, for as long as the function it gives is called."""
    line, started = LiveLine(), time.monotonic()

    def count(done: int, total: int | None) -> None:
        now = time.monotonic()
        if done == total:
            line.clear()
        elif line.due(now):
            left = f" of {total:,}, {_duration((now - started) / done * (total - done))} left" if total and done else ""
            line.show(f"preparing {task}: {done:,}{left}", now)

    try:
        yield count
    finally:
        line.clear()


class EpochLines(Callback):
    """Prints a line after every epoch and, on a terminal, where an epoch stands."""

    def __init__(self, metric: Score) -> None:
        self.metric, self.line = metric, LiveLine()
        self.started = self.epoch_started = time.monotonic()
        self.first_step = self.examples = 0
        self.rate = 0.0

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
        if not trainer.is_global_zero or not self.line.due(time.monotonic()):
            return
        scores: Any = module.scores["fitted"]  # type: ignore[index]
        sums = (outputs["loss"], scores.total.sum_value, scores.count.sum_value)
        loss, total, count = torch.stack([each.double() for each in sums]).tolist()  # waits for the device
        now, steps = time.monotonic(), int(trainer.num_training_batches)
        epoch, epochs = trainer.current_epoch, trainer.max_epochs or trainer.current_epoch + 1
        left = self._left(trainer, now, (epochs - epoch) * steps - batch_idx - 1)
        self.line.show(
            f"epoch {epoch + 1}/{epochs}: {batch_idx + 1}/{steps}, loss {loss:.4f}, "
            f"train {self.metric.text(total / count)}, {self._rate(now):,.0f} examples/s, {_duration(left)} left",
            now,
        )

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Count the epoch's examples per second, without validation."""
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        self.rate = self._rate(time.monotonic())

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Print the epoch's line."""
        if not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        self.line.clear()
        now, found = time.monotonic(), trainer.callback_metrics
        done = trainer.current_epoch + 1
        left = self._left(trainer, now, ((trainer.max_epochs or done) - done) * int(trainer.num_training_batches))
        parts = [f"epoch {done:>3}/{trainer.max_epochs}", f"loss {float(found['train/loss']):.4f}"]
        for name in ("train", "val", "test"):
            if f"{name}/{self.metric.name}" in found:
                parts.append(f"{name} {self.metric.text(float(found[f'{name}/{self.metric.name}']))}")
        parts.append(f"{self.rate:,.0f} examples/s")
        if module.device.type == "cuda":
            parts.append(f"{torch.cuda.max_memory_allocated(module.device) / 2**30:.1f} GiB")
        parts.append(f"{_duration(left)} left" if left else f"{_duration(now - self.started)} in all")
        print(", ".join(parts), flush=True)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the line to what is told of the error."""
        self.line.clear()

    def _rate(self, now: float) -> float:
        return self.examples / max(1e-9, now - self.epoch_started)

    def _left(self, trainer: pl.Trainer, now: float, steps: int) -> float:
        """Return the seconds that some more steps take, by those since the run began or went on."""
        return steps * (now - self.started) / max(1, trainer.global_step - self.first_step)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
