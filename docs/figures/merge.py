"""Draw merge.png: the branches of a trained layer and the kernel that they merge into.

python docs/figures/merge.py

The kernels are those of one channel of the language model in results/shakespeare-seed0 (fourier kernels, l0 = 32).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from mrconv import LanguageModel, MRConv
from mrconv._utils.colours import COLOURS

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "results/shakespeare-seed0/model"
LAYER, CHANNEL = 5, 227
TEXT = "#7d8590"  # readable on white and on black: the background is transparent
BRANCH_COLOURS = (COLOURS[0], "#56b4e9", COLOURS[2], COLOURS[5], COLOURS[1])
MERGED_COLOUR = "#a371f7"


@torch.no_grad()
def draw(path: Path) -> None:
    """Draw the branches above, each with its weight, and the merged kernel below."""
    layer = LanguageModel.from_pretrained(MODEL).backbone.blocks[LAYER].layer
    assert isinstance(layer, MRConv)
    direction = layer.directions[0]
    kernels = [values[CHANNEL] for values, _ in direction.kernels()]
    scale, _ = direction.scale_and_bias()
    assert scale is not None
    weights = scale[:, CHANNEL].tolist()
    scaled = [weight * values for weight, values in zip(weights, kernels, strict=True)]
    k_rep = sum(torch.nn.functional.pad(values, (0, layer.l_max - len(values))) for values in scaled)
    assert isinstance(k_rep, torch.Tensor)

    N = len(kernels)
    figure = Figure(figsize=(8.4, 5.4))
    heights = [1] * N + [0.9, 2.2]
    grid = figure.add_gridspec(N + 2, 3, width_ratios=[5, 0.85, 1], height_ratios=heights, hspace=0.15, wspace=0.04)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.94, bottom=0.1)
    for i, (kernel, weight, colour) in enumerate(zip(kernels, weights, BRANCH_COLOURS, strict=True)):
        axes, label, bar = (figure.add_subplot(grid[i, column]) for column in range(3))
        _kernel(axes, kernel / kernel.abs().max(), layer.l_max, colour)
        axes.set_ylim(-1.1, 1.1)
        label.text(0.08, 0.5, f"$k_{i}$, {len(kernel)} taps", va="center", color=TEXT, fontsize=10.5)
        label.axis("off")
        bar.barh([0], [weight], color=colour, height=0.75)
        bar.text(weight + 0.04 * max(weights), 0, f"{weight:.2f}", va="center", color=TEXT, fontsize=10.5)
        bar.set(xlim=(0, 1.4 * max(weights)), ylim=(-1, 1))
        bar.axis("off")
        if i == 0:
            axes.set_title(f"Training: N = {N} branches of doubling length", color=TEXT, fontsize=12, loc="left")
            bar.set_title("weight", color=TEXT, fontsize=12, loc="left")
    axes = figure.add_subplot(grid[N + 1, 0])
    _kernel(axes, k_rep, layer.l_max, MERGED_COLOUR)
    title = r"Inference: one kernel, $k_{rep} = \sum_i \mathrm{weight}_i \; k_i$"
    axes.set_title(title, color=TEXT, fontsize=12, loc="left", pad=12)
    axes.set_xticks([0, *(len(kernel) for kernel in kernels)])
    axes.tick_params(axis="x", colors=TEXT)
    axes.set_xlabel("lag (square-root scale)", color=TEXT)
    curve: dict[str, Any] = {
        "connectionstyle": "arc3,rad=-0.35",
        "arrowstyle": "-|>",
        "mutation_scale": 16,
        "linewidth": 1.6,
    }
    figure.add_artist(FancyArrowPatch((0.89, 0.43), (0.77, 0.26), color=TEXT, **curve))
    figure.text(0.885, 0.215, "reparameterize()", color=TEXT, fontsize=10.5, family="monospace", ha="center")
    figure.savefig(path, dpi=200, transparent=True)


def _kernel(axes: Axes, kernel: torch.Tensor, length: int, colour: str) -> None:
    lags = torch.arange(len(kernel))
    axes.set_xscale("function", functions=(lambda x: abs(x) ** 0.5, lambda x: x**2))
    axes.fill_between(lags, kernel, color=colour, alpha=0.35, linewidth=0)
    axes.plot(lags, kernel, color=colour, linewidth=1.6)
    axes.plot([0, len(kernel)], [0, 0], color=TEXT, linewidth=0.6)
    axes.set_xlim(0, length)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.minorticks_off()
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
