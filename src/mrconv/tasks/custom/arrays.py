"""Rows of a user's own data as the arrays of a task: by split, x; and facts on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..cache import Arrays
from ..errors import DataError
from ..packing import PADDING, Characters, packed, vocabulary
from .files import Rows

MOST_TOKENS = 2**15 - 2
Parts = Mapping[str, Rows]
Encoded = tuple[dict[str, Arrays], dict[str, Any]]


def texts(parts: Parts, length: int) -> Encoded:
    """Number the characters that occur in training, and cut; length 0 is that of the longest text with its end."""
    length = length or 1 + max(len(text) for rows in parts.values() for text in rows.x)
    if length < 2:
        raise DataError(f"{parts['train'].where}: length {length} holds no character beside the end")
    symbols = vocabulary(text[: length - 1] for text in parts["train"].x)
    encode = Characters(symbols, length)
    arrays = {split: packed([encode(text) for text in rows.x], encode.dtype) for split, rows in parts.items()}
    return arrays, {"encoder": "tokens", "length": length, "vocabulary": list(symbols)}


def tokens(parts: Parts, length: int, cut: bool) -> Encoded:
    """Number tokens from 1 on: 0 is the padding."""
    most = max(int(np.max(rows.x)) for rows in parts.values())
    for rows in parts.values():
        low, high = np.min(rows.x), np.max(rows.x)
        if low < 0 or high > MOST_TOKENS:
            raise DataError(
                f"{rows.where}: integers from {low} to {high}; tokens lie within 0 .. {MOST_TOKENS}. For values, give "
                "floats, or a third dimension of channels"
            )
    length = _length(parts, length, cut)
    dtype = np.uint8 if most + 1 < 256 else np.int16
    arrays = {split: packed([row[:length].astype(int) + 1 for row in rows.x], dtype) for split, rows in parts.items()}
    return arrays, {"encoder": "tokens", "length": length, "vocabulary": [PADDING, *map(str, range(most + 1))]}


def values(parts: Parts, length: int, cut: bool) -> Encoded:
    """Keep uint8 and int16 as they are, turn all else into float32, and pad with zeros."""
    length = _length(parts, length, cut)
    channels = parts["train"].x[0].shape[1]
    arrays: dict[str, Arrays] = {}
    for split, rows in parts.items():
        x = np.asarray(rows.x)
        if x.shape[2] != channels:
            raise DataError(f"{rows.where} has {x.shape[2]} channels; expected {channels}, as in train")
        with np.errstate(over="ignore"):  # found as not finite
            x = x if x.dtype in (np.uint8, np.int16) else x.astype(np.float32)
        finite = np.isfinite(x).all((1, 2))
        if not finite.all():
            raise DataError(f"{rows.at(int(np.argmin(finite)))}: not all values are finite in float32")
        arrays[split] = {"x": np.pad(x[:, :length], ((0, 0), (0, max(0, length - x.shape[1])), (0, 0)))}
    return normalised(arrays, {"encoder": "values", "length": length, "channels": channels})


def recordings(parts: Parts, length: int, cut: bool, rate: int) -> Encoded:
    """Pad with zeros on the right."""
    length = _length(parts, length, cut)
    arrays: dict[str, Arrays] = {}
    for split, rows in parts.items():
        x = np.zeros((len(rows.x), length, 1), np.int16)
        for row, samples in zip(x[..., 0], rows.x, strict=True):
            row[: len(samples)] = samples[:length]
        arrays[split] = {"x": x}
    return normalised(arrays, {"encoder": "values", "length": length, "channels": 1, "sampling_rate": rate})


def pictures(parts: Parts, length: int, sequence: bool) -> Encoded:
    """Give all of them as many channels as the one with most, and as a sequence one pixel after the other."""
    if length:
        raise DataError(f"{parts['train'].where} holds pictures, whose size is their length: leave length at 0")
    channels = max(image.shape[2] for rows in parts.values() for image in rows.x)
    height, width, _ = parts["train"].x[0].shape
    arrays: dict[str, Arrays] = {}
    for split, rows in parts.items():
        if rows.x[0].shape[:2] != (height, width):
            raise DataError(f"{rows.where}: pictures are of another size than in train, {width} x {height} pixels")
        x = np.stack([np.broadcast_to(image, (height, width, channels)) for image in rows.x])
        arrays[split] = {"x": x.reshape(len(x), -1, channels) if sequence else x}
    facts = {"encoder": "values" if sequence else "image", "length": height * width, "channels": channels}
    return normalised(arrays, facts | {"height": height, "width": width})


def _length(parts: Parts, length: int, cut: bool) -> int:
    """Return the length to store; where it is given, rows that are longer are to be cut or else refused."""
    longest = 0
    for rows in parts.values():
        for i, row in enumerate(rows.x):
            if length and len(row) > length and not cut:
                raise DataError(f"{rows.at(i)}: length {len(row)}; expected at most length={length}, or cut=True")
            longest = max(longest, len(row))
    return length or longest


def normalised(arrays: dict[str, Arrays], facts: dict[str, Any]) -> Encoded:
    """Add the scale and shift that give the training rows mean 0 and deviation 1: numbers, or one for each channel."""
    x = arrays["train"]["x"]
    pieces = [x[i : i + 256] for i in range(0, len(x), 256)]  # no copy of it all in float64
    axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
    mean = np.sum([piece.sum(axes, np.float64) for piece in pieces], 0) / count
    deviation = np.sqrt(np.sum([((piece - mean) ** 2).sum(axes) for piece in pieces], 0) / count)
    scale = 1 / np.where(deviation > 0, deviation, 1.0)
    shift = -mean * scale
    if len(mean) == 1:
        return arrays, {**facts, "scale": float(scale[0]), "shift": float(shift[0])}
    return {**arrays, "all": {"scale": scale.astype(np.float32), "shift": shift.astype(np.float32)}}, facts


def class_names(labels: Sequence[str]) -> list[str]:
    """Return the names of the classes in order, in that of numbers if all of them are."""
    names = set(labels)
    whole = all(name.removeprefix("-").isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if whole else sorted(names)


def numbered(rows: Rows, classes: Sequence[str]) -> np.ndarray:
    """Return the labels as numbers of the classes."""
    numbers = {name: i for i, name in enumerate(classes)}
    for i, label in enumerate(rows.labels):
        if label not in numbers:
            raise DataError(f"{rows.at(i)}: class {label} is not in the training data")
    return np.array([numbers[label] for label in rows.labels], np.int32)
