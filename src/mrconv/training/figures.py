"""Figures of a run: its curves, the weights of its resolutions, its merged kernels; needs matplotlib."""

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
from mrconv.hub import MODEL, read_json
from mrconv.inference import load_model

from .kernel_maps import kernel_maps
from .paper_numbers import published_for_run
from .scores import SCORES

Array = np.ndarray[Any, np.dtype[np.float64]]

METRICS, RESULT, FIGURES = "metrics.csv", "result.json", "figures"
SPLITS = {"train": COLOURS[3], "val": COLOURS[0], "test": COLOURS[1]}
MOST_CHANNELS = 32  # drawn of each kernel
BINS_PER_OCTAVE = 24  # of lag, where a kernel has as many taps
LINEAR = 0.01  # of a kernel's largest value: colours are logarithmic above, linear below


def draw_run(folder: Path, out: Path | None = None, result: dict[str, Any] | None = None) -> list[Path]:
    """Draw all figures that a run has the data for, into its folder `figures` or another; return their paths.

    Where its result is not recorded yet, it can be given.
    """
    drawn = []
    out = folder / FIGURES if out is None else out
    if not (folder / METRICS).is_file() and not (folder / MODEL).is_dir():
        raise ValueError(f"{folder} is no run: it has neither {METRICS} nor {MODEL}/")
    out.mkdir(parents=True, exist_ok=True)
    if (folder / METRICS).is_file():
        learning_curves(folder, out / "curves.png", result)
        drawn.append(out / "curves.png")
    if (folder / MODEL).is_dir():
        model = load_model(folder / MODEL)
        if not any(isinstance(module, MRConv) for module in model.modules()):
            return drawn  # a peer's: it has no branches
        if not any(_without_alpha(layer) for layer in layers(model).values()):
            alpha_distribution(model, out / "alpha.png")
            drawn.append(out / "alpha.png")
        merged_kernels(model, out / "kernels.png")
        drawn.append(out / "kernels.png")
        if isinstance(model, MRConvNeXt):
            kernel_maps(model, out / "maps.png")
            drawn.append(out / "maps.png")
    return drawn


