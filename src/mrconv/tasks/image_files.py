"""Decoding of image files with Pillow."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .._utils.extras import needs
from .errors import DataError
from .reading import check_size, reading

if TYPE_CHECKING:
    from PIL.Image import Image


def open_image(path: Path, mode: str) -> Image:
    """Return the image in a file, converted to a mode: "L" (greyscale) or "RGB"."""
    try:
        import PIL.Image
    except ImportError as error:
        raise DataError(needs(f"reading {path}", "Pillow", "data")) from error
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if not path.is_file() or not path.stat().st_size:
        raise DataError(f"{path} is empty or not a file")
    with reading(path, "cannot be read", ""), PIL.Image.open(path) as image:
        check_size(path, 3 * image.width * image.height)
        return image.convert(mode)


def decode_image(content: bytes, name: str, grey: bool, max_pixels: int | None = None) -> np.ndarray:
    """Return a PNG or JPEG image as uint8 (height, width, channels): 1 channel if greyscale or `grey`, else 3.

    An image of more than `max_pixels` pixels raises DataError before it is decoded.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise DataError(needs(f"reading {name}", "Pillow", "data")) from error
    damaged = "is not a PNG or JPEG file, or is damaged or truncated"
    with reading(name, damaged, ""), PIL.Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
        if image.mode[0] in "IF":
            raise DataError(f"{name} has pixels of more than 8 bits; expected 8")
        if max_pixels is not None and image.width * image.height > max_pixels:
            size = f"{image.width:,} x {image.height:,}"
            raise DataError(f"{name} has {size} pixels; expected at most {max_pixels:,}")
        check_size(name, 3 * image.width * image.height)
        pixels = np.asarray(image.convert("L" if grey or image.mode in ("1", "L", "LA") else "RGB"))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def fit_image(pixels: np.ndarray, height: int, width: int) -> tuple[np.ndarray, list[str]]:
    """Crop an image (h, w, channels) to the aspect ratio of height x width and resize it, for training and inference.

    Also return a note on the change, if there is one.
    """
    h, w = pixels.shape[:2]
    if (h, w) == (height, width):
        return pixels, []
    from PIL import Image, ImageOps

    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    fitted = np.asarray(ImageOps.fit(image, (width, height))).reshape(height, width, -1)
    return fitted, [f"resized from {w:,} x {h:,} to {width:,} x {height:,} pixels"]
