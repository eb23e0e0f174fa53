"""Previews of a task's data: counts, class balance, lengths, and examples as text, image or waveform."""

from __future__ import annotations

import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from .base import Prepared, Split
from .errors import DataError
from .vocabulary import END, is_characters

EIGHTHS = "▏▎▍▌▋▊▉█"
SHADES = " .:-=+*#%@"
BAR_WIDTH = 40
MAX_CLASSES = 40


def bar(fraction: float, width: int = BAR_WIDTH) -> str:
    """Return a bar of this fraction of the width."""
    eighths = round(8 * width * fraction)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")


def summary(data: Prepared) -> str:
    """Return counts, class balance, lengths, and changes made to the files, as lines of text."""
    symbols = f"{len(data.vocabulary)} symbols"
    kind = {"tokens": symbols, "text": symbols, "values": f"{data.channels} channel(s)"}.get(data.encoder, "")
    unit = data.target if data.target in ("labels", "values") else "classes"
    lines = [f"{data.name}: {data.encoder}, length {data.length:,}, {kind}, {len(data.classes) or 'no'} {unit}"]
    if changes := data.facts.get("changes"):
        lines.append(f"changed: {changes}")
    lines.append("")
    unit = "characters" if data.encoder == "text" else "examples"
    for name, split in data.splits.items():
        windows = "" if split.origins is None else f", windows of {len(np.unique(split.origins)):,} sequences"
        lines.append(f"{name:8s} {len(split):>9,} {unit}{windows}")
    first = next(iter(data.splits.values()))
    if data.target == "values":
        lines += ["", f"values of {first.name}", *_describe_values(data, first)]
    elif data.classes:
        lines += ["", f"{'labels' if data.target == 'labels' else 'classes'} of {first.name}"]
        counts = label_counts(data, first)
        total = counts.sum() if data.target == "positions" else len(first)
        for name, count in list(zip(data.classes, counts, strict=True))[:MAX_CLASSES]:
            lines.append(f"{name[:16]:16s} {count:>9,}  {count / total:6.1%} {bar(count / counts.max())}")
        if len(counts) > MAX_CLASSES:
            lines.append(f"... and {len(counts) - MAX_CLASSES} more")
    if first.offsets is not None:
        lines += ["", f"lengths of {first.name}", *histogram(first.lengths)]
    return "\n".join(line.rstrip() for line in lines)


def label_counts(data: Prepared, split: Split) -> np.ndarray:
    """Return how often each class occurs in the labels of a split."""
    y = np.asarray(split.y)
    if data.target == "labels":
        return y.sum(0).astype(int)
    return np.bincount(y[y >= 0], minlength=len(data.classes))


def _describe_values(data: Prepared, split: Split) -> list[str]:
    y = np.asarray(split.y, np.float64)
    columns = zip(data.classes, y.mean(0), y.std(0), y.min(0), y.max(0), strict=True)
    return [f"{name[:16]:16s} mean {m:.4g}, deviation {d:.4g}, from {a:.4g} to {b:.4g}" for name, m, d, a, b in columns]


def histogram(lengths: np.ndarray, bins: int = 10) -> list[str]:
    """Return the lines of a histogram."""
    counts, edges = np.histogram(lengths, bins=min(bins, int(lengths.max() - lengths.min()) + 1))
    edges = np.ceil(edges).astype(int)
    return [
        f"{edges[i]:>7,} .. {edges[i + 1] - (i < len(counts) - 1):>7,} {count:>9,} {bar(count / counts.max())}"
        for i, count in enumerate(counts)
    ]


def class_name(data: Prepared, split: Split, i: int) -> str:
    """Return the label of example i as text."""
    y = np.asarray(split.y[i])
    if data.target == "values":
        return ", ".join(f"{name}={value:.4g}" for name, value in zip(data.classes, y, strict=True))
    if data.target == "labels":
        return "; ".join(data.classes[j] for j in np.flatnonzero(y)) or "no label"
    if data.target == "positions":
        return textwrap.shorten(" ".join(data.classes[j] for j in y if j >= 0), 100, placeholder=" ...")
    return data.classes[int(y)] if data.classes else f"{y}"


def describe_example(data: Prepared, split: Split, i: int) -> str:
    """Return example i as text; for a long text, the window that starts at character i."""
    if data.encoder == "text":
        return f"{split.name} {i}:\n{decode_tokens(data, split.x[i : i + data.length])}"
    head = f"{split.name} {i}: {class_name(data, split, i)}"
    if data.encoder == "tokens":
        texts = [decode_tokens(data, split.example(i))]
        if data.pair:
            texts.append(decode_tokens(data, split.second(i)))
        return "\n".join([head, *(textwrap.shorten(text, 600, placeholder=" ...") for text in texts)])
    x = np.asarray(split.example(i))
    if x.dtype.kind == "S":
        return f"{head}, {x.item().decode()}"
    image = as_image(x)
    if image is not None:
        return f"{head}\n{image_blocks(image.mean(-1))}"
    return f"{head}\n{waveform_blocks(x[:, 0])}"


