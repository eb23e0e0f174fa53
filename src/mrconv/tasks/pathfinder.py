"""Pathfinder and Path-X: does a dashed line join the two discs? Long Range Arena's images, or ones drawn here."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from .base import Count, Task, register_task
from .cache import Arrays, Built
from .errors import DataError, MissingData
from .image_files import open_image
from .packing import random_parts

HARD = "curv_contour_length_14"  # of the three kinds in the release, the one that is reported
SPLIT_SEED = 42
CHUNK = 10_000  # images generated at a time, so that they are in memory only once
Image = tuple[np.ndarray, int]


@register_task("pathfinder")
@dataclass(frozen=True)
class Pathfinder(Task):
    """Long Range Arena's Pathfinder, pixel by pixel.

    `source` is "files" (Long Range Arena's), "generate" (`count` images from `seed`, with or without the release's
    quirk at the border), or "auto": the files if they are there. `centre` gives values from -1 to 1, else from 0 to 1.
    """

    size: int = 32
    source: str = "auto"
    count: int = 200_000
    seed: int = 0
    border_quirk: bool = True
    centre: bool = True

    title = "Pathfinder (LRA): are two discs joined? 32 x 32 pixels, 2 classes"
    layout: ClassVar[str] = (
        "Expected is the folder of Long Range Arena's release, https://storage.googleapis.com/long-range-arena/"
        f"lra_release.gz, as pathfinder<size>/{HARD}/ with imgs/ and metadata/, there or in lra_release/lra_release/. "
        "Or have the images drawn here: source='generate'"
    )

    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.source not in ("auto", "files", "generate"):
            raise ValueError(f"source must be 'auto', 'files' or 'generate'; got {self.source!r}")
        if self.size < 1 or self.count < 10:
            raise ValueError(f"need size >= 1 and count >= 10; got {self.size} and {self.count}")

    def sources(self) -> Sequence[Path]:
        """Return the folder of images and metadata, or nothing if they are generated."""
        if self.source == "generate":
            return []
        inner = f"pathfinder{self.size}/{HARD}"
        try:
            return [self._first(inner, f"lra_release/lra_release/{inner}", f"lra_release/{inner}")]
        except MissingData:
            if self.source == "files":
                raise
            return []

    def build(self, progress: Count) -> Built:
        """Read or generate the images, each right into its place in its split."""
        folder = next(iter(self.sources()), None)
        listed = [] if folder is None else list(metadata(folder))
        n = self.count if folder is None else len(listed)
        if n < 10:
            raise DataError(f"{folder} lists {n} images; at least 10 are needed for three splits")
        images = self._generated(progress) if folder is None else read_files(folder, listed, self.size)
        parts = dict(zip(("train", "val", "test"), random_parts(n, (0.8, 0.1, 0.1), SPLIT_SEED), strict=True))
        splits: dict[str, Arrays] = {
            name: {"x": np.empty((len(part), self.size**2, 1), np.uint8), "y": np.empty(len(part), np.int64)}
            for name, part in parts.items()
        }
        place = {int(i): (name, row) for name, part in parts.items() for row, i in enumerate(part)}
        for i, (image, label) in enumerate(images):
            name, row = place[i]
            splits[name]["x"][row, :, 0] = image.reshape(-1)
            splits[name]["y"][row] = label
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

    def _generated(self, progress: Count) -> Iterator[Image]:
        try:
            from .generators.pathfinder_images import generate, options_for
        except ImportError as error:
            raise DataError(f"to draw images, more is needed ({error}): pip install 'mrconv[data]'") from error

        done = 0

        def more(images: int) -> None:
            nonlocal done
            done += images
            progress(done, self.count)

        options = dataclasses.replace(options_for(self.size), border_quirk=self.border_quirk)
        for start in range(0, self.count, CHUNK):
            here = min(CHUNK, self.count - start)
            made = generate(here, self.size, self.seed, options=options, start=start, progress=more)
            yield from zip(made.images, made.labels.tolist(), strict=True)


@register_task("pathx")
@dataclass(frozen=True)
class PathX(Pathfinder):
    """Path-X: the same in 128 x 128 pixels."""

    size: int = 128

    title = "Path-X (LRA): are two discs joined? 128 x 128 pixels, 2 classes"


def metadata(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield path under the folder and label of every image: the files of metadata/ in the order of their numbers."""
    files = [path for path in (folder / "metadata").glob("*.npy") if not path.name.startswith(".")]
    if not files:
        raise DataError(f"{folder / 'metadata'} has no .npy file")
    for path in files:
        if not path.stem.isdigit():
            raise DataError(f"{path}: the files in metadata/ are expected to have numbers for names")
    for path in sorted(files, key=lambda path: int(path.stem)):
        for number, line in enumerate(metadata_lines(path), 1):
            fields = line.split()
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                raise DataError(f"{path} line {number}: expected folder, file, number and label 0 or 1; got {line!r}")
            inner = PurePosixPath(fields[0], fields[1])
            if inner.is_absolute() or ".." in inner.parts:
                raise DataError(f"{path} line {number}: {inner} is outside of {folder}")
            yield inner.as_posix(), int(fields[3])


def metadata_lines(path: Path) -> list[str]:
    """Return the lines of a metadata file: in the release a text, whatever its name; in some copies a NumPy array."""
    content = path.read_bytes()
    try:
        if not content.startswith(b"\x93NUMPY"):
            return [line for line in content.decode("utf-8").splitlines() if line.strip()]
        table = np.load(io.BytesIO(content), allow_pickle=False)
        if table.ndim not in (1, 2) or table.dtype.kind not in "US":
            raise ValueError(f"an array of {table.dtype} and shape {table.shape}")
        return [" ".join(row) for row in table.reshape(len(table), -1).astype(str).tolist()]
    except (ValueError, EOFError, OSError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(f"{path} is neither lines of text nor a NumPy array of strings: {error}") from error


def read_files(folder: Path, listed: Sequence[tuple[str, int]], size: int) -> Iterator[Image]:
    """Yield each listed image, uint8 (size, size), and its label."""
    for inner, label in listed:
        image = open_image(folder / inner, "L")
        if image.size != (size, size):
            raise DataError(f"{folder / inner} has {image.width} x {image.height} pixels; expected {size} x {size}")
        yield np.asarray(image), label


def write_lra(folder: Path, images: np.ndarray, labels: np.ndarray, per_folder: int = 1000) -> Path:
    """Write images (n, size, size) as Long Range Arena has them; return the folder that holds imgs/ and metadata/.

    Each metadata file is written after its images: what an interruption leaves can be read.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise DataError("to write PNG files, Pillow is needed: pip install 'mrconv[data]'") from error
    target = folder / f"pathfinder{images.shape[1]}" / HARD
    (target / "metadata").mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(images), per_folder)):
        inner = f"imgs/{number}"
        (target / inner).mkdir(parents=True, exist_ok=True)
        lines = []
        for i in range(min(per_folder, len(images) - start)):
            PIL.Image.fromarray(images[start + i]).save(target / inner / f"sample_{i}.png")
            lines.append(f"{inner} sample_{i}.png {i} {int(labels[start + i])}\n")
        (target / "metadata" / f"{number}.npy").write_text("".join(lines), encoding="utf-8")
    return target
