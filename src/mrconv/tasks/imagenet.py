"""ImageNet, or any images in one folder per class: an index of the files and a data set that decodes them."""

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

from .._utils.checks import check_positive_int
from .base import Prepared, Task, register_task
from .cache import Arrays, Built, cache_key
from .errors import DataError, MissingData
from .image_files import open_image
from .progress_callback import Progress
from .reading import check_text

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Augmentation = Callable[["Image", random.Random], "Image"]
MAX_ASPECT = 16
CROP = 0.875  # of the resized image's shorter side, in evaluation


@register_task("imagenet")
@dataclass(frozen=True)
class ImageNet(Task):
    """ImageNet in folders: train/<class>/ and val/<class>/. The arrays hold paths, which `ImageFiles` decodes."""

    size: int = 224

    title = "ImageNet: images in a folder per class, read on demand"
    layout: ClassVar[str] = (
        "Put train/<class>/*.JPEG and val/<class>/*.JPEG there or in imagenet/. ImageNet is at "
        "https://image-net.org/download-images and needs a registration; its validation images come without class "
        "folders and must be sorted into them first"
    )

    def check(self) -> None:
        """Raise ValueError for an invalid size."""
        check_positive_int(size=self.size)

    def sources(self) -> Sequence[Path]:
        """Return the two folders."""
        train = self._find_source("imagenet/train", "train")
        val = train.with_name("val")
        if not val.is_dir():
            raise MissingData(f"{train} exists, but {val} does not. {self.layout}")
        return [train, val]

    def cache_folder(self) -> Path:
        """Return the folder of the index.

        The cache key consists of the names and modification times of the class folders, which change when files are
        added or removed. Image files are not inspected.
        """
        sources = self.sources()
        times = [
            [e.name, e.stat().st_mtime_ns] for path in sources for e in sorted(os.scandir(path), key=lambda e: e.name)
        ]
        key = cache_key([self.name, self.size, str(sources[0].resolve()), times])
        return self.cache_root() / f"{self.name}-{key}"

    def build(self, progress: Progress) -> Built:
        """List the files."""
        train, val = self.sources()
        classes, val_classes = class_folders(train), class_folders(val)
        if classes != val_classes:
            odd = sorted(set(classes) ^ set(val_classes))
            raise DataError(f"{train} and {val} differ in {len(odd)} class folders, among them {', '.join(odd[:5])}")
        splits: dict[str, Arrays] = {}
        for done, folder in enumerate((train, val)):
            paths, labels = [], []
            for label, name in enumerate(classes):
                files = sorted(e.name for e in os.scandir(folder / name) if e.name.lower().endswith(SUFFIXES))
                if not files:
                    raise DataError(f"{folder / name} has no image ({', '.join(SUFFIXES)})")
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


def class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in a folder."""
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    for name in names:
        check_text(name, f"{folder}, name of {name!a}")
    if not names:
        raise DataError(f"{folder} has no folders; expected one for each class, with its images")
    return names


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images of a split, decoded on demand: normalised float (3, size, size), and the label.

    In training, an image is a random crop of 8 to 100 % of the area, resized and randomly flipped; the crop depends on
    (seed, epoch, index) alone. In evaluation, it is the centre crop.

    Args:
        data, split: the index and the name of the split.
        root: the folder of train/ and val/; by default that of the index.
        size: side of the returned image; by default the task's.
        train: crop at random; by default for the split "train".
        seed: seed of the random crops.
        augment: further augmentation of a cropped image in training, called with the image and a random generator.
    """

    def __init__(
        self,
        data: Prepared,
        split: str,
        root: str | Path | None = None,
        size: int | None = None,
        train: bool | None = None,
        seed: int = 0,
        augment: Augmentation | None = None,
    ) -> None:
        if split not in data.splits:
            raise ValueError(f"{data.name} has no split {split!r}; its splits are {', '.join(data.splits)}")
        if not data.facts.get("files"):
            raise ValueError(f"{data.name} is not a list of files: its examples are {data.encoder}")
        self.split, self.seed, self.augment = data.splits[split], seed, augment
        self.root = Path(root or data.facts["root"])
        self.size = size or int(data.facts["size"])
        self.train = split == "train" if train is None else train
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # shared with persistent workers
        self.mean, self.std = (torch.tensor(z).view(3, 1, 1) for z in (MEAN, STD))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the random crops."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = open_image(self.root / os.fsdecode(self.split.x[index]), "RGB")
        if self.train:
            generator = random.Random(f"{self.seed} {int(self.epoch)} {index}")
            image = random_resized_crop(image, self.size, generator)
            if self.augment is not None:
                image = self.augment(image, generator)
        else:
            image = centre_crop(image, self.size)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255  # (3, size, size)
        return (x - self.mean) / self.std, int(self.split.y[index])


def random_resized_crop(image: Image, size: int, generator: random.Random) -> Image:
    """Crop 8 to 100 % of the area with an aspect ratio of 3/4 to 4/3, resize, and flip with probability 1/2."""
    from PIL.Image import Resampling, Transpose

    width, height = image.size
    for _ in range(10):
        area = width * height * generator.uniform(0.08, 1)
        ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(generator.random() * (width - w + 1)), int(generator.random() * (height - h + 1))
            break
    else:  # a very elongated image: the largest centre crop of an allowed aspect ratio
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        left, top = (width - w) // 2, (height - h) // 2
    crop = image.crop((left, top, left + w, top + h)).resize((size, size), Resampling.BICUBIC)
    return crop.transpose(Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else crop


def centre_crop(image: Image, size: int) -> Image:
    """Resize the shorter side to size / 0.875 and return the central square."""
    from PIL.Image import Resampling

    width, height = image.size
    if max(width, height) > MAX_ASPECT * min(width, height):  # resized as a whole, it would be large
        side = MAX_ASPECT * min(width, height)
        w, h = min(width, side), min(height, side)
        left, top = (width - w) // 2, (height - h) // 2
        image = image.crop((left, top, left + w, top + h))
    short, (width, height) = int(size / CROP), image.size
    w, h = (short * side // min(width, height) for side in (width, height))
    left, top = round((w - size) / 2), round((h - size) / 2)
    return image.resize((w, h), Resampling.BICUBIC).crop((left, top, left + size, top + size))
