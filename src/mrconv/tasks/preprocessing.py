"""Preprocessing of raw inputs: text, symbols, numbers, recordings and images become what a trained model takes.

A `Preprocessor` is saved beside a model as inputs.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Self

import numpy as np

from .._utils.checks import check_choice, check_positive_int
from ..config import LabellerConfig, RegressorConfig, VisionConfig
from .audio_files import read_audio
from .base import Prepared
from .custom.labels import FORMATS
from .errors import DataError
from .image_files import decode_image, fit_image
from .imagenet import MEAN, STD
from .vocabulary import END, SPECIAL, UNKNOWN, is_characters
from .windows import window_starts

INPUTS_FILE = "inputs.json"
KINDS = ("text", "tokens", "values", "audio", "image")
MAX_PIXELS = 2**25  # limit for an image before resizing
MAX_LENGTH = 2**26  # limit for an input that is cut into windows: 70 minutes at 16,000 samples a second


@dataclass(frozen=True)
class ModelInput:
    """One preprocessed input: token ids (L,) or normalised values (L, channels), and notes on what was changed.

    `positions` is the number of positions of the input itself, without <eos> and padding.
    """

    x: np.ndarray
    notes: list[str] = field(default_factory=list)
    positions: int = 0


@dataclass(frozen=True, eq=False)
class Preprocessor:
    """The input format that a model was trained on, and the conversion of raw inputs to it.

    A model sees values * scale + shift, where scale and shift are one number, one per channel or one per position.

    Args:
        kind: "text" (tokens are characters), "tokens" (other symbols), "values" (length, channels), "audio" (values
            that are 16-bit samples) or "image" (values that are pixels, in raster order).
        length: maximum length of a sequence.
        classes: names of the classes, or of the values that the model predicts; empty for a language model.
        vocabulary: symbols by token id; empty for values.
        channels: channels of values.
        sample_rate: samples a second that the model sees.
        step: keep every `step`-th sample of a recording, without a filter.
        height, width: size of an image.
        scale, shift: normalisation of values.
        label_column, text_column, group_column: column names of the tables that inputs are read from.
        target: what the model predicts: "class", "labels", "values" or "positions".
        lengths: whether the model was trained with the lengths of values; else shorter values are padded with zeros.
        hop: cut longer sequences into windows of `length` that start every `hop` positions; 0 keeps the first `length`
            positions only.
    """

    kind: str
    length: int
    classes: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    channels: int = 1
    sample_rate: float | None = None
    step: int = 1
    height: int | None = None
    width: int | None = None
    scale: Any = 1.0
    shift: Any = 0.0
    label_column: str = "label"
    text_column: str = "text"
    group_column: str = ""
    target: str = "class"
    lengths: bool = False
    hop: int = 0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("target", self.target, tuple(FORMATS))
        check_positive_int(length=self.length, channels=self.channels, step=self.step)
        if self.hop:
            check_positive_int(hop=self.hop)
        for name in ("classes", "vocabulary"):
            names = getattr(self, name)
            strings = isinstance(names, tuple) and all(isinstance(each, str) for each in names)
            if not strings or len(set(names)) < len(names):
                raise ValueError(f"{name} must be distinct strings; got {names!r:.100}")
        rate = self.sample_rate
        if self.kind == "audio" and not (isinstance(rate, Real) and 1 <= rate * self.step < math.inf):
            raise ValueError(f"audio needs a sample_rate, in samples a second; got {rate!r}")
        if self.kind == "image":
            check_positive_int(height=self.height, width=self.width)
            if (self.height or 0) * (self.width or 0) != self.length:
                raise ValueError(f"length must be height * width = {self.height} * {self.width}; got {self.length}")
        for name in ("scale", "shift"):
            object.__setattr__(self, name, self._normalisation(name))

    def _normalisation(self, name: str) -> np.ndarray:
        """Return scale or shift as a finite float32 array that broadcasts to (length, channels)."""
        z, shape = np.array(getattr(self, name), np.float32), (self.length, self.channels)
        try:
            np.broadcast_to(z, shape)
        except ValueError:
            raise ValueError(
                f"{name} must be a number, or numbers that broadcast to (length, channels) = {shape}; got the "
                f"shape {z.shape}"
            ) from None
        if not np.isfinite(z).all():
            raise ValueError(f"{name} must be finite in float32")
        return z

    @classmethod
    def from_data(cls, data: Prepared) -> Self:
        """Return the preprocessor of a task's data."""
        names = ("sample_rate", "step", "height", "width", "label_column", "text_column", "group_column", "lengths")
        facts: dict[str, Any] = {name: data.facts[name] for name in (*names, "hop") if name in data.facts}
        if data.encoder == "image":
            facts["height"], facts["width"] = data.image_size
        kind = "image" if "height" in facts else "audio" if "sample_rate" in facts else "values"
        if data.vocabulary:
            kind = "text" if is_characters(data.vocabulary) and data.facts.get("kind") != "tokens" else "tokens"
        shared = {name: getattr(data, name) for name in ("length", "classes", "vocabulary", "channels", "target")}
        scale, shift = data.scale, data.shift
        if data.facts.get("files"):  # image files, which the data set normalises as it reads them
            scale, shift = 1 / (255 * np.array(STD)), -np.array(MEAN) / STD
        return cls(kind, scale=scale, shift=shift, **shared, **facts)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Return the preprocessor that a model's config implies: numbers as the model sees them, numbered classes."""
        classes = tuple(map(str, range(getattr(config, "n_outputs", getattr(config, "n_classes", 0)))))
        if isinstance(config, VisionConfig):
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            return cls("values", height * width, classes, channels=config.in_channels, height=height, width=width)
        vocabulary = tuple(map(str, range(config.vocab_size or 0)))
        kind = "tokens" if vocabulary else "values"
        target = {RegressorConfig: "values", LabellerConfig: "positions"}.get(type(config), "class")
        return cls(kind, config.l_max, classes, vocabulary, config.d_input or config.d_model, target=target)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of `to_json`."""
        values: Any = json.loads(text)
        if isinstance(values, dict) and "sampling_rate" in values:  # the former name
            values["sample_rate"] = values.pop("sampling_rate")
        fields = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not {"kind", "length"} <= set(values) <= fields:
            raise ValueError(f"expected an object with kind, length and some of {', '.join(sorted(fields))}")
        tuples = {name: tuple(z) for name in ("classes", "vocabulary") if isinstance(z := values.get(name), list)}
        return cls(**(values | tuples))

    def to_json(self) -> str:
        """Return all fields as a JSON object, omitting defaults."""
        values = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                value = value.astype(str).astype(float).tolist()  # the shortest digits that round-trip float32
            if value != f.default:
                values[f.name] = value
        return json.dumps(values) + "\n"

    def at_rate(self, rate: float) -> Self:
        """Return the preprocessor for the same model at another sampling rate, relative to the current one."""
        length = max(1, round(self.length * rate))
        at = np.minimum(np.arange(length) / rate, self.length - 1).astype(int)
        changes = {
            name: z[at] if (z := getattr(self, name)).ndim == 2 and len(z) > 1 else z for name in ("scale", "shift")
        }
        kind = "values" if self.kind == "image" else self.kind
        sample_rate, step = self.sample_rate and self.sample_rate * rate, max(1, round(1 / rate))
        if self.sample_rate and abs(step * rate - 1) < 1e-6:  # decimate as `Prepared.decimated`; else resample
            changes["step"] = self.step * step
        if self.hop:
            changes["hop"] = max(1, round(self.hop * rate))
        return dataclasses.replace(
            self, kind=kind, length=length, sample_rate=sample_rate, height=None, width=None, **changes
        )

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Token id of every symbol."""
        return {symbol: i for i, symbol in enumerate(self.vocabulary)}

    @property
    def end_tokens(self) -> list[int]:
        """Token ids that end a sequence: the id of <eos>, or none if the model was trained without <eos>."""
        return [self.token_ids[END]] if END in self.token_ids and self.classes else []

    @property
    def sizes(self) -> str:
        """Numbers of symbols or channels and of classes, which must match the model's."""
        inputs = f"{len(self.vocabulary)} symbols" if self.vocabulary else f"{self.channels} channels"
        return f"{inputs} and {len(self.classes)} classes"

    def check_kind(self, *kinds: str) -> None:
        """Raise DataError unless the model's kind of input is one of these."""
        if self.kind not in kinds:
            raise DataError(f"the model takes {self.kind}, not {' or '.join(kinds)}")

    def split_symbols(self, text: str) -> Sequence[str]:
        """Split a text into symbols: characters, or words between spaces for kind "tokens"."""
        self.check_kind("text", "tokens")
        return text if self.kind == "text" else text.split()

    def encode_symbols(self, symbols: Sequence[Any]) -> np.ndarray:
        """Return the token ids of symbols, int64, uncut and without <eos>.

        An unknown symbol raises DataError; in a string of characters it becomes <unk> where the vocabulary has one.
        Special symbols (<pad>, <unk>, <eos>) count as unknown.
        """
        self.check_kind("text", "tokens")
        fallback = self.token_ids.get(UNKNOWN) if isinstance(symbols, str) else None
        ids = np.empty(len(symbols), np.int64)
        for i, symbol in enumerate(symbols):
            token = None if symbol in SPECIAL else self.token_ids.get(str(symbol), fallback)
            if token is None:
                known = " ".join([repr(s)[1:-1] for s in self.vocabulary if s not in SPECIAL][:20])
                raise DataError(f"unknown symbol {symbol!r:.60} at position {i}; the model knows {known:.200}")
            ids[i] = token
        return ids

    def count_unknown(self, ids: np.ndarray) -> int:
        """Return how many of the token ids are <unk>."""
        return int((ids == self.token_ids[UNKNOWN]).sum()) if UNKNOWN in self.token_ids else 0

    def check_values(self, values: Any) -> np.ndarray:
        """Return numbers as float32 (n, channels), not normalised."""
        self.check_kind("values", "audio", "image")
        expected = f"values must be numbers of shape (length, {self.channels})"
        if not isinstance(values, np.ndarray) and (problem := _find_non_number(values)):
            raise DataError(f"{expected}; got {problem}")
        try:
            x = np.asarray(values)
        except ValueError:
            raise DataError(f"{expected}; got lists that differ in length") from None
        if x.ndim == 1 and self.channels == 1:
            x = x[:, None]
        if x.dtype.kind not in "iuf" or x.ndim != 2 or x.shape[1] != self.channels or len(x) == 0:
            got = f"the shape {x.shape}" if x.dtype.kind in "iuf" else f"an array of {x.dtype}"
            raise DataError(f"{expected}; got {got}")
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise DataError("values must be finite in float32")
        return x

    def normalise(self, x: np.ndarray, start: int = 0) -> np.ndarray:
        """Return x * scale + shift for values (n, channels) at positions `start` and following."""
        scale, shift = self.scale, self.shift
        if any(z.ndim == 2 and len(z) > 1 for z in (scale, shift)):
            if start + len(x) > self.length:
                raise DataError(
                    f"the model normalises each of its {self.length:,} positions separately; got {start + len(x):,}"
                )
            scale, shift = (z[start : start + len(x)] if z.ndim == 2 and len(z) > 1 else z for z in (scale, shift))
        return x * scale + shift

    def from_text(self, text: str) -> ModelInput:
        """Preprocess a text."""
        return self.from_symbols(self.split_symbols(text))

    def from_symbols(self, symbols: Sequence[Any]) -> ModelInput:
        """Preprocess a sequence of symbols as in training: cut to `max_length`, which includes <eos>."""
        if not symbols:
            raise DataError("expected at least one symbol; got none")
        room = self.max_length - len(self.end_tokens)
        notes = [] if len(symbols) <= room else [f"only the first {room:,} of {len(symbols):,} symbols were used"]
        ids = self.encode_symbols(symbols[:room])
        x = np.append(ids, self.end_tokens).astype(np.int64)
        notes += self._window_notes(len(x))
        return ModelInput(x, notes + unknown_symbol_notes(self.count_unknown(ids)), len(ids))

    def from_values(self, values: Any) -> ModelInput:
        """Preprocess numbers as in training: cut to `max_length` or, without `lengths`, padded; then normalised."""
        x = self.check_values(values)
        n, notes = len(x), self._window_notes(len(x))
        if self.kind == "image" and n != self.length:
            raise DataError(f"an image has {self.length:,} pixels, {self.height} x {self.width}; got {n:,}")
        if n > self.max_length:
            notes += [f"only the first {self.max_length:,} of {n:,} values were used"]
            x = x[: self.max_length]
        elif n < self.length and not self.lengths:
            notes += [f"{n:,} values were padded with {self.length - n:,} zeros"]
            x = np.pad(x, ((0, self.length - n), (0, 0)))
        return ModelInput(self.normalise(x), notes, min(n, self.max_length))

    @property
    def max_length(self) -> int:
        """Largest length of an input, which windows may cover."""
        return MAX_LENGTH if self.hop else self.length

    def window_starts(self, length: int) -> np.ndarray:
        """Return the first positions of the windows of an input of this length, cut as in training."""
        return window_starts(length, self.length, self.hop) if self.hop else np.zeros(1, int)

    def _window_notes(self, length: int) -> list[str]:
        windows = len(self.window_starts(min(length, self.max_length)))
        return [f"the mean of {windows:,} windows of {self.length:,} positions"] if windows > 1 else []

    def from_audio(self, content: bytes) -> ModelInput:
        """Preprocess a recording in any format that libsndfile reads: resampled and decimated, then as values."""
        self.check_kind("audio")
        assert self.sample_rate
        rate = round(self.sample_rate * self.step)  # sampling rate of the training recordings
        samples, notes = read_audio(content, "the recording", rate, self.max_length * self.step)
        result = self.from_values(samples[:: self.step])
        return ModelInput(result.x, notes + result.notes, result.positions)

    def from_image(self, content: bytes) -> ModelInput:
        """Preprocess a PNG or JPEG image: cropped to the model's aspect ratio and resized."""
        self.check_kind("image")
        assert self.height
        assert self.width
        pixels = decode_image(content, "the image", self.channels == 1, MAX_PIXELS)
        pixels, notes = fit_image(pixels, self.height, self.width)
        pixels = np.broadcast_to(pixels, (self.height, self.width, self.channels))
        return ModelInput(self.from_values(pixels.reshape(-1, self.channels)).x, notes)


def load_preprocessor(folder: Path) -> Preprocessor | None:
    """Return the preprocessor saved beside a model; None if the folder has no inputs.json."""
    path = folder / INPUTS_FILE
    try:
        return Preprocessor.from_json(path.read_text(encoding="utf-8")) if path.exists() else None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} does not describe a model's inputs: {error}") from None


def unknown_symbol_notes(n: int) -> list[str]:
    """Return the note that n symbols are unknown; no note for 0."""
    return [f"{n:,} symbol{' is' if n == 1 else 's are'} unknown to the model"] if n else []


def _find_non_number(values: Any, depth: int = 2) -> str | None:
    """Describe the first item that is not a number or a list of numbers nested at most `depth` deep; None if all are.

    Without this check numpy would first build an array whose items are all as wide as the longest string.
    """
    if not isinstance(values, list):
        return None if type(values) in (int, float) else f"{values!r:.60}, which is not a number"
    if depth == 0:
        return "lists nested more than two deep"
    if {*map(type, values)} <= {int, float}:
        return None
    return next(filter(None, (_find_non_number(value, depth - 1) for value in values)), None)
