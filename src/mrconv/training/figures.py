"""Figures of a run: learning curves, weights of the resolutions and merged kernels; needs matplotlib."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from torch import nn

from mrconv import MRConv, MRConvNeXt
from mrconv._utils.colours import COLOURS
from mrconv.hub import CONFIG, MODEL, read_json
from mrconv.inference import load_model

from .kernel_maps import kernel_maps
from .paper_numbers import published_for_run
from .scores import SCORES, Score

Array = np.ndarray[Any, np.dtype[np.float64]]

METRICS, RESULT, FIGURES = "metrics.csv", "result.json", "figures"
SPLITS = {"train": COLOURS[3], "val": COLOURS[0], "test": COLOURS[1]}
MAX_CHANNELS = 32  # plotted per kernel
BINS_PER_OCTAVE = 24  # of lag, at most
LINEAR_BELOW = 0.01  # of the largest value of a kernel; colours are logarithmic above it


def draw_run(folder: Path, out: Path | None = None, result: dict[str, Any] | None = None) -> list[Path]:
    """Plot all figures that the files of a run allow; return their paths.

    Args:
        folder: the run.
        out: the folder of the figures; default: `figures` in the run.
        result: the result of the run, if it is not recorded yet.
    """
    paths = []
    out = folder / FIGURES if out is None else out
    if not (folder / METRICS).is_file() and not (folder / MODEL / CONFIG).is_file():
        raise ValueError(f"{folder} is not a run folder: it has neither {METRICS} nor {MODEL}/")
    out.mkdir(parents=True, exist_ok=True)
    if (folder / METRICS).is_file():
        learning_curves(folder, out / "curves.png", result)
        paths.append(out / "curves.png")
    if (folder / MODEL / CONFIG).is_file():
        model = load_model(folder / MODEL)
        if not any(isinstance(module, MRConv) for module in model.modules()):
            return paths  # a baseline has no branches
        if not any(_why_no_alpha(layer) for layer in layers(model).values()):
            alpha_distribution(model, out / "alpha.png")
            paths.append(out / "alpha.png")
        merged_kernels(model, out / "kernels.png")
        paths.append(out / "kernels.png")
        if isinstance(model, MRConvNeXt):
            kernel_maps(model, out / "maps.png")
            paths.append(out / "maps.png")
    return paths


def layers(model: nn.Module) -> dict[str, MRConv]:
    """Return a model's MRConv layers by name, in order of depth."""
    by_name = {name: module for name, module in model.named_modules() if isinstance(module, MRConv)}
    if not by_name:
        raise ValueError(f"the {type(model).__name__} has no MRConv layer to plot")
    return by_name


