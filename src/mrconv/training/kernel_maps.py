"""Figure of the merged kernels of an image model as maps over shifts; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn

from mrconv import MRConv, MRConvNeXt
from mrconv.vision.flattening import FlattenedMixer, lags_to_shifts

CHANNELS = 8  # plotted per stage


def kernel_maps(model: nn.Module, out: Path) -> None:
    """Plot kernels of each stage's last block over row and column shifts, without the skip D.

    The channels are evenly spaced in the order of their kernels' energy. Each map has its own colour scale.
    """
    mixers = [mixer for mixer in _last_mixers(model) if isinstance(mixer.layer, MRConv)]
    if not mixers:
        raise ValueError(f"the {type(model).__name__} has no stages of MRConv layers to plot")
    figure = Figure(figsize=(1.05 * CHANNELS + 0.6, 2.05 * len(mixers) + 0.6), layout="constrained")
    grid = figure.subplots(len(mixers), CHANNELS, squeeze=False)
    for i, (line, mixer) in enumerate(zip(grid, mixers, strict=True)):
        images = shift_images(mixer)
        order = images.square().sum((1, 2)).argsort(descending=True)
        chosen = order[torch.linspace(0, len(order) - 1, min(CHANNELS, len(order))).round().long()]
        H, W = mixer.grid
        for axes, channel in zip(line, chosen.tolist(), strict=False):
            image = images[channel].numpy()
            largest = float(np.abs(image).max()) or 1.0
            extent = (-(W // 2) - 0.5, W - W // 2 - 0.5, H + 0.5, -H - 0.5)
            axes.imshow(image, cmap="RdBu_r", vmin=-largest, vmax=largest, extent=extent, interpolation="nearest")
            axes.set_title(f"{channel}", fontsize=7, pad=2)
        for axes in line:
            axes.set_visible(axes.has_data())
            axes.tick_params(labelsize=6, length=2)
            axes.tick_params(labelleft=axes is line[0])
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(3, integer=True))
        line[0].set_ylabel(f"stage {i + 1}, {H} x {W}\nshift, rows", fontsize=8)
    figure.supxlabel("shift, columns (positive: pixels to the left or above); title: channel", fontsize=8)
    figure.savefig(out, dpi=150)


@torch.no_grad()
def shift_images(mixer: FlattenedMixer) -> torch.Tensor:
    """Return a mixer's merged kernels (C, 2 H + 1, W) by shift; a dense merged kernel includes the skip D."""
    layer: Any = mixer.layer
    past, future = layer.k_rep()[0].detach().double().cpu()
    return lags_to_shifts(torch.cat([future.flip(1), past], 1), mixer.grid)


def _last_mixers(model: nn.Module) -> list[FlattenedMixer]:
    if not isinstance(model, MRConvNeXt):
        return []
    mixers = [stage.blocks[-1].mixer for stage in model.stages]  # type: ignore[union-attr, index]
    return [mixer for mixer in mixers if isinstance(mixer, FlattenedMixer)]
