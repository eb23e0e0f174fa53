"""The Lightning data module: the splits of a task, with the loader that suits the machine."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from mrconv.tasks import (
    Batch,
    BatchLoader,
    MissingData,
    Prepared,
    ResidentLoader,
    Task,
    WindowLoader,
    data_loader,
    task,
    task_class,
)
from mrconv.tasks.progress_callback import Progress, no_progress
from mrconv.tasks.randaugment import rand_augment

from .experiment import Experiment
from .image_augmentation import augment
from .metrics import monitorable
from .run_names import changed_keys

RESIDENT_FRACTION = 0.25  # of a GPU's memory that a resident split may occupy
IMAGE_KEYS = ("depths", "dims", "kernel_sizes", "drop_path", "randaugment")
AUGMENTATION_KEYS = ("crop", "flip", "rotate", "erasing", "mixup", "cutmix")  # of images and of sequences of pixels
NOT_AUGMENTED: dict[str, Any] = {name: getattr(Experiment, name) for name in AUGMENTATION_KEYS}
SEQUENCE_KEYS = (
    "kernel_size", "bidirectional", "d_model", "depth", "block_norm", "prenorm", "tie_dropout", "mask_padding", "pool",
)  # fmt: skip
EVALUATION_BATCHES = 4  # evaluation needs no memory for a backward pass: its batches are this many times larger


def make_task(experiment: Experiment) -> Task:
    """Return the experiment's task."""
    e = experiment
    options: dict[str, Any] = dict(e.task_options)
    if e.data:
        _check_data(e)
        options["path"] = e.data
    if e.target != "class":
        if e.task != "folder":
            raise ValueError(f"target={e.target} is for custom data; set task=folder too, or leave target=class")
        options["target"] = e.target
    if e.cache_dir:
        options["cache_dir"] = Path(e.cache_dir)
    return task(e.task, e.data_dir, **options)


def _check_data(experiment: Experiment) -> None:
    """Reject `data` that does not exist, or that the task does not take, under the name of this key."""
    if "path" not in {field.name for field in dataclasses.fields(task_class(experiment.task))}:
        raise ValueError(f"data={experiment.data}: {experiment.task} does not take custom data; set task=folder too")
    path = Path(experiment.data).expanduser()
    if not path.exists():
        raise MissingData(f"data={experiment.data} does not exist: looked for {path.absolute()}")


def prepare(experiment: Experiment, progress: Progress = no_progress) -> Prepared:
    """Return the experiment's data at its sampling rate."""
    data = make_task(experiment).prepare(progress)
    return data if experiment.rate == 1 else data.decimated(experiment.rate)


def make_loader(
    data: Prepared,
    split: str,
    batch_size: int,
    device: torch.device | None,
    workers: int = 0,
    limit: int = 0,
    **options: Any,
) -> BatchLoader:
    """Return a loader that keeps the split on a device, or reads it from disk if the device is None.

    A text is always kept in memory.

    Args:
        limit: the number of batches, spread over the split; 0 for all.
    """
    loader: BatchLoader
    if data.encoder == "text":
        loader = WindowLoader(data, split, batch_size, device=device or "cpu", **options)
    elif device is not None:
        loader = ResidentLoader(data, split, batch_size, device=device, **options)
    else:
        loader = data_loader(data, split, batch_size, workers=workers, **options)
    loader.plan = dataclasses.replace(loader.plan, limit=limit)
    return loader


