"""Batches of a split: through torch's DataLoader, or made on the device that holds the whole split.

Both go by the same plan: which rows make up each batch follows from the seed and the epoch alone. In training every
process takes its share of each global batch and what does not fill one is left out; in evaluation every row comes
exactly once, over all processes. Both can stop within an epoch and go on there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .base import Prepared, Split
from .imagenet import Change, ImageFiles

WINDOW = 50  # batches among which rows of about the same length are put together
PIECE = 4096  # rows that are unpacked at a time


@dataclass(frozen=True)
class Batch:
    """Inputs (B, L) of tokens, (B, L, C) of values or (B, C, H, W) of pictures, and labels (B,).

    Where rows differ in length there are lengths (B,); in a pair, second inputs.
    """

    x: Tensor
    y: Tensor
    lengths: Tensor | None = None
    x2: Tensor | None = None
    lengths2: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return it on a device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{k: v.to(device, non_blocking=non_blocking) for k, v in moved.items() if isinstance(v, Tensor)}
        )

    def pin_memory(self) -> Batch:
        """Return it in pinned memory, as DataLoader asks for."""
        return replace(
            self, **{f.name: v.pin_memory() for f in fields(self) if (v := getattr(self, f.name)) is not None}
        )

    def __len__(self) -> int:
        return len(self.y)


class Plan:
    """Which rows make up each batch, for one of `world` processes.

    With `lengths`, batches are of rows of similar length; those of training are still other ones in every epoch.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        train: bool,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        lengths: np.ndarray | None = None,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world:
            raise ValueError(f"need batch_size >= 1 and 0 <= rank < world; got {batch_size}, {rank} and {world}")
        if train and rows < batch_size * world:
            raise ValueError(
                f"{rows} training rows do not fill one batch of {batch_size} in {world} process(es): lower batch_size"
            )
        self.rows, self.batch_size, self.train, self.seed = rows, batch_size, train, seed
        self.rank, self.world, self.lengths = rank, world, lengths

    def __len__(self) -> int:
        if self.train:
            return self.rows // (self.batch_size * self.world)
        return -(-len(range(self.rank, self.rows, self.world)) // self.batch_size)

    def batches(self, epoch: int) -> list[np.ndarray]:
        """Return the row numbers of every batch of this process."""
        return [self.own(rows) for rows in self.joint(epoch)]

    def own(self, rows: np.ndarray) -> np.ndarray:
        """Return this process's share of a batch of training, which all of them step through together."""
        return rows[self.rank :: self.world] if self.train else rows

    def joint(self, epoch: int) -> list[np.ndarray]:
        """Return the row numbers of every batch; of training, those of all processes."""
        if not self.train:
            own = np.arange(self.rank, self.rows, self.world)
            if self.lengths is not None:
                own = own[np.argsort(self.lengths[own], kind="stable")]
            return [own[i : i + self.batch_size] for i in range(0, len(own), self.batch_size)]
        draw = np.random.default_rng([self.seed, epoch])
        order = draw.permutation(self.rows)
        size = self.batch_size * self.world
        if self.lengths is not None:
            windows = [order[i : i + WINDOW * size] for i in range(0, self.rows, WINDOW * size)]
            order = np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in windows])
        whole = order[: len(self) * size].reshape(len(self), size)
        if self.lengths is not None:
            whole = draw.permutation(whole)
        return list(whole)


