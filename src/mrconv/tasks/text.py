"""Text of Long Range Arena: sentiment of IMDB reviews (Maas et al., 2011) as sequences of characters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .._utils.checks import check_fraction, check_positive_int
from .archives import read_members
from .base import Task, register_task
from .cache import Built
from .download import Remote
from .errors import DataError, MissingData
from .packing import SPLIT_SEED, pack, random_split
from .progress_callback import Progress
from .text_lines import read_json_lines
from .vocabulary import CharacterEncoder, character_vocabulary

FOLDER, ARCHIVE = "aclImdb", "aclImdb_v1.tar.gz"
SPLITS = ("train", "test")
LABELS = {"neg": 0, "pos": 1}
REVIEW = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/[^/.][^/]*\.txt")
Review = tuple[str, str, int]
"""Split, text and label."""


@register_task("text")
@dataclass(frozen=True)
class IMDBReviews(Task):
    """Sentiment, positive or negative, of 25,000 training and 25,000 test reviews.

    As in LRA and S4 there is no validation split by default: the last epoch is recorded.

    Args:
        length: a text is cut to length - 1 characters and <eos>.
        min_freq: the vocabulary has the characters that occur at least `min_freq` times in the training texts.
        val_fraction: part of the training reviews that is held out as a validation split, to choose a recipe.
    """

    length: int = 4096
    min_freq: int = 15
    val_fraction: float = 0.0

    title: ClassVar[str] = "Text: sentiment of IMDB reviews by characters (LRA)"
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(f"https://ai.stanford.edu/~amaas/data/sentiment/{ARCHIVE}", ARCHIVE, "7c2ac02c03563afcf9b574c7e56c153a"),
    )
    file_mib: ClassVar[int] = 16
    layout: ClassVar[str] = (
        f"Put {ARCHIVE} from https://ai.stanford.edu/~amaas/data/sentiment/ there, or its folder {FOLDER} with "
        "{train,test}/{pos,neg}/*.txt, or train.jsonl and test.jsonl (also .jsonl.xz) with an object per line whose "
        "fields are text and label, 0 or 1."
    )

    def check(self) -> None:
        """Raise ValueError for an invalid length, frequency or fraction."""
        check_positive_int(min_freq=self.min_freq)
        check_fraction("val_fraction", self.val_fraction)
        if self.length < 2:
            raise ValueError(f"length must be at least 2, a character and <eos>; got {self.length}")

    def sources(self) -> Sequence[Path]:
        """Return the four folders of reviews, the archive, or the two JSON files."""
        first = self._find_source(FOLDER, ARCHIVE, "train.jsonl", "train.jsonl.xz")
        if first.name == ARCHIVE:
            return [first]
        if first.name == FOLDER:
            paths = [first / split / label for split in SPLITS for label in LABELS]
        else:
            tests = [first.with_name(f"test{suffix}") for suffix in (".jsonl", ".jsonl.xz")]
            paths = [first, next(filter(Path.exists, tests), tests[0])]
        for path in paths:
            if not path.exists():
                raise MissingData(f"{self.name}: {first} exists, but {path} does not. {self.layout}")
        return paths

    def build(self, progress: Progress) -> Built:
        """Read and encode all reviews."""
        reviews: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
        for i, (split, text, label) in enumerate(self._reviews()):
            reviews[split].append((text[: self.length - 1], label))
            if i % 1000 == 999:
                progress(i + 1, None)
        for split, examples in reviews.items():
            for name, label in LABELS.items():
                if all(each != label for _, each in examples):
                    raise DataError(f"{self.name}: no {name} review of {split} in {self.sources()[0].parent}")
        symbols = character_vocabulary((text for text, _ in reviews["train"]), self.min_freq)
        if self.val_fraction:
            parts = random_split(len(reviews["train"]), (1 - self.val_fraction, self.val_fraction), SPLIT_SEED)
            train, val = ([reviews["train"][i] for i in part] for part in parts)
            reviews = {"train": train, "val": val, "test": reviews["test"]}
        encode = CharacterEncoder(symbols, self.length)
        splits = {
            split: {
                **pack([encode(text) for text, _ in examples], encode.dtype),
                "y": np.array([label for _, label in examples], np.uint8),
            }
            for split, examples in reviews.items()
        }
        return splits, {
            "encoder": "tokens",
            "classes": ["negative", "positive"],
            "length": self.length,
            "vocabulary": list(symbols),
        }

    def _reviews(self) -> Iterator[Review]:
        """Yield all reviews in an order that is the same for folder and archive."""
        paths = self.sources()
        if len(paths) == len(SPLITS):
            for split, path in zip(SPLITS, paths, strict=True):
                for number, (text, label) in read_json_lines(path, "text", "label"):
                    if not isinstance(text, str):
                        raise DataError(f"{path}, line {number}: text is {text!r:.60}; expected a string")
                    if label not in (0, 1):
                        raise DataError(f"{path}, line {number}: label is {label!r:.60}; expected 0 or 1")
                    yield split, text, int(label)
            return
        root = paths[0] if len(paths) == 1 else paths[0].parent.parent
        reviews = []
        for name, content in read_members(root, lambda name: REVIEW.fullmatch(name) is not None):
            match = REVIEW.fullmatch(name)
            assert match is not None
            try:
                reviews.append((match[1], match[2], name, content.decode("utf-8")))
            except UnicodeDecodeError as error:
                raise DataError(f"{root}: {name} is not UTF-8 ({error.reason} at byte {error.start})") from error
        for split, label, _, text in sorted(reviews):
            yield split, text, LABELS[label]
