"""Sequential MNIST: pixels in raster order or in a fixed random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import Task, register_task
from .cache import Built
from .download import Remote
from .errors import DataError
from .packing import train_val_test
from .progress_callback import Progress
from .reading import read_file

SIDE = 28
MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
PERMUTATION_SEED = 92916  # used with RandomState by most work on permuted MNIST since uRNN and scoRNN


@register_task("smnist")
@dataclass(frozen=True)
class SequentialMNIST(Task):
    """Sequential MNIST: 784 grey values from 0 to 1; `permuted` applies one random permutation to all images."""

    permuted: bool = False

    title = "Sequential MNIST, in raster order or permuted: 784 pixels, 10 classes"
    remotes: ClassVar[tuple[Remote, ...]] = tuple(
        Remote(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", f"{name}.gz", md5)
        for name, md5 in MD5.items()
    )
    file_mib: ClassVar[int] = 64
    layout: ClassVar[str] = (
        f"Put the four files of MNIST, {', '.join(MD5)}, with or without .gz, there or in MNIST/raw/; they are at "
        "https://ossci-datasets.s3.amazonaws.com/mnist/"
    )

    def sources(self) -> Sequence[Path]:
        """Return the four files."""
        return [self._find_source(name, f"{name}.gz", f"MNIST/raw/{name}", f"MNIST/raw/{name}.gz") for name in MD5]

    def build(self, progress: Progress) -> Built:
        """Read the four files."""
        train_images, train_labels, test_images, test_labels = self.sources()
        x, y = read_pair(train_images, train_labels)
        progress(1, 2)
        x_test, y_test = read_pair(test_images, test_labels)
        progress(2, 2)
        if self.permuted:
            order = np.random.RandomState(PERMUTATION_SEED).permutation(SIDE**2)
            x, x_test = x[:, order], x_test[:, order]
        splits = train_val_test(x, y, x_test, y_test)
        digits = [str(digit) for digit in range(10)]
        facts = {"encoder": "values", "classes": digits, "length": SIDE**2, "channels": 1, "scale": 1 / 255}
        return splits, facts if self.permuted else facts | {"height": SIDE, "width": SIDE}


def read_pair(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 (n, 784, 1), and labels, int64 (n,)."""
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != (SIDE, SIDE):
        raise DataError(f"{images} has images of {x.shape[1]} x {x.shape[2]}; expected {SIDE} x {SIDE}")
    if len(x) != len(y):
        raise DataError(f"{images} has {len(x):,} images and {labels} {len(y):,} labels")
    if y.size and y.max() > 9:
        i = int(np.argmax(y > 9))
        raise DataError(f"{labels}: image {i} has label {y[i]}; expected 0 to 9")
    return x.reshape(-1, SIDE**2, 1), y.astype(np.int64)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the values of an IDX file: bytes 0, 0, 8 and the number of dimensions, each size in four bytes, values."""
    content = read_file(path)
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path} begins with {content[:4].hex(' ')}; expected 00 00 08 {dimensions:02}")
    shape = [int(size) for size in np.frombuffer(content, ">u4", dimensions, 4)]
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DataError(f"{path} has {len(content):,} bytes; expected {expected:,} by its header: download it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
