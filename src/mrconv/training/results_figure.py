"""The figure of recorded results: accuracy against training time, a panel per task; needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrconv._utils.colours import COLOURS

from .figures import METRICS, read_metrics
from .paper_numbers import TASKS, published_for_run
from .report import displayed_name, group_seeds

Result = Mapping[str, Any]
COLUMNS = 2
STYLES = ("-", "--", ":")


class Curve(NamedTuple):
    """The accuracy of a run in percent at the end of each epoch, and the minutes of training until then."""

    minutes: list[float]
    accuracies: list[float]


def accuracy_curve(result: Result) -> Curve | None:
    """Return the curve of a collected result on the test split; None if it has no accuracies or no time.

    The time of a run, with start, compilation and evaluation, is divided evenly among its epochs.
    """
    path = result["path"].with_name(METRICS)
    if not path.is_file() or not result["epochs_done"] or not math.isfinite(result["seconds"]):
        return None
    epochs, values = read_metrics(path).get("test/accuracy", ([], []))
    epoch_minutes = result["seconds"] / 60 / result["epochs_done"]
    return Curve([epoch_minutes * n for n in epochs], [100 * value for value in values]) if epochs else None


def plot_accuracies(results: Iterable[Result], out: Path) -> None:
    """Plot accuracy against training time for all runs of a task in one panel, seeds of a run in one colour."""
    by_task: dict[str, list[Result]] = {}
    for result in results:
        if (curve := accuracy_curve(result)) is not None:
            by_task.setdefault(result["task"], []).append({**result, "curve": curve})
    if not by_task:
        raise ValueError("none of the runs has recorded test accuracies and a time")
    columns = min(COLUMNS, len(by_task))
    rows = -(-len(by_task) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, task in zip(panels, [*filter(by_task.get, TASKS), *sorted(by_task.keys() - {*TASKS})], strict=False):
        _plot_task(axes, by_task[task])
        axes.set_title(task, fontsize="medium", loc="left")
    for axes in panels[len(by_task) :]:
        axes.set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def _plot_task(axes: Axes, results: Sequence[Result]) -> None:
    hardware = {str(result["environment"].get("hardware")) for result in results}
    for i, group in enumerate(group_seeds(results)):
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": STYLES[i // len(COLOURS) % len(STYLES)],
        }
        label = displayed_name(group[0]) + f", {group[0]['environment'].get('hardware')}" * (len(hardware) > 1)
        for curve in [result["curve"] for result in group]:
            axes.plot(*curve, linewidth=1.4, label=label, **style)
            axes.plot(curve.minutes[-1], curve.accuracies[-1], "o", markersize=4, color=style["color"])
            label = "_"  # one line of the legend for all seeds
    papers = filter(None, map(published_for_run, results))
    accuracies = sorted({paper.accuracy for paper in papers if paper.accuracy is not None})
    for accuracy in accuracies:
        axes.axhline(accuracy, color="0.45", linestyle="--", linewidth=1.0)
    if accuracies:  # one label below the lowest line, as lines may be closer than the height of a label
        label = "paper " + ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        place: dict[str, Any] = {"xytext": (3, -3), "textcoords": "offset points", "va": "top"}
        within = axes.get_yaxis_transform()
        axes.annotate(label, (0, accuracies[0]), xycoords=within, fontsize=8, color="0.35", **place)
    axes.set_xlim(left=0)
    axes.set_xlabel("minutes of training" + f", {min(hardware)}" * (len(hardware) == 1))
    axes.set_ylabel("test accuracy, %")
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
