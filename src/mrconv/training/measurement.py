"""Measurement of a model on validation and test: all metrics, every prediction, and the files that hold them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mrconv._utils.files import atomic_write
from mrconv.inference.prediction import activate, interpret
from mrconv.tasks import Prepared
from mrconv.tasks.custom.labels import FORMATS
from mrconv.tasks.progress_callback import Progress, ProgressCounter, no_progress
from mrconv.tasks.window_loader import IGNORED

from .confusion_matrix import draw_confusion_matrix
from .experiment import Experiment
from .figures import FIGURES
from .loop import evaluation_loaders
from .metrics import Metrics
from .outputs import model_outputs
from .rundir import write_json
from .tables import NOTHING, aligned_table
from .targets import TARGETS

METRICS, PREDICTIONS, CONFUSION = "metrics.json", "predictions.csv", "confusion.png"
MAX_PROBABILITIES = 100  # classes of which a table of predictions has all probabilities
MAX_PRINTED = 12  # classes of which a confusion matrix is printed
MAX_DRAWN = 100  # classes of which one is drawn


@dataclass
class Measurement:
    """Metrics by split, the predictions as lines of a table, the data that they are about, and how they were computed.

    `changes` has the settings that differ from the run's and may change its scores, among them `branches`.
    """

    data: Prepared
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    merged: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, facts: Mapping[str, Any]) -> list[Path]:
        """Write metrics.json with some facts, predictions.csv and the figure of the confusion matrix.

        Returns:
            The files. A language model has no predictions, data of many classes no figure.
        """
        folder.mkdir(parents=True, exist_ok=True)
        described = {"target": self.data.target, "classes": list(self.data.classes)} if self.data.classes else {}
        write_json(folder / METRICS, {**facts, **described, "splits": self.metrics})
        paths = [folder / METRICS]
        if self.lines:
            with atomic_write(folder / PREDICTIONS) as draft, draft.open("w", newline="", encoding="utf-8") as file:
                table = csv.DictWriter(file, list(self.lines[0]))
                table.writeheader()
                table.writerows(self.lines)
            paths.append(folder / PREDICTIONS)
        split = list(self.metrics)[-1]
        matrix = self.metrics[split].get("confusion_matrix")
        if matrix and self.data.target != "labels" and len(matrix) <= MAX_DRAWN:
            (folder / FIGURES).mkdir(exist_ok=True)
            draw_confusion_matrix(np.array(matrix), self.data.classes, split, folder / FIGURES / CONFUSION)
            paths.append(folder / FIGURES / CONFUSION)
        return paths

    def text(self) -> str:
        """Return the metrics as tables: one line per split, and those of each class or value of the last split."""
        numbers = [
            name for name, each in next(iter(self.metrics.values())).items() if not isinstance(each, dict | list)
        ]
        columns = {name: name.replace("_", " ") for name in ("split", *numbers)}
        lines = [
            {"split": split} | {name: _text(name, values[name]) for name in numbers}
            for split, values in self.metrics.items()
        ]
        tables = [aligned_table(columns, lines, ["split"])]
        split, last = list(self.metrics.items())[-1]
        by_output = {name: each for name, each in last.items() if isinstance(each, dict)}
        if by_output and len(self.data.classes) <= MAX_PRINTED:
            kind = "value" if self.data.target == "values" else "class"
            columns = {"name": f"{kind} ({split})"} | {name: name.split("_per_")[0] for name in by_output}
            tables.append(
                aligned_table(
                    columns,
                    [
                        {"name": output} | {name: _text("", each[output]) for name, each in by_output.items()}
                        for output in self.data.classes
                    ],
                    ["name"],
                )
            )
        matrix = last.get("confusion_matrix")
        if matrix and self.data.target != "labels" and len(matrix) <= MAX_PRINTED:
            tables.append(_confusion_text(matrix, self.data.classes, split))
        return "\n\n".join(tables)


def _text(name: str, number: float | None) -> str:
    if number is None:
        return NOTHING
    if name == "examples":
        return f"{number:,}"
    return f"{number:.2%}" if "accuracy" in name or name == "exact_match" else f"{number:.4g}"


def _confusion_text(matrix: Sequence[Sequence[int]], classes: Sequence[str], split: str) -> str:
    columns = {"": f"class \\ predicted ({split})"} | {f"{i}": name for i, name in enumerate(classes)}
    lines = [
        {"": name} | {f"{i}": f"{count:,}" for i, count in enumerate(counts)}
        for name, counts in zip(classes, matrix, strict=True)
    ]
    return aligned_table(columns, lines, [""])


@torch.no_grad()
def measure(
    model: nn.Module,
    data: Prepared,
    experiment: Experiment,
    device: torch.device,
    rate: float | None = None,
    progress: Progress = no_progress,
) -> Measurement:
    """Return the metrics and predictions for validation and test; options as for `loop.score`."""
    model.eval()
    target, result = TARGETS[data.target](data).to(device), Measurement(data)
    loaders = evaluation_loaders(data, experiment)
    count = ProgressCounter(progress, sum(len(loader) for loader in loaders.values()))
    for split, loader in loaders.items():
        metrics, lines, examples = Metrics(data).to(device), dict[int, dict[str, Any]](), 0
        for indices, outputs, y in model_outputs(model, loader, device, rate, count):
            metrics.update(outputs, y, target.loss(outputs, y))
            if data.classes:
                lines |= _lines(data, split, indices, outputs, y)
            examples += len(indices)
        result.metrics[split] = {"examples": examples} | metrics.compute()
        result.lines += [lines[i] for i in sorted(lines)]
    return result


def _lines(data: Prepared, split: str, indices: np.ndarray, outputs: Tensor, y: Tensor) -> dict[int, dict[str, Any]]:
    """Return the lines of a table of predictions by the index of the example."""
    names, lines = data.splits[split].names, {}
    for i, each, label in zip(indices.tolist(), activate(outputs, data.target), y.cpu().numpy(), strict=True):
        if data.target == "positions":
            each = each[: len(label)][label != IGNORED]
        prediction = interpret(each, data.target, data.classes, len(each), ())
        line = {"split": split, "example": f"{split} {i}" if names is None else names[i].decode()}
        line |= {"target": _label_text(data, label), "prediction": prediction.label}
        line |= {name: f"{number:.6g}" for name, number in prediction.values.items()}
        if len(data.classes) <= MAX_PROBABILITIES:
            line |= {f"p({name})": f"{p:.6g}" for name, p in prediction.probabilities.items()}
        lines[i] = line
    return lines


def _label_text(data: Prepared, label: np.ndarray) -> str:
    """Return a label in the form of a prediction."""
    labels: Any = label
    if data.target == "labels":
        labels = [data.classes[i] for i in np.flatnonzero(label)]
    elif data.target == "positions":
        labels = [data.classes[i] for i in label if i != IGNORED]
    elif data.target == "class":
        labels = data.classes[int(label)]
    return FORMATS[data.target].text(labels)
