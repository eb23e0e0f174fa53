"""A model with its preprocessing: raw inputs in, labels and probabilities out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hub import Model
from ..model import LanguageModel, SequenceClassifier, TwoTowerClassifier
from ..tasks.errors import DataError
from ..tasks.preprocessing import INPUTS_FILE, ModelInput, Preprocessor, load_preprocessor
from ..tasks.raw_inputs import Examples, RawInputs
from ..tasks.vocabulary import SPECIAL
from ..vision.convnext import MRConvNeXt


@dataclass(frozen=True)
class Prediction:
    """The most likely class, the probability of every class, the number of positions seen, and preprocessing notes.

    A language model predicts the next symbol: its classes are the symbols of its vocabulary.
    """

    label: str
    probabilities: dict[str, float]
    length: int
    notes: list[str]


class Predictor:
    """A model in eval mode on a device, with the preprocessing of its inputs. `load` creates one.

    Without an inputs.json, inputs are numbers as the model sees them and classes are named by their index.

    Args:
        model: a classifier of sequences, pairs or images, or a language model.
        folder: the folder of the model, with its inputs.json.
        device: where the model runs.
    """

    def __init__(self, model: Model, folder: Path, device: torch.device | str = "cpu") -> None:
        if not isinstance(model, SequenceClassifier | TwoTowerClassifier | LanguageModel | MRConvNeXt):
            raise ValueError(f"{folder} holds a {type(model).__name__}; expected a classifier or a language model")
        self.model: Any = model.eval().to(device)
        self.folder, self.device, self.dtype = folder, torch.device(device), next(model.parameters()).dtype
        self.generates = isinstance(model, LanguageModel)
        expected, described = Preprocessor.from_config(model.config), load_preprocessor(folder)
        self.preprocessor = described or expected
        self.described = described is not None
        if self.preprocessor.sizes != expected.sizes:
            raise ValueError(
                f"{folder / INPUTS_FILE} describes another model, with {self.preprocessor.sizes}; "
                f"this model has {expected.sizes}"
            )
        self.takes_pairs = isinstance(model, TwoTowerClassifier)
        self.raw_inputs = RawInputs(self.preprocessor, self.takes_pairs)
        self.classes = self.preprocessor.classes or self.preprocessor.vocabulary
        # Where padding reaches the outputs, only sequences of equal length share a batch.
        causal, masked = not getattr(model.config, "bidirectional", True), getattr(model.config, "mask_padding", False)
        self.ignores_padding = causal or masked
        self._warm_up()

    def _warm_up(self) -> None:
        """Predict once, so that initialisation and its errors happen before the first request."""
        p = self.preprocessor
        try:
            blank = ModelInput(
                np.zeros(p.length, np.int64) if p.vocabulary else np.zeros((p.length, p.channels), np.float32)
            )
            self.probabilities([(blank,) * (2 if self.takes_pairs else 1)])
        except MemoryError:
            raise ValueError(f"{self.folder}: not enough memory for an input of length {p.length:,}") from None

    def predict(self, inputs: Iterable[Any], batch_size: int = 32) -> list[Prediction]:
        """Return a prediction for each raw input.

        A prediction does not depend on the other inputs of its batch. An input is, by the kind that the model takes:

        - text or tokens: a string, a list of symbols, or the path or bytes of a UTF-8 file;
        - audio or image: the path or bytes of a file, or an array (length, channels) before normalisation;
        - values: an array (length, channels) before normalisation;
        - a pair: a tuple of two of these;
        - any of these: a mapping {"text": ...}, {"tokens": ...} or {"values": ...} (the second of a pair: "text2",
          ...), or the path of a .json file that holds one.

        Raises:
            DataError: an input does not fit the model; the message names its index.
        """
        if isinstance(inputs, str | bytes | Path | Mapping):
            raise TypeError(f"predict takes a list of inputs; got one {type(inputs).__name__}: put it in a list")
        raw = list(inputs)
        examples = [self._at(i, len(raw), self.raw_inputs.preprocess, each) for i, each in enumerate(raw)]
        predictions: list[Prediction] = []
        for start in range(0, len(raw), batch_size):
            batch = examples[start : start + batch_size]
            for example, probabilities in zip(batch, self.probabilities(batch), strict=True):
                index = len(predictions)
                predictions.append(self._at(index, len(raw), self.prediction, example, probabilities))
        return predictions

    @staticmethod
    def _at(index: int, count: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function; if there are several inputs, add the index of this one to its error."""
        try:
            return function(*arguments)
        except DataError as error:
            raise (DataError(f"input {index}: {error}") if count > 1 else error) from None

    @torch.inference_mode()
    def probabilities(self, examples: Sequence[Examples]) -> list[np.ndarray]:
        """Return the class probabilities of each preprocessed input; a language model's are those of the next token."""
        results: list[np.ndarray] = [np.empty(0)] * len(examples)
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, example in enumerate(examples):
            groups[None if self.ignores_padding else tuple(len(each.x) for each in example)].append(i)
        for indices in groups.values():
            sides = [self._batch([examples[i][side].x for i in indices]) for side in range(len(examples[0]))]
            xs, lengths = zip(*sides, strict=True)
            logits = self.model(*xs, *lengths)
            if self.generates:
                logits = logits[torch.arange(len(indices), device=self.device), lengths[0] - 1]
            for i, probabilities in zip(indices, softmax(logits), strict=True):
                results[i] = probabilities
        return results

    def _batch(self, xs: Sequence[np.ndarray]) -> tuple[Tensor, Tensor | None]:
        """Return sequences as one padded tensor, and their lengths; None for values, which are equally long."""
        if not self.preprocessor.vocabulary:
            x = torch.from_numpy(np.stack(xs)).to(self.device, self.dtype)
            if isinstance(self.model, MRConvNeXt):
                x = x.unflatten(1, (self.preprocessor.height, self.preprocessor.width)).permute(0, 3, 1, 2)
            return x, None
        lengths = torch.tensor([len(x) for x in xs])
        padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(x) for x in xs], batch_first=True)
        return padded.to(self.device), lengths.to(self.device)

    def prediction(self, example: Examples, probabilities: np.ndarray) -> Prediction:
        """Return a preprocessed input's probabilities as a prediction."""
        label, by_class = self.interpret(probabilities)
        notes = [note for each in example for note in each.notes]
        return Prediction(label, by_class, sum(len(each.x) for each in example), notes)

    def interpret(self, probabilities: np.ndarray) -> tuple[str, dict[str, float]]:
        """Return the most likely class and the probability of every class by name."""
        if not np.isfinite(probabilities).all():
            raise DataError("the model's output for this input is not finite; are its values too large?")
        return self.classes[int(probabilities.argmax())], dict(zip(self.classes, probabilities.tolist(), strict=True))

    def generate(
        self,
        prompt: Sequence[int] | np.ndarray,
        new_tokens: int,
        *,
        seed: int | None = None,
        stop: Collection[int] = (),
        callback: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Return the symbols that a language model generates after the token ids of a prompt.

        Args:
            seed: seed of the random numbers; None draws a new one.
            stop: token ids after which generation ends.
            callback: called with each symbol as soon as it is drawn.
            sampling: `temperature`, `top_k` and `top_p` of `LanguageModel.generate`.
        """
        generator = torch.Generator(self.device)
        generator.seed() if seed is None else generator.manual_seed(seed)
        symbols: list[str] = []

        def add(token: Tensor) -> None:
            symbol = self.preprocessor.vocabulary[int(token)]
            symbols.append("\N{REPLACEMENT CHARACTER}" if symbol in SPECIAL else symbol)
            if callback is not None:
                callback(symbols[-1])

        x = torch.as_tensor(np.asarray(prompt, np.int64), device=self.device)[None]
        self.model.generate(x, new_tokens, generator=generator, stop=stop, callback=add, **sampling)
        return symbols


def softmax(logits: Tensor) -> np.ndarray:
    """Return the probabilities (B, classes) of logits as a float32 array."""
    return logits.float().softmax(-1).cpu().numpy()