def read_metrics(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return the epochs and values of each column of a metrics.csv; the last value of an epoch counts."""
    columns: dict[str, dict[int, float]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if text and "/" in name:
                        columns.setdefault(name, {})[int(row["epoch"])] = float(text)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a metrics table of a run: {error}") from None
    if not columns:
        raise ValueError(f"{path} has no lines: the run was stopped before the end of its first epoch")
    return {name: ([*sorted(values)], [values[n] for n in sorted(values)]) for name, values in columns.items()}


def learning_curves(folder: Path, out: Path, result: dict[str, Any] | None = None) -> None:
    """Plot loss and score per epoch, with the best epoch and, where known, the paper's accuracy."""
    metrics = read_metrics(folder / METRICS)
    if result is None:
        result = read_json(folder / RESULT) if (folder / RESULT).is_file() else {}
    figure = Figure(figsize=(9, 3.6), layout=ConstrainedLayoutEngine(wspace=0.05))
    losses, scores = figure.subplots(1, 2, sharex=True)
    recorded = [name for name in SCORES if any(key.endswith(f"/{name}") for key in metrics)]
    metric = SCORES[result.get("metric") or (recorded or ["accuracy"])[0]]
    legend: dict[str, Any] = {}
    for name, colour in SPLITS.items():
        for axes, kind, scale in ((losses, "loss", 1.0), (scores, metric.name, metric.scale)):
            if f"{name}/{kind}" in metrics:
                epochs, values = metrics[f"{name}/{kind}"]
                style: dict[str, Any] = {"color": colour, "marker": "o" if len(epochs) < 25 else "", "markersize": 3.5}
                (legend[name],) = axes.plot(epochs, [scale * v for v in values], linewidth=1.5, label=name, **style)
    legend |= _mark_best_and_paper(scores, metrics, result, metric)
    for axes, label in ((losses, "loss" if metric.name == "mae" else "cross-entropy, nats"), (scores, metric.label)):
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(which="major", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=len(legend), frameon=False)
    partial = ", partial" if result.get("partial") else ""
    figure.suptitle(f"{result.get('name', folder.name)}{partial}", fontsize="medium")
    figure.savefig(out, dpi=150)


def _mark_best_and_paper(
    axes: Axes, metrics: dict[str, tuple[list[int], list[float]]], result: dict[str, Any], metric: Score
) -> dict[str, Any]:
    """Mark the best epoch and the paper's accuracy; return their handles by label."""
    legend: dict[str, Any] = {}
    split = result.get("watched", "").partition("/")[0]  # codespell:ignore watched
    epochs, values = metrics.get(f"{split}/{metric.name}", ([], []))
    epoch = result.get("best_on_test", {}).get("epoch", result.get("best_epoch"))
    if epoch in epochs:
        label, best = f"best: epoch {epoch}", metric.scale * values[epochs.index(epoch)]
        ring: dict[str, Any] = {
            "markersize": 9,
            "markerfacecolor": "none",
            "markeredgecolor": "black",
            "linestyle": "none",
        }
        (legend[label],) = axes.plot([epoch], [best], marker="o", label=label, clip_on=False, zorder=5, **ring)
    paper = published_for_run(result)
    if paper is not None and paper.accuracy is not None:
        label = f"paper, test: {paper.accuracy:.2f}"
        legend[label] = axes.axhline(paper.accuracy, color="0.45", linestyle="--", linewidth=1.2, label=label)
    return legend


def alpha_magnitudes(model: nn.Module) -> list[Array]:
    """Return, for each direction, |alpha_i| averaged over channels and divided by its sum over i: (depth, N).

    Resolutions that a layer does not have are NaN.
    """
    by_name = layers(model)
    for name, layer in by_name.items():
        reason = _why_no_alpha(layer)
        if reason:
            raise ValueError(f"{name or 'the layer'} has no alpha to plot: {reason}")
    resolutions = max(layer.resolutions for layer in by_name.values())
    directions = []
    for direction in range(max(len(layer.branches) for layer in by_name.values())):
        shares = np.full((len(by_name), resolutions), math.nan)
        for share, layer in zip(shares, by_name.values(), strict=True):
            if direction < len(layer.branches):
                alpha: torch.Tensor = layer.branches[direction].alpha  # type: ignore[assignment]
                magnitude = alpha.detach().double().abs().mean(1).cpu().numpy()
                share[: len(magnitude)] = magnitude / magnitude.sum()
        directions.append(shares)
    return directions


def _why_no_alpha(layer: MRConv) -> str:
    """Return why a layer has no learned weights; "" if it has them."""
    if layer.merged:
        return "it is merged; plot the unmerged model"
    if layer.resolutions == 1:
        return "it has only one resolution"
    if layer.norm == "none":
        return "norm='none' has no weights"
    if any(branches.decay is not None for branches in layer.branches):
        return "its weights are fixed by decay"
    return ""


def alpha_distribution(model: nn.Module, out: Path) -> None:
    """Plot the normalised magnitude of alpha by resolution and depth (the paper's figure of weight distributions)."""
    shares = alpha_magnitudes(model)
    depth, N = shares[0].shape
    longest = max(layers(model).values(), key=lambda layer: layer.resolutions)
    lengths = _lengths(longest)
    figure = Figure(figsize=((1.6 + 0.5 * N) * len(shares) + 0.8, 1.5 + 0.34 * depth), layout="constrained")
    panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    scale = Normalize(0, 100 * float(np.nanmax(shares)))
    for axes, values, title in zip(panels, shares, ("forward kernels", "backward kernels"), strict=False):
        image = axes.imshow(100 * values, cmap="cividis", norm=scale, aspect="auto")
        for (row, column), value in np.ndenumerate(100 * values):
            if math.isfinite(value):
                colour = "white" if scale(value) < 0.6 else "black"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7)
        axes.set_xticks(range(N), [f"{i}\n{_short(n)}" for i, n in enumerate(lengths)], fontsize=8)
        axes.set_xlabel("resolution i and its kernel length")
        axes.set_yticks(range(depth), [str(i + 1) for i in range(depth)], fontsize=8)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if len(shares) > 1:
            axes.set_title(title, fontsize="medium")
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label="share of |α|, %", pad=0.02)
    figure.savefig(out, dpi=150)


def _lengths(layer: MRConv) -> list[int]:
    return [int(n) for n in layer.branches[0].kernel.lengths]  # type: ignore[union-attr]


