"""Checkpoints that are whole or not there, and hold numbers only."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import random
import signal
import threading
import time
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.utilities.exceptions import SIGTERMException

from mrconv._utils.files import atomic_write
from mrconv.tasks import Prepared

from .datamodule import TaskData
from .module import NotFinite
from .scores import Score

ASK_EVERY = 50  # batches between two times that several processes ask each other whether to save or to stop
LAST, PREVIOUS, BEST, METRICS = "last.ckpt", "previous.ckpt", "best.ckpt", "metrics.csv"


class AtomicIO(CheckpointIO):
    """Writes beside the file and renames; reads tensors and plain values, and never code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, or leave the one that was there."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as draft, draft.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        """Read a checkpoint."""
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint."""
        Path(path).unlink(missing_ok=True)


class Checkpoints(Callback):
    """Keeps the last checkpoint, the one before it, the best by the watched score, and a table of all scores."""

    def __init__(self, folder: Path, data: TaskData, metric: Score, minutes: float) -> None:
        self.folder, self.metric, self.every = folder, metric, 60 * minutes
        self.watched, self.loss = f"{data.watched}/{metric.name}", f"{data.watched}/loss"
        self.data = described(data.data)
        self.history: list[dict[str, float]] = []
        self.best: float | None = None
        self.best_epoch = -1
        self.sound = False  # whether the last checkpoint is one that this run came from or wrote
        self.asked = False  # to stop, as one of several processes
        self.between = False  # two batches of training: where a run can be stopped and go on
        self.before = 0.0  # seconds of training before this process began
        self.started = self.saved = time.monotonic()
        self.random: list[dict[str, Any]] = []  # by process, to go on with

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Keep this state, as the best one too if it is."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        found = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.history.append({"epoch": trainer.current_epoch + 1, "step": trainer.global_step, "lr": lr, **found})
        score = found[self.watched]
        better = math.isfinite(found[self.loss]) and (self.best is None or self.metric.better(score, self.best))
        if better:
            self.best, self.best_epoch = score, trainer.current_epoch
        self.save(trainer, module)
        if trainer.is_global_zero:
            write_csv(self.folder / METRICS, self.history)
            if better:
                _link(self.folder / LAST, self.folder / BEST)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep this state if the last one was kept long ago; after an epoch's last batch, validation comes first.

        Several processes ask each other, now and then, so that all do the same at the same step.
        """
        self.between, several = not trainer.is_last_batch, trainer.world_size > 1
        if not self.between or (several and batch_idx % ASK_EVERY):
            return
        late = bool(self.every) and time.monotonic() - self.saved > self.every
        if several:
            if trainer.strategy.reduce_boolean_decision(self.asked, all=False):
                raise SIGTERMException
            late = trainer.strategy.reduce_boolean_decision(late, all=False)
        if late:
            self.save(trainer, module)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Know that a step is under way."""
        self.between = False

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        """Keep this state when a scheduler asks to stop between two batches of training, and all is well."""
        if isinstance(exception, SIGTERMException) and self.between:
            with contextlib.suppress(NotFinite):
                self.save(trainer, module)

    def ask(self, *_: Any) -> None:
        """Take a scheduler's signal to one of several processes: they stop together, soon."""
        self.asked = True

    def save(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Write the last checkpoint if weights are finite; what was the last, unless damaged, becomes the previous."""
        module.check_finite()  # type: ignore[operator]
        last = self.folder / LAST
        if trainer.is_global_zero and self.sound and last.exists():
            _link(last, self.folder / PREVIOUS)
        trainer.save_checkpoint(last)
        self.sound = True
        self.saved = time.monotonic()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add random states, the best score and all scores so far."""
        checkpoint["mrconv"] = {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "history": self.history,
            "seconds": self.seconds,
            "random": _of_all(random_states(), trainer.world_size),
            "data": self.data,
        }

    @property
    def seconds(self) -> float:
        """Return how long the run has trained, over all processes that went on with it."""
        return self.before + time.monotonic() - self.started

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the scores; random states are set when training begins, after all that draws before it."""
        self.restore(checkpoint["mrconv"])

    def restore(self, own: dict[str, Any]) -> None:
        """Take what a checkpoint keeps of a run."""
        self.best, self.best_epoch, self.random = own["best"], own["best_epoch"], own["random"]
        self.history, self.before = own["history"], own["seconds"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Set the random states of a checkpoint, or begin with other numbers in every process; count the time."""
        self.started = time.monotonic()
        if trainer.world_size > 1 and threading.current_thread() is threading.main_thread():
            # Lightning's broadcasts where the signal falls, and waits there for ever if the others are elsewhere.
            signal.signal(signal.SIGTERM, self.ask)
        if len(self.random) == trainer.world_size:
            set_random_states(self.random[trainer.global_rank])
        elif trainer.global_rank > 0:
            torch.manual_seed(torch.initial_seed() + trainer.global_rank)
        self.random = []


def described(data: Prepared) -> dict[str, Any]:
    """Return what must be the same of data that a run goes on with."""
    examples = {name: len(split) for name, split in data.splits.items()}
    return {"examples": examples, "classes": list(data.classes), "vocabulary": list(data.vocabulary)}


def check_data(checkpoint: Path, data: Prepared) -> None:
    """Refuse to go on with other data than a checkpoint's."""
    own = torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)["mrconv"]
    here = described(data)
    for name, there in own.get("data", here).items():
        if there != here[name]:
            told = f"{name} were {there!s:.200} and are {here[name]!s:.200}"
            raise ValueError(f"{checkpoint} comes from other data: {told}; give another name or out to train on these")


def write_csv(path: Path, rows: list[dict[str, float]]) -> None:
    """Write a table, all of it or nothing."""
    with atomic_write(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)


def _of_all(value: dict[str, Any], processes: int) -> list[dict[str, Any]]:
    """Return what every process has, in order."""
    found = [value] * processes
    if processes > 1:
        torch.distributed.all_gather_object(found, value)
    return found


def random_states() -> dict[str, Any]:
    """Return the states of all generators that a run draws from, as plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": list(random.getstate()[1]),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set the states of all generators."""
    random.setstate((3, tuple(states["python"]), None))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, in one step; no second copy where the file system can."""
    with atomic_write(target) as draft:
        draft.unlink(missing_ok=True)
        try:
            os.link(source, draft)
        except OSError:
            draft.write_bytes(source.read_bytes())


def settle(folder: Path, checkpoint: Path) -> int:
    """Do again what a kill may have cut short after a checkpoint was written at an epoch's end; return its step."""
    read = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    own, step = read["mrconv"], read["global_step"]
    if own["history"]:
        write_csv(folder / METRICS, own["history"])
        ended = own["history"][-1]
        if (ended["epoch"], ended["step"]) == (own["best_epoch"] + 1, step):
            _link(checkpoint, folder / BEST)
    return step


def last_good(folder: Path, names: Sequence[str] = (LAST, PREVIOUS, BEST)) -> Path | None:
    """Return the newest checkpoint that can be read; one that cannot is named in a warning."""
    for name in names:
        path = folder / name
        if not path.exists():
            continue
        try:
            known = "mrconv" in torch.load(path, map_location="meta", weights_only=True, mmap=True)
            with zipfile.ZipFile(path) as file:
                damaged = file.testzip()  # tensors too, whose checksums torch does not look at
            if known and damaged is None:
                return path
            reason = f"{damaged} in it is damaged" if known else "it is not a checkpoint of mrconv"
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"{path} cannot be read and is not used: {reason}", stacklevel=2)
    return None
