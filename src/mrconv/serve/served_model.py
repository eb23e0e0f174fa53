"""A predictor and its streaming form, as the server uses them."""

from __future__ import annotations

from typing import Any

from mrconv import MRConvNeXt
from mrconv.hub import MERGED, MODEL
from mrconv.inference import Predictor
from mrconv.mixers import Mixer
from mrconv.tasks.vocabulary import SPECIAL

MAX_GROWTH = 4  # a state that grows with the stream may hold this many times the model's length


class ServedModel:
    """A predictor, the initial state of its streams and their longest length.

    Attributes:
        no_stream: why the model cannot stream; None if it can.
        max_positions: maximum number of positions of a stream; None if the state does not grow.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.preprocessor, self.model = predictor, predictor.preprocessor, predictor.model
        self.no_stream = self._initialise_stream()
        self.max_positions = self._max_positions()

    def _initialise_stream(self) -> str | None:
        """Create the state that every stream starts from; return the reason if the model cannot stream, else None."""
        config = self.model.config
        if self.predictor.takes_pairs:
            return "a model of pairs needs both complete sequences and cannot stream"
        if isinstance(self.model, MRConvNeXt):
            return "the model needs the complete image and cannot stream"
        if config.bidirectional:
            return (
                "the model is bidirectional: it needs the future of its input and cannot stream. Train a causal model "
                "with bidirectional=false; for speech, use experiment=speech-base variant=causal"
            )
        try:
            self._initial_state = self.model.initial_state(1)
        except (ValueError, NotImplementedError, AttributeError):
            return f"the mixer of the model, {config.mixer}, does not support streaming"
        return None

    def _max_positions(self) -> int | None:
        for module in self.model.modules():
            if isinstance(module, Mixer) and module.max_positions is not None:
                return module.max_positions
            if isinstance(module, Mixer) and module.state_grows:
                return MAX_GROWTH * self.preprocessor.length
        return None

    def new_state(self) -> Any:
        """Return the state of a new stream."""
        return self._initial_state.copy()

    def description(self) -> dict[str, Any]:
        """Return what a client needs to know about the model, as JSON values."""
        p, folder = self.preprocessor, self.predictor.folder.resolve()
        return {
            "name": folder.parent.name if folder.name in (MERGED, MODEL) else folder.name,
            "model": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "kind": p.kind,
            "length": p.length - len(p.end_tokens),
            "symbols": [symbol for symbol in p.vocabulary if symbol not in SPECIAL],
            "classes": list(p.classes),
            "channels": p.channels,
            "pair": self.predictor.takes_pairs,
            "sampling_rate": p.sampling_rate,
            "step": p.step,
            "height": p.height,
            "width": p.width,
            "generates": self.predictor.generates,
            "streams": self.no_stream is None,
            "no_stream": self.no_stream,
        }
