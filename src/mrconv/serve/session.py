"""Sessions of a WebSocket: a sequence that arrives in chunks, and text generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mrconv.inference import Predictor
from mrconv.tasks import DataError
from mrconv.tasks.preprocessing import unknown_symbol_notes
from mrconv.tasks.raw_inputs import parse_json, quoted

SAMPLING = {"temperature": float | int, "top_k": int, "top_p": float | int}
MAX_SYMBOLS = 100_000  # limit for a prompt, and for the generated text


class StreamSession:
    """A stream whose chunks are the messages of a client."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.stream = predictor, predictor.stream()
        self.feed = self.stream.advance

    def pieces(self, message: bytes | str) -> tuple[list[np.ndarray], bool]:
        """Return the positions that a message adds, and whether it ends the sequence.

        The pieces are at most as long as the model's input: `feed` processes them one by one, so that other clients
        are served in between.
        """
        content = message if isinstance(message, bytes) else parse_json(message)
        if content == {"end": True}:
            return self.stream.end_pieces(), True
        return self.stream.pieces(content if isinstance(content, bytes) else self._chunk(content)), False

    def _chunk(self, content: Mapping[str, Any]) -> Any:
        """Return the values or symbols of a JSON object."""
        inputs = self.predictor.raw_inputs
        given = [name for name in inputs.fields if name in content]
        if len(given) != 1 or len(content) != 1:
            names = " or ".join((*inputs.fields, "end"))
            raise DataError(f"expected an object with one of {names}; got {quoted(content)}")
        value = content[given[0]]
        return value if given[0] == "values" else inputs.symbols(given[0], value)

    def answer(self, end: bool) -> dict[str, Any]:
        """Return the prediction for the sequence so far; at its end, start a new one."""
        prediction = self.stream.prediction()
        if end:
            self.stream.reset()
        values: dict[str, Any] = {"label": prediction.label, "probabilities": prediction.probabilities}
        values |= {"notes": prediction.notes} | ({"values": prediction.values} if prediction.values else {})
        return {"position": prediction.length, "end": end, **values}


def generate_text(predictor: Predictor, request: Mapping[str, Any], callback: Callable[[str], None]) -> dict[str, Any]:
    """Generate text after a prompt; call `callback` with each piece, and return the whole text with notes."""
    options, maximum = dict(request), predictor.max_positions
    prompt = predictor.preprocessor.encode_symbols(predictor.raw_inputs.symbols("text", options.pop("text", None)))
    new_tokens, seed = options.pop("new_tokens", 200), options.pop("seed", None)
    for name, kind in SAMPLING.items():
        if name in options and (isinstance(options[name], bool) or not isinstance(options[name], kind)):
            raise DataError(f"{name} must be a number; got {options[name]!r:.60}")
    if unknown := set(options) - set(SAMPLING):
        allowed = ", ".join(("text", "new_tokens", *SAMPLING, "seed"))
        raise DataError(f"unknown option {min(unknown)!r:.60}; expected some of {allowed}")
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or not 1 <= new_tokens <= MAX_SYMBOLS:
        raise DataError(f"new_tokens must be from 1 to {MAX_SYMBOLS:,}; got {new_tokens!r:.60}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise DataError(f"seed must be an integer from 0 to 2**63 - 1; got {seed!r:.60}")
    if not 1 <= len(prompt) <= MAX_SYMBOLS:
        raise DataError(f"text must have from 1 to {MAX_SYMBOLS:,} symbols; got {len(prompt):,}")
    if maximum is not None and len(prompt) + new_tokens > maximum:
        raise DataError(
            f"the model attends to all previous positions: text and new_tokens may together have "
            f"{maximum:,} symbols; got {len(prompt):,} and {new_tokens:,}"
        )
    separator = "" if predictor.preprocessor.kind == "text" else " "
    try:
        symbols = predictor.generate(
            prompt, new_tokens, seed=seed, callback=lambda symbol: callback(symbol + separator), **options
        )
    except ValueError as error:  # an option out of range
        raise DataError(str(error)) from None
    notes = unknown_symbol_notes(predictor.preprocessor.count_unknown(prompt))
    return {"text": "".join(symbol + separator for symbol in symbols), "notes": notes}
