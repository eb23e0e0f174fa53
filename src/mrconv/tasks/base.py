"""The interface of a task: options, source files, and the arrays prepared from them."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from .._utils.registry import Registry
from .._utils.suggest import closest
from .cache import (
    DAMAGED_CACHE,
    REMOVE_CACHE,
    Built,
    bounds,
    build_once,
    cache_key,
    check_split,
    fingerprint,
    is_complete,
    load_arrays,
)
from .download import Remote, download
from .errors import DataError, MissingData
from .normalisation import normalisation
from .packing import pack, pad
from .progress_callback import Progress, no_progress
from .reading import MAX_FILE_MIB, limited, reading


@dataclass(frozen=True)
class Split:
    """One split of a task's data, as stored.

    Args:
        name: name of the split.
        x: examples (n, ...); sequences of different lengths are concatenated, bounded by `offsets`.
        y: classes (n,); for other targets 0 and 1 (n, classes), values (n, values) or classes of positions (n, length).
        offsets: boundaries (n + 1,) of the sequences in `x`, or the start and stop of each, (n, 2), if they overlap.
        x2, offsets2: the second sequences of pairs.
        names: names of custom examples (n,) in their files, as UTF-8.
        origins: for windows, the number (n,) of the sequence that each was cut from.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray | None = None
    x2: np.ndarray | None = None
    offsets2: np.ndarray | None = None
    names: np.ndarray | None = None
    origins: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def lengths(self) -> np.ndarray:
        """Length of every example; for a pair, the length of the longer sequence."""
        if self.offsets is None:
            return np.full(len(self), self.x.shape[1] if self.x.ndim > 1 else 1)
        starts, stops = bounds(self.offsets)
        lengths = stops - starts
        return lengths if self.offsets2 is None else np.maximum(lengths, np.diff(self.offsets2))

    def example(self, i: int) -> np.ndarray:
        """Return example i as stored; for a pair, its first sequence."""
        if self.offsets is None:
            return self.x[i]
        starts, stops = bounds(self.offsets)
        return self.x[starts[i] : stops[i]]

    def padded(self, length: int) -> np.ndarray:
        """Return sequences (n, length, ...) padded with zeros."""
        if self.offsets is not None:
            return pad(self.x, *bounds(self.offsets), length)
        return np.pad(self.x, ((0, 0), (0, length - self.x.shape[1]), *[(0, 0)] * (self.x.ndim - 2)))

    def second(self, i: int) -> np.ndarray:
        """Return the second sequence of pair i as stored."""
        assert self.x2 is not None
        assert self.offsets2 is not None
        return self.x2[self.offsets2[i] : self.offsets2[i + 1]]


