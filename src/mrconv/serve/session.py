"""Sessions of a WebSocket: a sequence that arrives in chunks, and text generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mrconv.inference.predictor import softmax
from mrconv.tasks import DataError
from mrconv.tasks.preprocessing import unknown_symbol_notes
from mrconv.tasks.raw_inputs import parse_json, quoted

from .served_model import ServedModel

SAMPLING = {"temperature": float | int, "top_k": int, "top_p": float | int}
MAX_SYMBOLS = 100_000  # limit for a prompt, and for the generated text


class StreamSession:
    """One sequence that arrives in chunks: its streaming state, position and latest prediction."""

    def __init__(self, served: ServedModel) -> None:
        self.served, self.predictor, self.preprocessor = served, served.predictor, served.preprocessor
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self.state = self.served.new_state()
        self.position, self.unknowns, self.latest = 0, 0, np.empty(0)

    def pieces(self, message: bytes | str) -> tuple[list[np.ndarray], bool]:
        """Return the positions that a message adds, and whether it ends the sequence.

        The pieces are at most as long as the model's input: `feed` processes them one by one, so that other clients
        are served in between.
        """
        content = message if isinstance(message, bytes) else parse_json(message)
        end = content == {"end": True}
        if end and self.position == 0:
            raise DataError("the sequence is empty: send at least one position before the end")
        x = self._padding() if end else self._chunk(content)
        maximum = self.served.max_positions
        limit = None if maximum is None else maximum - len(self.preprocessor.end_tokens)
        if not end and limit is not None and self.position + len(x) > limit:
            raise DataError(
                f"the model attends to all previous positions: its streams may have {limit:,} positions; with this "
                f"message the stream would have {self.position + len(x):,}"
            )
        n = self.preprocessor.length
        return [x[i : i + n] for i in range(0, len(x), n)], end

    def _chunk(self, content: bytes | Mapping[str, Any]) -> np.ndarray:
        """Return the model's input for 16-bit samples, or for a JSON object."""
        if isinstance(content, bytes):
            self.preprocessor.check_kind("audio")
            if not content or len(content) % 2:
                raise DataError(f"expected samples of two bytes each; got {len(content)} bytes")
            return self._values(np.frombuffer(content, "<i2"))
        fields = self.predictor.raw_inputs.fields
        given = [name for name in fields if name in content]
        if len(given) != 1 or len(content) != 1:
            names = " or ".join((*fields, "end"))
            raise DataError(f"expected an object with one of {names}; got {quoted(content)}")
        value = content[given[0]]
        if given[0] == "values":
            return self._values(value)
        symbols = self.predictor.raw_inputs.symbols(given[0], value)
        if not symbols:
            raise DataError("expected at least one symbol; got none")
        return self.preprocessor.encode_symbols(symbols)

    def _values(self, values: Any) -> np.ndarray:
        return self.preprocessor.normalise(self.preprocessor.check_values(values), self.position)

    def _padding(self) -> np.ndarray:
        """Return the positions that `/predict` would append: <eos>, or zeros up to the model's length."""
        if self.preprocessor.vocabulary:
            return np.array(self.preprocessor.end_tokens, np.int64)
        zeros = np.zeros((max(0, self.preprocessor.length - self.position), self.preprocessor.channels), np.float32)
        return self.preprocessor.normalise(zeros, self.position) if len(zeros) else zeros

    @torch.inference_mode()
    def feed(self, piece: np.ndarray) -> None:
        """Process the next positions."""
        x = torch.from_numpy(piece)[None].to(self.predictor.device)
        x = x.to(self.predictor.dtype) if x.is_floating_point() else x
        logits, self.state = self.predictor.model.stream(x, self.state)
        self.position += len(piece)
        self.unknowns += self.preprocessor.count_unknown(piece)
        self.latest = softmax(logits[:, -1])[0]

    def answer(self, end: bool) -> dict[str, Any]:
        """Return the prediction for the sequence so far; start a new one at its end, or if the output is not finite."""
        try:
            label, probabilities = self.predictor.interpret(self.latest)
        except DataError as error:
            self.reset()  # the state is not finite either
            raise DataError(f"{error} A new sequence starts") from None
        prediction = {"label": label, "probabilities": probabilities, "notes": unknown_symbol_notes(self.unknowns)}
        answer = {"position": self.position, "end": end, **prediction}
        if end:
            self.reset()
        return answer


def generate_text(served: ServedModel, request: Mapping[str, Any], callback: Callable[[str], None]) -> dict[str, Any]:
    """Generate text after a prompt; call `callback` with each piece, and return the whole text with notes."""
    predictor, options = served.predictor, dict(request)
    prompt = served.preprocessor.encode_symbols(predictor.raw_inputs.symbols("text", options.pop("text", None)))
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
    if served.max_positions is not None and len(prompt) + new_tokens > served.max_positions:
        raise DataError(
            f"the model attends to all previous positions: text and new_tokens may together have "
            f"{served.max_positions:,} symbols; got {len(prompt):,} and {new_tokens:,}"
        )
    separator = "" if served.preprocessor.kind == "text" else " "
    try:
        symbols = predictor.generate(
            prompt, new_tokens, seed=seed, callback=lambda symbol: callback(symbol + separator), **options
        )
    except ValueError as error:  # an option out of range
        raise DataError(str(error)) from None
    notes = unknown_symbol_notes(served.preprocessor.count_unknown(prompt))
    return {"text": "".join(symbol + separator for symbol in symbols), "notes": notes}
