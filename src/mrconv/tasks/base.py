"""What a task is: options, source files, and the arrays that a model sees of them."""

from __future__ import annotations

import dataclasses
import difflib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from .._utils.registry import Registry
from .cache import Arrays, Built, cached, fingerprint, key, load
from .download import Progress, Remote, download
from .errors import DataError, MissingData

Count = Callable[[int, int | None], None]
"""Called with how much of how much is done while a task is prepared."""


def nothing(done: int, total: int | None) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Split:
    """A part of a task's data, as stored.

    Rows are `x` (n, ...) or, if they differ in length, all of them one after the other in `x` and where each begins in
    `offsets` (n + 1,). `y` (n,) are the labels. Pairs of sequences have `x2` and `offsets2` too.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray | None = None
    x2: np.ndarray | None = None
    offsets2: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def lengths(self) -> np.ndarray:
        """Length of every row; of a pair, the longer one's."""
        if self.offsets is None:
            return np.full(len(self), self.x.shape[1] if self.x.ndim > 1 else 1)
        lengths = np.diff(self.offsets)
        return lengths if self.offsets2 is None else np.maximum(lengths, np.diff(self.offsets2))

    def row(self, i: int) -> np.ndarray:
        """Return row i as stored."""
        return self.x[i] if self.offsets is None else self.x[self.offsets[i] : self.offsets[i + 1]]

    def row2(self, i: int) -> np.ndarray:
        """Return the second sequence of pair i as stored."""
        assert self.x2 is not None
        assert self.offsets2 is not None
        return self.x2[self.offsets2[i] : self.offsets2[i + 1]]


