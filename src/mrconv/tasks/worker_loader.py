"""Batches read from disk through torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .base import Prepared
from .cache import bounds
from .errors import DataError
from .imagenet import Augmentation, ImageFiles
from .loaders import Batch, BatchLoader, Normaliser, label_tensor
from .packing import pad


class _ArrayBatches(Dataset[Batch]):
    """A split of memory-mapped arrays as a torch data set, indexed by whole batches."""

    def __init__(self, loader: BatchLoader) -> None:
        self.split, self.plan, self.padded_length = loader.split, loader.plan, loader.padded_length
        self.cut_labels = loader.cut_labels
        self.labels, self.normalise = label_tensor(loader.split), Normaliser(loader.data)

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        batch = np.asarray(indices)
        local, split = self.plan.local(batch), self.split
        y = self.labels[torch.from_numpy(local)]
        if split.offsets is None:
            x = torch.from_numpy(np.ascontiguousarray(split.x[local]))
            return Batch(self.normalise(x), self.cut_labels(y, x))
        x, lengths = self._pad(split.x, split.offsets, local, batch)
        if split.x2 is None or split.offsets2 is None:
            return Batch(x, self.cut_labels(y, x), lengths)
        return Batch(x, y, lengths, *self._pad(split.x2, split.offsets2, local, batch))

    def _pad(self, x: np.ndarray, offsets: np.ndarray, local: np.ndarray, batch: np.ndarray) -> tuple[Tensor, Tensor]:
        starts, stops = bounds(offsets)
        length = self.padded_length(int((stops[batch] - starts[batch]).max()))
        starts, stops = starts[local], stops[local]
        return self.normalise(torch.from_numpy(pad(x, starts, stops, length))), torch.from_numpy(stops - starts)


class _ImageFileBatches(Dataset[Batch]):
    """A split of image files as a torch data set, indexed by whole batches of (B, 3, size, size)."""

    def __init__(self, loader: BatchLoader, train: bool, augment: Augmentation | None = None) -> None:
        self.plan = plan = loader.plan
        self.images = ImageFiles(loader.data, loader.split.name, train=train, seed=plan.seed, augment=augment)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        images, y = zip(*(self.images[int(i)] for i in self.plan.local(np.asarray(indices))), strict=True)
        return Batch(torch.stack(images), torch.tensor(y))


class _ReportedErrors(Dataset[Batch | DataError]):
    """A data set that returns errors in data: to one that is raised, a worker process would add its traceback."""

    def __init__(self, dataset: _ArrayBatches | _ImageFileBatches) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Sequence[int]) -> Batch | DataError:
        try:
            return self.dataset.__getitems__(indices)
        except DataError as error:
            return error


def _identity(batch: Any) -> Any:
    return batch


class WorkerLoader(BatchLoader):
    """Batches read by torch's DataLoader from the memory-mapped arrays or from image files.

    Args:
        workers: number of worker processes.
        pin_memory: return batches in pinned memory.
        augment: augmentation of `ImageFiles`.
    """

    def __init__(
        self,
        *args: Any,
        workers: int = 0,
        pin_memory: bool = False,
        augment: Augmentation | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.workers, self.pin_memory = workers, pin_memory
        self.dataset: _ArrayBatches | _ImageFileBatches = (
            _ImageFileBatches(self, self.plan.train, augment) if self.data.facts.get("files") else _ArrayBatches(self)
        )

    def without_augmentation(self) -> Self:
        """Return a copy with its own position and the same batches, whose images are centre crops."""
        loader = super().without_augmentation()
        if isinstance(self.dataset, _ImageFileBatches):
            loader.dataset = _ImageFileBatches(self, train=False)
        return loader

    def _load(self, batches: Sequence[np.ndarray]) -> Iterator[Batch]:
        if isinstance(self.dataset, _ImageFileBatches):
            self.dataset.images.set_epoch(self.epoch)
        # without a generator DataLoader draws from torch's global one, which would change dropout
        generator = torch.Generator().manual_seed(self.plan.seed)
        loader = DataLoader(
            _ReportedErrors(self.dataset),
            batch_sampler=[[int(i) for i in batch] for batch in batches],
            collate_fn=_identity,
            num_workers=self.workers,
            pin_memory=self.pin_memory,
            generator=generator,
        )
        for batch in _without_lost_workers(loader):
            if isinstance(batch, DataError):
                raise batch
            yield batch


def _without_lost_workers(loader: DataLoader[Batch | DataError]) -> Iterator[Batch | DataError]:
    """Yield the batches; raise DataError if a worker process is killed."""
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{reason}: was it killed for lack of memory? Set fewer workers, or workers=0") from error


def data_loader(data: Prepared, split: str, batch_size: int, **options: Any) -> WorkerLoader:
    """Return a loader that reads from disk; options are those of `BatchLoader` and `WorkerLoader`."""
    return WorkerLoader(data, split, batch_size, **options)
