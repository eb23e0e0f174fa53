"""Probes: short trainings that each answer a question about the recipe, and their table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._utils.duration import format_duration
from ..hub import read_json
from .checkpoints import METRICS
from .run_names import recipe_changes
from .rundir import CONFIG, ENVIRONMENT, RESULT, read_config
from .scores import SCORES, Score
from .tables import NOTHING, aligned_table, markdown_table

FINDING = "finding.txt"
"""The file whose first line states what a probe shows."""
COLUMNS = {
    "probe": "probe",
    "change": "change",
    "epochs": "epochs",
    "validation": "validation, %",
    "best": "best (epoch)",
    "training": "training, %",
    "loss": "validation loss",
    "time": "time",
    "hardware": "hardware",
    "revision": "revision",
    "finding": "finding",
}
LEFT = ("probe", "change", "hardware", "revision", "finding")


def find_probes(folders: Iterable[Path]) -> list[Path]:
    """Return the folders under some folders that hold a config and a table of metrics, in alphabetical order."""
    folders = list(folders)
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise ValueError(f"no such folder: {', '.join(missing)}")
    found = {path.parent.resolve(): path.parent for folder in folders for path in folder.rglob(METRICS)}
    return sorted(folder for folder in found.values() if (folder / CONFIG).exists())


def table(probes: Iterable[Path]) -> str:
    """Return an aligned table of probes for a terminal."""
    return aligned_table(COLUMNS, map(line, probes), LEFT)


def markdown(probes: Iterable[Path]) -> str:
    """Return a table of probes in Markdown."""
    return markdown_table(COLUMNS, map(line, probes), LEFT)


def line(folder: Path) -> dict[str, str]:
    """Return the cells of a probe by column; the scores are those of validation and training only, never of test."""
    config, history = read_config(folder), _read_history(folder / METRICS)
    environment = read_json(folder / ENVIRONMENT) if (folder / ENVIRONMENT).exists() else {}
    result = read_json(folder / RESULT) if (folder / RESULT).exists() else environment
    last, done = history[-1], int(history[-1]["epoch"])
    cells = dict.fromkeys(COLUMNS, NOTHING) | {
        "probe": folder.name,
        "change": _change(environment.get("changes", recipe_changes(config))),
        "epochs": str(done) if done == config["epochs"] else f"{done} of {config['epochs']}",
        "hardware": environment.get("hardware") or NOTHING,
        "revision": (environment.get("revision") or NOTHING)[:7],
        "finding": _finding(folder / FINDING),
    }
    if "seconds" in result:
        cells["time"] = format_duration(result["seconds"])
    metric = next((score for score in SCORES.values() if f"train/{score.name}" in last), None)
    if metric is not None:
        cells["training"] = _score(metric, last[f"train/{metric.name}"])
    if metric is not None and f"val/{metric.name}" in last:
        key = f"val/{metric.name}"
        best = (max if metric.higher else min)(history, key=lambda epoch: epoch[key])
        cells["validation"], cells["loss"] = _score(metric, last[key]), f"{last['val/loss']:.3f}"
        cells["best"] = f"{_score(metric, best[key])} ({best['epoch']:.0f})"
    return cells


def _read_history(path: Path) -> list[dict[str, float]]:
    """Return the metrics of each epoch."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            history = [{key: float(value) for key, value in epoch.items()} for epoch in csv.DictReader(file)]
        if not history or "epoch" not in history[0]:
            raise ValueError("it has no epochs")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the table of metrics of a run: {error}") from error
    return history


def _change(changes: Mapping[str, Any]) -> str:
    """Return changed settings without the epochs, which have a column of their own."""
    settings = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in changes.items()
        if key != "epochs"
    ]
    return ", ".join(settings) or NOTHING


def _finding(path: Path) -> str:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.partition("\n")[0].strip() or NOTHING


def _score(metric: Score, value: float) -> str:
    """Return a score in the unit of the column, percent, or with another unit."""
    return metric.text(value).removesuffix("%")