def layers(model: nn.Module) -> dict[str, MRConv]:
    """Return a model's MRConv layers by name, in order of depth."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, MRConv)}
    if not found:
        raise ValueError(f"a {type(model).__name__} without an MRConv layer has nothing to draw")
    return found


def read_metrics(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return, by column of a metrics.csv, epochs and values; the last of each epoch."""
    found: dict[str, dict[int, float]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if text and "/" in name:
                        found.setdefault(name, {})[int(row["epoch"])] = float(text)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what a run writes: {error}") from None
    if not found:
        raise ValueError(f"{path} has no rows: the run was stopped before its first epoch was done")
    return {name: ([*sorted(values)], [values[n] for n in sorted(values)]) for name, values in found.items()}


def learning_curves(folder: Path, out: Path, result: dict[str, Any] | None = None) -> None:
    """Draw loss and score per epoch, with the epoch that was kept and the paper's accuracy where known."""
    metrics = read_metrics(folder / METRICS)
    if result is None:
        result = read_json(folder / RESULT) if (folder / RESULT).is_file() else {}
    figure = Figure(figsize=(9, 3.6), layout=ConstrainedLayoutEngine(wspace=0.05))
    losses, scores = figure.subplots(1, 2, sharex=True)
    metric = SCORES[result.get("metric") or ("bits" if any(key.endswith("/bits") for key in metrics) else "accuracy")]
    shown: dict[str, Any] = {}  # the legend
    for name, colour in SPLITS.items():
        for axes, kind, scale in ((losses, "loss", 1.0), (scores, metric.name, metric.scale)):
            if f"{name}/{kind}" in metrics:
                epochs, values = metrics[f"{name}/{kind}"]
                look: dict[str, Any] = {"color": colour, "marker": "o" if len(epochs) < 25 else "", "markersize": 3.5}
                (shown[name],) = axes.plot(epochs, [scale * v for v in values], linewidth=1.5, label=name, **look)
    shown |= _marks(scores, metrics, result, metric.scale)
    for axes, label in ((losses, "cross-entropy, nats"), (scores, metric.label)):
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(which="major", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=len(shown), frameon=False)
    partial = ", partial" if result.get("partial") else ""
    figure.suptitle(f"{result.get('name', folder.name)}{partial}", fontsize="medium")
    figure.savefig(out, dpi=150)


def _marks(
    axes: Axes, metrics: dict[str, tuple[list[int], list[float]]], result: dict[str, Any], scale: float
) -> dict[str, Any]:
    """Mark the epoch that was kept and the paper's accuracy; return both by their labels."""
    shown: dict[str, Any] = {}
    epochs, values = metrics.get(result.get("watched", ""), ([], []))
    epoch = result.get("best_epoch")
    if epoch in epochs:
        label, best = f"kept: epoch {epoch}", scale * values[epochs.index(epoch)]
        ring: dict[str, Any] = {
            "markersize": 9,
            "markerfacecolor": "none",
            "markeredgecolor": "black",
            "linestyle": "none",
        }
        (shown[label],) = axes.plot([epoch], [best], marker="o", label=label, clip_on=False, zorder=5, **ring)
    paper = published_for_run(result)
    if paper is not None and paper.accuracy is not None:
        label = f"paper, test: {paper.accuracy:.2f}"
        shown[label] = axes.axhline(paper.accuracy, color="0.45", linestyle="--", linewidth=1.2, label=label)
    return shown


def alpha_magnitudes(model: nn.Module) -> list[Array]:
    """Return, for each direction, |alpha_i| averaged over channels and divided by its sum over i: (depth, N).

    A layer of fewer resolutions than others has NaN in the place of those it lacks.
    """
    found = layers(model)
    for name, layer in found.items():
        reason = _without_alpha(layer)
        if reason:
            raise ValueError(f"{name or 'the layer'} has no alpha to draw: {reason}")
    most = max(layer.resolutions for layer in found.values())
    directions = []
    for direction in range(max(len(layer.branches) for layer in found.values())):
        shares = np.full((len(found), most), math.nan)
        for row, layer in zip(shares, found.values(), strict=True):
            if direction < len(layer.branches):
                alpha: torch.Tensor = layer.branches[direction].alpha  # type: ignore[assignment]
                size = alpha.detach().double().abs().mean(1).cpu().numpy()
                row[: len(size)] = size / size.sum()
        directions.append(shares)
    return directions


def _without_alpha(layer: MRConv) -> str:
    """Return why a layer has no learned weights; "" if it has."""
    if layer.merged:
        return "it is merged; draw the model from before"
    if layer.resolutions == 1:
        return "it has one resolution only"
    if layer.norm == "none":
        return "norm='none' gives all kernels the weight 1"
    if any(branches.decay is not None for branches in layer.branches):
        return "decay fixes the weights"
    return ""


def alpha_distribution(model: nn.Module, out: Path) -> None:
    """Draw the normalised magnitude of alpha per resolution and depth (the paper's figure of weight distributions)."""
    shares = alpha_magnitudes(model)
    depth, N = shares[0].shape
    deepest = max(layers(model).values(), key=lambda layer: layer.resolutions)
    lengths = _lengths(deepest)
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
        axes.set_xlabel("resolution i; its kernel's length, positions")
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
    """Draw each layer's merged kernel, channels by lag; lags on a logarithmic scale, values on a symmetric one.

    Up to MOST_CHANNELS channels, evenly chosen; those whose energy lies at the largest lags are at the top.
    """
    found = layers(model)
    columns = 1 if len(found) < 3 else 2 if len(found) < 9 else 3
    rows = math.ceil(len(found) / columns)
    width = 6.5 if columns == 1 else 3.9 * columns
    figure = Figure(figsize=(width + 1.2, 1.6 * rows + 1.0), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    for i, (axes, layer) in enumerate(zip(grid.flat, found.values(), strict=False)):
        lags, kernel = kernel_by_lag(layer)
        largest = float(np.abs(kernel).max())
        image = _draw_kernel(axes, lags, kernel / (largest or 1.0))
        axes.set_title(f"layer {i + 1}, largest {largest:.2g}", fontsize="small", loc="left", pad=3)
    bar = figure.colorbar(image, ax=grid, pad=0.02, aspect=15 * rows, label="value / largest")
    ticks = [-1, -0.1, -0.01, 0, 0.01, 0.1, 1]
    bar.set_ticks(ticks, labels=[_signed(f"{value:g}") for value in ticks])
    bar.minorticks_off()
    merged = any(layer.merged and layer.groups == 1 for layer in found.values())
    figure.supxlabel("lag, positions" + (" (lag 0 holds the skip D too)" if merged else ""), fontsize="medium")
    figure.supylabel("channels, by reach", fontsize="medium")
    figure.savefig(out, dpi=150)


def _draw_kernel(axes: Axes, lags: Array, kernel: Array) -> Any:
    """Draw one kernel (C, T) of values in [-1, 1], against lags on the scale of `place`."""
    chosen = np.unique(np.linspace(0, len(kernel) - 1, min(len(kernel), MOST_CHANNELS)).round().astype(int))
    kernel = kernel[chosen]
    energy = kernel**2
    reach = energy @ np.log2(1 + np.abs(lags)) / np.maximum(energy.sum(1), 1e-300)
    edges, values = binned(lags, kernel[np.argsort(reach, kind="stable")])
    norm = SymLogNorm(LINEAR, linscale=0.5, vmin=-1, vmax=1, base=10)
    image = axes.pcolormesh(edges, np.arange(len(chosen) + 1), values, cmap="RdBu_r", norm=norm)
    both = lags[0] < 0
    base = 16 if both and lags[-1] > 256 else 4
    steps = [n for n in (base**k for k in range(1, 12)) if n <= lags[-1] + 1]
    ticks = [*(-n for n in reversed(steps) if both), 0, *steps]
    axes.set_xticks([float(place(n)) for n in ticks], [_short(n) for n in ticks], fontsize=8)
    axes.set_yticks([])
    if both:
        axes.axvline(0, color="black", linewidth=0.8)
    return image


def place(lag: Any) -> Any:
    """Return where a lag is drawn."""
    return np.sign(lag) * np.log2(1 + np.abs(lag))


def binned(lags: Array, kernel: Array) -> tuple[Array, Array]:
    """Return edges (T + 1,) on the drawn scale and values (C, T), taps that would be finer than a bin joined.

    Of joined taps the largest in magnitude is drawn, so that single taps of sparse kernels stay.
    """
    edges = place(np.append(lags, lags[-1] + 1))
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
    return text.replace("-", "−")
