"""What a trained model takes: how a text, a recording, a picture or plain numbers become its input."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any, Self

import numpy as np

from .._utils.checks import check_choice, check_positive_int
from ..config import VisionConfig
from .base import Prepared
from .custom.files import read_image
from .errors import DataError
from .imagenet import MEAN, STD
from .packing import END, SPECIAL, UNKNOWN

FILE = "inputs.json"
KINDS = ("text", "tokens", "values", "audio", "image")
RATES = (1_000, 1_000_000)  # of a recording before it is resampled
MOST_PIXELS = 2**25  # of a picture before it is resized


@dataclass(frozen=True)
class Row:
    """One input: tokens (L,) or values (L, channels), normalised; and what was done to it that one should know."""

    x: np.ndarray
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model was trained on, without the data: kept beside it as inputs.json.

    kind: "text" (of characters), "tokens" (other symbols), "values" (length, channels), "audio" (values that are
    samples of 16 bits, `sampling_rate` a second, every `step`th of a recording, without a filter) or "image" (values
    that are pixels, row by row). A model sees values * scale + shift, which are numbers for all, for each channel or
    for each position. Without `classes`, it is a language model that takes them.
    """

    kind: str
    length: int
    classes: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    channels: int = 1
    sampling_rate: float | None = None
    step: int = 1
    height: int | None = None
    width: int | None = None
    scale: Any = 1.0
    shift: Any = 0.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_positive_int(length=self.length, channels=self.channels, step=self.step)
        for name in ("classes", "vocabulary"):
            names = getattr(self, name)
            strings = isinstance(names, tuple) and all(isinstance(each, str) for each in names)
            if not strings or len(set(names)) < len(names):
                raise ValueError(f"{name} must be strings, no two of them the same; got {names!r:.100}")
        rate = self.sampling_rate
        if self.kind == "audio" and not (isinstance(rate, Real) and 1 <= rate * self.step < math.inf):
            raise ValueError(f"audio needs a sampling_rate, in samples a second; got {rate!r}")
        if self.kind == "image":
            check_positive_int(height=self.height, width=self.width)
            if (self.height or 0) * (self.width or 0) != self.length:
                raise ValueError(f"length must be that of {self.height} x {self.width} pixels; got {self.length}")
        for name in ("scale", "shift"):
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
            object.__setattr__(self, name, z)

    @classmethod
    def of(cls, data: Prepared) -> Self:
        """Return what a task's rows are."""
        names = ("sampling_rate", "step", "height", "width")
        facts: dict[str, Any] = {name: data.facts[name] for name in names if name in data.facts}
        if data.encoder == "image":
            facts |= {"height": data.facts["size"], "width": data.facts["size"]}
        kind = "image" if "height" in facts else "audio" if "sampling_rate" in facts else "values"
        if data.vocabulary:
            characters = all(len(symbol) == 1 for symbol in data.vocabulary if symbol not in SPECIAL)
            kind = "text" if characters and data.facts.get("kind") != "tokens" else "tokens"
        shared = {name: getattr(data, name) for name in ("length", "classes", "vocabulary", "channels")}
        scale, shift = data.scale, data.shift
        if data.facts.get("files"):  # pictures, which are normalised when they are read
            scale, shift = 1 / (255 * np.array(STD)), -np.array(MEAN) / STD
        return cls(kind, scale=scale, shift=shift, **shared, **facts)

    @classmethod
    def unknown(cls, config: Any) -> Self:
        """Return what is known from a model's config alone: numbers as the model sees them, classes by number."""
        classes = tuple(map(str, range(getattr(config, "n_classes", 0))))
        if isinstance(config, VisionConfig):
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            return cls("values", height * width, classes, channels=config.in_channels, height=height, width=width)
        vocabulary = tuple(map(str, range(config.vocab_size or 0)))
        kind = "tokens" if vocabulary else "values"
        return cls(kind, config.l_max, classes, vocabulary, config.d_input or config.d_model)

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse what `json` wrote."""
        values: Any = json.loads(text)
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not {"kind", "length"} <= set(values) <= known:
            raise ValueError(f"expected an object with kind, length and some of {', '.join(sorted(known))}")
        named = {name: tuple(z) for name in ("classes", "vocabulary") if isinstance(z := values.get(name), list)}
        return cls(**(values | named))

    def json(self) -> str:
        """Return it as JSON, without what is as usual."""
        found = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                value = value.astype(str).astype(float).tolist()  # no more digits than float32 has
            if value != f.default:
                found[f.name] = value
        return json.dumps(found, ensure_ascii=False) + "\n"

    def decimated(self, rate: float) -> Self:
        """Return what a model takes that runs at another rate."""
        length = max(1, round(self.length * rate))
        at = np.minimum(np.arange(length) / rate, self.length - 1).astype(int)
        thin = {
            name: z[at] if (z := getattr(self, name)).ndim == 2 and len(z) > 1 else z for name in ("scale", "shift")
        }
        kind = "values" if self.kind == "image" else self.kind
        sampling_rate, step = self.sampling_rate and self.sampling_rate * rate, max(1, round(1 / rate))
        if self.sampling_rate and abs(step * rate - 1) < 1e-6:  # as `Prepared.decimated` does it, else by resampling
            thin["step"] = self.step * step
        return dataclasses.replace(
            self, kind=kind, length=length, sampling_rate=sampling_rate, height=None, width=None, **thin
        )

    @cached_property
    def codes(self) -> dict[str, int]:
        """The number of every symbol."""
        return {symbol: i for i, symbol in enumerate(self.vocabulary)}

    @property
    def end(self) -> list[int]:
        """What closes a sequence of tokens: the number of <eos>, if the model has learnt from ones that end so."""
        return [self.codes[END]] if END in self.codes and self.classes else []

    @property
    def sizes(self) -> str:
        """What must be as many as the model has."""
        what = f"{len(self.vocabulary)} symbols" if self.vocabulary else f"{self.channels} channels"
        return f"{what} and {len(self.classes)} classes"

    def takes(self, *kinds: str) -> None:
        """Refuse other kinds of input than the model's."""
        if self.kind not in kinds:
            raise DataError(f"the model takes {self.kind}, not {' or '.join(kinds)}")

    def symbols(self, text: str) -> Sequence[str]:
        """Return the symbols of a text: its characters, or what stands between spaces."""
        self.takes("text", "tokens")
        return text if self.kind == "text" else text.split()

    def numbers(self, symbols: Sequence[Any]) -> np.ndarray:
        """Return the numbers of symbols, int64; in a text, given as a string, what was not learnt is <unk>.

        What stands for padding, for the unknown and for the end is no symbol that an input may have.
        """
        self.takes("text", "tokens")
        unknown = self.codes.get(UNKNOWN) if isinstance(symbols, str) else None
        found = np.empty(len(symbols), np.int64)
        for i, symbol in enumerate(symbols):
            code = None if symbol in SPECIAL else self.codes.get(str(symbol), unknown)
            if code is None:
                some = " ".join([s for s in self.vocabulary if s not in SPECIAL][:20])
                raise DataError(f"{symbol!r:.60}, at position {i}, is no symbol of the model; it knows {some:.200}")
            found[i] = code
        return found

    def unknowns(self, x: np.ndarray) -> int:
        """Return how many of the numbers that `numbers` gave stand for <unk>."""
        return int((x == self.codes[UNKNOWN]).sum()) if UNKNOWN in self.codes else 0

    def tokens(self, symbols: Sequence[Any]) -> Row:
        """Return a sequence of symbols as in training: cut to the length, <eos> included."""
        if not symbols:
            raise DataError("expected at least one symbol; got none")
        room = self.length - len(self.end)
        notes = [] if len(symbols) <= room else [f"only the first {room:,} of {len(symbols):,} symbols were used"]
        x = self.numbers(symbols[:room])
        return Row(np.append(x, self.end).astype(np.int64), notes + told_unknown(self.unknowns(x)))

    def array(self, values: Any) -> np.ndarray:
        """Return numbers as float32 (n, channels), as they are."""
        self.takes("values", "audio", "image")
        if not isinstance(values, np.ndarray) and (got := _strange(values)):
            raise DataError(f"values must be numbers of shape (length, {self.channels}); got {got}")
        try:
            x = np.asarray(values)
        except ValueError:
            raise DataError(
                f"values must have the shape (length, {self.channels}); these rows differ in length"
            ) from None
        if x.ndim == 1 and self.channels == 1:
            x = x[:, None]
        if x.dtype.kind not in "iuf" or x.ndim != 2 or x.shape[1] != self.channels or len(x) == 0:
            got = f"the shape {x.shape}" if x.dtype.kind in "iuf" else "something that is no number"
            raise DataError(f"values must be numbers of shape (length, {self.channels}); got {got}")
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise DataError("values must be finite in float32")
        return x

    def normalised(self, x: np.ndarray, start: int = 0) -> np.ndarray:
        """Return what the model sees of values (n, channels), the first of which is at this position."""
        scale, shift = self.scale, self.shift
        if any(z.ndim == 2 and len(z) > 1 for z in (scale, shift)):
            if start + len(x) > self.length:
                raise DataError(f"the model normalises each position by itself, of which it knows {self.length:,}")
            scale, shift = (z[start : start + len(x)] if z.ndim == 2 and len(z) > 1 else z for z in (scale, shift))
        return x * scale + shift

    def values(self, values: Any) -> Row:
        """Return a sequence of values as in training: cut to the length, or zeros put behind it."""
        x = self.array(values)
        n, notes = len(x), []
        if self.kind == "image" and n != self.length:
            raise DataError(f"a picture has {self.length:,} pixels, {self.height} x {self.width}; got {n:,}")
        if n > self.length:
            notes = [f"only the first {self.length:,} of {n:,} values were used"]
        elif n < self.length:
            notes = [f"{self.length - n:,} zeros were put behind {n:,} values"]
        x = np.pad(x[: self.length], ((0, max(0, self.length - n)), (0, 0)))
        return Row(self.normalised(x), notes)

    def audio(self, content: bytes) -> Row:
        """Return a recording, in any form that libsndfile reads, at the model's rate; no more of it than it takes."""
        self.takes("audio")
        assert self.sampling_rate
        try:
            import soundfile  # type: ignore[import-untyped]
            import soxr  # type: ignore[import-untyped]
        except (ImportError, OSError) as error:
            raise DataError("to read recordings, soundfile and soxr are needed: pip install 'mrconv[serve]'") from error
        try:
            with soundfile.SoundFile(io.BytesIO(content)) as file:
                rate, seconds = file.samplerate, file.frames / file.samplerate
                own = round(self.sampling_rate * self.step)  # of the recordings in training
                if rate != own and not RATES[0] <= rate <= RATES[1]:
                    raise DataError(f"a recording has from {RATES[0]:,} to {RATES[1]:,} samples a second; got {rate:,}")
                wanted = math.ceil(self.length * self.step / own * rate)
                x = file.read(wanted, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
            why = getattr(error, "error_string", error)
            raise DataError(f"this is no recording that can be read, or is damaged or cut off: {why}") from error
        if len(x) == 0:
            raise DataError("the recording has no samples")
        notes = []
        if x.shape[1] > 1:
            notes.append(f"{x.shape[1]} channels were averaged")
        samples = x.mean(1) * 2**15  # as integers of 16 bits, which the model was trained on
        if rate != own:
            notes.append(f"resampled from {rate:,} to {own:,} samples a second")
            samples = soxr.resample(samples, rate, own)
        row = self.values(samples[:: self.step][: self.length])
        if seconds > wanted / rate:
            notes.append(f"only the first {wanted / rate:.2f} of {seconds:.2f} seconds were used")
        return Row(row.x, notes + row.notes)

    def image(self, content: bytes) -> Row:
        """Return a picture, cut to the model's proportions and resized."""
        self.takes("image")
        assert self.height
        assert self.width
        pixels = read_image(content, "this", self.channels == 1, MOST_PIXELS)
        notes, (height, width) = [], pixels.shape[:2]
        if (height, width) != (self.height, self.width):
            from PIL import Image, ImageOps

            picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
            pixels = np.asarray(ImageOps.fit(picture, (self.width, self.height))).reshape(self.height, self.width, -1)
            notes = [f"resized from {width:,} x {height:,} to {self.width} x {self.height} pixels"]
        pixels = np.broadcast_to(pixels, (self.height, self.width, self.channels))
        return Row(self.values(pixels.reshape(-1, self.channels)).x, notes)


def told_unknown(n: int) -> list[str]:
    """Return the note that so many symbols are unknown; none if there are none."""
    return [f"{n:,} symbol{' is' if n == 1 else 's are'} unknown to the model"] if n else []


def _strange(values: Any, deep: int = 2) -> str | None:
    """Return what is neither a number nor a list of them, at most so deep; None if nothing is.

    numpy would make an array of it first, all of whose items are as wide as the longest string.
    """
    if not isinstance(values, list):
        return None if type(values) in (int, float) else f"something that is no number: {values!r:.60}"
    if deep == 0:
        return "lists that are more than two deep"
    if {*map(type, values)} <= {int, float}:
        return None
    return next(filter(None, (_strange(value, deep - 1) for value in values)), None)
