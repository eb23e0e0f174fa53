"""The figure of a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

MAX_LABELLED = 25  # classes whose names and counts are readable


def draw_confusion_matrix(matrix: np.ndarray, classes: Sequence[str], split: str, out: Path) -> None:
    """Draw counts by class and predicted class; colours are fractions of the class."""
    n = len(classes)
    side = min(12.0, 3 + 0.4 * n)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    fractions = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    drawn = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(drawn, ax=axes, label="fraction of the class")
    axes.set(xlabel="predicted class", ylabel="class", title=f"{split}, {int(matrix.sum()):,} labels")
    if n <= MAX_LABELLED:
        axes.set_xticks(range(n), [name[:16] for name in classes], rotation=45, ha="right")
        axes.set_yticks(range(n), [name[:16] for name in classes])
        for (i, j), count in np.ndenumerate(matrix):
            colour = "white" if fractions[i, j] > 0.6 else "black"
            axes.text(j, i, f"{count:,}", ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(out, dpi=150)
