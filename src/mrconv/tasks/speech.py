"""Speech Commands: which word is said in one second of sound?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from .archives import members
from .audio_files import read_audio
from .base import Count, Task, register_task
from .cache import Arrays, Built
from .download import Remote
from .errors import DataError, MissingData
from .packing import random_parts

RATE = LENGTH = 16_000
TEN = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
LISTS = {"validation_list.txt": "val", "testing_list.txt": "test"}
SPLITS = ("train", "val", "test")
RELEASE = "speech_commands_v0.02"
NO_WORD = ("_", ".")  # _background_noise_, and what file managers leave
BLOCK = 256  # clips


@register_task("speech")
@dataclass(frozen=True)
class SpeechCommands(Task):
    """Speech Commands: 16,000 samples, of all words (35 in the release) or of ten.

    `words` 35: all words that are there, split by the release's lists (or by archive, if there are three); shorter
    clips are padded with zeros. `words` 10: the ten-word task; shorter clips are left out, and of each word 70 % are
    for training, 15 % each for validation and test (S4's fractions; not its draw, which is scikit-learn's).
    `normalise` "s4": as S4 does, see `s4_scaling`; "unit": from -1 to 1.
    Preparing needs the memory of all clips, about 4 GB for the whole release.
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
    layout: ClassVar[str] = (
        f"Expected is {RELEASE}.tar.gz, from http://download.tensorflow.org/data/, or unpacked as {RELEASE}/ with a "
        f"folder per word, {' and '.join(LISTS)}; or train.zip, val.zip and test.zip, each with a folder per word, of "
        "WAV or FLAC files"
    )

    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.words not in (10, 35):
            raise ValueError(f"words must be 10 or 35; got {self.words!r}")
        if self.normalise not in ("s4", "unit"):
            raise ValueError(f"normalise must be 's4' or 'unit'; got {self.normalise!r}")

    def sources(self) -> Sequence[Path]:
        """Return the folder or the archive, or three archives."""
        first = self._first(RELEASE, f"SpeechCommands/{RELEASE}", f"{RELEASE}.tar.gz", "train.zip")
        if first.name != "train.zip":
            return [first]
        paths = [first.with_name(f"{split}.zip") for split in SPLITS]
        if missing := [path.name for path in paths if not path.exists()]:
            raise MissingData(f"{first} is there and {', '.join(missing)} beside it is not. {self.layout}")
        return paths

    def build(self, progress: Count) -> Built:
        """Read all clips, then put each in its place in its split."""
        paths = self.sources()
        clips, short = Clips(), 0
        lists: dict[str, str] = {}
        for name, content, split in self._files(paths, lists):
            row = read_audio(content, name, RATE)
            if len(row) > LENGTH:
                raise DataError(f"{name} has {len(row):,} samples; expected at most {LENGTH:,}")
            short += len(row) < LENGTH
            if self.words == 35 or len(row) == LENGTH:
                clips.add(identity(name), row, split)
                if len(clips.names) % 1000 == 0:
                    progress(len(clips.names), None)
        classes = list(TEN) if self.words == 10 else sorted({name.split("/")[0] for name in clips.names})
        parts = stratified(clips.names, classes) if self.words == 10 else clips.listed(lists)
        labels = {split: [classes.index(clips.names[i].split("/")[0]) for i in part] for split, part in parts.items()}
        expected = set(classes) | (words_of(paths[0]) if self.words == 35 else set())
        if empty := expected - {classes[label] for label in labels["train"]}:
            raise DataError(f"{paths[0]} has no training clip of {', '.join(sorted(empty))}")
        if not clips.names:
            raise DataError(f"{paths[0]} has no clips. {self.layout}")
        splits: dict[str, Arrays] = {
            name: {"x": x, "y": np.array(labels[name], np.int64)} for name, x in clips.split(parts).items()
        }
        facts = {"encoder": "values", "classes": classes, "length": LENGTH, "channels": 1, "sampling_rate": RATE}
        facts["padded" if self.words == 35 else "left_out"] = short
        if self.normalise == "unit":
            return splits, facts | {"scale": 1 / 32768}
        return splits | {"all": s4_scaling(splits["train"]["x"])}, facts

    def _files(self, paths: Sequence[Path], lists: dict[str, str]) -> Iterator[tuple[str, bytes, str | None]]:
        """Yield path and content of each clip, its split if the archive tells; put in `lists` what the lists say."""
        found = set()
        for path in paths:
            for inner, content in members(path, self._wanted):
                file = PurePosixPath(inner).name
                if file in LISTS:
                    found.add(file)
                    read_list(content, f"{path}/{inner}", LISTS[file], lists)
                elif "/" in inner:
                    yield f"{path}/{inner}", content, path.stem if len(paths) == 3 else None
                else:
                    raise DataError(f"{path}/{inner} is not in a folder: one for each word is expected")
        missing = [file for file in LISTS if file not in found]
        if len(paths) == 1 and self.words == 35 and missing:
            raise DataError(f"{paths[0]} has no {' and no '.join(missing)}: the clips that are not for training")

    def _wanted(self, name: str) -> bool:
        path = PurePosixPath(name)
        if any(part.startswith(NO_WORD) for part in path.parts):
            return False
        word = path.parts[-2] if len(path.parts) > 1 else None
        return path.name in LISTS or (path.suffix.lower() in (".wav", ".flac") and (self.words == 35 or word in TEN))


