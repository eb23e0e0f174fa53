"""Draw speed.png: the time of a training step and of inference of whole block stacks on an H200.

python docs/figures/speed.py

The times are those of CUDA graphs in benchmarks/results/model-h200-bfloat16.json, recorded by `mrconv bench model`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrconv._utils.colours import COLOURS

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/model-h200-bfloat16.json"
TEXT = "#7d8590"  # readable on white and on black: the background is transparent
TRAINING = {
    "branches": ("N convolutions, N BatchNorms", "#9aa4ae"),
    "dense": ("one dense FFT convolution", COLOURS[5]),
    "ours": ("MRConv (merged for inference)", COLOURS[0]),
}
INFERENCE = {"dense": ("one dense FFT convolution", COLOURS[5]), "merged": ("MRConv, merged", COLOURS[0])}


def draw(path: Path) -> None:
    """Draw one panel for training and one for inference."""
    record = json.loads(RECORD.read_text())
    figure = Figure(figsize=(8.4, 3.9), layout="constrained")
    training, inference = figure.subplots(1, 2)
    _bars(training, record["rows"], "training", TRAINING)
    _bars(inference, record["rows"], "inference", INFERENCE)
    training.set_title("Training step (forward and backward), ms", color=TEXT, fontsize=11, loc="left")
    inference.set_title("Inference, ms", color=TEXT, fontsize=11, loc="left")
    handles, labels = training.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=TEXT)
    figure.savefig(path, dpi=200, transparent=True)


def _bars(axes: Axes, rows: list[dict[str, Any]], pass_name: str, candidates: dict[str, tuple[str, str]]) -> None:
    height = 0.8 / len(candidates)
    most = max(row[pass_name][name]["graph_ms"] or 0.0 for row in rows for name in candidates)
    for j, (name, (label, colour)) in enumerate(candidates.items()):
        times = [row[pass_name][name]["graph_ms"] for row in rows]
        places = [i + (j - (len(candidates) - 1) / 2) * height for i in range(len(rows))]
        axes.barh(places, [ms or 0.0 for ms in times], 0.9 * height, color=colour, label=label)
        for place, ms in zip(places, times, strict=True):
            text = "out of memory" if ms is None else f"{ms:.1f}"
            axes.text((ms or 0.0) + 0.015 * most, place, text, va="center", fontsize=9, color=TEXT)
    axes.set_yticks(range(len(rows)), [row["shape"]["name"] for row in rows])
    axes.set_xticks([])
    axes.set_xlim(0, 1.15 * most)
    axes.invert_yaxis()
    axes.tick_params(colors=TEXT, length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
