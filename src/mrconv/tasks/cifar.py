"""CIFAR-10: as sequences of grey (Image of Long Range Arena) or colour pixels (sequential CIFAR), or as images."""

from __future__ import annotations

import hashlib
import io
import pickle
import pickletools
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from .archives import read_members
from .base import Task, register_task
from .cache import Built
from .download import Remote
from .errors import DataError
from .packing import train_val_test
from .progress_callback import Progress
from .reading import check_text, reading

SIDE = 32
PIXELS = SIDE**2
TRAINING = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
META = "batches.meta"
NAMES_IN_PICKLES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}


@dataclass(frozen=True)
class _Cifar(Task):
    """Base of the CIFAR-10 tasks: files, labels, and a validation split of a tenth of the training images."""

    encoder: ClassVar[str] = "values"

    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "md5",
        ),
    )
    file_mib: ClassVar[int] = 64
    layout: ClassVar[str] = (
        "Put CIFAR-10 for Python there, as cifar-10-python.tar.gz or unpacked as cifar-10-batches-py/ with "
        "data_batch_1 ... data_batch_5, test_batch and batches.meta; it is at https://www.cs.toronto.edu/~kriz/cifar.html"
    )

    @abstractmethod
    def pixels(self, planes: np.ndarray) -> np.ndarray:
        """Convert colour planes (n, 3, 1024) to the stored uint8 pixels (n, 1024, channels) or images."""

    @abstractmethod
    def normalisation(self) -> tuple[Any, Any]:
        """Return scale and shift."""

    def sources(self) -> Sequence[Path]:
        """Return the folder or the archive."""
        return [self._find_source("cifar-10-batches-py", "cifar-10-python.tar.gz")]

    def build(self, progress: Progress) -> Built:
        """Read the six batches."""
        (path,) = self.sources()
        contents: dict[str, Any] = {}
        sums: dict[str, str] = {}
        for full, content in read_members(path, lambda name: PurePosixPath(name).name in MD5):
            name = PurePosixPath(full).name
            sums[name] = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if name == META:
                contents[name] = parse_class_names(content, f"{path}/{full}")
            else:
                planes, labels = parse_batch(content, f"{path}/{full}")
                if len(labels) == 10_000 and sums[name] != MD5[name]:
                    raise DataError(f"{path}/{full} is not the original: its MD5 is {sums[name]}; expected {MD5[name]}")
                contents[name] = self.pixels(planes), labels
            progress(len(contents), len(MD5))
        if missing := [name for name in MD5 if name not in contents]:
            raise DataError(f"{path} has no {', '.join(missing)}. {self.layout}")
        x = np.concatenate([contents[name][0] for name in TRAINING])
        y = np.concatenate([contents[name][1] for name in TRAINING])
        splits = train_val_test(x, y, *contents[TEST])
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
        scale, shift = self.normalisation()
        if isinstance(scale, float):
            return splits, facts | {"scale": scale, "shift": shift}
        return splits | {"all": {"scale": scale, "shift": shift}}, facts


@register_task("image")
@dataclass(frozen=True)
class Image(_Cifar):
    """Long Range Arena's Image: 1,024 grey values, normalised as in S4."""

    title = "Image (LRA): CIFAR-10 in greyscale, 1,024 pixels, 10 classes"

    def pixels(self, planes: np.ndarray) -> np.ndarray:
        """Return the luma, rounded as in Pillow, which torchvision's Grayscale uses."""
        red, green, blue = planes.astype(np.uint32).transpose(1, 0, 2)
        return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)[:, :, None]

    def normalisation(self) -> tuple[Any, Any]:
        """Return scale and shift for a mean of 122.6 and a standard deviation of 61."""
        return 1 / 61, -122.6 / 61


@register_task("scifar")
@dataclass(frozen=True)
class SCIFAR(_Cifar):
    """Sequential CIFAR: 1,024 RGB pixels, each channel normalised as in S4."""

    title = "Sequential CIFAR-10 in colour: 1,024 pixels, 10 classes"

    def pixels(self, planes: np.ndarray) -> np.ndarray:
        """Return pixels with channels last."""
        return np.ascontiguousarray(planes.transpose(0, 2, 1))

    def normalisation(self) -> tuple[Any, Any]:
        """Return scale and shift per channel, (1, 3)."""
        mean, std = np.array([[0.4914, 0.4822, 0.4465]]), np.array([[0.247, 0.243, 0.261]])
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)


