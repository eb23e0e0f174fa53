"""One page about a run that needs no other file: scores, curves, kernels, examples, settings, environment."""

from __future__ import annotations

import base64
import csv
import html
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._utils.duration import format_duration
from .._utils.files import atomic_write
from ..hub import read_json
from . import rundir
from .checkpoints import METRICS as HISTORY
from .figures import FIGURES, draw_run
from .measurement import METRICS, PREDICTIONS
from .scores import SCORES

EXAMPLES = 20  # predictions that are shown
CAPTIONS = {
    "curves": "Learning curves",
    "alpha": "Weights of the resolutions",
    "kernels": "Merged kernels",
    "maps": "Merged kernels as maps",
    "confusion": "Confusion matrix",
}
STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; background: white; border-radius: 4px; } figure { margin: 1rem 0; }
figcaption, .note { color: #7d8590; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 1rem 0; }
"""
# The page loads nothing and runs no script, whatever the names of classes and files in it are.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(folder: Path, out: Path) -> None:
    """Write the page of a run that has a result, or at least one epoch."""
    experiment = rundir.read_run(folder)
    if not (folder / rundir.RESULT).exists() and not (folder / HISTORY).exists():
        raise ValueError(f"{folder} has no {rundir.RESULT} and no {HISTORY}: no epoch is complete yet")
    result = rundir.read_result(folder) if (folder / rundir.RESULT).exists() else {}
    environment = read_json(folder / rundir.ENVIRONMENT) if (folder / rundir.ENVIRONMENT).exists() else {}
    parts = [
        _heading(experiment.name, experiment.task, experiment.seed, result),
        _scores(folder, result),
        *_figures(folder),
        _examples(folder),
        _section("Settings", _table(["key", "value"], _items(vars(experiment)))),
        _section("Environment", _table(["", ""], _items(environment))),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(experiment.name)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as draft:
        draft.write_text(page, encoding="utf-8")


def _heading(name: str, task: str, seed: int, result: Mapping[str, Any]) -> str:
    facts = [f"task {task}", f"seed {seed}"]
    if result:
        done = result.get("epochs_done", result["epochs"])
        facts += [
            f"{done} of {result['epochs']} epochs" if result["partial"] else f"{result['epochs']} epochs",
            f"best epoch {result['best_epoch']}",
            f"{result['parameters']:,} parameters",
            format_duration(result["seconds"]),
        ]
    else:
        facts.append("not recorded yet")
    return f'<h1>{html.escape(name)}</h1>\n<p class="note">{html.escape(" · ".join(facts))}</p>'


def _scores(folder: Path, result: Mapping[str, Any]) -> str:
    """Return the scores of the model as trained and merged, and those of `mrconv evaluate` if it has written them."""
    tables = []
    if result:
        metric = SCORES[result.get("metric", "accuracy")]
        columns = {"as trained": metric.name, "merged": f"merged_{metric.name}"}
        rows = [
            [split, *(metric.text(result[key][split]) for key in columns.values())] for split in result[metric.name]
        ]
        tables.append(_table([metric.name, *columns], rows))
    if (folder / METRICS).exists():
        splits = read_json(folder / METRICS)["splits"]
        tables.append(_measured("evaluation", splits))
        for name in [name for name, value in next(iter(splits.values())).items() if isinstance(value, dict)]:
            tables.append(_measured(name.replace("_", " "), {split: each[name] for split, each in splits.items()}))
    return _section("Scores", "\n".join(tables)) if tables else ""


def _measured(title: str, splits: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the numbers that an evaluation has for all splits, a row each."""
    names = [name for name, value in next(iter(splits.values())).items() if isinstance(value, int | float)]
    rows = [[name.replace("_", " "), *(f"{each[name]:.4g}" for each in splits.values())] for name in names]
    return _table([title, *splits], rows)


def _figures(folder: Path) -> list[str]:
    """Return the figures of a run, drawn again, and those that lie in its folder besides."""
    with tempfile.TemporaryDirectory() as drawn:
        paths = {path.stem: path for path in sorted((folder / FIGURES).glob("*.png"))}
        paths |= {path.stem: path for path in draw_run(folder, Path(drawn))}
        order = sorted(paths, key=lambda name: (list(CAPTIONS).index(name) if name in CAPTIONS else 99, name))
        return [_section(CAPTIONS.get(name, name), _image(paths[name], CAPTIONS.get(name, name))) for name in order]


def _image(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}"></figure>'


def _examples(folder: Path) -> str:
    """Return the first predictions of `mrconv evaluate`, if it has written them."""
    path = folder / PREDICTIONS
    if not path.exists():
        return ""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        rows = [row for _, row in zip(range(EXAMPLES), reader, strict=False)]
    note = f'<p class="note">The first {len(rows)} of {PREDICTIONS}.</p>'
    return _section("Predictions", note + _table(header, rows))


def _section(title: str, content: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{content}"


def _items(values: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """Return keys and values as texts; nested values as JSON."""
    for key, value in values.items():
        yield key, value if isinstance(value, str) else json.dumps(value, default=str)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in header)
    lines = [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows]
    body = "\n".join(lines)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _cell(text: str) -> str:
    number = text.replace(".", "", 1).replace("%", "").replace("-", "", 1).strip().isdigit()
    return f"<td{' class=number' if number else ''}>{html.escape(text)}</td>"
