"""Predictions for a sequence while it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..mixers import Mixer
from ..tasks.errors import DataError
from ..tasks.preprocessing import unknown_symbol_notes
from ..tasks.raw_inputs import as_array
from ..vision.convnext import MRConvNeXt
from .prediction import Prediction, activate

if TYPE_CHECKING:
    from .predictor import Predictor

MAX_GROWTH = 4  # a state that grows with the stream may hold this many times the model's length


class Stream:
    """A sequence that arrives in chunks of any length. `Predictor.stream` creates one.

    The prediction after a chunk is that of the model for the positions so far, and the prediction at the end is that of
    `Predictor.predict` for the whole sequence, unless `predict` cuts it into windows. Of a classifier of positions, it
    is the class of the latest position.

    Attributes:
        position: number of positions so far.
    """

    def __init__(self, predictor: Predictor) -> None:
        if predictor.no_stream is not None:
            raise ValueError(predictor.no_stream)
        self.predictor, self.preprocessor = predictor, predictor.preprocessor
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self.state = self.predictor.new_state()
        self.position, self.unknowns, self.latest = 0, 0, np.empty(0)

    def feed(self, chunk: Any) -> Prediction:
        """Add a chunk and return the prediction for the sequence so far.

        A chunk is a text or a list of symbols, an array (length, channels) before normalisation, or 16-bit samples as
        bytes. A chunk that does not fit the model raises DataError and adds nothing.
        """
        for piece in self.pieces(chunk):
            self.advance(piece)
        return self.prediction()

    def end(self) -> Prediction:
        """End the sequence, return its prediction and start a new one."""
        for piece in self.end_pieces():
            self.advance(piece)
        result = self.prediction()
        self.reset()
        return result

    def pieces(self, chunk: Any) -> list[np.ndarray]:
        """Return the positions of a chunk in pieces of at most the model's length, which `advance` takes one by one."""
        x, maximum = self._encode(chunk), self.predictor.max_positions
        limit = None if maximum is None else maximum - len(self.preprocessor.end_tokens)
        if limit is not None and self.position + len(x) > limit:
            raise DataError(
                f"the model attends to all previous positions: its streams may have {limit:,} positions; with this "
                f"message the stream would have {self.position + len(x):,}"
            )
        return self._cut(x)

    def end_pieces(self) -> list[np.ndarray]:
        """Return the positions that `predict` would append, in pieces: <eos>, or zeros up to the model's length.

        They have no class of their own: a classifier of positions needs none.
        """
        if self.position == 0:
            raise DataError("the sequence is empty: send at least one position before the end")
        if self.predictor.target == "positions" or self.preprocessor.lengths:
            return []
        if self.preprocessor.vocabulary:
            return self._cut(np.array(self.preprocessor.end_tokens, np.int64))
        zeros = np.zeros((max(0, self.preprocessor.length - self.position), self.preprocessor.channels), np.float32)
        return self._cut(self.preprocessor.normalise(zeros, self.position)) if len(zeros) else []

    def _cut(self, x: np.ndarray) -> list[np.ndarray]:
        n = self.preprocessor.length
        return [x[i : i + n] for i in range(0, len(x), n)]

    def _encode(self, chunk: Any) -> np.ndarray:
        """Return the model's input for a chunk."""
        if isinstance(chunk, bytes):
            self.preprocessor.check_kind("audio")
            if not chunk or len(chunk) % 2:
                raise DataError(f"expected samples of two bytes each; got {len(chunk)} bytes")
            chunk = np.frombuffer(chunk, "<i2")
        if not self.preprocessor.vocabulary:
            return self.preprocessor.normalise(self.preprocessor.check_values(as_array(chunk)), self.position)
        symbols = self.predictor.raw_inputs.symbols("text" if isinstance(chunk, str) else "tokens", as_array(chunk))
        if not symbols:
            raise DataError("expected at least one symbol; got none")
        return self.preprocessor.encode_symbols(symbols)

    @torch.inference_mode()
    def advance(self, piece: np.ndarray) -> None:
        """Process the next positions."""
        x = torch.from_numpy(piece)[None].to(self.predictor.device)
        x = x.to(self.predictor.dtype) if x.is_floating_point() else x
        logits, self.state = self.predictor.model.stream(x, self.state)
        self.position += len(piece)
        self.unknowns += self.preprocessor.count_unknown(piece)
        self.latest = activate(logits[:, -1], self.predictor.target)[0]

    def prediction(self) -> Prediction:
        """Return the prediction for the sequence so far; start a new sequence if the output is not finite."""
        try:
            return self.predictor.interpret(self.latest, self.position, unknown_symbol_notes(self.unknowns))
        except DataError as error:
            self.reset()  # the state is not finite either
            raise DataError(f"{error} A new sequence starts") from None


def initial_state(model: Any) -> Any:
    """Return the state that every stream of a model starts from; raise ValueError with the reason if it has none."""
    if isinstance(model, MRConvNeXt):
        raise ValueError("the model needs the complete image and cannot stream")
    if model.config.bidirectional:
        raise ValueError(
            "the model is bidirectional: it needs the future of its input and cannot stream. Train a causal model "
            "with bidirectional=false; for speech, use experiment=speech-base variant=causal"
        )
    try:
        return model.initial_state(1)
    except (ValueError, NotImplementedError, AttributeError):
        raise ValueError(f"the mixer of the model, {model.config.mixer}, does not support streaming") from None


def max_positions(model: Any, length: int) -> int | None:
    """Return the maximum number of positions of a stream; None if the state does not grow."""
    for module in model.modules():
        if isinstance(module, Mixer) and module.max_positions is not None:
            return module.max_positions
        if isinstance(module, Mixer) and module.state_grows:
            return MAX_GROWTH * length
    return None
