"""A saved model and what it takes, ready to answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrconv import LanguageModel, MRConvNeXt, SequenceClassifier, TwoTowerClassifier, reparameterize
from mrconv.baselines.mega import GatedAttention
from mrconv.baselines.transformer import Attention
from mrconv.hub import MERGED, MODEL, model_folder, saved_model
from mrconv.tasks import DataError
from mrconv.tasks.packing import SPECIAL
from mrconv.tasks.preprocessing import ModelInput, Preprocessor, load_preprocessor

from .request_parsing import checked_text, checked_tokens, decoded, listed, parsed

GROWTH = 4  # a state that grows may become that of so many inputs of the model's length
Rows = tuple[ModelInput, ...]
"""One sequence, or two for a model of pairs."""


class WrongKind(DataError):
    """A body of a kind that the model does not take."""


class Served:
    """A model on a device, in eval mode.

    Args:
        folder: of a run, whose merged model is taken, or of any model that `save_pretrained` wrote; it is merged here
            if it is not yet.
        device: where it runs.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.folder = model_folder(folder, MERGED, MODEL)
        own = self.folder.resolve()
        self.name = own.parent.name if own.name in (MERGED, MODEL) else own.name
        self.model: Any = reparameterize(saved_model(self.folder)).to(device)
        if not isinstance(self.model, SequenceClassifier | TwoTowerClassifier | LanguageModel | MRConvNeXt):
            raise ValueError(
                f"{folder} holds a {type(self.model).__name__}; classifiers and language models are served"
            )
        self.device, self.dtype = torch.device(device), next(self.model.parameters()).dtype
        self.generates = isinstance(self.model, LanguageModel)
        config = self.model.config
        told = Preprocessor.from_config(config)
        self.inputs = load_preprocessor(self.folder) or told
        if self.inputs.sizes != told.sizes:
            raise ValueError(
                f"{self.folder}: inputs.json is of another model, with {self.inputs.sizes}; this one has {told.sizes}"
            )
        self.classes = self.inputs.classes or self.inputs.vocabulary
        # where padding reaches an answer, only sequences of one length share a batch: no answer depends on the others'
        self.mixes_lengths = not getattr(config, "bidirectional", True) or getattr(config, "mask_padding", False)
        self.no_stream = self._no_stream(config)
        self.most = self._most()
        try:
            self.predict([(self._blank(),) * len(self._ends())])  # what the first call sets up is set up, or fails, now
        except MemoryError:
            raise ValueError(f"{self.folder}: no memory for an input of length {self.inputs.length:,}") from None

    def _no_stream(self, config: Any) -> str | None:
        """Return why the model cannot stream; None if it can, and then keep the state that every stream begins with."""
        if isinstance(self.model, TwoTowerClassifier):
            return "a model of pairs needs both sequences whole and cannot stream"
        if isinstance(self.model, MRConvNeXt):
            return "the model needs a picture whole and cannot stream"
        if config.bidirectional:
            return (
                "the model is bidirectional: it needs the future of its input and cannot stream. Train a causal one, "
                "bidirectional=false; for speech there is experiment=speech-causal"
            )
        try:
            self.beginning = self.model.initial_state(1)
        except (ValueError, NotImplementedError, AttributeError):
            return f"the model's mixer, {config.mixer}, has no state to stream with"
        return None

    def _most(self) -> int | None:
        """Return how long a stream may get; None if for ever, with a state that does not grow."""
        for module in self.model.modules():
            if isinstance(module, Attention) and module.embedding is not None:
                return module.l_max
            if isinstance(module, Attention) or (isinstance(module, GatedAttention) and module.chunk is None):
                return GROWTH * self.inputs.length
        return None

    def about(self) -> dict[str, Any]:
        """Return what a client needs to know."""
        i = self.inputs
        return {
            "name": self.name,
            "model": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "kind": i.kind,
            "length": i.length - len(i.end_tokens),
            "symbols": [symbol for symbol in i.vocabulary if symbol not in SPECIAL],
            "classes": list(i.classes),
            "channels": i.channels,
            "pair": isinstance(self.model, TwoTowerClassifier),
            "sampling_rate": i.sampling_rate,
            "step": i.step,
            "height": i.height,
            "width": i.width,
            "generates": self.generates,
            "streams": self.no_stream is None,
            "no_stream": self.no_stream,
        }

    def rows(self, content: bytes, media_type: str) -> Rows:
        """Return the model's input, of a body of a media type; DataError tells what is wrong with it."""
        family, own = media_type.partition("/")[0], self.inputs.kind
        if media_type == "application/json":
            return self._from_json(content)
        if family in ("text", "audio", "image"):
            if family != own and (family, own) != ("text", "tokens"):
                raise WrongKind(f"the model takes {own}, not {family}")
        elif media_type not in ("application/octet-stream", "application/x-www-form-urlencoded", ""):
            raise WrongKind(f"bodies of type {media_type:.60} are not known; send JSON, text, audio or an image")
        if own == "values":
            raise WrongKind('the model takes numbers: send JSON, {"values": [[...], ...]}')
        if isinstance(self.model, TwoTowerClassifier):
            raise WrongKind('the model takes pairs: send JSON, {"text": "...", "text2": "..."}')
        if own == "audio":
            return (self.inputs.from_audio(content),)
        return (self.inputs.from_image(content) if own == "image" else self._text(decoded(content)),)

    def _from_json(self, content: bytes) -> Rows:
        found, ends = parsed(decoded(content)), self._ends()
        allowed = [f"{name}{end}" for name in self.fields() for end in ends]
        wrong = [name for name in found if name not in allowed]
        rows = []
        for end in ends:
            given = [name for name in self.fields() if f"{name}{end}" in found]
            if wrong or len(given) != 1:
                names = " and one of ".join(" or ".join(f"{name}{end}" for name in self.fields()) for end in ends)
                raise DataError(f"expected an object with one of {names}; got {listed(found)}")
            rows.append(self.row(given[0], found[given[0] + end]))
        return tuple(rows)

    def _ends(self) -> tuple[str, ...]:
        """Return what the names of a request's fields end in, for each of its sequences."""
        return ("", "2") if isinstance(self.model, TwoTowerClassifier) else ("",)

    def _blank(self) -> ModelInput:
        n, i = self.inputs.length, self.inputs
        return ModelInput(np.zeros(n, np.int64) if i.vocabulary else np.zeros((n, i.channels), np.float32))

    def fields(self) -> tuple[str, ...]:
        """Return the names that an input may have in JSON."""
        return ("text", "tokens") if self.inputs.vocabulary else ("values",)

    def row(self, name: str, value: Any) -> ModelInput:
        """Return an input that JSON gives as text, tokens or values."""
        if name == "values":
            return self.inputs.from_values(value)
        return self._text(value) if name == "text" else self.inputs.from_symbols(checked_tokens(value))

    def _text(self, text: Any) -> ModelInput:
        return self.inputs.from_text(checked_text(text))

    @torch.inference_mode()
    def predict(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Return the probabilities of each: of the classes or, by a language model, of the next token."""
        found: list[np.ndarray] = [np.empty(0)] * len(rows)
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            groups[None if self.mixes_lengths else tuple(len(each.x) for each in row)].append(i)
        for places in groups.values():
            sides = [self._padded([rows[i][side].x for i in places]) for side in range(len(rows[0]))]
            xs, lengths = zip(*sides, strict=True)
            logits = self.model(*xs, *lengths)
            if self.generates:
                logits = logits[torch.arange(len(places), device=self.device), lengths[0] - 1]
            for i, each in zip(places, probabilities(logits), strict=True):
                found[i] = each
        return found

    def named(self, found: np.ndarray) -> dict[str, Any]:
        """Return the likeliest class, or next token, and the probabilities by name."""
        if not np.isfinite(found).all():
            raise DataError("the model gives no numbers for this input; are its values too large?")
        return {
            "label": self.classes[int(found.argmax())],
            "probabilities": dict(zip(self.classes, found.tolist(), strict=True)),
        }

    def _padded(self, xs: Sequence[np.ndarray]) -> tuple[Tensor, Tensor | None]:
        """Return sequences as one tensor, and the lengths of those of tokens: values all have the model's."""
        if not self.inputs.vocabulary:
            x = torch.from_numpy(np.stack(xs)).to(self.device, self.dtype)
            if isinstance(self.model, MRConvNeXt):
                x = x.unflatten(1, (self.inputs.height, self.inputs.width)).permute(0, 3, 1, 2)
            return x, None
        lengths = torch.tensor([len(x) for x in xs])
        out = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(x) for x in xs], batch_first=True)
        return out.to(self.device), lengths.to(self.device)


def probabilities(logits: Tensor) -> np.ndarray:
    """Return softmax of (B, classes)."""
    return logits.float().softmax(-1).cpu().numpy()