class BatchLoader(ABC):
    """Batches of one split, epoch after epoch; each pass over it is one epoch.

    Args:
        data, split: what to load.
        batch_size: rows per batch and process.
        train: shuffle, and drop what does not fill a batch; by default for the split "train".
        seed: of the shuffling.
        rank, world: this process among how many.
        bucket: put rows of similar length together.
        pad: "batch" to the longest row of the batch (in training, of all processes'), a number n to the next multiple
            of n (so that batches come in few shapes), "max" to the task's length, the same for all batches.
    """

    of_texts: ClassVar[bool] = False
    """Whether it makes windows of one long text, rather than batches of rows."""

    def __init__(
        self,
        data: Prepared,
        split: str,
        batch_size: int,
        *,
        train: bool | None = None,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        bucket: bool = False,
        pad: str | int = "batch",
    ) -> None:
        if split not in data.splits:
            raise ValueError(f"{data.name} has no split {split!r}; it has {', '.join(data.splits)}")
        if (data.encoder == "text") != self.of_texts:
            raise ValueError(f"{data.name} is {data.encoder}: WindowLoader is for texts, the others are for rows")
        if pad not in ("batch", "max") and (not isinstance(pad, int) or pad < 1):
            raise ValueError(f"pad must be 'batch', 'max' or a number of positions; got {pad!r}")
        self.data, self.split, self.pad = data, data.splits[split], pad
        lengths = self.split.lengths if bucket and self.split.offsets is not None else None
        train = split == "train" if train is None else train
        self.plan = Plan(data.rows(split, train), batch_size, train, seed, rank, world, lengths)
        self.epoch = self.position = 0

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of this epoch's batches; with the last one it stands at the beginning of the next epoch."""
        for batch in self._batches(self.plan.joint(self.epoch)[self.position :]):
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = self.epoch + 1, 0
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch."""
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return where it stands: the batch last yielded counts as done."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.plan.seed, "batches": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where another one stood."""
        for name, own in (("seed", self.plan.seed), ("batches", len(self))):
            if state[name] != own:
                raise ValueError(f"cannot go on: {name} was {state[name]} and is {own}")
        self.epoch, self.position = state["epoch"], state["position"]

    def width(self, longest: int) -> int:
        """Return what a batch is padded to whose longest row is this long."""
        if self.pad == "max":
            return self.data.length
        step = 1 if self.pad == "batch" else int(self.pad)
        return min(-(-max(1, longest) // step) * step, max(longest, self.data.length))

    @abstractmethod
    def _batches(self, rows: Sequence[np.ndarray]) -> Iterator[Batch]:
        """Make batches of what this process has of these rows, as wide as all of them need."""


def labels(split: Split) -> Tensor:
    """Return all labels: int64, or float32 where they are numbers to predict."""
    return torch.from_numpy(np.array(split.y)).to(torch.float32 if split.y.dtype.kind == "f" else torch.int64)


def _scaling(data: Prepared, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    return tuple(torch.as_tensor(np.array(z, np.float32), device=device) for z in (data.scale, data.shift))  # type: ignore[return-value]


def _as_input(data: Prepared, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return stored rows of equal length as a model takes them; pictures have their channels first, in name only."""
    if data.encoder == "tokens":
        return x.long()
    x = x * scale + shift
    return x.permute(0, 3, 1, 2) if data.encoder == "image" else x


class _Rows(Dataset[Batch]):
    """A split as a torch data set, a whole batch at a time."""

    def __init__(self, loader: BatchLoader) -> None:
        self.data, self.split = loader.data, loader.split
        self.width = loader.width
        self.labels, (self.scale, self.shift) = labels(loader.split), _scaling(loader.data)
        self.own = loader.plan.own

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        joint = np.asarray(rows)
        index, split = self.own(joint), self.split
        y = self.labels[torch.from_numpy(index)]
        if split.offsets is None:
            x = torch.from_numpy(np.ascontiguousarray(split.x[index]))
            return Batch(_as_input(self.data, x, self.scale, self.shift), y)
        x, lengths = self._padded(split.x, split.offsets, index, joint)
        if split.x2 is None or split.offsets2 is None:
            return Batch(x, y, lengths)
        return Batch(x, y, lengths, *self._padded(split.x2, split.offsets2, index, joint))

    def _padded(self, x: np.ndarray, offsets: np.ndarray, rows: np.ndarray, joint: np.ndarray) -> tuple[Tensor, Tensor]:
        starts, stops = offsets[rows], offsets[rows + 1]
        lengths, longest = stops - starts, (offsets[joint + 1] - offsets[joint]).max()
        out = np.zeros((len(rows), self.width(int(longest))), np.int64)
        for row, start, stop in zip(out, starts, stops, strict=True):
            row[: stop - start] = x[start:stop]
        return torch.from_numpy(out), torch.from_numpy(lengths)


class _Files(Dataset[Batch]):
    """A split of pictures in files as a torch data set, a whole batch at a time: (B, 3, size, size)."""

    def __init__(self, loader: BatchLoader, change: Change | None = None) -> None:
        self.plan = plan = loader.plan
        self.images = ImageFiles(loader.data, loader.split.name, train=plan.train, seed=plan.seed, change=change)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        images, y = zip(*(self.images[int(row)] for row in self.plan.own(np.asarray(rows))), strict=True)
        return Batch(torch.stack(images), torch.tensor(y))


def _as_it_is(batch: Any) -> Any:
    return batch


class WorkerLoader(BatchLoader):
    """Batches by torch's DataLoader, read from the memory-mapped arrays, or from files, by `workers` processes.

    `change` is what `ImageFiles` takes, for pictures in files.
    """

    def __init__(
        self,
        *args: Any,
        workers: int = 0,
        pin_memory: bool = False,
        change: Change | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.dataset: _Rows | _Files = _Files(self, change) if self.data.facts.get("files") else _Rows(self)
        self.workers, self.pin_memory = workers, pin_memory

    def _batches(self, rows: Sequence[np.ndarray]) -> Iterator[Batch]:
        if isinstance(self.dataset, _Files):
            self.dataset.images.set_epoch(self.epoch)
        sampler = [[int(i) for i in each] for each in rows]
        yield from DataLoader(
            self.dataset,
            batch_sampler=sampler,
            collate_fn=_as_it_is,
            num_workers=self.workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator().manual_seed(
                self.plan.seed
            ),  # else it draws from torch's own, and shifts dropout
        )


def data_loader(data: Prepared, split: str, batch_size: int, **options: Any) -> WorkerLoader:
    """Return a loader that reads from disk; options are those of `BatchLoader` and `WorkerLoader`."""
    return WorkerLoader(data, split, batch_size, **options)


class ResidentLoader(BatchLoader):
    """Batches gathered on the device that holds the whole split, as small as it is stored: no worker, no wait."""

    def __init__(self, *args: Any, device: torch.device | str = "cuda", **options: Any) -> None:
        super().__init__(*args, **options)
        split, self.device = self.split, torch.device(device)
        if split.x.dtype.kind not in "uif":
            raise ValueError(f"{self.data.name} is a list of files, which no device can hold: use data_loader")
        self.labels = labels(split).to(self.device)
        self.scale, self.shift = _scaling(self.data, self.device)
        self.first = self._resident(split.x, split.offsets)
        self.second = None if split.x2 is None else self._resident(split.x2, split.offsets2)

    def _resident(self, x: np.ndarray, offsets: np.ndarray | None) -> tuple[Tensor, np.ndarray | None, Tensor | None]:
        """Return the rows, padded, on the device; their lengths there and here."""
        if offsets is None:
            return torch.from_numpy(np.array(x)).to(self.device), None, None
        lengths = np.diff(offsets)
        width = int(lengths.max())
        rows = torch.zeros(len(lengths), width, dtype=torch.from_numpy(x[:0].copy()).dtype, device=self.device)
        for i in range(0, len(lengths), PIECE):
            here = lengths[i : i + PIECE]
            padded = np.zeros((len(here), width), x.dtype)
            padded[np.arange(width) < here[:, None]] = x[offsets[i] : offsets[i + len(here)]]
            rows[i : i + len(here)] = torch.from_numpy(padded)
        return rows, lengths, torch.from_numpy(lengths).to(self.device)

    def _batches(self, rows: Sequence[np.ndarray]) -> Iterator[Batch]:
        if not rows:
            return
        own = [self.plan.own(each) for each in rows]
        every = torch.from_numpy(np.concatenate(own)).to(self.device)
        for joint, index in zip(rows, every.split([len(each) for each in own]), strict=True):
            y = self.labels.index_select(0, index)
            x, lengths = self._gathered(self.first, joint, index)
            if self.second is None:
                yield Batch(x, y, lengths)
            else:
                yield Batch(x, y, lengths, *self._gathered(self.second, joint, index))

    def _gathered(
        self, held: tuple[Tensor, np.ndarray | None, Tensor | None], joint: np.ndarray, index: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        rows, known, lengths = held
        x = rows.index_select(0, index)
        if known is None or lengths is None:
            return _as_input(self.data, x, self.scale, self.shift), None
        width = self.width(int(known[joint].max()))
        x = x[:, :width] if width <= x.shape[1] else torch.nn.functional.pad(x, (0, width - x.shape[1]))
        return x.long(), lengths.index_select(0, index)