@register_task("cifar")
@dataclass(frozen=True)
class CIFAR10(SCIFAR):
    """CIFAR-10 as images, normalised like sequential CIFAR."""

    title = "CIFAR-10: colour images of 32 x 32, 10 classes"
    encoder = "image"

    def pixels(self, planes: np.ndarray) -> np.ndarray:
        """Return images (n, 32, 32, 3)."""
        return super().pixels(planes).reshape(-1, SIDE, SIDE, 3)


def parse_batch(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes, uint8 (n, 3, 1024), and the labels, int64 (n,), of a batch file."""
    data = safe_unpickle(content, where)
    x, y = data.get("data"), data.get("labels")
    if not isinstance(x, PickledArray):
        raise DataError(f"{where}: 'data' must be an array; got {type(x).__name__}")
    planes = x.pixels(where)
    if not isinstance(y, list) or len(y) != len(planes):
        raise DataError(f"{where}: 'labels' must be a list of {len(planes)}, one for each image")
    for i, label in enumerate(y):
        if type(label) is not int or not 0 <= label <= 9:
            got = label if type(label) is int and abs(label) < 1000 else f"of type {type(label).__name__}"
            raise DataError(f"{where}: image {i} has label {got}; expected 0 to 9")
    return planes, np.array(y, np.int64)


def parse_class_names(content: bytes, where: str) -> list[str]:
    """Return the names in batches.meta."""
    given = safe_unpickle(content, where).get("label_names")
    names = [_text(name) for name in given] if isinstance(given, list) else []
    if None in names or len(set(names)) != 10:
        raise DataError(f"{where}: 'label_names' must be a list of ten different names")
    for name in names:
        check_text(str(name), where)
    return [str(name) for name in names]


def safe_unpickle(content: bytes, where: str) -> dict[str, Any]:
    """Return a pickled dictionary of built-in types and `PickledArray`; reject other classes, which could run code."""
    with reading(where, "is not a pickle, or is damaged or truncated", ""):
        for opcode, argument, _ in pickletools.genops(content):
            # pickle allocates as many entries as the largest index
            if opcode.name.endswith("PUT") and isinstance(argument, int) and argument > len(content):
                raise ValueError(f"an index of {argument}")
        data = _Unpickler(io.BytesIO(content), where).load()
    if not isinstance(data, dict):
        raise DataError(f"{where} holds {type(data).__name__}; expected a dictionary")
    return {name: value for key, value in data.items() if (name := _text(key)) is not None}


def _text(value: Any) -> str | None:
    """Return a string, or the bytes of one that Python 2 wrote, as text; None for everything else."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value if isinstance(value, str) else None


class PickledArray:
    """What a pickle says about an array, kept as it is: NumPy's own classes trust the state that they are given.

    All names of NumPy in a pickle stand for this class: the function that creates an array, which the state fills, and
    the types.
    """

    __slots__ = ("given", "state")

    def __init__(self, *given: Any) -> None:
        self.given, self.state = given, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self, where: str) -> np.ndarray:
        """Return the array as planes, uint8 (n, 3, 1024)."""
        match self.state:
            case (_, (int(n), int(width)), PickledArray(given=(str(code), *_)), order, str() | bytes() as data):
                pass
            case _:
                raise DataError(f"{where}: 'data' is not an array of two dimensions as NumPy pickles it")
        if code not in ("u1", "|u1") or width != 3 * PIXELS or n < 0:
            kind = code if re.fullmatch(r"[<>=|]?\w{1,4}", code, re.ASCII) else "another type"
            shape = f"({n}, {width})" if max(abs(n), abs(width)) < 2**31 else "too large a shape"
            raise DataError(f"{where}: 'data' must be uint8 of shape (n, {3 * PIXELS}); got {kind} of shape {shape}")
        with reading(where):
            values = np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, np.uint8)
            return values.reshape(n, width, order="F" if order is True else "C").reshape(n, 3, PIXELS)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="latin1")  # the files were written by Python 2
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in NAMES_IN_PICKLES:
            return PickledArray
        raise DataError(
            f"{self.where} needs {f'{module}.{name}'!a:.60}, which no CIFAR-10 file does: do not trust this file"
        )