def kernel_by_lag(layer: MRConv) -> tuple[Array, Array]:
    """Return lags (T,) and the merged kernel (C, T) at each; the backward kernel's tap 0 is at lag -1."""
    with torch.no_grad():
        kernel = layer.k_rep()[0].detach().double().cpu().numpy()
    if not layer.bidirectional:
        return np.arange(kernel.shape[1], dtype=np.float64), kernel
    reach = kernel.shape[2]
    return np.arange(-reach, reach, dtype=np.float64), np.concatenate([kernel[1, :, ::-1], kernel[0]], 1)


def merged_kernels(model: nn.Module, out: Path) -> None:
    """Plot each layer's merged kernel by channel and lag, with a logarithmic axis and symmetric logarithmic colours.

    At most MAX_CHANNELS evenly spaced channels are shown; those with energy at larger lags are nearer to the top.
    """
    by_name = layers(model)
    columns = 1 if len(by_name) < 3 else 2 if len(by_name) < 9 else 3
    rows = math.ceil(len(by_name) / columns)
    width = 6.5 if columns == 1 else 3.9 * columns
    figure = Figure(figsize=(width + 1.2, 1.6 * rows + 1.0), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(by_name) :]:
        axes.set_visible(False)
    for i, (axes, layer) in enumerate(zip(grid.flat, by_name.values(), strict=False)):
        lags, kernel = kernel_by_lag(layer)
        largest = float(np.abs(kernel).max())
        image = _plot_kernel(axes, lags, kernel / (largest or 1.0))
        axes.set_title(f"layer {i + 1}, largest {largest:.2g}", fontsize="small", loc="left", pad=3)
    bar = figure.colorbar(image, ax=grid, pad=0.02, aspect=15 * rows, label="value / largest")
    ticks = [-1, -0.1, -0.01, 0, 0.01, 0.1, 1]
    bar.set_ticks(ticks, labels=[_signed(f"{value:g}") for value in ticks])
    bar.minorticks_off()
    merged = any(layer.D is None for layer in by_name.values())
    figure.supxlabel("lag, positions" + (" (lag 0 includes the skip D)" if merged else ""), fontsize="medium")
    figure.supylabel("channels, ordered by reach", fontsize="medium")
    figure.savefig(out, dpi=150)


def _plot_kernel(axes: Axes, lags: Array, kernel: Array) -> Any:
    """Plot one kernel (C, T) of values in [-1, 1] against lags on the axis of `axis_position`."""
    chosen = np.unique(np.linspace(0, len(kernel) - 1, min(len(kernel), MAX_CHANNELS)).round().astype(int))
    kernel = kernel[chosen]
    energy = kernel**2
    reach = energy @ np.log2(1 + np.abs(lags)) / np.maximum(energy.sum(1), 1e-300)
    edges, values = binned(lags, kernel[np.argsort(reach, kind="stable")])
    norm = SymLogNorm(LINEAR_BELOW, linscale=0.5, vmin=-1, vmax=1, base=10)
    image = axes.pcolormesh(edges, np.arange(len(chosen) + 1), values, cmap="RdBu_r", norm=norm)
    bidirectional = lags[0] < 0
    base = 16 if bidirectional and lags[-1] > 256 else 4
    steps = [n for n in (base**k for k in range(1, 12)) if n <= lags[-1] + 1]
    ticks = [*(-n for n in reversed(steps) if bidirectional), 0, *steps]
    axes.set_xticks([float(axis_position(n)) for n in ticks], [_short(n) for n in ticks], fontsize=8)
    axes.set_yticks([])
    if bidirectional:
        axes.axvline(0, color="black", linewidth=0.8)
    return image


def axis_position(lag: Any) -> Any:
    """Return the position of a lag on the axis: sign(lag) log2(1 + |lag|)."""
    return np.sign(lag) * np.log2(1 + np.abs(lag))


def binned(lags: Array, kernel: Array) -> tuple[Array, Array]:
    """Return bin edges (T + 1,) on the axis and values (C, T), with taps closer than a bin joined.

    The value of joined taps is the largest in magnitude, so that single taps of sparse kernels remain visible.
    """
    edges = axis_position(np.append(lags, lags[-1] + 1))
    starts = [0]
    for i in range(1, len(lags)):
        if edges[i] - edges[starts[-1]] >= 1 / BINS_PER_OCTAVE:
            starts.append(i)
    low, high = np.minimum.reduceat(kernel, starts, axis=1), np.maximum.reduceat(kernel, starts, axis=1)
    return np.append(edges[starts], edges[-1]), np.where(-low > high, low, high)


def _short(n: float) -> str:
    """Return 4096 as 4K."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if abs(n) >= size and n % size == 0:
            return _signed(f"{n / size:g}{letter}")
    return _signed(f"{n:g}")


def _signed(text: str) -> str:
    """Return a number with a typographic minus sign."""
    return text.replace("-", "−")
