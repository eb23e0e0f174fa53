"""Speech Commands: classify the word in one second of audio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from .._utils.checks import check_choice
from .archives import read_members
from .audio_files import read_audio
from .base import Task, register_task
from .cache import Arrays, Built
from .download import Remote
from .errors import DataError, MissingData
from .packing import random_split
from .progress_callback import Progress

RATE = LENGTH = 16_000
TEN_WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
LISTS = {"validation_list.txt": "val", "testing_list.txt": "test"}
SPLITS = ("train", "val", "test")
RELEASE = "speech_commands_v0.02"
NOT_A_WORD = ("_", ".")  # prefixes of _background_noise_ and of hidden files
BLOCK = 256  # clips that are stored and freed together


@register_task("speech")
@dataclass(frozen=True)
class SpeechCommands(Task):
    """Speech Commands: 16,000 samples, of all words (35 in the release) or of ten.

    Preparing holds all clips in memory, about 4 GB for the whole release.

    Args:
        words: 35 for all words, split by the release's lists or, with three archives, by archive; shorter clips are
            padded with zeros. 10 for the ten-word task; shorter clips are left out, and the clips of each word are
            split into 70 % training, 15 % validation and 15 % test (S4's fractions, but not its draw by scikit-learn).
        normalise: "s4" for S4's normalisation, see `s4_normalisation`; "unit" for values from -1 to 1.
    """

    words: int = 35
    normalise: str = "s4"

    title = "Speech Commands: one second at 16 kHz, 35 or 10 words"
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            f"http://download.tensorflow.org/data/{RELEASE}.tar.gz",
            f"{RELEASE}.tar.gz",
            "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
            "sha256",
        ),
    )
    file_mib: ClassVar[int] = 16
    layout: ClassVar[str] = (
        f"Put {RELEASE}.tar.gz, from http://download.tensorflow.org/data/, there, or unpacked as {RELEASE}/ with a "
        f"folder per word, {' and '.join(LISTS)}; or train.zip, val.zip and test.zip, each with a folder per word, of "
        "WAV or FLAC files"
    )

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        if self.words not in (10, 35):
            raise ValueError(f"words must be 10 or 35; got {self.words!r}")
        check_choice("normalise", self.normalise, ("s4", "unit"))

    def sources(self) -> Sequence[Path]:
        """Return the folder, the archive or the three archives."""
        first = self._find_source(RELEASE, f"SpeechCommands/{RELEASE}", f"{RELEASE}.tar.gz", "train.zip")
        if first.name != "train.zip":
            return [first]
        paths = [first.with_name(f"{split}.zip") for split in SPLITS]
        if missing := [path.name for path in paths if not path.exists()]:
            raise MissingData(f"{first} exists, but {', '.join(missing)} beside it does not. {self.layout}")
        return paths

    def build(self, progress: Progress) -> Built:
        """Read all clips, then copy each into its split."""
        paths = self.sources()
        clips, short = Clips(), 0
        lists: dict[str, str] = {}
        for name, content, split in self._files(paths, lists):
            samples, changes = read_audio(content, name, RATE)
            if changes:  # the benchmark's scores hold for the samples of the release
                raise DataError(f"{name} is not a mono clip at {RATE:,} samples a second ({', '.join(changes)})")
            if len(samples) > LENGTH:
                raise DataError(f"{name} has {len(samples):,} samples; expected at most {LENGTH:,}")
            short += len(samples) < LENGTH
            if self.words == 35 or len(samples) == LENGTH:
                clips.add(clip_id(name), samples, split)
                if len(clips.names) % 1000 == 0:
                    progress(len(clips.names), None)
        classes = list(TEN_WORDS) if self.words == 10 else sorted({name.split("/")[0] for name in clips.names})
        parts = stratified_split(clips.names, classes) if self.words == 10 else clips.split_by_list(lists)
        labels = {split: [classes.index(clips.names[i].split("/")[0]) for i in part] for split, part in parts.items()}
        expected = set(classes) | (word_folders(paths[0]) if self.words == 35 else set())
        if empty := expected - {classes[label] for label in labels["train"]}:
            raise DataError(f"{paths[0]} has no training clip of {', '.join(sorted(empty))}")
        if not clips.names:
            raise DataError(f"{paths[0]} has no clips. {self.layout}")
        splits: dict[str, Arrays] = {
            name: {"x": x, "y": np.array(labels[name], np.int64)} for name, x in clips.take(parts).items()
        }
        facts = {"encoder": "values", "classes": classes, "length": LENGTH, "channels": 1, "sample_rate": RATE}
        facts["padded" if self.words == 35 else "left_out"] = short
        if self.normalise == "unit":
            return splits, facts | {"scale": 1 / 32768}
        return splits | {"all": s4_normalisation(splits["train"]["x"])}, facts

    def _files(self, paths: Sequence[Path], lists: dict[str, str]) -> Iterator[tuple[str, bytes, str | None]]:
        """Yield path, content and, if known from the archive, split of each clip; fill `lists` from the list files."""
        lists_read = set()
        for path in paths:
            for inner, content in read_members(path, self._wanted):
                file = PurePosixPath(inner).name
                if file in LISTS:
                    lists_read.add(file)
                    read_list(content, f"{path}/{inner}", LISTS[file], lists)
                elif "/" in inner:
                    yield f"{path}/{inner}", content, path.stem if len(paths) == 3 else None
                else:
                    raise DataError(f"{path}/{inner} is not in a folder; expected a folder for each word")
        missing = [file for file in LISTS if file not in lists_read]
        if len(paths) == 1 and self.words == 35 and missing:
            raise DataError(f"{paths[0]} has no {' and no '.join(missing)}, which list the clips of val and test")

    def _wanted(self, name: str) -> bool:
        path = PurePosixPath(name)
        if any(part.startswith(NOT_A_WORD) for part in path.parts):
            return False
        word = path.parts[-2] if len(path.parts) > 1 else None
        return path.name in LISTS or (
            path.suffix.lower() in (".wav", ".flac") and (self.words == 35 or word in TEN_WORDS)
        )


class Clips:
    """Clips in blocks that are freed one by one when split, so that memory never holds a second copy of all clips."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.splits: list[str | None] = []
        self.blocks: list[np.ndarray] = []

    def add(self, name: str, samples: np.ndarray, split: str | None) -> None:
        """Add a clip, padded with zeros on the right, and its split if that is known."""
        at = len(self.names) % BLOCK
        if at == 0:
            self.blocks.append(np.zeros((BLOCK, LENGTH, 1), np.int16))
        self.blocks[-1][at, : len(samples), 0] = samples
        self.names.append(name)
        self.splits.append(split)

    def split_by_list(self, lists: Mapping[str, str]) -> dict[str, list[int]]:
        """Return the clips of each split, sorted by name; clips in no list are for training."""
        parts: dict[str, list[int]] = {split: [] for split in SPLITS}
        for i in sorted(range(len(self.names)), key=self.names.__getitem__):
            parts[self.splits[i] or lists.get(self.names[i], "train")].append(i)
        return parts

    def take(self, parts: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Return the clips of each part and free their blocks."""
        out = {name: np.empty((len(part), LENGTH, 1), np.int16) for name, part in parts.items()}
        place = {i: (name, at) for name, part in parts.items() for at, i in enumerate(part)}
        for i in reversed(range(len(self.names))):
            if i in place:
                name, at = place[i]
                out[name][at] = self.blocks[-1][i % BLOCK]
            if i % BLOCK == 0:
                self.blocks.pop()
        return out


def clip_id(name: str) -> str:
    """Return word/clip of a path, without suffix: the lists name .wav files, which may have been converted to .flac."""
    path = PurePosixPath(name)
    return f"{path.parent.name}/{path.stem}"


def word_folders(path: Path) -> set[str]:
    """Return the names of the word folders in a folder; none for an archive, which has no empty folders."""
    if not path.is_dir():
        return set()
    return {p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith(NOT_A_WORD)}


def read_list(content: bytes, name: str, split: str, lists: dict[str, str]) -> None:
    """Add the clips of validation_list.txt or testing_list.txt to `lists`, which maps clips to splits."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.strip().count("/") != 1:
            raise DataError(f"{name} line {number}: expected word/clip.wav; got {line.strip()!r}")
        clip = clip_id(line.strip())
        if lists.setdefault(clip, split) != split:
            raise DataError(f"{name} line {number}: {line.strip()} is also in the other list")


def stratified_split(names: Sequence[str], classes: Sequence[str]) -> dict[str, list[int]]:
    """Return random splits of 70, 15 and 15 % of the clips of each word; word k is split with seed k."""
    parts: dict[str, list[int]] = {split: [] for split in SPLITS}
    for k, word in enumerate(classes):
        clips = sorted((i for i, name in enumerate(names) if name.split("/")[0] == word), key=names.__getitem__)
        for split, chosen in zip(SPLITS, random_split(len(clips), (0.7, 0.15, 0.15), k), strict=True):
            parts[split] += [clips[j] for j in chosen]
    return parts


def s4_normalisation(x: np.ndarray) -> Arrays:
    """Return S4's scale and shift, float32 (length, 1).

    Samples are divided by 2**15 twice, then normalised by mean and standard deviation of the training clips at each
    time index: (x - mean) / (std + 1e-5). As std is smaller than 1e-5, values are of the order of 0.2, not 1.
    """
    total, squares = np.zeros(x.shape[1:]), np.zeros(x.shape[1:])
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK].astype(np.float64)
        total += block.sum(0)
        squares += np.square(block, out=block).sum(0)  # integers below 2**53: exact
    mean = total / len(x)
    variance = (squares - total * mean) / max(1, len(x) - 1)
    std = np.sqrt(variance.clip(min=0)) / 2**30 + 1e-5
    return {"scale": (1 / (2**30 * std)).astype(np.float32), "shift": (-mean / (2**30 * std)).astype(np.float32)}