class TaskData(pl.LightningDataModule):
    """Loaders for training, validation and test; without a validation split, test is monitored."""

    def __init__(self, experiment: Experiment, data: Prepared) -> None:
        super().__init__()
        self.experiment, self.data = experiment, data
        if "train" not in data.splits or not {"val", "test"} & set(data.splits):
            raise ValueError(f"{data.name} needs a train split and val or test; it has {', '.join(data.splits)}")
        self.augmented = check_image_keys(experiment, data)
        self.monitored = "val" if "val" in data.splits else "test"
        self.monitored_metric = experiment.monitor or data.metric
        if self.monitored_metric not in (names := monitorable(data)):
            raise ValueError(f"monitor must be one of {', '.join(names)}; got {self.monitored_metric!r}")
        if experiment.patience and self.monitored == "test":
            raise ValueError(f"patience={experiment.patience} needs a validation split; {data.name} has train and test")
        self.evaluated = [name for name in ("val", "test") if name in data.splits]
        self.shapes = self._max_shapes()  # of training batches
        self.loaders: dict[str, BatchLoader] = {}

    def _max_shapes(self) -> float:
        if self.data.splits["train"].offsets is None or self.experiment.pad == "max":
            return 1
        return math.inf if self.experiment.pad == "batch" else math.ceil(self.data.length / self.experiment.pad)

    def steps_per_epoch(self, world: int) -> int:
        """Return the number of training batches of an epoch."""
        n = self.data.examples_per_epoch("train", True) // (self.experiment.batch_size * world)
        return min(n, self.experiment.limit_train or n)

    def loader(self, split: str, train: bool, device: torch.device, rank: int = 0, world: int = 1) -> BatchLoader:
        """Return the loader of a split, created at the first call."""
        e, key = self.experiment, f"{split}, {train}"
        if key not in self.loaders:
            options: dict[str, Any] = {"seed": e.seed, "rank": rank, "world": world, "pad": e.pad, "train": train}
            resident = e.loader == "resident" or (e.loader == "auto" and self._fits(split, device))
            if not resident and self.data.encoder != "text":
                options |= {"workers": e.workers, "pin_memory": device.type == "cuda"}
                if e.randaugment and train:
                    options["augment"] = functools.partial(rand_augment, magnitude=e.randaugment)
            size, limit = (e.batch_size, 0) if train else (EVALUATION_BATCHES * e.batch_size, e.limit_eval)
            options |= {"limit": limit, "bucket": e.bucket or not train}
            self.loaders[key] = make_loader(self.data, split, size, device if resident else None, **options)
        return self.loaders[key]

    def _fits(self, split: str, device: torch.device) -> bool:
        if device.type != "cuda":
            return False
        examples = self.data.splits[split]
        if examples.x.dtype.kind == "S":  # file names
            return False
        size = examples.x.nbytes
        if examples.offsets is not None:
            size = len(examples) * int(examples.lengths.max()) * examples.x[:1].nbytes
        return size < RESIDENT_FRACTION * torch.cuda.get_device_properties(device).total_memory

    def _loader(self, split: str, train: bool) -> BatchLoader:
        trainer = self.trainer
        assert trainer is not None
        device = trainer.strategy.root_device
        return self.loader(split, train, device, trainer.global_rank, trainer.world_size)

    def train_dataloader(self) -> BatchLoader:
        """Return the training loader at the start of the current epoch."""
        assert self.trainer is not None
        loader = self._loader("train", True)
        loader.set_epoch(self.trainer.current_epoch)
        return loader

    def val_dataloader(self) -> list[BatchLoader]:
        """Return the loaders of the evaluated splits."""
        return [self._loader(name, False) for name in self.evaluated]

    def statistics_batches(self, epoch: int, device: torch.device, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield `precise_stats` batches of an epoch's training, spread over it and not augmented.

        If padding is masked, they have mixed lengths with `bucket` too: the variances of long kernels depend on the
        length. Otherwise they would have more padding than the batches of training, which takes part in statistics.
        """
        loader = self.loader("train", True, device, rank, world).without_augmentation()
        lengths = None if self.experiment.masks_padding else loader.plan.lengths
        loader.plan = dataclasses.replace(loader.plan, limit=self.experiment.precise_stats, lengths=lengths)
        loader.set_epoch(epoch)
        return (batch.to(device, non_blocking=True) for batch in loader)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to a device."""
        return batch.to(device, non_blocking=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment a training batch."""
        if not self.augmented or self.trainer is None or not self.trainer.training:
            return batch
        return augment(batch, self.experiment, self.data)


def check_image_keys(experiment: Experiment, data: Prepared) -> list[str]:
    """Return the keys that augment batches; raise ValueError for a key that does not fit the data."""
    e, images = experiment, data.encoder == "image"
    changed = changed_keys(dataclasses.asdict(e), {})
    given = [name for name in AUGMENTATION_KEYS if name in changed]
    if wrong := [name for name in (SEQUENCE_KEYS if images else IMAGE_KEYS) if name in changed]:
        other, kind = ("sequences", "images") if images else ("images", "sequences")
        raise ValueError(f"{', '.join(wrong)} can only be used with {other}; {data.name} has {kind}")
    if given and (not data.has_images or data.pair or data.target == "positions"):
        where = "images, or all of their pixels in raster order, with a label for each"
        raise ValueError(f"{', '.join(given)} can only be used with {where}; {data.name} has other examples")
    if e.randaugment and not data.facts.get("files"):
        raise ValueError(f"randaugment needs image files; {data.name} has arrays")
    if (e.mixup or e.cutmix) and data.target != "class":
        raise ValueError(f"mixup and cutmix are for classes; {data.name} has target={data.target}")
    if e.rotate and len(set(data.image_size)) == 2:
        raise ValueError("rotate needs square images; {} has {} x {} pixels".format(data.name, *data.image_size))
    return given
