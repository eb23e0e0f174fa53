"""CIFAR-10: pixel by pixel in grey (Image, of Long Range Arena) or colour (sequential CIFAR), or as pictures."""

from __future__ import annotations

import hashlib
import io
import pickle
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from .archives import members
from .base import Count, Task, register_task
from .cache import Arrays, Built
from .download import Remote
from .errors import DataError
from .packing import random_parts

SIDE = 32
PIXELS = SIDE**2
TRAINING = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
META = "batches.meta"
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
SPLIT_SEED = 42


@dataclass(frozen=True)
class _Cifar(Task):
    """What all have in common: the files, the labels, and a tenth of the training images for validation."""

    encoder: ClassVar[str] = "values"

    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "md5",
        ),
    )
    layout: ClassVar[str] = (
        "Expected is CIFAR-10 for Python, as cifar-10-python.tar.gz or unpacked as cifar-10-batches-py/ with "
        "data_batch_1 ... data_batch_5, test_batch and batches.meta; it is at https://www.cs.toronto.edu/~kriz/cifar.html"
    )

    @abstractmethod
    def pixels(self, planes: np.ndarray) -> np.ndarray:
        """Return what is stored, uint8 (n, 1024, channels) or pictures, of planes of the three colours (n, 3, 1024)."""

    @abstractmethod
    def scaling(self) -> tuple[Any, Any]:
        """Return scale and shift."""

    def sources(self) -> Sequence[Path]:
        """Return the folder or the archive."""
        return [self._first("cifar-10-batches-py", "cifar-10-python.tar.gz")]

    def build(self, progress: Count) -> Built:
        """Read the six batches."""
        (path,) = self.sources()
        contents: dict[str, Any] = {}
        sums: dict[str, str] = {}
        for full, content in members(path, lambda name: PurePosixPath(name).name in MD5):
            name = PurePosixPath(full).name
            sums[name] = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if name == META:
                contents[name] = class_names(content, f"{path}/{full}")
            else:
                planes, labels = batch(content, f"{path}/{full}")
                if len(labels) == 10_000 and sums[name] != MD5[name]:
                    raise DataError(f"{path}/{full} is not the original: its MD5 is {sums[name]}, not {MD5[name]}")
                contents[name] = self.pixels(planes), labels
            progress(len(contents), len(MD5))
        if missing := [name for name in MD5 if name not in contents]:
            raise DataError(f"{path} has no {', '.join(missing)}. {self.layout}")
        x = np.concatenate([contents[name][0] for name in TRAINING])
        y = np.concatenate([contents[name][1] for name in TRAINING])
        train, val = random_parts(len(y), (0.9, 0.1), SPLIT_SEED)
        splits: dict[str, Arrays] = {
            "train": {"x": x[train], "y": y[train]},
            "val": {"x": x[val], "y": y[val]},
            "test": {"x": contents[TEST][0], "y": contents[TEST][1]},
        }
        facts = {
            "encoder": self.encoder,
            "classes": contents[META],
            "length": PIXELS,
            "channels": x.shape[-1],
            "size": SIDE,
            "height": SIDE,
            "width": SIDE,
            "md5": sums,
            "original": sums == MD5,
        }
        scale, shift = self.scaling()
        if isinstance(scale, float):
            return splits, facts | {"scale": scale, "shift": shift}
        return splits | {"all": {"scale": scale, "shift": shift}}, facts


@register_task("image")
@dataclass(frozen=True)
class Image(_Cifar):
    """Long Range Arena's Image: 1,024 grey values, normalised as S4 does."""

    title = "Image (LRA): CIFAR-10 in grey, 1,024 pixels, 10 classes"

    def pixels(self, planes: np.ndarray) -> np.ndarray:
        """Return luma, rounded as Pillow does: torchvision's Grayscale is Pillow's."""
        red, green, blue = planes.astype(np.uint32).transpose(1, 0, 2)
        return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)[:, :, None]

    def scaling(self) -> tuple[Any, Any]:
        """Return scale and shift for a mean of 122.6 and a standard deviation of 61, of 255."""
        return 1 / 61, -122.6 / 61


@register_task("scifar")
@dataclass(frozen=True)
class SCIFAR(_Cifar):
    """Sequential CIFAR: 1,024 pixels of red, green and blue, each normalised as S4 does."""

    title = "Sequential CIFAR-10 in colour: 1,024 pixels, 10 classes"

    def pixels(self, planes: np.ndarray) -> np.ndarray:
        """Return the three values of each pixel side by side."""
        return np.ascontiguousarray(planes.transpose(0, 2, 1))

    def scaling(self) -> tuple[Any, Any]:
        """Return scale and shift per channel, (1, 3)."""
        mean, std = np.array([[0.4914, 0.4822, 0.4465]]), np.array([[0.247, 0.243, 0.261]])
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)


@register_task("cifar")
@dataclass(frozen=True)
class CIFAR10(SCIFAR):
    """CIFAR-10 as pictures, normalised as sequential CIFAR is."""

    title = "CIFAR-10: pictures of 32 x 32 in colour, 10 classes"
    encoder = "image"

    def pixels(self, planes: np.ndarray) -> np.ndarray:
        """Return pictures (n, 32, 32, 3)."""
        return super().pixels(planes).reshape(-1, SIDE, SIDE, 3)


def batch(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes, uint8 (n, 3, 1024), and the labels, int64 (n,), of a batch file."""
    data = unpickled(content, where)
    x, y = data.get("data"), data.get("labels")
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3 * PIXELS:
        got = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise DataError(f"{where}: 'data' should be uint8 of shape (n, {3 * PIXELS}); it is {got}")
    if not isinstance(y, list) or len(y) != len(x):
        raise DataError(f"{where}: 'labels' should be a list of {len(x)}, one for each image")
    for row, label in enumerate(y):
        if type(label) is not int or not 0 <= label <= 9:
            raise DataError(f"{where}: image {row} has label {label!r}; expected 0 to 9")
    return x.reshape(-1, 3, PIXELS), np.array(y, np.int64)


def class_names(content: bytes, where: str) -> list[str]:
    """Return the names in batches.meta."""
    names = unpickled(content, where).get("label_names")
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) != 10:
        raise DataError(f"{where}: 'label_names' should be a list of ten different names")
    return names


def unpickled(content: bytes, where: str) -> dict[str, Any]:
    """Return a pickled dictionary, made of plain values and arrays only: a pickle could run anything."""
    try:
        data = _Unpickler(io.BytesIO(content), where).load()
    except DataError:
        raise
    except Exception as error:  # pickle raises nearly anything on damaged bytes
        raise DataError(f"{where} is no pickle, or is damaged or cut off: {error or type(error).__name__}") from error
    if not isinstance(data, dict):
        raise DataError(f"{where} holds {type(data).__name__}; expected a dictionary")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in data.items()}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="latin1")  # the files are Python 2's
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")):
            return _empty
        raise DataError(f"{self.where} asks for {module}.{name}, which no CIFAR-10 file needs: not a file to trust")


def _empty(*_: Any) -> np.ndarray:
    """Begin an array, whose shape and content the pickle sets next: NumPy's own has moved between versions."""
    return np.ndarray(0, np.int8)
