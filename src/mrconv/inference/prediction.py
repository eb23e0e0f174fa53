"""The prediction for one input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..tasks.custom.labels import FORMATS


@dataclass(frozen=True)
class Prediction:
    """What a model predicts for an input, by its target, the number of positions seen, and preprocessing notes.

    - "class": `label` is the most likely class; `probabilities` has every class. A language model predicts the next
      symbol: its classes are the symbols of its vocabulary.
    - "labels": `label` has the classes with a probability of at least 1/2, separated by ";".
    - "values": `values` has every value by name, in the units of the training data; `label` is their text.
    - "positions": `positions` has the most likely class of every position; `label` is their text. While a sequence
      arrives, `label` and `probabilities` are those of the latest position.
    """

    label: str
    probabilities: dict[str, float]
    length: int
    notes: list[str]
    values: dict[str, float] = field(default_factory=dict)
    positions: list[str] = field(default_factory=list)


def activate(outputs: Tensor, target: str) -> np.ndarray:
    """Return a model's outputs as probabilities or, for target "values", as they are, in float32."""
    z = outputs.float()
    if target == "labels":
        z = z.sigmoid()
    elif target != "values":
        z = z.softmax(-1)
    return z.cpu().numpy()


def interpret(
    activated: np.ndarray, target: str, names: Sequence[str], length: int, notes: Sequence[str]
) -> Prediction:
    """Return the prediction in the activated outputs (outputs,) or, for positions, (positions, outputs)."""
    if activated.ndim == 2:
        positions = [names[i] for i in activated.argmax(-1)]
        return Prediction(FORMATS[target].text(positions), {}, length, [*notes], positions=positions)
    by_name = dict(zip(names, activated.tolist(), strict=True))
    if target == "values":
        return Prediction(FORMATS[target].text(by_name.values()), {}, length, [*notes], values=by_name)
    label = names[int(activated.argmax())]
    if target == "labels":
        label = FORMATS[target].text([name for name, p in by_name.items() if p >= 0.5])
    return Prediction(label, by_name, length, [*notes])
