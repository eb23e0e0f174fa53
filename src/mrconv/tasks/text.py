"""Text of Long Range Arena: the sentiment of IMDB reviews (Maas et al., 2011), character by character."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .archives import members
from .base import Count, Task, register_task
from .cache import Built
from .download import Remote
from .errors import DataError, MissingData
from .packing import Characters, packed, vocabulary
from .text_lines import json_rows

FOLDER, ARCHIVE = "aclImdb", "aclImdb_v1.tar.gz"
SPLITS = ("train", "test")
LABELS = {"neg": 0, "pos": 1}
REVIEW = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/[^/.][^/]*\.txt")
Review = tuple[str, str, int]
"""Split, text and label."""


@register_task("text")
@dataclass(frozen=True)
class Text(Task):
    """Positive or negative: 25,000 reviews to train on and 25,000 to test on.

    There is no validation set, as in LRA and S4: those who choose a model by its test accuracy should say so. A text is
    cut to `length` - 1 characters and <eos>; the vocabulary is of those that occur `min_freq` times in training texts.
    """

    length: int = 4096
    min_freq: int = 15

    title: ClassVar[str] = "Text: sentiment of IMDB reviews by characters (LRA)"
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(f"https://ai.stanford.edu/~amaas/data/sentiment/{ARCHIVE}", ARCHIVE, "7c2ac02c03563afcf9b574c7e56c153a"),
    )
    layout: ClassVar[str] = (
        f"Put {ARCHIVE} of https://ai.stanford.edu/~amaas/data/sentiment/ there, or its folder {FOLDER} with "
        "{train,test}/{pos,neg}/*.txt, or train.jsonl and test.jsonl (also .jsonl.xz) with the fields text and label, "
        "which is 0 or 1, in each line."
    )

    def check(self) -> None:
        """Refuse lengths and frequencies that make no sense."""
        if self.length < 2 or self.min_freq < 1:
            raise ValueError(f"need length >= 2 and min_freq >= 1; got {self.length} and {self.min_freq}")

    def sources(self) -> Sequence[Path]:
        """Return the four folders of reviews, the archive, or the two JSON files."""
        first = self._first(FOLDER, ARCHIVE, "train.jsonl", "train.jsonl.xz")
        if first.name == ARCHIVE:
            return [first]
        if first.name == FOLDER:
            found = [first / split / label for split in SPLITS for label in LABELS]
        else:
            tests = [first.with_name(f"test{suffix}") for suffix in (".jsonl", ".jsonl.xz")]
            found = [first, next(filter(Path.exists, tests), tests[0])]
        for path in found:
            if not path.exists():
                raise MissingData(f"{self.name}: {first} is there, but {path} is not. {self.layout}")
        return found

    def build(self, progress: Count) -> Built:
        """Read all reviews, then turn them into numbers."""
        reviews: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
        for i, (split, text, label) in enumerate(self._reviews()):
            reviews[split].append((text[: self.length - 1], label))
            if i % 1000 == 999:
                progress(i + 1, None)
        for split, rows in reviews.items():
            for name, label in LABELS.items():
                if all(each != label for _, each in rows):
                    raise DataError(f"{self.name}: no {name} review for {split} in {self.sources()[0].parent}")
        symbols = vocabulary((text for text, _ in reviews["train"]), self.min_freq)
        encode = Characters(symbols, self.length)
        splits = {
            split: {
                **packed([encode(text) for text, _ in rows], encode.dtype),
                "y": np.array([label for _, label in rows], np.uint8),
            }
            for split, rows in reviews.items()
        }
        return splits, {
            "encoder": "tokens",
            "classes": ["negative", "positive"],
            "length": self.length,
            "vocabulary": list(symbols),
        }

    def _reviews(self) -> Iterator[Review]:
        """Yield all reviews, in an order that does not depend on how files are packed."""
        paths = self.sources()
        if len(paths) == len(SPLITS):
            for split, path in zip(SPLITS, paths, strict=True):
                for number, (text, label) in json_rows(path, "text", "label"):
                    if not isinstance(text, str):
                        raise DataError(f"{path}, line {number}: text is {text!r:.60}; expected a string")
                    if label not in (0, 1):
                        raise DataError(f"{path}, line {number}: label is {label!r:.60}; expected 0 or 1")
                    yield split, text, int(label)
            return
        root = paths[0] if len(paths) == 1 else paths[0].parent.parent
        found = []
        for name, content in members(root, lambda name: REVIEW.fullmatch(name) is not None):
            match = REVIEW.fullmatch(name)
            assert match is not None
            try:
                found.append((match[1], match[2], name, content.decode("utf-8")))
            except UnicodeDecodeError as error:
                raise DataError(f"{root}: {name} is not UTF-8 ({error.reason} at byte {error.start})") from error
        for split, label, _, text in sorted(found):
            yield split, text, LABELS[label]