@dataclass(frozen=True)
class Prepared:
    """A task's prepared data.

    Args:
        name: name of the task.
        encoder: kind of the examples: "tokens" (ids into `vocabulary`, 0 is padding), "values" (length, channels),
            "image" (height, width, channels), or "text": one long sequence of tokens whose labels are the next tokens,
            which loaders cut into windows.
        classes: names of the classes, or of the values.
        length: maximum length of an example.
        splits: splits by name.
        vocabulary: symbols by token id.
        channels: number of channels of values and images.
        scale, shift: values and images are stored as integers; a model sees x * scale + shift.
        pair: whether examples are pairs of sequences.
        metric: score of the task's models, one of `mrconv.training.scores`.
        target: what models predict: "class", "labels", "values" or "positions"; see `mrconv.tasks.custom`.
        facts: other properties, such as the sampling rate.
        folder: folder of the arrays.
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
    target: str = "class"
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: Path | None = None

    def examples_per_epoch(self, split: str, train: bool) -> int:
        """Return the number of examples in an epoch; for a text, the number of windows."""
        stored = len(self.splits[split])
        if self.encoder != "text":
            return stored
        if train:  # as many windows as fit after any offset
            return self.facts["passes"] * ((stored - self.length + 1) // self.length)
        return -(-stored // (self.length - self.facts["context"]))

    @property
    def has_images(self) -> bool:
        """Whether the examples are images, as such or as sequences of their pixels in raster order."""
        return self.encoder == "image" or "height" in self.facts

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        if "height" in self.facts:
            return self.facts["height"], self.facts["width"]
        return self.facts["size"], self.facts["size"]

    def decimated(self, rate: float) -> Prepared:
        """Return the data at a lower sampling rate: 0.5 keeps every second sample, without a filter."""
        step = round(1 / rate) if 0 < rate <= 1 else 0
        if abs(step * rate - 1) > 1e-6:
            raise ValueError(f"rate must be 1, 1/2, 1/3, ...; got {rate!r}")
        if self.encoder != "values":
            raise ValueError(f"{self.name} has no sampling rate: its examples are {self.encoder}")
        splits = {}
        for name, split in self.splits.items():
            x: dict[str, Any] = {"x": split.x[:, ::step]}
            if split.offsets is not None:
                x = pack([split.example(i)[::step] for i in range(len(split))], split.x.dtype)
            y = split.y[:, ::step] if self.target == "positions" else split.y
            splits[name] = dataclasses.replace(split, y=y, **x)
        scale, shift = (z[::step] if isinstance(z, np.ndarray) and z.ndim == 2 else z for z in (self.scale, self.shift))
        facts = {name: z for name, z in self.facts.items() if name not in ("height", "width")}  # no longer an image
        if "sample_rate" in facts:
            facts |= {"sample_rate": facts["sample_rate"] / step, "step": step * facts.get("step", 1)}
        if "hop" in facts:
            facts["hop"] = max(1, round(facts["hop"] / step))
        length = -(-self.length // step)
        return dataclasses.replace(self, splits=splits, length=length, scale=scale, shift=shift, facts=facts)

    def without_lengths(self) -> Prepared:
        """Return values padded with zeros to one length, normalised with the zeros.

        This is the data of models that were trained without lengths.
        """
        if not self.facts.get("lengths"):
            return self
        splits = {
            name: dataclasses.replace(split, x=split.padded(self.length), offsets=None)
            for name, split in self.splits.items()
        }
        scale, shift = normalisation(splits["train"].x)
        facts = {name: z for name, z in self.facts.items() if name != "lengths"}
        return dataclasses.replace(self, splits=splits, scale=scale, shift=shift, facts=facts)


@dataclass(frozen=True)
class Task(ABC):
    """A benchmark task. Its fields are its options; all but the folders are part of the cache key.

    A subclass lists its source files (`sources`) and builds arrays from them (`build`): the arrays of `Split` for each
    split, and a dictionary with `encoder`, `classes`, `length` and all fields of `Prepared` that are not the default.
    """

    data_dir: Path = Path("data")
    cache_dir: Path | None = None
    max_file_mib: int = dataclasses.field(default=0, kw_only=True)
    """Largest size of a source file, or of a file in an archive, decompressed; 0 stands for `file_mib`."""

    name: ClassVar[str]
    title: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    """Score of the task's models: one of `mrconv.training.scores`."""
    file_mib: ClassVar[int] = MAX_FILE_MIB
    """What the task's files need, in MiB."""
    remotes: ClassVar[tuple[Remote, ...]] = ()
    version: ClassVar[int] = 1
    """A larger number rebuilds caches, because `build` returns other arrays than before."""
    layout: ClassVar[str] = ""
    """The expected files and where to get them; ends the error message if files are missing."""

    @abstractmethod
    def sources(self) -> Sequence[Path]:
        """Return the source files and folders, none for generated data; raise MissingData if one does not exist."""

    @abstractmethod
    def build(self, progress: Progress) -> Built:
        """Read or generate the arrays."""

    def prepare(self, progress: Progress = no_progress) -> Prepared:
        """Return the data from the cache, building it first if needed."""
        self.check()
        if self.max_file_mib < 0:
            raise ValueError(f"max_file_mib must be 0, for what {self.name} needs, or more; got {self.max_file_mib}")
        with limited(self.max_file_mib or self.file_mib):
            folder = build_once(self.cache_folder(), lambda: self._with_metadata(self.build(progress)))
        return self.load(folder)

    def load(self, folder: Path) -> Prepared:
        """Return the prepared data of a folder; raise DataError if it is damaged."""
        splits, metadata = load_arrays(folder)
        with reading(folder, DAMAGED_CACHE, REMOVE_CACHE):
            fields: dict[str, Any] = {name: tuple(z) if isinstance(z, list) else z for name, z in metadata.items()}
            if "sampling_rate" in fields["facts"]:  # the former name, in older caches
                fields["facts"]["sample_rate"] = fields["facts"].pop("sampling_rate")
            fields |= splits.pop("all", {})  # scale and shift, where they are arrays
            fields["splits"] = {name: Split(name, **splits[name]) for name in metadata["splits"]}
            for name in fields["splits"]:
                check_split(self.name, name, splits[name], fields, ValueError)
            return Prepared(name=self.name, folder=folder, **({"metric": self.metric} | fields))

    def check(self) -> None:  # noqa: B027
        """Raise ValueError for invalid options."""

    def cache_root(self) -> Path:
        """Return the folder of all prepared data."""
        return self.cache_dir or self.data_dir / "cache"

    def cache_folder(self) -> Path:
        """Return the folder of the prepared arrays, which may not exist yet.

        Its name depends on the options and the source files. Where these are missing, it is the folder that
        `packed_data.unpack` created for the same options.
        """
        try:
            sources = fingerprint(self.sources())
        except MissingData:
            if is_complete(self.unpacked_folder()):
                return self.unpacked_folder()
            raise
        version = [self.version] if self.version > 1 else []
        return self.cache_root() / f"{self.name}-{cache_key([self.name, self.options(), sources, *version])}"

    def unpacked_folder(self) -> Path:
        """Return the folder of arrays that were prepared on another machine with the same options."""
        return self.cache_root() / f"{self.name}-{cache_key([self.name, self.options(), 'unpacked'])}"

    def options(self) -> dict[str, Any]:
        """Return the options that determine the arrays, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in NOT_IN_KEY}

    def is_prepared(self) -> bool:
        """Return whether the cache holds the data; raise MissingData if a source file does not exist."""
        return is_complete(self.cache_folder())

    def download(self, progress: Progress = no_progress) -> list[Path]:
        """Download the source files from their publisher."""
        if not self.remotes:
            raise DataError(f"{self.name} has no stable public address to download from. {self.layout}")
        return [download(remote, self.data_dir, progress) for remote in self.remotes]

    def _with_metadata(self, built: Built) -> Built:
        """Check the arrays of each split and separate fields of `Prepared` from other facts."""
        splits, facts = built
        fields = {f.name for f in dataclasses.fields(Prepared)}
        metadata = {name: facts[name] for name in facts if name in fields}
        metadata["facts"] = {name: facts[name] for name in facts if name not in fields}
        metadata["splits"] = [name for name in splits if name != "all"]
        where = ", ".join([self.name, *map(str, self.sources()[:3])])
        for name in metadata["splits"]:
            check_split(where, name, splits[name], facts)
        return splits, metadata

    def _find_source(self, *candidates: str) -> Path:
        """Return the first candidate that exists in the data folder or in its subfolder named after the task."""
        roots = [self.data_dir, self.data_dir / self.name]
        for root in roots:
            for candidate in candidates:
                if (root / candidate).exists():
                    return root / candidate
        raise MissingData(
            f"{self.name}: none of {', '.join(candidates)} exists in {' or '.join(map(str, roots))}. {self.layout}"
        )


_Class = TypeVar("_Class", bound=type[Task])
NOT_IN_KEY = {"data_dir", "cache_dir", "max_file_mib"}


TASKS: Registry[Task] = Registry("task")
task_names = TASKS.names
task_class = TASKS.get


def register_task(name: str) -> Callable[[_Class], _Class]:
    """Register a task class under a name (class decorator)."""

    def register(cls: _Class) -> _Class:
        if "rate" in (field.name for field in dataclasses.fields(cls)):
            raise ValueError(
                f"task {name}: an option cannot be called rate, because task.rate sets the experiment's rate; "
                "samples a second are called sample_rate"
            )
        cls.name = name
        return TASKS.register(name)(cls)

    return register


def task(name: str, data_dir: str | Path | None = None, **options: Any) -> Task:
    """Return a task by name; its files are in data_dir, by default $MRCONV_DATA or else ./data."""
    cls = task_class(name)
    fields = [f.name for f in dataclasses.fields(cls)]
    for option in options:
        if option not in fields:
            hint = closest(option, fields) or "."
            raise ValueError(f"{name} has no option {option!r}{hint} Its options are {', '.join(fields)}")
    return cls(Path(data_dir or os.environ.get("MRCONV_DATA") or "data"), **options)
