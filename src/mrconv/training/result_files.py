"""Reading of result.json files."""

from __future__ import annotations

import csv
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .experiment import Experiment
from .run_names import EVALUATION, setting_texts
from .scores import SCORES

RESULT, METRICS = "result.json", "metrics.csv"
EVALUATIONS = f"{EVALUATION}-*/metrics.json"
"""The metrics of evaluations with other settings, in a run."""
ROUNDED = "rounded_matrices"
"""The key of a record's dtype of matrices that the run has in float32."""
FOLDERS = ("data_dir", "cache_dir", "out")
"""The keys of folders of the machine. Records have their defaults instead of absolute paths."""
PROBES = "probes"
"""The folder of probes, which are not results."""

KEYS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "task": str,
    "partial": bool,
    "epochs": int,
    "parameters": int,
    "seconds": (int, float),
    "seed": int,
    "environment": dict,
}


def collect(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Read every result.json under the folders; ignore further copies of a result, and probes.

    Each result has the contents of its file, its `path`, `epochs_done` (None if unknown), and `evaluations` with other
    settings: their scores by split.
    """
    folders = list(folders)
    missing = [str(folder) for folder in folders if not folder.exists()]
    if missing:
        raise ValueError(f"no such file or folder: {', '.join(missing)}")
    contents: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    errors: list[str] = []
    for path in _find_files(folders):
        try:
            content = read(path)
            evaluations = _read_evaluations(path.parent, content.get("metric", "accuracy"))
        except ValueError as error:
            errors.append(str(error))
            continue
        recorded = {key: value for key, value in portable(content).items() if key != ROUNDED}  # a record is a copy
        if recorded in contents:
            results[contents.index(recorded)]["evaluations"] |= evaluations
        else:
            contents.append(recorded)
            done = _epochs_done(content, path.with_name(METRICS))
            results.append(content | {"path": path, "epochs_done": done, "evaluations": evaluations})
    if errors:
        raise ValueError("; ".join(errors))
    return sorted(results, key=lambda result: (result["name"], result["seed"], str(result["path"])))


def portable(value: Any, key: str = "") -> Any:
    """Return the contents of a run's file, the value of a key in it, without absolute paths of `FOLDERS`."""
    if isinstance(value, dict):
        return {name: portable(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [portable(each) for each in value if not _is_absolute_folder(each)]
    if key == "command" and isinstance(value, str):
        return _portable_command(value)
    return getattr(Experiment, key) if _is_absolute_folder(f"{key}={value}") else value


def _portable_command(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError:  # not a command line
        return command
    return shlex.join(word for word in words if not _is_absolute_folder(word))


def _is_absolute_folder(word: Any) -> bool:
    key, _, path = str(word).partition("=")
    return key.lstrip("+") in FOLDERS and Path(path.strip("'\"")).is_absolute()


def _find_files(folders: Sequence[Path]) -> list[Path]:
    paths = [path for folder in folders for path in (_files_under(folder) if folder.is_dir() else [folder])]
    return list({path.resolve(): path for path in reversed(paths)}.values())[::-1]


def _files_under(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob(RESULT) if PROBES not in path.relative_to(folder).parts)


def read(path: Path) -> dict[str, Any]:
    """Read one result.json; raise ValueError if it is not the result of a run."""
    result = _read_object(path, "the result of a run")
    metric = result.get("metric", "accuracy")
    if metric not in SCORES:
        raise ValueError(f"{path}: 'metric' must be one of {', '.join(SCORES)}; got {json.dumps(metric)}")
    scores = (metric, f"merged_{metric}")
    for key, kind in (KEYS | dict.fromkeys(scores, dict)).items():
        if key not in result:
            raise ValueError(f"{path} is not the result of a run: key {key!r} is missing")
        if not isinstance(result[key], kind) or (kind is not bool and isinstance(result[key], bool)):
            raise ValueError(f"{path}: {key!r} cannot be {json.dumps(result[key])}")
    best = result.get("best_on_test", {"epoch": 1, metric: 0})
    if not isinstance(best, dict) or any(type(best.get(key)) not in (int, float) for key in ("epoch", metric)):
        raise ValueError(f"{path}: 'best_on_test' must have numbers 'epoch' and {metric!r}; got {json.dumps(best)}")
    used = result.get("substitution", {"used": "", "instead_of": ""})
    if not isinstance(used, dict) or any(type(used.get(key)) is not str for key in ("used", "instead_of")):
        raise ValueError(f"{path}: 'substitution' must have strings 'used' and 'instead_of'; got {json.dumps(used)}")
    for key in scores:
        for split, value in result[key].items():
            _check_score(path, key, split, value)
    return result


def _read_object(path: Path, kind: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not {kind}: it must contain a JSON object")
    return content


def _check_score(path: Path, key: str, split: str, value: Any) -> None:
    """Raise ValueError unless a score is a number in the range of its metric."""
    most = 1 if key.removeprefix("merged_") == "accuracy" else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        allowed = "from 0 to 1" if most == 1 else "0 or more"
        raise ValueError(f"{path}: {key!r} of {split} must be {allowed}; got {json.dumps(value)}")


def _read_evaluations(folder: Path, metric: str) -> dict[str, dict[str, float]]:
    """Return the scores of a run's evaluations with other settings, by settings and split."""
    found = {}
    for path in sorted(folder.glob(EVALUATIONS)):
        content = _read_object(path, "an evaluation")
        changes, splits = content.get("changes"), content.get("splits")
        if not changes:  # the run's own settings, or written by an earlier version
            continue
        if not isinstance(changes, dict) or not isinstance(splits, dict):
            raise ValueError(f"{path} is not an evaluation: it must have objects 'changes' and 'splits'")
        scores: dict[str, float] = {}
        for split, values in splits.items():
            score = values.get(metric) if isinstance(values, dict) else None
            if score is not None:  # null: not finite
                _check_score(path, metric, split, score)
                scores[split] = score
        found[", ".join(setting_texts(changes))] = scores
    return found


def _epochs_done(result: Mapping[str, Any], metrics: Path) -> int | None:
    """Return the number of epochs that a run has finished, as recorded or from its metrics.csv."""
    if "epochs_done" in result:
        return int(result["epochs_done"])
    if not result["partial"]:
        return int(result["epochs"])
    try:
        with metrics.open(newline="", encoding="utf-8") as file:
            return max(int(line["epoch"]) for line in csv.DictReader(file))
    except (OSError, ValueError, KeyError, TypeError):
        return None
