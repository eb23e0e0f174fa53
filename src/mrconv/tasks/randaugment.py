"""RandAugment on pictures, every operation the stronger the larger its magnitude; as timm's "rand-m9-mstd0.5-inc1"."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .imagenet import MEAN

if TYPE_CHECKING:
    from PIL.Image import Image

LEVELS, DEVIATION = 10.0, 0.5
OPERATIONS, CHANCE = 2, 0.5  # drawn for each picture; applied or not
FILL = tuple(round(255 * x) for x in MEAN)
NAMES = (
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color", "contrast",
    "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip


def rand_augment(image: Image, draw: random.Random, magnitude: float = 9.0) -> Image:
    """Return a picture after operations drawn at random, of about this magnitude of 10."""
    for name in draw.choices(NAMES, k=OPERATIONS):
        if draw.random() < CHANCE:
            level = min(LEVELS, max(0.0, draw.gauss(magnitude, DEVIATION))) / LEVELS
            image = apply(name, image, level, draw)
    return image


def apply(name: str, image: Image, level: float, draw: random.Random) -> Image:
    """Return a picture after one operation; where it has a direction, that is drawn."""
    from PIL import ImageEnhance, ImageOps

    if name in ("autocontrast", "equalize", "invert"):
        return getattr(ImageOps, name)(image)
    if name == "posterize":
        return ImageOps.posterize(image, max(1, 4 - int(4 * level)))
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(256 * level))
    if name == "solarize_add":
        return image.point([min(255, x + int(110 * level)) if x < 128 else x for x in range(256)] * 3)
    sign = draw.choice((-1, 1))
    if name in ("color", "contrast", "brightness", "sharpness"):
        return getattr(ImageEnhance, name.capitalize())(image).enhance(max(0.1, 1 + sign * 0.9 * level))
    return _moved(name, image, sign * level, draw)


def _moved(name: str, image: Image, level: float, draw: random.Random) -> Image:
    from PIL.Image import Resampling, Transform

    how = draw.choice((Resampling.BILINEAR, Resampling.BICUBIC))
    if name == "rotate":
        return image.rotate(30 * level, how, fillcolor=FILL)
    matrix = {
        "shear_x": (1, 0.3 * level, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * level, 1, 0),
        "translate_x": (1, 0, 0.45 * level * image.width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, 0.45 * level * image.height),
    }[name]
    return image.transform(image.size, Transform.AFFINE, matrix, how, fillcolor=FILL)
