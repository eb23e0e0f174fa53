"""Character-level language modelling of any text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import Task, register_task
from .cache import Arrays, Built
from .download import Remote
from .errors import DataError, MissingData
from .progress_callback import Progress
from .reading import read_file
from .vocabulary import UNKNOWN

SHAKESPEARE = "tinyshakespeare"
SUFFIXES = (".txt", ".txt.xz")


@register_task("characters")
@dataclass(frozen=True)
class Characters(Task):
    """Predict each character of a text from the characters before it.

    The text is cut into train, val and test in this order. The vocabulary is that of the training part; other
    characters become <unk>. In training, windows tile the text from a random offset. In evaluation, consecutive windows
    predict every character of a split exactly once.

    Args:
        path: a UTF-8 file (decompressed if its name ends in .xz) or a folder of .txt or .txt.xz files, concatenated in
            the order of their names; by default tinyshakespeare.
        length: characters of a window.
        val_fraction, test_fraction: parts of the text.
        context: in evaluation, characters that a window sees before those it predicts.
        passes: passes over the text in an epoch, each with its own offset.
    """

    path: str = ""
    length: int = 512
    val_fraction: float = 0.05
    test_fraction: float = 0.05
    context: int = 0
    passes: int = 1

    title: ClassVar[str] = "Characters: language modelling of any text; default: tinyshakespeare"
    metric: ClassVar[str] = "bits"
    file_mib: ClassVar[int] = 2048
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            f"{SHAKESPEARE}/input.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            "sha256",
        ),
    )
    layout: ClassVar[str] = (
        "Set path to a text file or a folder of text files, or put tinyshakespeare there: "
        "https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt."
    )

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        if self.length < 1 or self.passes < 1 or not 0 <= self.context < self.length:
            got = f"{self.length}, {self.passes} and {self.context}"
            raise ValueError(f"need length >= 1, passes >= 1 and 0 <= context < length; got {got}")
        val, test = self.val_fraction, self.test_fraction
        if not (val >= 0 and test >= 0 and 0 < val + test < 1):
            raise ValueError(
                f"val_fraction and test_fraction must be 0 or more, and their sum between 0 and 1; got {val} and {test}"
            )

    def sources(self) -> Sequence[Path]:
        """Return the files."""
        if not self.path:
            return [self._find_source(*(f"{SHAKESPEARE}/input{suffix}" for suffix in SUFFIXES))]
        root = Path(self.path).expanduser()
        if not root.exists():
            raise MissingData(f"path {self.path} does not exist: looked for {root.absolute()}")
        if root.is_file():
            return [root]
        files = sorted(p for p in root.iterdir() if p.name.endswith(SUFFIXES))
        if not files:
            raise MissingData(f"{root} has no {' or '.join(SUFFIXES)} file")
        return files

    def build(self, progress: Progress) -> Built:
        """Read the text, encode its characters and cut it into splits; labels are the next characters."""
        paths = self.sources()
        texts = []
        for i, path in enumerate(paths):
            texts.append(read_text(path))
            progress(i + 1, len(paths))
        text = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
        stops = np.rint(np.cumsum([1 - self.val_fraction - self.test_fraction, self.val_fraction]) * len(text))
        train, val = (int(stop) for stop in stops)
        alphabet = np.unique(text[:train])
        tokens = encode(text, alphabet)
        parts = {"train": (1, train), "val": (train, val), "test": (val, len(text))}
        splits: dict[str, Arrays] = {}
        for name, (start, stop) in parts.items():
            if name == "train" and stop < 2 * self.length:
                raise DataError(
                    f"{paths[0]}: {stop} training characters are too few for windows of length {self.length}"
                )
            if start < stop:
                splits[name] = {"x": tokens[start - 1 : stop - 1], "y": tokens[start:stop]}
        return splits, {
            "encoder": "text",
            "classes": [],
            "length": self.length,
            "vocabulary": [UNKNOWN, *map(chr, alphabet)],
            "context": self.context,
            "passes": self.passes,
        }


def encode(text: np.ndarray, alphabet: np.ndarray) -> np.ndarray:
    """Return the index, from 1, of each code point in the sorted alphabet; 0 if it is not in the alphabet."""
    index = np.searchsorted(alphabet, text).clip(max=len(alphabet) - 1)
    return np.where(alphabet[index] == text, index + 1, 0).astype(np.uint8 if len(alphabet) < 256 else np.int32)


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file, decompressed if its name ends in .xz."""
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start})") from error
