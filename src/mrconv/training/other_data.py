"""Other data for a trained model: encoded as its training data was, so that it can be scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mrconv.tasks import Prepared
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.tasks.vocabulary import UNKNOWN
from mrconv.tasks.window_loader import IGNORED

COMPARED = ("kind", "channels", "sample_rate", "target", "classes")


def as_trained(data: Prepared, trained: Preprocessor, model: str) -> Prepared:
    """Return data with the vocabulary, classes, lengths and normalisation of a model's training data.

    Data of another kind, with other classes, or with symbols that the model cannot represent raises ValueError.
    """
    if data.encoder != "text":  # a language model predicts each symbol: bits of others do not compare
        data = with_vocabulary(data, trained)
    data = _with_classes(data, trained)
    current = Preprocessor.from_data(data)
    if trained.vocabulary != current.vocabulary:
        raise ValueError(
            f"the vocabulary of the data, {len(current.vocabulary)} symbols, differs from that of {model}, "
            f"{len(trained.vocabulary)} symbols"
        )
    for name in COMPARED:
        if text := difference(current, trained, name, model):
            raise ValueError(text)
    if current.lengths and not trained.lengths:
        data = data.without_lengths()
    by_position = trained.scale.ndim == 2 and len(trained.scale) > 1  # such a normalisation is part of the task
    if current.vocabulary or data.facts.get("files") or by_position:
        return data
    return dataclasses.replace(data, scale=trained.scale, shift=trained.shift)


def difference(current: Preprocessor, trained: Preprocessor, name: str, model: str) -> str:
    """Describe how a property of data differs from that of a model's training data; empty if it does not."""
    expected, actual = _as_text(trained, name), _as_text(current, name)
    if expected == actual:
        return ""
    return f"{name.replace('_', ' ')} of the data: {actual:.200}; of {model}: {expected:.200}"


def with_vocabulary(data: Prepared, trained: Preprocessor) -> Prepared:
    """Return tokens with the ids of a model's vocabulary, unless it lacks one of the symbols and <unk>."""
    known = trained.token_ids
    if data.vocabulary in ((), trained.vocabulary):
        return data
    if UNKNOWN not in known and not set(data.vocabulary) <= set(known):
        return data
    ids = np.array([known.get(symbol, known.get(UNKNOWN, 0)) for symbol in data.vocabulary], np.int32)
    arrays = ["x", *(["x2"] * data.pair), *(["y"] * (data.encoder == "text"))]
    for array in arrays:
        data = _mapped(data, array, ids.__getitem__)
    return dataclasses.replace(data, vocabulary=trained.vocabulary)


def _with_classes(data: Prepared, trained: Preprocessor) -> Prepared:
    """Return data that has some of a model's classes with all of them."""
    if data.target == "values" or not set(data.classes) < set(trained.classes):
        return data
    indices = np.array([trained.classes.index(name) for name in data.classes])

    def columns(y: np.ndarray) -> np.ndarray:
        out = np.zeros((len(y), len(trained.classes)), y.dtype)
        out[:, indices] = y
        return out

    def numbers(y: np.ndarray) -> np.ndarray:
        return np.where(y == IGNORED, IGNORED, indices[y.clip(0)])

    return dataclasses.replace(
        _mapped(data, "y", columns if data.target == "labels" else numbers), classes=trained.classes
    )


def _mapped(data: Prepared, array: str, function: Callable[[np.ndarray], np.ndarray]) -> Prepared:
    splits = {}
    for name, split in data.splits.items():
        changes: dict[str, Any] = {array: function(np.asarray(getattr(split, array)))}
        splits[name] = dataclasses.replace(split, **changes)
    return dataclasses.replace(data, splits=splits)


def _as_text(preprocessor: Preprocessor, name: str) -> str:
    """Return a property for comparison and messages; images and values are the same kind here."""
    value = getattr(preprocessor, name)
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(value) if isinstance(value, tuple) else str(value).replace("image", "values")


def undrawn(task_options: dict[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """Return the options of custom data without random splits, and without the table of other files' labels."""
    options = {name: z for name, z in task_options.items() if name != "labels" or name in given}
    return {"val_fraction": 0, "test_fraction": 0} | {
        name: z for name, z in options.items() if name not in ("val_fraction", "test_fraction") or name in given
    }
