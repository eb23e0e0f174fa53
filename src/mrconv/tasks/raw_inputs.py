"""Conversion of raw inputs (texts, paths, bytes, arrays, mappings) to preprocessed inputs of a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import DataError
from .preprocessing import ModelInput, Preprocessor

Examples = tuple[ModelInput, ...]
"""The preprocessed sequence of one input, or the two sequences of a pair."""


class RawInputs:
    """Preprocessing of raw inputs of any form.

    Args:
        preprocessor: preprocessor of the model.
        pairs: whether an input is a pair of sequences.
    """

    def __init__(self, preprocessor: Preprocessor, pairs: bool) -> None:
        self.preprocessor, self.pairs = preprocessor, pairs

    def preprocess(self, raw: Any) -> Examples:
        """Return the preprocessed input for a raw input; `mrconv.inference.Predictor.predict` lists its forms."""
        if isinstance(raw, Path) and raw.suffix.lower() == ".json":
            raw = parse_json(decode(raw.read_bytes()))
        if isinstance(raw, Mapping):
            return self._from_fields(raw)
        if not self.pairs:
            return (self._example(raw),)
        if not isinstance(raw, tuple) or len(raw) != 2:
            raise DataError('the model takes pairs: give a tuple of two inputs, or {"text": "...", "text2": "..."}')
        return tuple(self._example(each) for each in raw)

    def _example(self, raw: Any) -> ModelInput:
        kind = self.preprocessor.kind
        if isinstance(raw, Path) or (isinstance(raw, str) and kind in ("audio", "image")):
            raw = Path(raw).read_bytes()
        if isinstance(raw, bytes):
            if kind == "values":
                raise DataError('the model takes numbers: give an array, or JSON, {"values": [[...], ...]}')
            if kind in ("audio", "image"):
                return self.preprocessor.from_audio(raw) if kind == "audio" else self.preprocessor.from_image(raw)
            raw = decode(raw)
        if isinstance(raw, str):
            return self.example("text", raw)
        raw = list(raw) if isinstance(raw, tuple) else as_array(raw)
        return self.example("tokens" if self.preprocessor.vocabulary else "values", raw)

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys of a mapping that hold an input."""
        return ("text", "tokens") if self.preprocessor.vocabulary else ("values",)

    def example(self, field: str, value: Any) -> ModelInput:
        """Return the preprocessed value of a field of a mapping."""
        if field == "values":
            return self.preprocessor.from_values(self._pixels(value))
        return self.preprocessor.from_symbols(self.symbols(field, value))

    def symbols(self, field: str, value: Any) -> Sequence[Any]:
        """Return the symbols of a text, or of a list of tokens."""
        if field == "text":
            if not isinstance(value, str):
                raise DataError(f"text must be a string; got {value!r:.60}")
            return self.preprocessor.split_symbols(value)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(value, list) or any(isinstance(t, bool) or not isinstance(t, str | Integral) for t in value):
            raise DataError(f"tokens must be a list of symbols; got {value!r:.60}")
        return value

    def split(self, x: Any) -> list[Any] | None:
        """Return the inputs of a list, another iterable or an array of several; None if `x` is one input."""
        if isinstance(x, str | bytes | Path | Mapping) or (self.pairs and isinstance(x, tuple)):
            return None
        x = as_array(x)
        if isinstance(x, np.ndarray):
            return None if self._is_one(x) else list(x)
        items = list(x)
        numbers = all(isinstance(item, Real) and not isinstance(item, bool) for item in items)
        return None if items and numbers else items

    def _is_one(self, x: np.ndarray) -> bool:
        """Return whether an array is one input: by its dimensions, or by its last ones if there are channels."""
        p = self.preprocessor
        if x.dtype.kind in "OUS":  # an array or column of texts
            return x.ndim == 0
        if p.vocabulary:
            return x.ndim < 2
        if p.kind == "image" and x.shape in ((p.height, p.width, p.channels), (p.height, p.width)):
            return True
        return x.ndim < 2 or (x.ndim == 2 and (x.shape[1] == p.channels or p.channels > 1))

    def _pixels(self, value: Any) -> Any:
        """Return an array of an image (height, width[, channels]) as pixels in raster order, other values as given."""
        p = self.preprocessor
        image = isinstance(value, np.ndarray) and p.kind == "image" and value.shape[:2] == (p.height, p.width)
        return value.reshape(p.length, -1) if image else value

    def _from_fields(self, values: Mapping[str, Any]) -> Examples:
        suffixes = ("", "2") if self.pairs else ("",)
        unknown = set(values) - {f"{name}{suffix}" for name in self.fields for suffix in suffixes}
        examples = []
        for suffix in suffixes:
            given = [name for name in self.fields if f"{name}{suffix}" in values]
            if unknown or len(given) != 1:
                names = " and one of ".join(" or ".join(f"{name}{end}" for name in self.fields) for end in suffixes)
                raise DataError(f"expected an object with one of {names}; got {quoted(values)}")
            examples.append(self.example(given[0], values[given[0] + suffix]))
        return tuple(examples)


def as_array(x: Any) -> Any:
    """Return a tensor, a data frame's column or another kind of array as a numpy array, anything else as given."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
    return np.asarray(x) if hasattr(x, "__array__") else x


def decode(content: bytes) -> str:
    """Return UTF-8 bytes as text."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the input is not UTF-8 ({error.reason} at byte {error.start})") from None


def parse_json(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the input is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object; got {text[:60]}")
    return value


def quoted(names: Iterable[str]) -> str:
    """Return names in ASCII for an error message: JSON strings may hold surrogates that UTF-8 cannot encode."""
    return f"{', '.join(map(ascii, names)) or 'none':.100}"
