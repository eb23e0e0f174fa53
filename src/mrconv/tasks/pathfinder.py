"""Pathfinder and Path-X: does a dashed contour join two discs? Long Range Arena's images, or generated ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from .._utils.checks import check_choice, check_positive_int
from .._utils.extras import needs
from .base import Task, register_task
from .cache import Arrays, Built
from .errors import DataError, MissingData
from .image_files import open_image
from .npy_files import parse_npy
from .packing import SPLIT_SEED, random_split
from .progress_callback import Progress, ProgressCounter
from .reading import read_file, reading

CONTOUR_FOLDER = "curv_contour_length_14"  # the one of the release's three difficulties that papers report
CHUNK = 10_000  # images generated at a time, to save memory
LabelledImage = tuple[np.ndarray, int]


@register_task("pathfinder")
@dataclass(frozen=True)
class Pathfinder(Task):
    """Long Range Arena's Pathfinder, as a sequence of pixels.

    Args:
        size: side of the images in pixels.
        source: "files" (Long Range Arena's), "generate", or "auto": the files if they exist.
        count, seed: number of generated images, and their seed.
        border_quirk: generate with the release's behaviour at the border.
        centre: normalise to -1 .. 1, else to 0 .. 1.
    """

    size: int = 32
    source: str = "auto"
    count: int = 200_000
    seed: int = 0
    border_quirk: bool = True
    centre: bool = True

    title = "Pathfinder (LRA): are two discs joined? 32 x 32 pixels, 2 classes"
    file_mib: ClassVar[int] = 16
    layout: ClassVar[str] = (
        "Put Long Range Arena's release, https://storage.googleapis.com/long-range-arena/lra_release.gz, there: "
        f"pathfinder<size>/{CONTOUR_FOLDER}/ with imgs/ and metadata/, or the same in lra_release/lra_release/. Or "
        "generate images: source='generate'"
    )

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        check_choice("source", self.source, ("auto", "files", "generate"))
        check_positive_int(size=self.size)
        if self.count < 10:
            raise ValueError(f"count must be at least 10; got {self.count}")

    def sources(self) -> Sequence[Path]:
        """Return the folder of images and metadata; none if images are generated."""
        if self.source == "generate":
            return []
        inner = f"pathfinder{self.size}/{CONTOUR_FOLDER}"
        try:
            return [self._find_source(inner, f"lra_release/lra_release/{inner}", f"lra_release/{inner}")]
        except MissingData:
            if self.source == "files":
                raise
            return []

    def build(self, progress: Progress) -> Built:
        """Read or generate the images, directly into the arrays of their splits."""
        folder = next(iter(self.sources()), None)
        listed = [] if folder is None else list(read_metadata(folder))
        n = self.count if folder is None else len(listed)
        if n < 10:
            raise DataError(f"{folder} lists {n} images; expected at least 10, for three splits")
        images = self._generate(progress) if folder is None else read_images(folder, listed, self.size)
        parts = dict(zip(("train", "val", "test"), random_split(n, (0.8, 0.1, 0.1), SPLIT_SEED), strict=True))
        splits: dict[str, Arrays] = {
            name: {"x": np.empty((len(part), self.size**2, 1), np.uint8), "y": np.empty(len(part), np.int64)}
            for name, part in parts.items()
        }
        place = {int(i): (name, at) for name, part in parts.items() for at, i in enumerate(part)}
        for i, (image, label) in enumerate(images):
            name, at = place[i]
            splits[name]["x"][at, :, 0] = image.reshape(-1)
            splits[name]["y"][at] = label
            if folder is not None and i % 1000 == 999:
                progress(i + 1, n)
        return splits, {
            "encoder": "values",
            "classes": ["apart", "joined"],
            "length": self.size**2,
            "channels": 1,
            "height": self.size,
            "width": self.size,
            "scale": 2 / 255 if self.centre else 1 / 255,
            "shift": -1.0 if self.centre else 0.0,
            "source": "generated" if folder is None else "files",
        }

    def _generate(self, progress: Progress) -> Iterator[LabelledImage]:
        try:
            from .generators.pathfinder_images import generate
            from .generators.pathfinder_options import options_for
        except ImportError as error:
            raise DataError(needs("generating images", error.name, "data")) from error
        report = ProgressCounter(progress, self.count)
        options = dataclasses.replace(options_for(self.size), border_quirk=self.border_quirk)
        for start in range(0, self.count, CHUNK):
            count = min(CHUNK, self.count - start)
            chunk = generate(count, self.size, self.seed, options=options, start=start, progress=report)
            yield from zip(chunk.images, chunk.labels.tolist(), strict=True)


@register_task("pathx")
@dataclass(frozen=True)
class PathX(Pathfinder):
    """Path-X: Pathfinder with 128 x 128 pixels."""

    size: int = 128

    title = "Path-X (LRA): are two discs joined? 128 x 128 pixels, 2 classes"


def read_metadata(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield relative path and label of every image, from the files of metadata/ in numerical order."""
    files = [path for path in (folder / "metadata").glob("*.npy") if not path.name.startswith(".")]
    if not files:
        raise DataError(f"{folder / 'metadata'} has no .npy file")
    for path in files:
        if not path.stem.isdigit():
            raise DataError(f"{path}: expected a number as the name of a file in metadata/")
    for path in sorted(files, key=lambda path: int(path.stem)):
        for number, line in enumerate(read_metadata_lines(path), 1):
            fields = line.split()
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                raise DataError(f"{path} line {number}: expected folder, file, number and label 0 or 1; got {line!r}")
            inner = PurePosixPath(fields[0], fields[1])
            if inner.is_absolute() or ".." in inner.parts:
                raise DataError(f"{path} line {number}: {inner} is outside of {folder}")
            yield inner.as_posix(), int(fields[3])


def read_metadata_lines(path: Path) -> list[str]:
    """Return the lines of a metadata file: text in the release, despite its suffix; in some copies a NumPy array."""
    content = read_file(path)
    with reading(path, "is neither text nor a NumPy array of strings", ""):
        if not content.startswith(b"\x93NUMPY"):
            return [line for line in content.decode("utf-8").splitlines() if line.strip()]
        table = parse_npy(content, str(path))
        if table.ndim not in (1, 2) or table.dtype.kind not in "US":
            raise ValueError(f"an array of {table.dtype} and shape {table.shape}")
        return [" ".join(fields) for fields in table.reshape(len(table), -1).astype(str).tolist()]


def read_images(folder: Path, listed: Sequence[tuple[str, int]], size: int) -> Iterator[LabelledImage]:
    """Yield each listed image, uint8 (size, size), and its label."""
    for inner, label in listed:
        image = open_image(folder / inner, "L")
        if image.size != (size, size):
            raise DataError(f"{folder / inner} has {image.width} x {image.height} pixels; expected {size} x {size}")
        yield np.asarray(image), label
