"""A model with its preprocessing: raw inputs in, predictions out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from ..hub import Model
from ..model import LanguageModel, SequenceClassifier, SequenceLabeller, SequenceRegressor, TwoTowerClassifier
from ..tasks.errors import DataError
from ..tasks.input_files import Input, holds_several, read_inputs
from ..tasks.preprocessing import INPUTS_FILE, ModelInput, Preprocessor, load_preprocessor
from ..tasks.raw_inputs import Examples, RawInputs
from ..tasks.vocabulary import SPECIAL
from ..tasks.windows import mean_of_windows
from ..vision.convnext import MRConvNeXt
from .prediction import Prediction, activate, interpret
from .stream import Stream, initial_state, max_positions

MAX_NUMBERS = 2**28
"""Largest number of activations of one input in one layer."""
MODELS = SequenceClassifier | SequenceRegressor | SequenceLabeller | TwoTowerClassifier | LanguageModel | MRConvNeXt


class Predictor:
    """A model in eval mode on a device, with the preprocessing of its inputs. `load` creates one.

    Without an inputs.json, inputs are numbers as the model sees them and classes are named by their index.

    Args:
        model: a classifier of sequences, pairs, images or positions, a regressor, or a language model.
        folder: the folder of the model, with its inputs.json.
        device: where the model runs.
    """

    def __init__(self, model: Model, folder: Path, device: torch.device | str = "cpu") -> None:
        if not isinstance(model, MODELS) or getattr(model.config, "per_position", False):
            raise ValueError(
                f"{folder} holds a {type(model).__name__}; expected a classifier, a regressor of whole sequences or a "
                "language model"
            )
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
        self._check_length()
        self.target = self.preprocessor.target
        if expected.target != ("class" if self.target == "labels" else self.target):
            raise ValueError(
                f"{folder / INPUTS_FILE} describes a model with target {self.target}; this is a {type(model).__name__}"
            )
        self.takes_pairs = isinstance(model, TwoTowerClassifier)
        self.raw_inputs = RawInputs(self.preprocessor, self.takes_pairs)
        self.classes = self.preprocessor.classes or self.preprocessor.vocabulary
        # Where padding reaches the outputs, only sequences of equal length share a batch.
        causal, masked = not getattr(model.config, "bidirectional", True), getattr(model.config, "mask_padding", False)
        self.ignores_padding = causal or masked
        self._warm_up()

    def _check_length(self) -> None:
        """Reject inputs so long that one layer's output would take more than a gigabyte."""
        config, length = self.model.config, self.preprocessor.length
        if length * (width := getattr(config, "d_model", 0) or config.dims[0]) > MAX_NUMBERS:
            raise ValueError(
                f"{self.folder}: not enough memory for an input of length {length:,} with {width:,} channels; their "
                f"product may be {MAX_NUMBERS:,}"
            )

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

    @overload
    def predict(self, x: list[Any], batch_size: int = ...) -> list[Prediction]: ...
    @overload
    def predict(self, x: Any, batch_size: int = ...) -> Any: ...
    def predict(self, x: Any, batch_size: int = 32) -> Prediction | list[Prediction]:
        """Return the prediction for one input, or a list of predictions for several.

        A prediction does not depend on the other inputs of its batch. An input is, by the kind that the model takes:

        - text or tokens: a string, a list of symbols, an array of integers, or the path or bytes of a UTF-8 file;
        - audio or image: the path or bytes of a file, or an array (length, channels), for an image also (height, width,
          channels), before normalisation;
        - values: an array (length, channels) before normalisation;
        - a pair: a tuple of two of these;
        - any of these: a mapping {"text": ...}, {"tokens": ...} or {"values": ...} (the second of a pair: "text2",
          ...), or the path of a .json file that holds one.

        Several inputs are a list of these, an array with one more dimension at the front, or the path of a table
        (.csv, .tsv, .jsonl, .npz), folder or archive (`read`). A list of numbers is one sequence. To a model of text or
        tokens a string is a text: give paths as `Path`.

        Args:
            x: the input or inputs.
            batch_size: inputs that run at once.

        Raises:
            DataError: an input does not fit the model; the message names it.
        """
        inputs, several = self._inputs(x)
        predictions = [prediction for _, prediction in self.predict_each(inputs, batch_size)]
        return predictions if several else predictions[0]

    def predict_proba(self, x: Any, batch_size: int = 32) -> np.ndarray:
        """Return the probabilities (classes,) of one input or (n, classes) of several, in the order of `classes`.

        A classifier of positions returns (positions, classes) or, for inputs of one length, (n, positions, classes).
        """
        if self.target == "values":
            raise ValueError("the model predicts values, not probabilities: use predict")
        inputs, several = self._inputs(x)
        results = [probabilities for _, _, probabilities in self._run(inputs, batch_size)]
        shapes = {each.shape for each in results} or {(len(self.classes),)}
        if len(shapes) > 1:
            raise ValueError("the inputs have different numbers of positions: give one at a time")
        probabilities = np.array(results, np.float32).reshape(-1, *shapes.pop())
        return probabilities if several else probabilities[0]

    def read(self, path: Path | str) -> Iterator[Input]:
        """Yield the inputs of a table, folder, archive or single file: name, raw input, and label if it is known.

        It reads everything that `task=folder` trains on (`mrconv.tasks.custom`), also without labels.
        """
        return read_inputs(Path(path).expanduser(), self.preprocessor)

    def predict_each(self, inputs: Iterable[Input], batch_size: int = 32) -> Iterator[tuple[Input, Prediction]]:
        """Yield the inputs of `read` with their predictions, batch by batch."""
        for each, example, probabilities in self._run(inputs, batch_size):
            yield each, self.prediction(example, probabilities)

    def stream(self) -> Stream:
        """Return a new stream, which predicts while its sequence arrives; raise ValueError if the model cannot."""
        return Stream(self)

    @cached_property
    def no_stream(self) -> str | None:
        """Why the model cannot stream; None if it can."""
        if self.takes_pairs:
            return "a model of pairs needs both complete sequences and cannot stream"
        try:
            self._initial_state = initial_state(self.model)
        except ValueError as error:
            return str(error)
        return None

    @cached_property
    def max_positions(self) -> int | None:
        """Maximum number of positions of a stream; None if the state does not grow."""
        return max_positions(self.model, self.preprocessor.length)

    def new_state(self) -> Any:
        """Return the state of a new stream."""
        return self._initial_state.copy()

    def _inputs(self, x: Any) -> tuple[Iterable[Input], bool]:
        """Return the inputs of an argument of `predict`, and whether the argument stands for several."""
        if isinstance(x, str) and not self.preprocessor.vocabulary:
            x = Path(x)
        if isinstance(x, Path) and holds_several(x):
            return self.read(x), True
        inputs = self.raw_inputs.split(x)
        if inputs is None:
            return [Input("", x)], False
        return [Input(f"input {i}" if len(inputs) > 1 else "", raw) for i, raw in enumerate(inputs)], True

    def _run(self, inputs: Iterable[Input], batch_size: int) -> Iterator[tuple[Input, Examples, np.ndarray]]:
        """Yield each input, its preprocessed form and its probabilities; an error names the input."""
        for batch in self._batches(inputs, batch_size):
            flat = [window for _, _, windows in batch for window in windows]
            results = chain.from_iterable(
                self.probabilities(flat[i : i + batch_size]) for i in range(0, len(flat), batch_size)
            )
            for each, example, windows in batch:
                probabilities = self.combine(example, list(islice(results, len(windows))))
                _named(each, check_finite, probabilities)
                yield each, example, probabilities

    def _batches(self, inputs: Iterable[Input], size: int) -> Iterator[list[tuple[Input, Examples, list[Examples]]]]:
        """Yield inputs with their preprocessed form and its windows, as many as it takes for `size` windows."""
        batch: list[tuple[Input, Examples, list[Examples]]] = []
        for each in inputs:
            example = _named(each, self.raw_inputs.preprocess, each.raw)
            batch.append((each, example, self.windows(example)))
            if sum(len(windows) for _, _, windows in batch) >= size:  # few long inputs are in memory at once
                yield batch
                batch = []
        if batch:
            yield batch

    def windows(self, example: Examples) -> list[Examples]:
        """Return a preprocessed input in windows, as the training data was cut; itself if it needs no windows."""
        starts = self.preprocessor.window_starts(len(example[0].x)).tolist()
        if len(starts) == 1:
            return [example]
        (whole,), n = example, self.preprocessor.length
        return [(ModelInput(whole.x[i : i + n], positions=min(n, whole.positions - i)),) for i in starts]

    def combine(self, example: Examples, results: Sequence[np.ndarray]) -> np.ndarray:
        """Return the mean of the probabilities, or values, of the windows of a preprocessed input."""
        if len(results) == 1:
            return results[0]
        starts = self.preprocessor.window_starts(len(example[0].x)).tolist()
        return mean_of_windows(results, starts if self.target == "positions" else None)

    @torch.inference_mode()
    def probabilities(self, examples: Sequence[Examples]) -> list[np.ndarray]:
        """Return the probabilities, or values, of each preprocessed input; those of a language model's next token."""
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
            for i, activated in zip(indices, activate(logits, self.target), strict=True):
                results[i] = activated[: examples[i][0].positions] if self.target == "positions" else activated
        return results

    def _batch(self, xs: Sequence[np.ndarray]) -> tuple[Tensor, Tensor | None]:
        """Return sequences as one padded tensor, and their lengths; None for values that are equally long."""
        if not self.preprocessor.vocabulary and len({len(x) for x in xs}) == 1:
            x = torch.from_numpy(np.stack(xs)).to(self.device, self.dtype)
            if isinstance(self.model, MRConvNeXt):
                x = x.unflatten(1, (self.preprocessor.height, self.preprocessor.width)).permute(0, 3, 1, 2)
            return x, None
        lengths = torch.tensor([len(x) for x in xs])
        padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(x) for x in xs], batch_first=True).to(self.device)
        return padded.to(self.dtype) if padded.is_floating_point() else padded, lengths.to(self.device)

    def prediction(self, example: Examples, probabilities: np.ndarray) -> Prediction:
        """Return a preprocessed input's probabilities as a prediction."""
        notes = [note for each in example for note in each.notes]
        return self.interpret(probabilities, sum(len(each.x) for each in example), notes)

    def interpret(self, probabilities: np.ndarray, length: int, notes: Sequence[str]) -> Prediction:
        """Return the probabilities, or values, of a sequence as a prediction."""
        check_finite(probabilities)
        return interpret(probabilities, self.target, self.classes, length, notes)

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


def check_finite(probabilities: np.ndarray) -> None:
    """Raise DataError if a probability is not finite."""
    if not np.isfinite(probabilities).all():
        raise DataError("the model's output for this input is not finite; are its values too large?")


def _named(each: Input, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; add the name of an input to its error."""
    try:
        return function(*arguments)
    except DataError as error:
        raise (DataError(f"{each.name}: {error}") if each.name else error) from None
