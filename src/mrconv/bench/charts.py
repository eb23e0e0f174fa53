"""Figures of recorded results; needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mrconv._utils.colours import COLOURS

from .records import SPEEDS, speed
from .shapes import LENGTHS

TITLES = {
    "training": "Forward and backward",
    "forward": "Forward, in training",
    "inference": "Inference, merged",
}
COMPARED = {"training": "forward and backward", "inference": "inference"}
MARKERS = "osD^vP"
STYLES = ("-", "--", ":")
OURS = {
    "ours": "mrconv",
    "merged": "mrconv, merged",
    "large": "mrconv, large",
    "large merged": "mrconv, large, merged",
}


def plot_length(found: Mapping[str, Any], path: Path) -> None:
    """Draw time per element and per sequence against length, one column per pass."""
    rows = found["rows"]
    lengths = [row["shape"]["length"] for row in rows]
    titles = {name: title for name, title in TITLES.items() if name in rows[0]}
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
        draw(axes[0][column], lengths, per_element, [math.log2(n) for n in lengths])
        draw(axes[1][column], lengths, per_sequence, [n * math.log2(n) for n in lengths])
        axes[0][column].set_title(title)
        axes[1][column].set_xlabel("length L")
    axes[0][0].set_ylabel("time per element of (B, L, D), ns")
    axes[1][0].set_ylabel("time per sequence, ms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    shape = rows[0]["shape"]
    positions, channels = shape["batch"] * shape["length"], shape["channels"]
    how = "replayed as CUDA graphs" if graphs else "launched op by op"
    if graphs and eager:
        how += f" (op by op where that failed: {', '.join(sorted(eager))})"
    figure.suptitle(
        f"One layer on {found['hardware']}, {found['dtype']}: {positions:,} positions of {channels} channels, {how}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def plot_compare(found: Mapping[str, Any], path: Path) -> None:
    """Draw how fast each mixer is beside S4 at the paper's shapes, and the time of a block against length."""
    lengths = [row for row in found["rows"] if row["shape"]["name"] in {shape.name for shape in LENGTHS}]
    models = [row for row in found["rows"] if row not in lengths]
    passes = {name: title for name, title in COMPARED.items() if name in found["rows"][0]}
    columns = max(len(models), 1)
    figure = Figure(figsize=(2.5 + 2.6 * max(columns, 3), 0.5 + 3.7 * len(passes) * bool(models) + 4.2 * bool(lengths)))
    figure.set_layout_engine("constrained")
    parts: Any = [figure, figure]
    if models and lengths:
        parts = figure.subfigures(2, 1, height_ratios=[3.7 * len(passes), 4.2])
    if models:
        grid = parts[0].subplots(len(passes), columns, squeeze=False, sharey="row", sharex="row")
        for axes, name in zip(grid, passes, strict=True):
            times = [best_times(row[name]) for row in models]
            names = list(dict.fromkeys(key for key in (*OURS.values(), *times[0]) if any(key in t for t in times)))
            for each, row, found_times in zip(axes, models, times, strict=True):
                _bars(each, {key: found_times.get(key, math.nan) for key in names})
                each.set_title(f"{row['shape']['name']}, {passes[name]}", fontsize="medium")
            axes[0].set_xlim(left=min(0.1, axes[0].get_xlim()[0]))
        parts[0].supxlabel("speed beside S4's", fontsize="medium")
    if lengths:
        _sweeps(parts[1].subplots(1, len(passes), sharey=True, squeeze=False)[0], lengths, passes)
        handles, labels = parts[1].axes[0].get_legend_handles_labels()
        parts[1].legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    results = [result for row in found["rows"] for name in passes for result in row[name].values()]
    ways = [title for way, title in SPEEDS.items() if any(result.get(way) is not None for result in results)]
    how = ways[0] if len(ways) == 1 else f"the fastest of {', '.join(ways)}"
    figure.suptitle(
        f"The same block with each mixer on {found['hardware']}, {found['dtype']}, {how}", fontsize="medium"
    )
    figure.savefig(path, dpi=150)


