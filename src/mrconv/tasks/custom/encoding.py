"""Encoding of custom examples: arrays by split, and facts common to all splits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..cache import Arrays
from ..errors import DataError
from ..image_files import fit_image
from ..normalisation import normalisation
from ..packing import pack
from ..vocabulary import PADDING, CharacterEncoder, character_vocabulary
from ..window_loader import IGNORED
from ..windows import window_starts
from .file_readers import Examples
from .labels import FORMATS

MAX_TOKEN = 2**15 - 2
MAX_LENGTH = 2**20  # of a text or recording, where no length is set: a minute at 16 kHz
ExamplesBySplit = Mapping[str, Examples]
Encoded = tuple[dict[str, Arrays], dict[str, Any]]


def encode_text(parts: ExamplesBySplit, length: int) -> Encoded:
    """Encode texts with the characters of the training texts; length 0 stands for the longest text with <eos>."""
    length = length or 1 + max(len(text) for examples in parts.values() for text in examples.x)
    if length < 2:
        raise DataError(f"{parts['train'].where}: length {length} has no room for a character before <eos>")
    symbols = character_vocabulary(text[: length - 1] for text in parts["train"].x)
    encode = CharacterEncoder(symbols, length)
    arrays = {split: pack([encode(text) for text in examples.x], encode.dtype) for split, examples in parts.items()}
    return arrays, {"encoder": "tokens", "length": length, "vocabulary": list(symbols)}


def encode_tokens(parts: ExamplesBySplit, length: int, cut: bool) -> Encoded:
    """Encode integers as tokens, shifted by 1 because 0 is padding."""
    largest = max(int(np.max(tokens)) for examples in parts.values() for tokens in examples.x)
    for examples in parts.values():
        low, high = min(map(np.min, examples.x)), max(map(np.max, examples.x))
        if low < 0 or high > MAX_TOKEN:
            raise DataError(
                f"{examples.where}: integers from {low} to {high}; tokens must lie in 0 .. {MAX_TOKEN}. For values, "
                "give floats, or a third dimension of channels"
            )
    length = _stored_length(parts, length, cut)
    dtype = np.uint8 if largest + 1 < 256 else np.int16
    arrays = {
        split: pack([tokens[:length].astype(int) + 1 for tokens in examples.x], dtype)
        for split, examples in parts.items()
    }
    return arrays, {"encoder": "tokens", "length": length, "vocabulary": [PADDING, *map(str, range(largest + 1))]}


def encode_values(parts: ExamplesBySplit, length: int, cut: bool) -> Encoded:
    """Keep uint8 and int16, and convert other types to float32."""
    length = _stored_length(parts, length, cut)
    channels = parts["train"].x[0].shape[1]
    sequences: dict[str, list[np.ndarray]] = {}
    for split, examples in parts.items():
        if examples.x[0].shape[1] != channels:
            raise DataError(f"{examples.where} has {examples.x[0].shape[1]} channels; expected {channels}, as in train")
        dtype = examples.x[0].dtype
        with np.errstate(over="ignore"):  # the result is checked below
            dtype = dtype if dtype in (np.uint8, np.int16) else np.dtype(np.float32)
            sequences[split] = [x[:length].astype(dtype, copy=False) for x in examples.x]
        for i, x in enumerate(sequences[split]):
            if not np.isfinite(x).all():
                raise DataError(f"{examples.describe(i)}: not all values are finite in float32")
    facts = {"encoder": "values", "length": length, "channels": channels, "lengths": True}
    return with_normalisation(_stored(sequences), facts)


def encode_audio(parts: ExamplesBySplit, length: int, cut: bool, sample_rate: int) -> Encoded:
    """Store the samples of recordings."""
    length = _stored_length(parts, length, cut)
    sequences = {split: [x[:length, None] for x in examples.x] for split, examples in parts.items()}
    facts = {"encoder": "values", "length": length, "channels": 1, "sample_rate": sample_rate, "lengths": True}
    return with_normalisation(_stored(sequences), facts)


def _stored(sequences: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Arrays]:
    """Return sequences of one length as arrays (n, length, channels), of several lengths concatenated."""
    if len({len(x) for each in sequences.values() for x in each}) == 1:
        return {split: {"x": np.stack(each)} for split, each in sequences.items()}
    return {split: pack(each, each[0].dtype) for split, each in sequences.items()}


def cut_windows(arrays: Arrays, window: int, hop: int, by_position: bool) -> Arrays:
    """Return the windows of the encoded examples of a split, without a copy of x.

    A window has the label and the name of its example or, with `by_position`, the labels of its positions; windows
    without any are left out.
    """
    x, offsets = arrays["x"], arrays.get("offsets")
    if offsets is None:
        x, offsets = x.reshape(-1, x.shape[-1]), np.arange(len(x) + 1) * x.shape[1]
    lengths = np.diff(offsets)
    starts = [window_starts(n, window, hop) for n in lengths.tolist()]
    origins, first = np.repeat(np.arange(len(lengths)), [len(each) for each in starts]), np.concatenate(starts)
    y = arrays["y"][origins] if not by_position else np.full((len(origins), window), IGNORED, np.int32)
    if by_position:
        for out, i, start in zip(y, origins, first, strict=True):
            labels = arrays["y"][i, start : start + window]
            out[: len(labels)] = labels
        kept = (y != IGNORED).any(1)
        y, origins, first = y[kept], origins[kept], first[kept]
    begin = offsets[origins] + first
    bounds = np.stack([begin, begin + np.minimum(window, lengths[origins])], 1)
    return {"x": x, "offsets": bounds, "origins": origins, "y": y, "names": arrays["names"][origins]}


def check_longest(parts: ExamplesBySplit, unit: str) -> None:
    """Reject an example of more than MAX_LENGTH, which would be the length of the model."""
    for examples in parts.values():
        for i, x in enumerate(examples.x):
            if len(x) > MAX_LENGTH:
                raise DataError(
                    f"{examples.describe(i)}: {len(x):,} {unit}, which would be the length of the model; more than "
                    f"{MAX_LENGTH:,} need task.length={len(x)}, a shorter length and task.cut=true, or task.window"
                )


def encode_images(parts: ExamplesBySplit, length: int, sequence: bool) -> Encoded:
    """Give images of one size the largest number of channels; with `sequence`, store the pixels in raster order."""
    if length:
        where = parts["train"].where
        raise DataError(f"{where} holds images, whose length follows from their size: leave length at 0, or set size")
    channels = max(image.shape[2] for examples in parts.values() for image in examples.x)
    height, width, _ = parts["train"].x[0].shape
    arrays: dict[str, Arrays] = {}
    for split, examples in parts.items():
        x = np.stack([np.broadcast_to(image, (height, width, channels)) for image in examples.x])
        arrays[split] = {"x": x.reshape(len(x), -1, channels) if sequence else x}
    facts = {"encoder": "values" if sequence else "image", "length": height * width, "channels": channels}
    return with_normalisation(arrays, facts | {"height": height, "width": width})


def fit_images(parts: ExamplesBySplit) -> dict[str, Examples]:
    """Crop and resize images to the most frequent size in the training data, of equally frequent sizes the smallest."""
    counts = Counter(image.shape[:2] for image in parts.get("train", next(iter(parts.values()))).x)
    height, width = min(counts, key=lambda size: (-counts[size], size[0] * size[1], size))
    fitted = {}
    for split, examples in parts.items():
        images, notes = zip(*(fit_image(image, height, width) for image in examples.x), strict=True)
        changes = examples.changes + Counter(note for each in notes for note in each)
        fitted[split] = dataclasses.replace(examples, x=images, changes=changes)
    return fitted


def describe_changes(parts: ExamplesBySplit, most: int = 4) -> str:
    """Return what was changed to read the files, the most frequent changes first; "" if nothing was."""
    total = sum(map(len, parts.values()))
    changes = sum((examples.changes for examples in parts.values()), Counter[str]()).most_common()
    lines = [f"{change} ({count:,} of {total:,} files)" for change, count in changes[:most]]
    if len(changes) > most:
        lines.append(f"and {len(changes) - most:,} more such changes")
    return "; ".join(lines)


def _stored_length(parts: ExamplesBySplit, length: int, cut: bool) -> int:
    """Return `length`, or the longest example's length if it is 0; raise DataError for longer ones unless `cut`."""
    longest = 0
    for examples in parts.values():
        for i, x in enumerate(examples.x):
            if length and len(x) > length and not cut:
                raise DataError(
                    f"{examples.describe(i)}: length {len(x)}; expected at most length={length}, or cut=True"
                )
            longest = max(longest, len(x))
    return length or longest