def as_image(x: np.ndarray) -> np.ndarray | None:
    """Return an example as an image (height, width, channels); None if it is not an image."""
    if x.dtype.kind == "S":
        raise DataError(f"{x.item().decode()} is an image file: open it instead")
    side = math.isqrt(len(x))
    if x.ndim == 3:
        return x
    return x.reshape(side, side, -1) if x.dtype == np.uint8 and side * side == len(x) else None


def decode_tokens(data: Prepared, tokens: np.ndarray) -> str:
    """Return tokens as text, without <eos>."""
    symbols = [data.vocabulary[int(token)] for token in tokens]
    separator = "" if is_characters(data.vocabulary) else " "
    return separator.join(symbol for symbol in symbols if symbol != END)


def image_blocks(grey: np.ndarray, columns: int = 64) -> str:
    """Return a greyscale image (H, W) as half blocks in the 24 grey levels of terminals with 256 colours.

    Where standard output is not a terminal, the blocks are plain characters, without colour codes.
    """
    step = max(1, -(-grey.shape[1] // columns))
    height, width = (n // step * step for n in grey.shape)
    small = grey[:height, :width].reshape(height // step, step, width // step, step).mean((1, 3))
    small = np.pad(small, ((0, len(small) % 2), (0, 0)))
    if not sys.stdout.isatty():
        shades = np.rint((small[::2] + small[1::2]) / 2 / 255 * (len(SHADES) - 1)).astype(int)
        return "\n".join("".join(SHADES[shade] for shade in line) for line in shades)
    levels = 232 + np.rint(small / 255 * 23).astype(int)
    pairs = zip(levels[::2], levels[1::2], strict=True)
    lines = ("".join(f"\x1b[38;5;{a};48;5;{b}m▀" for a, b in zip(*pair, strict=True)) for pair in pairs)
    return "\n".join(f"{line}\x1b[0m" for line in lines)


def waveform_blocks(samples: np.ndarray, columns: int = 72, height: int = 9) -> str:
    """Return a waveform as columns of blocks around zero."""
    pieces = np.array_split(np.asarray(samples, np.float64), min(columns, len(samples)))
    peak = max(1e-12, float(np.abs(samples).max()))
    top = np.array([max(0.0, piece.max()) for piece in pieces]) / peak
    bottom = np.array([min(0.0, piece.min()) for piece in pieces]) / peak
    levels = np.linspace(1, -1, height)
    half = 1 / (height - 1)
    lines = (
        "".join("█" if bottom[j] - half <= level <= top[j] + half else " " for j in range(len(top))) for level in levels
    )
    return "\n".join(line.rstrip() for line in lines)


def draw_examples(data: Prepared, out: Path, count: int = 8) -> None:
    """Draw examples of all classes in turn to a file; for tokens, a histogram of lengths; for a text, of characters."""
    from matplotlib.figure import Figure

    split = next(iter(data.splits.values()))
    figure: Any = Figure(figsize=(10, 5), layout="constrained")
    if data.encoder == "text":
        _draw_character_counts(figure.subplots(), data, split)
    elif data.encoder == "tokens":
        _draw_lengths(figure.subplots(), data)
    else:
        examples = _choose_examples(data, split, count)
        grid = figure.subplots(2, -(-len(examples) // 2), squeeze=False)
        for axes, i in zip(grid.flat, examples, strict=False):
            _draw_example(axes, np.asarray(split.example(i)))
            axes.set_title(class_name(data, split, i), fontsize=9)
        figure.suptitle(data.name)
    figure.savefig(out, dpi=120)


def _choose_examples(data: Prepared, split: Split, count: int) -> list[int]:
    """Return the first examples of all classes in turn."""
    if data.target != "class":
        return list(range(min(count, len(split))))
    labels = np.asarray(split.y)
    by_class = [np.flatnonzero(labels == c)[: count // 2 + 1] for c in range(max(1, len(data.classes)))]
    in_turn = zip(*(indices for indices in by_class if len(indices)), strict=False)
    examples = [int(i) for group in in_turn for i in group][:count]
    return examples or list(range(min(count, len(split))))


def _draw_character_counts(axes: Any, data: Prepared, split: Split) -> None:
    counts = np.bincount(split.y, minlength=len(data.vocabulary))
    frequent = np.argsort(-counts, kind="stable")[:60]
    axes.bar(range(len(frequent)), 100 * counts[frequent] / len(split), color="0.4")
    axes.set_xticks(range(len(frequent)), [repr(data.vocabulary[i])[1:-1] for i in frequent], fontsize=8)
    axes.set(ylabel=f"% of {split.name}", title=f"{data.name}: the most frequent of {len(data.vocabulary)}")


def _draw_lengths(axes: Any, data: Prepared) -> None:
    for name, split in data.splits.items():
        axes.hist(split.lengths, bins=60, histtype="step", density=True, label=f"{name}, {len(split):,}")
    axes.set(xlabel="length", ylabel="density", title=f"{data.name}: lengths")
    axes.legend(frameon=False)


def _draw_example(axes: Any, x: np.ndarray) -> None:
    image = as_image(x)
    if image is not None:
        axes.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=255)
        axes.set_axis_off()
    else:
        axes.plot(x, linewidth=0.4)
        axes.set_xticks([])
