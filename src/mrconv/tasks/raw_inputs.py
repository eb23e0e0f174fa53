"""Conversion of raw inputs (texts, paths, bytes, arrays, mappings) to preprocessed inputs of a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
                raise DataError('the model takes numbers: give an array, or {"values": [[...], ...]}')
            if kind in ("audio", "image"):
                return self.preprocessor.from_audio(raw) if kind == "audio" else self.preprocessor.from_image(raw)
            raw = decode(raw)
        if isinstance(raw, str):
            return self.example("text", raw)
        if self.preprocessor.vocabulary:
            return self.example("tokens", list(raw))
        return self.example("values", np.asarray(raw) if hasattr(raw, "__array__") else raw)

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys of a mapping that hold an input."""
        return ("text", "tokens") if self.preprocessor.vocabulary else ("values",)

    def example(self, field: str, value: Any) -> ModelInput:
        """Return the preprocessed value of a field of a mapping."""
        if field == "values":
            return self.preprocessor.from_values(value)
        return self.preprocessor.from_symbols(self.symbols(field, value))

    def symbols(self, field: str, value: Any) -> Sequence[Any]:
        """Return the symbols of a text, or of a list of tokens."""
        if field == "text":
            if not isinstance(value, str):
                raise DataError(f"text must be a string; got {value!r:.60}")
            return self.preprocessor.split_symbols(value)
        if not isinstance(value, list) or any(isinstance(t, bool) or not isinstance(t, str | int) for t in value):
            raise DataError(f"tokens must be a list of symbols; got {value!r:.60}")
        return value

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
