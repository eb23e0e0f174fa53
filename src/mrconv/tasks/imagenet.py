"""ImageNet, or any pictures in one folder per class: an index of the files, and a data set that decodes them."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .base import Count, Prepared, Task, register_task
from .cache import Arrays, Built, key
from .errors import DataError, MissingData
from .image_files import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Change = Callable[["Image", random.Random], "Image"]
CROP = 0.875  # of the resized picture's shorter side, in evaluation


@register_task("imagenet")
@dataclass(frozen=True)
class ImageNet(Task):
    """ImageNet in folders: train/<class>/ and val/<class>/. The arrays are paths; `ImageFiles` decodes."""

    size: int = 224

    title = "ImageNet: pictures in a folder per class, read as they are needed"
    layout: ClassVar[str] = (
        "Expected are train/<class>/*.JPEG and val/<class>/*.JPEG, there or in imagenet/. ImageNet itself is at "
        "https://image-net.org/download-images, for those who register; its validation pictures come without folders "
        "and must be sorted into them first"
    )

    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.size < 1:
            raise ValueError(f"size must be at least 1; got {self.size}")

    def sources(self) -> Sequence[Path]:
        """Return the two folders."""
        train = self._first("imagenet/train", "train")
        val = train.with_name("val")
        if not val.is_dir():
            raise MissingData(f"{train} is there and {val} is not. {self.layout}")
        return [train, val]

    def folder(self) -> Path:
        """Return where the index is: it follows from names only, so that no picture needs to be looked at.

        A class folder's time of change tells whether files were added or removed.
        """
        sources = self.sources()
        times = [[e.name, e.stat().st_mtime_ns] for path in sources for e in sorted(os.scandir(path), key=_name)]
        root = self.cache_dir or self.data_dir / "cache"
        return root / f"{self.name}-{key([self.name, self.size, str(sources[0].resolve()), times])}"

    def build(self, progress: Count) -> Built:
        """List the files."""
        train, val = self.sources()
        classes, known = class_folders(train), class_folders(val)
        if classes != known:
            odd = sorted(set(classes) ^ set(known))
            raise DataError(f"{train} and {val} differ in {len(odd)} class folders, among them {', '.join(odd[:5])}")
        splits: dict[str, Arrays] = {}
        for done, folder in enumerate((train, val)):
            paths, labels = [], []
            for label, name in enumerate(classes):
                files = sorted(e.name for e in os.scandir(folder / name) if e.name.lower().endswith(SUFFIXES))
                if not files:
                    raise DataError(f"{folder / name} has no picture ({', '.join(SUFFIXES)})")
                paths += [os.fsencode(f"{folder.name}/{name}/{file}") for file in files]
                labels += [label] * len(files)
                progress(done * len(classes) + label + 1, 2 * len(classes))
            splits[folder.name] = {"x": np.array(paths, np.bytes_), "y": np.array(labels, np.int64)}
        return splits, {
            "encoder": "image",
            "classes": classes,
            "length": self.size**2,
            "channels": 3,
            "files": True,
            "size": self.size,
            "root": str(train.parent.resolve()),
        }


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, in order."""
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise DataError(f"{folder} has no folders: one for each class is expected, with its pictures")
    return names


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Pictures of a split, decoded when asked for: float (3, size, size), normalised, and the label.

    In training a random part, of 8 to 100 % of the area, resized, and mirrored or not; it follows from (seed, epoch,
    index) alone. Otherwise the middle of the picture.

    Args:
        data, split: the index.
        root: the folder of train/ and val/; by default where the index was made.
        size: side of what is returned; by default the task's.
        train: whether to draw at random; by default for the split "train".
        seed: of the drawing.
        change: what else is done to a picture in training, given it and what to draw from.
    """

    def __init__(
        self,
        data: Prepared,
        split: str,
        root: str | Path | None = None,
        size: int | None = None,
        train: bool | None = None,
        seed: int = 0,
        change: Change | None = None,
    ) -> None:
        if split not in data.splits:
            raise ValueError(f"{data.name} has no split {split!r}; it has {', '.join(data.splits)}")
        if not data.facts.get("files"):
            raise ValueError(f"{data.name} is not a list of files: its rows are {data.encoder}")
        self.split, self.seed, self.change = data.splits[split], seed, change
        self.root = Path(root or data.facts["root"])
        self.size = size or int(data.facts["size"])
        self.train = split == "train" if train is None else train
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # shared: workers that are kept see it change
        self.mean, self.std = (torch.tensor(z).view(3, 1, 1) for z in (MEAN, STD))

    def set_epoch(self, epoch: int) -> None:
        """Draw other parts than in other epochs."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = open_image(self.root / os.fsdecode(self.split.x[index]), "RGB")
        if self.train:
            draw = random.Random(f"{self.seed} {int(self.epoch)} {index}")
            image = random_part(image, self.size, draw)
            if self.change is not None:
                image = self.change(image, draw)
        else:
            image = middle(image, self.size)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255  # (3, size, size)
        return (x - self.mean) / self.std, int(self.split.y[index])


def random_part(image: Image, size: int, draw: random.Random) -> Image:
    """Return a part of 8 to 100 % of the area, 3/4 to 4/3 as wide as high, resized; every second one is mirrored."""
    from PIL.Image import Resampling, Transpose

    width, height = image.size
    for _ in range(10):
        area, ratio = width * height * draw.uniform(0.08, 1), math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draw.random() * (width - w + 1)), int(draw.random() * (height - h + 1))
            break
    else:  # a very long picture: the middle, as much of it as the ratios allow
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        left, top = (width - w) // 2, (height - h) // 2
    part = image.crop((left, top, left + w, top + h)).resize((size, size), Resampling.BICUBIC)
    return part.transpose(Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else part


def middle(image: Image, size: int) -> Image:
    """Return the middle square of a picture whose shorter side is resized to size / 0.875."""
    from PIL.Image import Resampling

    short, (width, height) = int(size / CROP), image.size
    w, h = (short * side // min(width, height) for side in (width, height))
    left, top = round((w - size) / 2), round((h - size) / 2)
    return image.resize((w, h), Resampling.BICUBIC).crop((left, top, left + size, top + size))
