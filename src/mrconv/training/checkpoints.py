"""Checkpoints, which are written atomically, read without executing code, and resume a run exactly."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.utilities.exceptions import SIGTERMException

from mrconv._utils.files import atomic_write, link
from mrconv.tasks import Prepared

from .checkpoint_files import BEST, LAST, PREVIOUS
from .datamodule import TaskData
from .module import NonFiniteError
from .scores import is_better

SYNC_EVERY = 50  # batches after which processes exchange whether to save or stop
METRICS = "metrics.csv"


class AtomicIO(CheckpointIO):
    """Writes checkpoints atomically; reads tensors and plain values only, never code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; if that fails, the previous file stays."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_write(target) as draft, draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch replaces an error of the file by one of its own
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(target)) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        """Read a checkpoint."""
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint."""
        Path(path).unlink(missing_ok=True)


class Checkpoints(Callback):
    """Saves the last checkpoint, the previous one, the best weights by the monitored score, and a table of scores.

    Without a validation split the test split is monitored but chooses nothing: the weights of the last epoch are kept.
    """

    def __init__(self, folder: Path, data: TaskData, minutes: float) -> None:
        self.folder, self.metric, self.interval = folder, data.monitored_metric, 60 * minutes
        self.monitored, self.loss = f"{data.monitored}/{self.metric}", f"{data.monitored}/loss"
        self.keeps_last_epoch = data.monitored == "test"
        self.patience = data.experiment.patience
        self.data = data_summary(data.data)
        self.history: list[dict[str, float]] = []
        self.best_epoch = -1  # an index of the history
        self.last_is_valid = False  # whether this run resumed from the last checkpoint or wrote it
        self.stop_requested = False  # set by a signal to this process, in a distributed run
        self.between_batches = False  # a run can resume only from a state between two training batches
        self.previous_seconds = 0.0  # training time in earlier processes
        self.started = self.saved_at = time.monotonic()
        self.random_states: list[dict[str, Any]] = []  # of each process, from the checkpoint
        self.rounded_moments_at: list[int] = []  # steps at which `packed_run` rounded the optimizer's moments

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Save the state; if its score is the best so far, or the last epoch is kept, save its weights as the best."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.history.append({"epoch": trainer.current_epoch + 1, "step": trainer.global_step, "lr": lr, **metrics})
        compared = self.best_epoch >= 0 and not self.keeps_last_epoch
        better = self.is_better(metrics, self.history[self.best_epoch] if compared else None)
        if better:
            self.best_epoch = trainer.current_epoch
        self.save(trainer, module)
        if trainer.is_global_zero:
            write_csv(self.folder / METRICS, self.history)
            if better:
                write_best(self.folder, self.folder / LAST)
        trainer.should_stop |= self.stops_early

    def is_better(self, new: dict[str, float], best: dict[str, float] | None) -> bool:
        """Return whether the scores of an epoch are better than those of another; equal ones compare by their loss."""
        if not math.isfinite(new[self.loss]) or best is None:
            return math.isfinite(new[self.loss])
        if new[self.monitored] == best[self.monitored]:
            return new[self.loss] < best[self.loss]
        return is_better(self.metric, new[self.monitored], best[self.monitored])

    def best_scores(self) -> dict[str, float] | None:
        """Return the scores of the epoch with the best monitored score, even if the last epoch is kept instead."""
        best = None
        for scores in self.history:
            if self.is_better(scores, best):
                best = scores
        return best

    @property
    def stops_early(self) -> bool:
        """Whether the history ends with `patience` epochs that are not better than an earlier one."""
        best = self.best_scores()
        since = len(self.history) - (0 if best is None else self.history.index(best) + 1)
        return 0 < self.patience <= since

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the state if the interval has passed, except after an epoch's last batch: validation saves it there.

        Several processes exchange their decisions every SYNC_EVERY batches, so that all save or stop at the same step.
        """
        self.between_batches, distributed = not trainer.is_last_batch, trainer.world_size > 1
        if not self.between_batches or (distributed and batch_idx % SYNC_EVERY):
            return
        due = bool(self.interval) and time.monotonic() - self.saved_at > self.interval
        if distributed:
            if trainer.strategy.reduce_boolean_decision(self.stop_requested, all=False):
                raise SIGTERMException
            due = trainer.strategy.reduce_boolean_decision(due, all=False)
        if due:
            self.save(trainer, module)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Note that a step has started."""
        self.between_batches = False

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        """Save the state when SIGTERM stops the run between two batches of training, if it is finite."""
        if isinstance(exception, SIGTERMException) and self.between_batches:
            with contextlib.suppress(NonFiniteError):
                self.save(trainer, module)

    def request_stop(self, *_: Any) -> None:
        """Handle SIGTERM in one of several processes: all stop together at the next exchange."""
        self.stop_requested = True

    def save(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Write the last checkpoint if weights are finite; a valid last checkpoint becomes the previous one."""
        module.check_finite()  # type: ignore[operator]
        last = self.folder / LAST
        if trainer.is_global_zero and self.last_is_valid and last.exists():
            link(last, self.folder / PREVIOUS)
        trainer.save_checkpoint(last)
        self.last_is_valid = True
        self.saved_at = time.monotonic()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add random states, the best epoch and the history of scores."""
        checkpoint["mrconv"] = {
            "best_epoch": self.best_epoch,
            "history": self.history,
            "seconds": self.seconds,
            "random": _gather(get_random_states(), trainer.world_size),
            "data": self.data,
            "rounded_moments_at": self.rounded_moments_at,
        }

    @property
    def seconds(self) -> float:
        """The training time of the run in seconds, over all its processes."""
        return self.previous_seconds + time.monotonic() - self.started

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the scores; `on_train_start` sets random states, after all other uses of random numbers."""
        self.restore(checkpoint["mrconv"])

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` saved."""
        self.best_epoch, self.random_states = state["best_epoch"], state["random"]
        self.history, self.previous_seconds = state["history"], state["seconds"]
        self.rounded_moments_at = state.get("rounded_moments_at", [])

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Set the random states of a checkpoint, or a different seed in every process; start the clock."""
        self.started = time.monotonic()
        trainer.should_stop |= self.stops_early  # a run that was killed between its last epoch and its result
        if trainer.world_size > 1 and threading.current_thread() is threading.main_thread():
            # Lightning's handler broadcasts at once, and blocks if the other processes do not take part.
            signal.signal(signal.SIGTERM, self.request_stop)
        if len(self.random_states) == trainer.world_size:
            set_random_states(self.random_states[trainer.global_rank])
        elif trainer.global_rank > 0:
            torch.manual_seed(torch.initial_seed() + trainer.global_rank)
        self.random_states = []


def data_summary(data: Prepared) -> dict[str, Any]:
    """Return the properties of data that must not change when a run resumes."""
    examples = {name: len(split) for name, split in data.splits.items()}
    lengths = bool(data.facts.get("lengths"))
    return {
        "examples": examples,
        "classes": list(data.classes),
        "vocabulary": list(data.vocabulary),
        "lengths": lengths,
    }


def data_of_checkpoint(checkpoint: Path, data: Prepared) -> Prepared:
    """Return data as a checkpoint was trained on it, with or without lengths of values; reject data that differs."""
    state = torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)["mrconv"]
    summary = state.get("data", {})
    if not summary.get("lengths"):
        data = data.without_lengths()
    current = data_summary(data)
    for name, saved in summary.items():
        if saved != current[name]:
            change = f"{name} were {saved!s:.200} and are {current[name]!s:.200}"
            raise ValueError(
                f"{checkpoint} was trained on other data: {change}; give another name or out to train on this data"
            )
    return data


def write_csv(path: Path, rows: list[dict[str, float]]) -> None:
    """Write a table atomically."""
    with atomic_write(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)


def _gather(value: dict[str, Any], processes: int) -> list[dict[str, Any]]:
    """Return the values of all processes, in order of rank."""
    values = [value] * processes
    if processes > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def get_random_states() -> dict[str, Any]:
    """Return the states of all random generators of a run, as plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": list(random.getstate()[1]),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set the states of all random generators."""
    random.setstate((3, tuple(states["python"]), None))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def read_step(checkpoint: Path) -> int:
    """Return the number of steps before a checkpoint."""
    return int(torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)["global_step"])


def write_best(folder: Path, checkpoint: Path) -> None:
    """Write the best weights, those of a checkpoint, without the state that resumes a run."""
    content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    weights = {name: value for name, value in content["state_dict"].items() if name.startswith("model.")}
    AtomicIO().save_checkpoint({"mrconv": {}, "epoch": content["epoch"], "state_dict": weights}, folder / BEST)


def restore_files(folder: Path, checkpoint: Path) -> int:
    """Write the metrics table and the best weights again, in case a kill prevented it; return the step."""
    content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    if content["mrconv"]["history"]:
        write_csv(folder / METRICS, content["mrconv"]["history"])
        if has_best_weights(content):
            write_best(folder, checkpoint)
    return int(content["global_step"])


def has_best_weights(content: dict[str, Any]) -> bool:
    """Return whether the weights of a last checkpoint are the best ones: it was written at the end of that epoch."""
    state = content["mrconv"]
    epochs = [(each["epoch"], each["step"]) for each in state["history"][-1:]]
    return epochs == [(state["best_epoch"] + 1, content["global_step"])]