def with_normalisation(arrays: dict[str, Arrays], facts: dict[str, Any]) -> Encoded:
    """Add the scale and shift that give the training data mean 0 and deviation 1 in each channel."""
    scale, shift = normalisation(arrays["train"]["x"])
    if isinstance(scale, np.ndarray):
        return {**arrays, "all": {"scale": scale, "shift": np.asarray(shift)}}, facts
    return arrays, {**facts, "scale": scale, "shift": shift}


def output_names(parts: ExamplesBySplit, target: str) -> list[str]:
    """Return the names of the outputs: those that the file sets, or the classes of all labels of these parts."""
    given = {examples.outputs: examples.where for examples in parts.values()}
    if len(given) > 1:
        sizes = " and ".join(f"{where} has {', '.join(names) or 'none'}" for names, where in given.items())
        raise DataError(f"expected the same names of {target} in all splits; {sizes}")
    (names,) = given
    return list(names) or FORMATS[target].classes([label for part in parts.values() for label in part.labels])


def encode_labels(examples: Examples, target: str, outputs: Sequence[str], length: int) -> np.ndarray:
    """Return the labels as an array: see `labels.FORMATS`."""
    known = set(outputs)
    for i, label in enumerate(examples.labels):
        for name in FORMATS[target].names(label):
            if name not in known:
                raise DataError(f"{examples.describe(i)}: class {name} is not in the training data")
        if target == "values" and len(label) != len(outputs):
            raise DataError(f"{examples.describe(i)}: {len(label)} values; expected {len(outputs)}")
        if target == "positions" and len(label) != len(examples.x[i]):
            positions = f"{len(label)} labels of {len(examples.x[i])} positions"
            raise DataError(f"{examples.describe(i)}: {positions}; expected a label for each")
    y = FORMATS[target].encode(examples.labels, outputs, length)
    if target == "positions" and not (labelled := (y != IGNORED).any(1)).all():
        raise DataError(f"{examples.describe(int(np.argmin(labelled)))}: no position has a label")
    return y
