"""Draw speed.png: the time of a training step and of inference of whole block stacks on an H200 in bfloat16.

python docs/figures/speed.py

MRConv and the dense kernel are those of benchmarks/results/model-h200-bfloat16.json (`mrconv bench model`), attention
that of compare-h200-bfloat16.json (`mrconv bench compare`), and S4 and Mamba-2 those of baselines-h200.json, measured
separately with their authors' code. Each is shown in its fastest way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrconv._utils.colours import COLOURS

ROOT = Path(__file__).parents[2]
TEXT = "#7d8590"  # readable on white and on black: the background is transparent
COLUMNS = {
    "attention": "#9aa4ae",
    "Mamba-2": COLOURS[3],
    "S4": COLOURS[2],
    "one dense FFT convolution": COLOURS[5],
    "MRConv (merged for inference)": COLOURS[0],
}


def read(name: str) -> Any:
    """Return a record."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def times(pass_name: str) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each mixer by stack."""
    found: dict[str, dict[str, float]] = {name: {} for name in COLUMNS}
    ours = "ours" if pass_name == "training" else "merged"
    keys = {"one dense FFT convolution": "dense", "MRConv (merged for inference)": ours}
    for row in read("model-h200-bfloat16")["rows"]:
        for label, key in keys.items():
            forms = [row[pass_name][form] for form in (key, f"{key}, dense") if form in row[pass_name]]
            found[label][row["shape"]["name"]] = min(map(fastest, forms))
    for row in read("compare-h200-bfloat16")["rows"]:
        found["attention"][row["shape"]["name"]] = fastest(row[pass_name]["attention"])
    for name, stacks in read("baselines-h200")["ms"][pass_name]["bfloat16"].items():
        label = {"S4, kernel kept": "S4"}.get(name, name)
        if label in found:
            found[label] = {stack: ms for stack, (ms, _) in stacks.items()}
    return found


def fastest(result: dict[str, Any]) -> float:
    """Return the smallest of a candidate's times."""
    return min(result[key] for key in ("ms", "graph_ms", "compile_ms", "compile_graph_ms") if result.get(key))


def draw(path: Path) -> None:
    """Draw one panel for training and one for inference."""
    figure = Figure(figsize=(8.4, 6.2), layout="constrained")
    training, inference = figure.subplots(1, 2)
    _bars(training, times("training"))
    _bars(inference, times("inference"))
    training.set_title("Training step (forward and backward), ms", color=TEXT, fontsize=11, loc="left")
    inference.set_title("Inference, ms", color=TEXT, fontsize=11, loc="left")
    handles, labels = training.get_legend_handles_labels()
    ordered = sorted(zip(labels, handles, strict=True), key=lambda pair: list(COLUMNS).index(pair[0]))
    labels, handles = zip(*ordered, strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=TEXT)
    figure.savefig(path, dpi=200, transparent=True)


def _bars(axes: Axes, by_mixer: dict[str, dict[str, float]]) -> None:
    stacks = list(by_mixer["MRConv (merged for inference)"])
    others = [by_stack for name, by_stack in by_mixer.items() if name != "attention"]
    most = max(by_stack.get(stack, 0.0) for by_stack in others for stack in stacks)
    bottom, centres, shown = 0.0, [], set[str]()
    for stack in stacks:
        mixers = [name for name, by_stack in by_mixer.items() if stack in by_stack]
        for i, name in enumerate(mixers):
            ms = by_mixer[name][stack]
            end = min(ms, most)  # attention over long sequences is cut
            axes.barh(bottom + i, end, 0.85, color=COLUMNS[name], label=None if name in shown else name)
            shown.add(name)
            text = f"{ms:.1f}" + " →" * (ms > end)
            axes.text(end + 0.015 * most, bottom + i, text, va="center", fontsize=8, color=TEXT)
        centres.append(bottom + (len(mixers) - 1) / 2)
        bottom += len(mixers) + 1
    axes.set_yticks(centres, stacks)
    axes.set_xticks([])
    axes.set_xlim(0, 1.15 * most)
    axes.invert_yaxis()
    axes.tick_params(colors=TEXT, length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
