"""The results of runs, beside the paper's: found in result.json files, joined over seeds, as a table."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .experiment import Experiment
from .paper_numbers import EXAMPLES, QUOTED, TASKS, Published, of_mrconv, published
from .presets import ready
from .scores import SCORES

RESULT, METRICS = "result.json", "metrics.csv"
NOTHING = "–"

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
# What may differ between runs that are one experiment with several seeds.
APART = {
    "seed", "data_dir", "cache_dir", "loader", "workers", "accelerator", "compile", "graphs", "backend",
    "checkpoint_minutes", "wandb", "out", "precision", "pad", "strategy",
}  # fmt: skip
# What makes a run another experiment, whatever its name, and how a note tells it.
REDUCED = {
    "limit_train": "{} batches an epoch",
    "limit_eval": "{} batches evaluated",
    "rate": "trained at rate {:g}",
}
MOST = 4  # changes that a note spells out

COLUMNS = {
    "run": "run",
    "task": "task",
    "seeds": "seeds",
    "test": "test, %",
    "merged": "merged, %",
    "paper": "paper, %",
    "difference": "difference",
    "peer": "best peer in the paper",
    "parameters": "parameters",
    "epochs": "epochs",
    "time": "time a run",
    "hardware": "hardware",
    "revision": "revision",
    "notes": "notes",
}
LEFT = ("run", "task", "seeds", "peer", "hardware", "revision", "notes")
NOT_ON_TERMINALS = ("task", "hardware", "revision")


def collect(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Read every result.json under the folders; a copy of a result counts once.

    Each is what the file holds, with its `path` and the `epochs_done` (None where nothing tells).
    """
    folders = list(folders)
    missing = [str(folder) for folder in folders if not folder.exists()]
    if missing:
        raise ValueError(f"not there: {', '.join(missing)}")
    found: list[dict[str, Any]] = []
    wrong: list[str] = []
    for path in _files(folders):
        try:
            result = read(path)
        except ValueError as error:
            wrong.append(str(error))
            continue
        if not any(result == {k: v for k, v in each.items() if k not in ("path", "epochs_done")} for each in found):
            found.append(result | {"path": path, "epochs_done": _epochs_done(result, path.with_name(METRICS))})
    if wrong:
        raise ValueError("; ".join(wrong))
    return sorted(found, key=lambda result: (result["name"], result["seed"], str(result["path"])))


def _files(folders: Sequence[Path]) -> list[Path]:
    paths = [p for f in folders for p in (sorted(f.rglob(RESULT)) if f.is_dir() else [f])]
    return list({path.resolve(): path for path in reversed(paths)}.values())[::-1]


def read(path: Path) -> dict[str, Any]:
    """Read one result.json; refuse one that lacks what a result has."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict):
        raise ValueError(f"{path} is not the result of a run: it holds no object")
    metric = result.get("metric", "accuracy")
    if metric not in SCORES:
        raise ValueError(f"{path}: 'metric' cannot be {json.dumps(metric)}; it is one of {', '.join(SCORES)}")
    scores = (metric, f"merged_{metric}")
    for key, kind in (KEYS | dict.fromkeys(scores, dict)).items():
        if key not in result:
            raise ValueError(f"{path} is not the result of a run: it has no {key!r}")
        if not isinstance(result[key], kind) or (kind is not bool and isinstance(result[key], bool)):
            raise ValueError(f"{path}: {key!r} cannot be {json.dumps(result[key])}")
    most = 1 if metric == "accuracy" else math.inf
    for key in scores:
        for split, value in result[key].items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                told = "from 0 to 1" if most == 1 else "0 or more"
                raise ValueError(f"{path}: {key!r} of {split} must be {told}; got {json.dumps(value)}")
    return result


def _epochs_done(result: Mapping[str, Any], metrics: Path) -> int | None:
    """Return how many epochs a run did: as recorded, or by its metrics.csv."""
    if "epochs_done" in result:
        return int(result["epochs_done"])
    if not result["partial"]:
        return int(result["epochs"])
    try:
        with metrics.open(newline="", encoding="utf-8") as file:
            return max(int(row["epoch"]) for row in csv.DictReader(file))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def join(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group runs that differ in their seed only; partial runs stay alone."""
    groups: list[tuple[Any, list[Mapping[str, Any]]]] = []
    for row in rows:
        config = {k: v for k, v in row.get("config", {}).items() if k not in APART}
        same = (row["name"], row["task"], config)
        for key, group in groups:
            alone = row["partial"] or group[0]["partial"] or row["seed"] in [each["seed"] for each in group]
            if key == same and not alone:
                group.append(row)
                break
        else:
            groups.append((same, [row]))
    return [group for _, group in groups]


