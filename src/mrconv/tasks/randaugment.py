"""RandAugment with operations that get stronger with magnitude, as in timm's "rand-m9-mstd0.5-inc1"."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .imagenet import MEAN

if TYPE_CHECKING:
    from PIL.Image import Image

LEVELS, DEVIATION = 10.0, 0.5
OPERATIONS, PROBABILITY = 2, 0.5  # operations drawn for each image; probability of applying each
FILL = tuple(round(255 * x) for x in MEAN)
NAMES = (
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color", "contrast",
    "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip


def rand_augment(image: Image, generator: random.Random, magnitude: float = 9.0) -> Image:
    """Apply random operations of about this magnitude, from 0 to 10."""
    for name in generator.choices(NAMES, k=OPERATIONS):
        if generator.random() < PROBABILITY:
            level = min(LEVELS, max(0.0, generator.gauss(magnitude, DEVIATION))) / LEVELS
            image = apply(name, image, level, generator)
    return image


def apply(name: str, image: Image, level: float, generator: random.Random) -> Image:
    """Apply one operation at a level from 0 to 1; its direction, if it has one, is random."""
    from PIL import ImageEnhance, ImageOps

    if name in ("autocontrast", "equalize", "invert"):
        return getattr(ImageOps, name)(image)
    if name == "posterize":
        return ImageOps.posterize(image, max(1, 4 - int(4 * level)))
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(256 * level))
    if name == "solarize_add":
        return image.point([min(255, x + int(110 * level)) if x < 128 else x for x in range(256)] * 3)
    sign = generator.choice((-1, 1))
    if name in ("color", "contrast", "brightness", "sharpness"):
        return getattr(ImageEnhance, name.capitalize())(image).enhance(max(0.1, 1 + sign * 0.9 * level))
    return _warp(name, image, sign * level, generator)


def _warp(name: str, image: Image, level: float, generator: random.Random) -> Image:
    """Rotate, shear or translate an image."""
    from PIL.Image import Resampling, Transform

    resample = generator.choice((Resampling.BILINEAR, Resampling.BICUBIC))
    if name == "rotate":
        return image.rotate(30 * level, resample, fillcolor=FILL)
    matrix = {
        "shear_x": (1, 0.3 * level, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * level, 1, 0),
        "translate_x": (1, 0, 0.45 * level * image.width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, 0.45 * level * image.height),
    }[name]
    return image.transform(image.size, Transform.AFFINE, matrix, resample, fillcolor=FILL)
