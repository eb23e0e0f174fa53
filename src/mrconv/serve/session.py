"""One sequence that comes in chunks, or that a language model writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrconv.tasks import DataError
from mrconv.tasks.packing import SPECIAL
from mrconv.tasks.preprocessing import unknown_symbol_notes

from .predictor import Served, probabilities
from .request_parsing import checked_text, checked_tokens, listed, parsed

SAMPLING = {"temperature": float | int, "top_k": int, "top_p": float | int}
MOST = 100_000  # symbols of a prompt, and of what is written after it


class Stream:
    """One sequence that comes in chunks, its state, and how far it has come."""

    def __init__(self, served: Served) -> None:
        self.served, self.inputs = served, served.inputs
        self.reset()

    def reset(self) -> None:
        """Begin a new sequence."""
        self.state = self.served.beginning.copy()
        self.position, self.unknowns, self.last = 0, 0, np.empty(0)

    def pieces(self, message: bytes | str) -> tuple[list[np.ndarray], bool]:
        """Return what a message adds, in pieces no longer than `/predict` takes, and whether the sequence ends there.

        Nothing is taken in yet: `feed` does that, piece by piece, so that others get their answers in between.
        """
        found = message if isinstance(message, bytes) else parsed(message)
        end = found == {"end": True}
        if end and self.position == 0:
            raise DataError("nothing came before the end")
        x = self.rest() if end else self.chunk(found)
        most = None if self.served.most is None else self.served.most - len(self.inputs.end_tokens)
        if not end and most is not None and self.position + len(x) > most:
            raise DataError(
                f"the model attends to all that came before: a stream of it may have {most:,} "
                f"positions; with these it would have {self.position + len(x):,}"
            )
        n = self.inputs.length
        return [x[i : i + n] for i in range(0, len(x), n)], end

    def answer(self, end: bool) -> dict[str, Any]:
        """Return the prediction for what was fed so far; at the end, or if there is none, begin a new sequence."""
        try:
            found = self.served.named(self.last)
        except DataError as error:
            self.reset()  # the state has no numbers either
            raise DataError(f"{error} A new sequence begins") from None
        result = {"position": self.position, "end": end, **found, "notes": unknown_symbol_notes(self.unknowns)}
        if end:
            self.reset()
        return result

    def chunk(self, found: bytes | Mapping[str, Any]) -> np.ndarray:
        """Return the next positions, as the model takes them: of samples, 16 bits each, or of JSON."""
        if isinstance(found, bytes):
            self.inputs.check_kind("audio")
            if not found or len(found) % 2:
                raise DataError(f"expected samples of two bytes each; got {len(found)} bytes")
            return self._values(np.frombuffer(found, "<i2"))
        fields = self.served.fields()
        given = [name for name in fields if name in found]
        if len(given) != 1 or len(found) != 1:
            names = " or ".join((*fields, "end"))
            raise DataError(f"expected an object with one of {names}; got {listed(found)}")
        value = found[given[0]]
        if given[0] == "values":
            return self._values(value)
        symbols = self.inputs.split_symbols(checked_text(value)) if given[0] == "text" else checked_tokens(value)
        if not symbols:
            raise DataError("expected at least one symbol; got none")
        return self.inputs.encode_symbols(symbols)

    def _values(self, values: Any) -> np.ndarray:
        return self.inputs.normalise(self.inputs.check_values(values), self.position)

    def rest(self) -> np.ndarray:
        """Return what `/predict` would put behind the sequence so far: <eos>, or zeros up to the model's length."""
        if self.inputs.vocabulary:
            return np.array(self.inputs.end_tokens, np.int64)
        zeros = np.zeros((max(0, self.inputs.length - self.position), self.inputs.channels), np.float32)
        return self.inputs.normalise(zeros, self.position) if len(zeros) else zeros

    @torch.inference_mode()
    def feed(self, piece: np.ndarray) -> None:
        """Take the next positions in."""
        x = torch.from_numpy(piece)[None].to(self.served.device)
        logits, self.state = self.served.model.stream(
            x.to(self.served.dtype) if x.is_floating_point() else x, self.state
        )
        self.position += len(piece)
        self.unknowns += self.inputs.count_unknown(piece)
        self.last = probabilities(logits[:, -1])[0]


def generate(served: Served, found: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Tell what a language model writes after a prompt, symbol by symbol; return all of it, with notes."""
    options = dict(found)
    prompt = served.inputs.encode_symbols(served.inputs.split_symbols(checked_text(options.pop("text", None))))
    new, seed = options.pop("new_tokens", 200), options.pop("seed", None)
    for name, kind in SAMPLING.items():
        if name in options and (isinstance(options[name], bool) or not isinstance(options[name], kind)):
            raise DataError(f"{name} must be a number; got {options[name]!r:.60}")
    if unknown := set(options) - set(SAMPLING):
        known = ", ".join(("text", "new_tokens", *SAMPLING, "seed"))
        raise DataError(f"{min(unknown)!r:.60} is not known; there are {known}")
    if isinstance(new, bool) or not isinstance(new, int) or not 1 <= new <= MOST:
        raise DataError(f"new_tokens must be from 1 to {MOST:,}; got {new!r:.60}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise DataError(f"seed must be a whole number from 0 on; got {seed!r:.60}")
    if not 1 <= len(prompt) <= MOST:
        raise DataError(f"text must have from 1 to {MOST:,} symbols, to go on from; got {len(prompt):,}")
    if served.most is not None and len(prompt) + new > served.most:
        raise DataError(
            f"the model attends to all that came before: text and new_tokens may be {served.most:,} symbols; "
            f"got {len(prompt):,} and {new:,}"
        )
    generator = None if seed is None else torch.Generator(served.device).manual_seed(seed)
    space = "" if served.inputs.kind == "text" else " "
    pieces: list[str] = []

    def each(token: Tensor) -> None:
        symbol = served.inputs.vocabulary[int(token)]
        pieces.append(("\N{REPLACEMENT CHARACTER}" if symbol in SPECIAL else symbol) + space)
        tell(pieces[-1])

    x = torch.from_numpy(prompt)[None].to(served.device)
    try:
        served.model.generate(x, new, generator=generator, callback=each, **options)
    except ValueError as error:  # of an option out of range
        raise DataError(str(error)) from None
    return {"text": "".join(pieces), "notes": unknown_symbol_notes(served.inputs.count_unknown(prompt))}