@dataclass(frozen=True)
class Prepared:
    """A task's data, ready to load.

    `encoder` says what rows are: "tokens" (of `vocabulary` symbols, 0 the padding), "values" (length, channels) or
    "image" (height, width, channels). Values and images are stored as integers; a model sees x * scale + shift. A
    "text" is one long row of tokens, and its labels the tokens that follow: loaders make windows of it.
    """

    name: str
    encoder: str
    classes: tuple[str, ...]
    length: int
    splits: Mapping[str, Split]
    vocabulary: tuple[str, ...] = ()
    channels: int = 1
    scale: np.ndarray | float = 1.0
    shift: np.ndarray | float = 0.0
    pair: bool = False
    metric: str = "accuracy"
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: Path | None = None

    def rows(self, split: str, train: bool) -> int:
        """Return how many rows an epoch has; of a text, windows, as many as fit behind any offset in training."""
        stored = len(self.splits[split])
        if self.encoder != "text":
            return stored
        if train:
            return self.facts["passes"] * ((stored - self.length + 1) // self.length)
        return -(-stored // (self.length - self.facts["context"]))

    def decimated(self, rate: float) -> Prepared:
        """Return the data as sampled at a lower rate: every second sample at 0.5, without a filter."""
        step = round(1 / rate) if 0 < rate <= 1 else 0
        if abs(step * rate - 1) > 1e-6:
            raise ValueError(f"rate must be 1, 1/2, 1/3, ...; got {rate!r}")
        if self.encoder != "values":
            raise ValueError(f"{self.name} has no sampling rate: its rows are {self.encoder}")
        splits = {name: dataclasses.replace(split, x=split.x[:, ::step]) for name, split in self.splits.items()}
        thin = [z[::step] if isinstance(z, np.ndarray) and z.ndim == 2 else z for z in (self.scale, self.shift)]
        facts = {name: z for name, z in self.facts.items() if name not in ("height", "width")}  # no picture any more
        if "sampling_rate" in facts:
            facts |= {"sampling_rate": facts["sampling_rate"] / step, "step": step * facts.get("step", 1)}
        length = -(-self.length // step)
        return dataclasses.replace(self, splits=splits, length=length, scale=thin[0], shift=thin[1], facts=facts)


@dataclass(frozen=True)
class Task(ABC):
    """One benchmark. Fields are its options; all but the folders decide what is in the cache.

    A subclass says which files it needs (`sources`) and makes arrays of them (`build`): by split, those that `Split`
    has; and facts, among them `encoder`, `classes`, `length` and whatever else of `Prepared` is not as usual.
    """

    data_dir: Path = Path("data")
    cache_dir: Path | None = None

    name: ClassVar[str]
    title: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    """What its models are scored by: one of `mrconv.training.scores`."""
    remotes: ClassVar[tuple[Remote, ...]] = ()
    layout: ClassVar[str] = ""
    """Where the files are looked for, and where they are to be had: the rest of the message when they are not there."""

    @abstractmethod
    def sources(self) -> Sequence[Path]:
        """Return the files and folders the data is made from, none if it is generated; MissingData if one is absent."""

    @abstractmethod
    def build(self, progress: Count) -> Built:
        """Make the arrays."""

    def prepare(self, progress: Count = nothing) -> Prepared:
        """Return the data; what is not in the cache yet is read or generated and put there."""
        self.check()
        folder = cached(self.folder(), lambda: self._checked(self.build(progress)))
        splits, meta = load(folder)
        known: dict[str, Any] = {name: tuple(z) if isinstance(z, list) else z for name, z in meta.items()}
        known |= splits.pop("all", {})  # scale and shift, where they are arrays
        known["splits"] = {name: Split(name, **splits[name]) for name in meta["splits"]}
        return Prepared(name=self.name, metric=self.metric, folder=folder, **known)

    def check(self) -> None:  # noqa: B027
        """Refuse options that make no sense."""

    def folder(self) -> Path:
        """Return where the prepared arrays are, or will be."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in NOT_IN_KEY}
        root = self.cache_dir or self.data_dir / "cache"
        return root / f"{self.name}-{key([self.name, options, fingerprint(self.sources())])}"

    def download(self, progress: Progress | None = None) -> list[Path]:
        """Fetch the files from where their publisher has them."""
        if not self.remotes:
            raise DataError(f"{self.name} has no stable public address to download from. {self.layout}")
        return [download(remote, self.data_dir, progress) for remote in self.remotes]

    def _checked(self, built: Built) -> Built:
        """Add what every task's meta data holds; find arrays that do not belong together before they are stored."""
        splits, facts = built
        known = {f.name for f in dataclasses.fields(Prepared)}
        meta = {name: facts[name] for name in facts if name in known}
        meta["facts"] = {name: facts[name] for name in facts if name not in known}
        meta["splits"] = [name for name in splits if name != "all"]
        for name in meta["splits"]:
            check_split(self.name, name, splits[name], len(facts["classes"]))
        return splits, meta

    def _first(self, *candidates: str) -> Path:
        """Return the first of these that is there, under the data folder or under its folder of the task's name."""
        roots = [self.data_dir, self.data_dir / self.name]
        for root in roots:
            for candidate in candidates:
                if (root / candidate).exists():
                    return root / candidate
        raise MissingData(
            f"{self.name}: none of {', '.join(candidates)} is in {' or '.join(map(str, roots))}. {self.layout}"
        )


_Class = TypeVar("_Class", bound=type[Task])
NOT_IN_KEY = {"data_dir", "cache_dir"}


def check_split(task: str, split: str, arrays: Arrays, classes: int) -> None:
    """Refuse a split that is empty, whose arrays differ in number of rows, or with labels out of range."""
    y, x, offsets = arrays["y"], arrays["x"], arrays.get("offsets")
    if len(y) == 0:
        raise DataError(f"{task}: the {split} split has no example")
    rows = len(x) if offsets is None else len(offsets) - 1
    if rows != len(y):
        raise DataError(f"{task}: the {split} split has {rows} rows and {len(y)} labels")
    if classes and (y.min() < 0 or y.max() >= classes):
        bad = int(np.flatnonzero((y < 0) | (y >= classes))[0])
        raise DataError(f"{task}: {split} row {bad} has label {y[bad]}; there are {classes} classes")


TASKS: Registry[Task] = Registry("task")
task_names = TASKS.names
task_class = TASKS.get


def register_task(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: make a task known by a name."""

    def register(cls: _Class) -> _Class:
        cls.name = name
        return TASKS.register(name)(cls)

    return register


def task(name: str, data_dir: str | Path | None = None, **options: Any) -> Task:
    """Return a task; its files are in data_dir, by default in $MRCONV_DATA or else in ./data."""
    cls = task_class(name)
    known = [f.name for f in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{name} has no option {option!r}; {hint}it has {', '.join(known)}")
    return cls(Path(data_dir or os.environ.get("MRCONV_DATA") or "data"), **options)
