"""Figures of recorded benchmarks; needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mrconv._utils.colours import COLOURS

from .options import TIMINGS
from .records import speed
from .shapes import LENGTHS

LENGTH_TITLES = {
    "training": "Forward and backward",
    "forward": "Forward, in training",
    "inference": "Inference, merged",
}
COMPARISON_TITLES = {"training": "forward and backward", "inference": "inference"}
MARKERS = "osD^vP"
STYLES = ("-", "--", ":")
OURS = {
    "ours": "mrconv",
    "merged": "mrconv, merged",
    "large": "mrconv, large",
    "large merged": "mrconv, large, merged",
}


def plot_length(record: Mapping[str, Any], path: Path) -> None:
    """Draw time per element and per sequence against length, one column per pass."""
    rows = record["rows"]
    lengths = [row["shape"]["length"] for row in rows]
    titles = {name: title for name, title in LENGTH_TITLES.items() if name in rows[0]}
    figure = Figure(figsize=(2.5 + 3 * len(titles), 6.6), layout="constrained")
    axes = figure.subplots(2, len(titles), sharex=True, sharey="row", squeeze=False)
    graphs: set[str] = set()
    eager: set[str] = set()
    for column, (name, title) in enumerate(titles.items()):
        curves = {}
        for kind in rows[0][name]:
            curves[kind], graph = curve(rows, name, kind)
            (graphs if graph else eager).add(kind)
        per_element = {kind: _scaled(ms, rows, 1e6, ("batch", "length", "channels")) for kind, ms in curves.items()}
        per_sequence = {kind: _scaled(ms, rows, 1.0, ("batch",)) for kind, ms in curves.items()}
        draw_curves(axes[0][column], lengths, per_element, [math.log2(n) for n in lengths])
        draw_curves(axes[1][column], lengths, per_sequence, [n * math.log2(n) for n in lengths])
        axes[0][column].set_title(title)
        axes[1][column].set_xlabel("length L")
    axes[0][0].set_ylabel("time per element of (B, L, D), ns")
    axes[1][0].set_ylabel("time per sequence, ms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    shape = rows[0]["shape"]
    positions, channels = shape["batch"] * shape["length"], shape["channels"]
    execution = "replayed as CUDA graphs" if graphs else "launched op by op"
    if graphs and eager:
        execution += f" (op by op where capture failed: {', '.join(sorted(eager))})"
    title = f"{positions:,} positions of {channels} channels, {execution}"
    figure.suptitle(f"One layer on {record['hardware']}, {record['dtype']}: {title}", fontsize="medium")
    figure.savefig(path, dpi=150)


def plot_compare(record: Mapping[str, Any], path: Path) -> None:
    """Draw the speed of each mixer relative to S4 at the paper's shapes, and the time of a block against length."""
    lengths = [row for row in record["rows"] if row["shape"]["name"] in {shape.name for shape in LENGTHS}]
    models = [row for row in record["rows"] if row not in lengths]
    titles = {name: title for name, title in COMPARISON_TITLES.items() if name in record["rows"][0]}
    columns = max(len(models), 1)
    height = 0.5 + 3.7 * len(titles) * bool(models) + 4.2 * bool(lengths)
    figure = Figure(figsize=(2.5 + 2.6 * max(columns, 3), height), layout="constrained")
    parts: Any = [figure, figure]
    if models and lengths:
        parts = figure.subfigures(2, 1, height_ratios=[3.7 * len(titles), 4.2])
    if models:
        _speed_bars(parts[0], models, titles)
    if lengths:
        _time_curves(parts[1].subplots(1, len(titles), sharey=True, squeeze=False)[0], lengths, titles)
        handles, labels = parts[1].axes[0].get_legend_handles_labels()
        parts[1].legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    results = [result for row in record["rows"] for name in titles for result in row[name].values()]
    labels = TIMINGS | {"compile_graph_ms": "compiled + graph"}
    used = [label for timing, label in labels.items() if any(result.get(timing) is not None for result in results)]
    execution = used[0] if len(used) == 1 else f"the fastest of {', '.join(used)}"
    title = f"The same block with each mixer on {record['hardware']}, {record['dtype']}, {execution}"
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _speed_bars(figure: Any, models: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> None:
    grid = figure.subplots(len(titles), len(models), squeeze=False, sharey="row", sharex="row")
    for panels, name in zip(grid, titles, strict=True):
        times = [best_times(row[name]) for row in models]
        names = list(dict.fromkeys(key for key in (*OURS.values(), *times[0]) if any(key in t for t in times)))
        for axes, row, times_of_shape in zip(panels, models, times, strict=True):
            draw_bars(axes, {key: times_of_shape.get(key, math.nan) for key in names})
            axes.set_title(f"{row['shape']['name']}, {titles[name]}", fontsize="medium")
        panels[0].set_xlim(left=min(0.1, panels[0].get_xlim()[0]))
    figure.supxlabel("speed relative to S4", fontsize="medium")


def best_times(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of each candidate with its fastest timing, NaN where none was measured.

    Where others have a graph or are compiled, the eager time of a candidate alone is none that can be compared.
    """
    measured = {
        name: {timing: ms for timing in TIMINGS if (ms := result.get(timing)) is not None}
        for name, result in results.items()
    }
    eager_only = all(set(each) <= {"ms"} for each in measured.values())
    comparable = {name: each.values() if eager_only or set(each) - {"ms"} else () for name, each in measured.items()}
    return {OURS.get(name, name): min(times, default=math.nan) for name, times in comparable.items()}


def draw_bars(axes: Axes, times: Mapping[str, float]) -> None:
    """Draw the speed of each mixer relative to S4 as a bar."""
    names = list(times)[::-1]
    speeds = [times["s4"] / times[name] for name in names]
    colours = [COLOURS[0] if name in OURS.values() else "0.65" for name in names]
    axes.barh(range(len(names)), speeds, color=colours, height=0.7)
    axes.set_yticks(range(len(names)), names)
    for place, ratio in enumerate(speeds):
        end, text = (1.0, "–") if math.isnan(ratio) else (ratio, f"{ratio:.2g}")
        label = axes.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3})  # readable over the line at 1
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _time_curves(panels: Sequence[Axes], rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> None:
    lengths = [row["shape"]["length"] for row in rows]
    for axes, name in zip(panels, titles, strict=True):
        curves: dict[str, list[float]] = {}
        for row in rows:
            times = best_times(row[name])
            if OURS["merged"] in times:
                times[OURS["ours"]] = times.pop(OURS["merged"])
            for kind, ms in times.items():
                curves.setdefault(kind, []).append(ms / row["shape"]["batch"])
        draw_curves(axes, lengths, curves, [n * math.log2(n) for n in lengths])
        axes.lines[0].set_linewidth(3)  # ours
        axes.set_title(f"One block, {titles[name]}", fontsize="medium")
        axes.set_xlabel("length L")
    panels[0].set_ylabel("time per sequence, ms")


def plot_vision(record: Mapping[str, Any], path: Path) -> None:
    """Draw the paper's accuracy against images per second, one line per family of models through its sizes."""
    rows = [row for row in record["rows"] if "inference" in row]
    if not rows:
        raise ValueError("the record has no inference pass")
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    family, accuracies = record["family"], record["accuracies"]
    kinds = [kind for kind in rows[0]["inference"] if family.get(kind, kind) in accuracies]
    for i, kind in enumerate(kinds):
        accuracy = accuracies[family.get(kind, kind)]
        points = [(speed(row["inference"][kind], row["batch"]["inference"]), row["shape"]["name"]) for row in rows]
        points = [(images_per_s, size) for images_per_s, size in points if images_per_s]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        label = "MRConvNeXt, " + kind if family.get(kind, kind) == "merged" else kind
        x, y = [images_per_s for images_per_s, _ in points], [accuracy[size] for _, size in points]
        axes.plot(x, y, label=label, color=colour, marker=marker, markersize=6)
        for images_per_s, size in points:
            offset = (5, 5) if i % 2 == 0 else (-10, -11)  # keeps the names of neighbours apart
            place = (images_per_s, accuracy[size])
            axes.annotate(size, place, textcoords="offset points", xytext=offset, fontsize=8, color=colour)
    axes.set_xlabel(f"images/s on {record['hardware']}, {record['dtype']}, the fastest timing of each")
    axes.set_ylabel("top-1 accuracy on ImageNet in the paper, %")
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def curve(rows: Sequence[Mapping[str, Any]], name: str, kind: str) -> tuple[list[float], bool]:
    """Return the times of CUDA graphs if all lengths have them, else eager times; NaN where one is missing."""
    results = [row[name][kind] for row in rows]
    graph = all(result["graph_ms"] is not None for result in results)
    times = [result["graph_ms" if graph else "ms"] for result in results]
    return [math.nan if ms is None else ms for ms in times], graph


def draw_curves(
    axes: Axes, lengths: Sequence[int], curves: Mapping[str, Sequence[float]], guide: Sequence[float]
) -> None:
    """Draw curves against length and, below them, the guide."""
    for i, (kind, values) in enumerate(curves.items()):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        style = STYLES[i // len(COLOURS) % len(STYLES)]
        axes.plot(lengths, values, style, label=kind, color=colour, marker=marker, markersize=4, linewidth=1.5)
    ratios = [v / g for values in curves.values() for v, g in zip(values, guide, strict=True) if v > 0]
    scale = 0.6 * min(ratios, default=1.0)
    axes.plot(lengths, [scale * g for g in guide], "--", color="0.6", linewidth=1.2, label="L log L")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2, subs=[1.0], numticks=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _abbreviated(n)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _scaled(ms: Sequence[float], rows: Sequence[Mapping[str, Any]], by: float, over: Sequence[str]) -> list[float]:
    return [by * t / math.prod(row["shape"][key] for key in over) for t, row in zip(ms, rows, strict=True)]


def _abbreviated(n: float) -> str:
    """Return 4096 as 4K."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if n >= size:
            return f"{n / size:g}{letter}"
    return f"{n:g}"