class Clips:
    """Clips as they come, in blocks that are freed one by one when split: all of them are in memory only once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.given: list[str | None] = []
        self.blocks: list[np.ndarray] = []

    def add(self, name: str, row: np.ndarray, split: str | None) -> None:
        """Add one, padded with zeros to the right; its split if that is known already."""
        at = len(self.names) % BLOCK
        if at == 0:
            self.blocks.append(np.zeros((BLOCK, LENGTH, 1), np.int16))
        self.blocks[-1][at, : len(row), 0] = row
        self.names.append(name)
        self.given.append(split)

    def listed(self, lists: Mapping[str, str]) -> dict[str, list[int]]:
        """Return the clips of each split in the order of their names; those in no list are for training."""
        parts: dict[str, list[int]] = {split: [] for split in SPLITS}
        for i in sorted(range(len(self.names)), key=self.names.__getitem__):
            parts[self.given[i] or lists.get(self.names[i], "train")].append(i)
        return parts

    def split(self, parts: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Return the clips of each part, and forget them here."""
        out = {name: np.empty((len(part), LENGTH, 1), np.int16) for name, part in parts.items()}
        place = {i: (name, row) for name, part in parts.items() for row, i in enumerate(part)}
        for i in reversed(range(len(self.names))):
            if i in place:
                name, row = place[i]
                out[name][row] = self.blocks[-1][i % BLOCK]
            if i % BLOCK == 0:
                self.blocks.pop()
        return out


def identity(name: str) -> str:
    """Return word/clip of a path, without its suffix: lists name .wav files, which may have become .flac."""
    path = PurePosixPath(name)
    return f"{path.parent.name}/{path.stem}"


def words_of(path: Path) -> set[str]:
    """Return the folders in a folder, of words; of an archive nothing, as it has no empty folder that would matter."""
    if not path.is_dir():
        return set()
    return {each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith(NO_WORD)}


def read_list(content: bytes, name: str, split: str, lists: dict[str, str]) -> None:
    """Add the clips of validation_list.txt or testing_list.txt to those known."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.strip().count("/") != 1:
            raise DataError(f"{name} line {number}: expected word/clip.wav; got {line.strip()!r}")
        clip = identity(line.strip())
        if lists.setdefault(clip, split) != split:
            raise DataError(f"{name} line {number}: {line.strip()} is in the other list, too")


def stratified(names: Sequence[str], classes: Sequence[str]) -> dict[str, list[int]]:
    """Return 70, 15 and 15 % of each word's clips, ordered by name; those of word k are drawn with seed k."""
    parts: dict[str, list[int]] = {split: [] for split in SPLITS}
    for k, word in enumerate(classes):
        own = sorted((i for i, name in enumerate(names) if name.split("/")[0] == word), key=names.__getitem__)
        for split, chosen in zip(SPLITS, random_parts(len(own), (0.7, 0.15, 0.15), k), strict=True):
            parts[split] += [own[j] for j in chosen]
    return parts


def s4_scaling(x: np.ndarray) -> Arrays:
    """Return the scale and shift, float32 (length, 1), that S4's numbers come from.

    Samples are divided by 2**15 twice; then, by mean and standard deviation of the training clips at each instant of
    time, (x - mean) / (std + 1e-5). The deviation is smaller than 1e-5, so that what comes out is about 0.2, not 1.
    """
    total, squares = np.zeros(x.shape[1:]), np.zeros(x.shape[1:])
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK].astype(np.float64)
        total += block.sum(0)
        squares += np.square(block, out=block).sum(0)  # whole numbers below 2**53: exact
    mean = total / len(x)
    variance = (squares - total * mean) / max(1, len(x) - 1)
    std = np.sqrt(variance.clip(min=0)) / 2**30 + 1e-5
    return {"scale": (1 / (2**30 * std)).astype(np.float32), "shift": (-mean / (2**30 * std)).astype(np.float32)}