def best_times(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of each contestant, NaN where it has none; ours is MRConv, merged in inference."""
    times = {}
    for name, result in results.items():
        measured = [result[way] for way in SPEEDS if result.get(way) is not None]
        times[OURS.get(name, name)] = min(measured, default=math.nan)
    return times


def _bars(axes: Axes, times: Mapping[str, float]) -> None:
    names = list(times)[::-1]
    speeds = [times["s4"] / times[name] for name in names]
    colours = [COLOURS[0] if name in OURS.values() else "0.65" for name in names]
    axes.barh(range(len(names)), speeds, color=colours, height=0.7)
    axes.set_yticks(range(len(names)), names)
    for place, ratio in enumerate(speeds):
        end, text = (1.0, "–") if math.isnan(ratio) else (ratio, f"{ratio:.2g}")
        label = axes.annotate(text, (end, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3})  # over the line at 1
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _sweeps(panels: Sequence[Axes], rows: Sequence[Mapping[str, Any]], passes: Mapping[str, str]) -> None:
    lengths = [row["shape"]["length"] for row in rows]
    for axes, name in zip(panels, passes, strict=True):
        curves: dict[str, list[float]] = {}
        for row in rows:
            times = best_times(row[name])
            if OURS["merged"] in times:
                times[OURS["ours"]] = times.pop(OURS["merged"])
            for kind, ms in times.items():
                curves.setdefault(kind, []).append(ms / row["shape"]["batch"])
        draw(axes, lengths, curves, [n * math.log2(n) for n in lengths])
        axes.lines[0].set_linewidth(3)  # ours
        axes.set_title(f"One block, {passes[name]}", fontsize="medium")
        axes.set_xlabel("length L")
    panels[0].set_ylabel("time per sequence, ms")


def plot_vision(found: Mapping[str, Any], path: Path) -> None:
    """Draw the paper's accuracy against pictures a second, a line per family of models through its sizes."""
    rows = [row for row in found["rows"] if "inference" in row]
    if not rows:
        raise ValueError("there is no pass of inference in the record")
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    kinds = [kind for kind in rows[0]["inference"] if found["family"].get(kind, kind) in found["accuracies"]]
    for i, kind in enumerate(kinds):
        known = found["accuracies"][found["family"].get(kind, kind)]
        points = [(speed(row["inference"][kind], row["batch"]["inference"]), row["shape"]["name"]) for row in rows]
        points = [(each, name) for each, name in points if each]
        look: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 6,
        }
        label = "MRConvNeXt, " + kind if found["family"].get(kind, kind) == "merged" else kind
        axes.plot([each for each, _ in points], [known[name] for _, name in points], label=label, **look)
        for each, name in points:
            place = (5, 5) if i % 2 == 0 else (-10, -11)  # neighbours' names apart
            axes.annotate(
                name, (each, known[name]), textcoords="offset points", xytext=place, fontsize=8, color=look["color"]
            )
    axes.set_xlabel(f"images/s on {found['hardware']}, {found['dtype']}, the fastest way of each")
    axes.set_ylabel("top-1 accuracy on ImageNet in the paper, %")
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def curve(rows: Sequence[Mapping[str, Any]], name: str, kind: str) -> tuple[list[float], bool]:
    """Return the times of CUDA graphs if all lengths have them, else those op by op; NaN where there is none."""
    results = [row[name][kind] for row in rows]
    graph = all(result["graph_ms"] is not None for result in results)
    times = [result["graph_ms" if graph else "ms"] for result in results]
    return [math.nan if ms is None else ms for ms in times], graph


def draw(axes: Axes, lengths: Sequence[int], curves: Mapping[str, Sequence[float]], guide: Sequence[float]) -> None:
    """Draw curves and, below them all, a guide of the given form."""
    for i, (kind, values) in enumerate(curves.items()):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        style = STYLES[i // len(COLOURS) % len(STYLES)]
        axes.plot(lengths, values, style, label=kind, color=colour, marker=marker, markersize=4, linewidth=1.5)
    below = [v / g for values in curves.values() for v, g in zip(values, guide, strict=True) if v > 0]
    scale = 0.6 * min(below, default=1.0)
    axes.plot(lengths, [scale * g for g in guide], "--", color="0.6", linewidth=1.2, label="L log L")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2, subs=[1.0], numticks=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _short(n)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _scaled(ms: Sequence[float], rows: Sequence[Mapping[str, Any]], by: float, over: Sequence[str]) -> list[float]:
    return [by * t / math.prod(row["shape"][key] for key in over) for t, row in zip(ms, rows, strict=True)]


def _short(n: float) -> str:
    """Return 4096 as 4K."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if n >= size:
            return f"{n / size:g}{letter}"
    return f"{n:g}"