def lines(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return what each line of a table says, by column."""
    return [_line(group) for group in join(rows)]


def _line(group: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    first = group[0]
    metric = SCORES[first.get("metric", "accuracy")]
    test, merged = _scores(group), _scores(group, "merged_")
    unit = "" if metric.name == "accuracy" else f" {metric.name}"
    paper = _published(first)
    says = dict.fromkeys(COLUMNS, NOTHING) | {
        "run": first["name"],
        "task": first["task"],
        "seeds": ", ".join(str(row["seed"]) for row in group),
        "test": spread(test, unit),
        "merged": spread(merged, unit),
        "parameters": " or ".join(dict.fromkeys(f"{row['parameters']:,}" for row in group)),
        "epochs": _epochs(first),
        "time": " to ".join(dict.fromkeys(duration(f([r["seconds"] for r in group])) for f in (min, max))),
        "hardware": _all(group, "hardware"),
        "revision": _all(group, "revision"),
        "notes": "; ".join(notes(first)) or NOTHING,
    }
    if paper is not None:
        says["paper"] = "chance" if paper.accuracy is None else f"{paper.accuracy:.2f}"
        says["peer"] = f"{paper.peer} {paper.peer_accuracy:.2f}"
        if test and paper.accuracy is not None and as_published(first):
            says["difference"] = f"{statistics.mean(test) - paper.accuracy:+.2f}".replace("-", "−")
    return says


def _split(row: Mapping[str, Any]) -> str:
    """Return the split whose score a run is told by: test, or validation where there is no test."""
    scores = row[row.get("metric", "accuracy")]
    return "val" if "val" in scores and "test" not in scores else "test"


def _scores(group: Sequence[Mapping[str, Any]], prefix: str = "") -> list[float]:
    """Return the runs' scores as they are told, those in percent times 100."""
    metric, split = SCORES[group[0].get("metric", "accuracy")], _split(group[0])
    key = prefix + metric.name
    return [metric.scale * row[key][split] for row in group if split in row[key]]


def _published(row: Mapping[str, Any]) -> Published | None:
    return published(row["name"]) if row["name"].split("-")[0] == row["task"] else None


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return the mean and, of several values, the standard deviation (of n - 1), in percent if there is no unit."""
    if not values:
        return NOTHING
    digits = 3 if unit else 2
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}{unit}"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    if not math.isfinite(seconds):
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _epochs(row: Mapping[str, Any]) -> str:
    if not row["partial"]:
        return str(row["epochs"])
    done = row.get("epochs_done")
    return f"{'?' if done is None else done} of {row['epochs']}"


def _all(group: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the values that an environment's key has in a group; a revision with its first 10 digits."""
    found = dict.fromkeys(row["environment"].get(key) or NOTHING for row in group)
    if key == "revision":
        found = dict.fromkeys(text[:10] + "+" * (len(text) > 10 and text.endswith("+")) for text in found)
    return ", ".join(found)


def notes(row: Mapping[str, Any]) -> list[str]:
    """Return what keeps a run from being compared with the paper's as it stands."""
    found, changed = ["partial"] if row["partial"] else [], changes(row)
    found += [text.format(changed.pop(key)) for key, text in REDUCED.items() if key in changed]
    if "epochs" in changed:
        found.append(f"{changed.pop('epochs')} epochs instead of {_known(row)['epochs']}")
    if changed:
        told = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items()]
        found.append(", ".join(told[:MOST]) + (f" and {len(told) - MOST} more" if len(told) > MOST else ""))
    task, examples = row["task"], row.get("examples", {}).get("train")
    if _published(row) is not None and task in EXAMPLES and examples is not None and examples != EXAMPLES[task]:
        found.append(f"{examples:,} training examples, {EXAMPLES[task]:,} in the paper")
    if row.get("watched", "").startswith("test/"):
        found.append("epoch chosen by test")
    if _split(row) == "val":
        found.append("validation")
    return found


def changes(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the model and the recipe that are not those of the ready experiment of a run's name."""
    config, known = row.get("config", {}), _known(row)
    usual = _flat(dataclasses.asdict(Experiment()) | known)
    counted = _flat({k: v for k, v in config.items() if k not in APART | {"name"} and (known or k in REDUCED)})
    return {key: value for key, value in counted.items() if value != usual.get(key)}


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ready experiment of a run's name, of a peer's name that of the task if it has none of its own."""
    return ready(row["name"]) or ready(row["name"].removesuffix(f"-{row.get('config', {}).get('mixer')}"))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the options of the task and the mixer as they are set: task.KEY and mixer.KEY."""
    flat = dict(config)
    for group in ("task", "mixer"):
        flat |= {f"{group}.{key}": value for key, value in flat.pop(f"{group}_options", {}).items()}
    return flat


def as_published(row: Mapping[str, Any]) -> bool:
    """Return whether a run is whole and its experiment unchanged, so that it can be compared with the paper's."""
    return not row["partial"] and not changes(row)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return an aligned table for a terminal."""
    shown = [key for key in COLUMNS if key not in NOT_ON_TERMINALS]
    cells = [[COLUMNS[key] for key in shown]] + [[line[key] for key in shown] for line in lines(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = []
    for row in cells:
        parts = [
            cell.ljust(width) if key in LEFT else cell.rjust(width)
            for key, cell, width in zip(shown, row, widths, strict=True)
        ]
        text.append("  ".join(parts).rstrip())
    return "\n".join(text)


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table in Markdown, with all columns."""
    sides = [":---" if key in LEFT else "---:" for key in COLUMNS]
    cells = [list(COLUMNS.values()), sides, *(list(line.values()) for line in lines(rows))]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells) + "\n"


def beside_peers(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the paper's accuracies of all models by task in Markdown and, beneath, those of the runs.

    A run stands in the line of its mixer: of MRConv, the experiments TASK-base and TASK-large; of others, TASK-MIXER.
    Only whole runs of unchanged experiments do, several as their mean.
    """
    own: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if as_published(row):
            own.setdefault(row["name"], []).append(row)
    quoted = QUOTED | {f"MRConv, {size}": (size, of_mrconv(size)) for size in ("base", "large")}
    cells = [["model", *TASKS], [":---", *("---:" for _ in TASKS)]]
    for name, (suffix, accuracies) in quoted.items():
        cells.append([name, *(NOTHING if value is None else f"{value:.2f}" for value in accuracies)])
        runs = [own.get(f"{task}-{suffix}") for task in TASKS]
        found = [spread(_scores(each)) if each else NOTHING for each in runs]
        if any(text != NOTHING for text in found):
            cells.append([f"{name}, here", *found])
    return "\n".join("| " + " | ".join(row) + " |" for row in cells) + "\n"
