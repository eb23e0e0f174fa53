"""A task's data as a person would look at it: counts, balance, lengths, and examples as text, picture or waveform."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from .base import Prepared, Split
from .errors import DataError
from .packing import SPECIAL

BAR = "▏▎▍▌▋▊▉█"
WIDTH = 40


def bar(part: float, width: int = WIDTH) -> str:
    """Return a bar that fills this part of the width."""
    eighths = round(8 * width * part)
    return "█" * (eighths // 8) + (BAR[eighths % 8 - 1] if eighths % 8 else "")


def summary(data: Prepared) -> str:
    """Return counts, class balance and lengths, as lines of text."""
    symbols = f"{len(data.vocabulary)} symbols"
    kind = {"tokens": symbols, "text": symbols, "values": f"{data.channels} channel(s)"}.get(data.encoder, "")
    lines = [f"{data.name}: {data.encoder}, length {data.length:,}, {kind}, {len(data.classes) or 'no'} classes", ""]
    what = "characters" if data.encoder == "text" else "examples"
    lines += [f"{name:8s} {len(split):>9,} {what}" for name, split in data.splits.items()]
    first = next(iter(data.splits.values()))
    if data.classes:
        lines += ["", f"classes of {first.name}"]
        counts = np.bincount(np.asarray(first.y), minlength=len(data.classes))
        shown = list(zip(data.classes, counts, strict=True))
        for name, count in shown[:40]:
            lines.append(f"{name[:16]:16s} {count:>9,}  {count / len(first):6.1%} {bar(count / counts.max())}")
        if len(shown) > 40:
            lines.append(f"... and {len(shown) - 40} more")
    if first.offsets is not None:
        lines += ["", f"lengths of {first.name}", *histogram(first.lengths)]
    return "\n".join(line.rstrip() for line in lines)


def histogram(lengths: np.ndarray, bins: int = 10) -> list[str]:
    """Return lines of a histogram."""
    counts, edges = np.histogram(lengths, bins=min(bins, int(lengths.max() - lengths.min()) + 1))
    edges = np.ceil(edges).astype(int)
    return [
        f"{edges[i]:>7,} .. {edges[i + 1] - (i < len(counts) - 1):>7,} {count:>9,} {bar(count / counts.max())}"
        for i, count in enumerate(counts)
    ]


def example(data: Prepared, split: Split, i: int) -> str:
    """Return one row as text: what it says, or what it looks like; of a text, a window from character i on."""
    if data.encoder == "text":
        return f"{split.name} {i}:\n{as_text(data, split.x[i : i + data.length])}"
    label = data.classes[int(split.y[i])] if data.classes else f"{split.y[i]}"
    head = f"{split.name} {i}: {label}"
    if data.encoder == "tokens":
        parts = [as_text(data, split.row(i))] + ([as_text(data, split.row2(i))] if data.pair else [])
        return "\n".join([head, *(textwrap.shorten(part, 600, placeholder=" ...") for part in parts)])
    row = np.asarray(split.row(i))
    if row.dtype.kind == "S":
        return f"{head}, {row.item().decode()}"
    image = pixels(row)
    if image is not None:
        return f"{head}\n{picture(image.mean(-1))}"
    return f"{head}\n{waveform(row[:, 0])}"


def pixels(row: np.ndarray) -> np.ndarray | None:
    """Return a row as a square picture (side, side, channels), if it is one."""
    if row.dtype.kind == "S":
        raise DataError(f"{row.item().decode()} is a picture already: open it")
    side = math.isqrt(len(row))
    if row.ndim == 3:
        return row
    return row.reshape(side, side, -1) if row.dtype == np.uint8 and side * side == len(row) else None


def as_text(data: Prepared, row: np.ndarray) -> str:
    """Return tokens as text."""
    symbols = [data.vocabulary[int(token)] for token in row]
    single = all(len(symbol) == 1 for symbol in data.vocabulary if symbol not in SPECIAL)
    return ("" if single else " ").join(symbol for symbol in symbols if symbol != SPECIAL[2])


def picture(grey: np.ndarray, columns: int = 64) -> str:
    """Return a grey picture (H, W) in half blocks, in 24 shades that every terminal with 256 colours has."""
    step = max(1, -(-grey.shape[1] // columns))
    height, width = (n // step * step for n in grey.shape)
    small = grey[:height, :width].reshape(height // step, step, width // step, step).mean((1, 3))
    small = np.pad(small, ((0, len(small) % 2), (0, 0)))
    shades = 232 + np.rint(small / 255 * 23).astype(int)
    rows = zip(shades[::2], shades[1::2], strict=True)
    lines = ("".join(f"\x1b[38;5;{a};48;5;{b}m▀" for a, b in zip(*pair, strict=True)) for pair in rows)
    return "\n".join(f"{line}\x1b[0m" for line in lines)


def waveform(samples: np.ndarray, columns: int = 72, height: int = 9) -> str:
    """Return a waveform as columns of blocks around zero."""
    pieces = np.array_split(np.asarray(samples, np.float64), min(columns, len(samples)))
    most = max(1e-12, float(np.abs(samples).max()))
    top = np.array([max(0.0, piece.max()) for piece in pieces]) / most
    low = np.array([min(0.0, piece.min()) for piece in pieces]) / most
    levels = np.linspace(1, -1, height)
    half = 1 / (height - 1)
    lines = (
        "".join("█" if low[j] - half <= level <= top[j] + half else " " for j in range(len(top))) for level in levels
    )
    return "\n".join(line.rstrip() for line in lines)


def figure(data: Prepared, out: Path, count: int = 8) -> None:
    """Draw the first examples of two classes in turn, or lengths of texts, or how often characters are, into a file."""
    from matplotlib.figure import Figure

    split = next(iter(data.splits.values()))
    picture: Any = Figure(figsize=(10, 5), layout="constrained")
    if data.encoder == "text":
        axes = picture.subplots()
        counts = np.bincount(split.y, minlength=len(data.vocabulary))
        often = np.argsort(-counts, kind="stable")[:60]
        axes.bar(range(len(often)), 100 * counts[often] / len(split), color="0.4")
        axes.set_xticks(range(len(often)), [repr(data.vocabulary[i])[1:-1] for i in often], fontsize=8)
        axes.set(ylabel=f"% of {split.name}", title=f"{data.name}: the most frequent of {len(data.vocabulary)}")
    elif data.encoder == "tokens":
        axes = picture.subplots()
        for name, each in data.splits.items():
            axes.hist(each.lengths, bins=60, histtype="step", density=True, label=f"{name}, {len(each):,}")
        axes.set(xlabel="length", ylabel="density", title=f"{data.name}: lengths")
        axes.legend(frameon=False)
    else:
        every = [np.flatnonzero(np.asarray(split.y) == c)[: count // 2 + 1] for c in range(max(1, len(data.classes)))]
        rows = [int(i) for group in zip(*(g for g in every if len(g)), strict=False) for i in group][:count]
        rows = rows or list(range(min(count, len(split))))
        for axes, i in zip(picture.subplots(2, -(-len(rows) // 2), squeeze=False).flat, rows, strict=False):
            _draw(axes, data, np.asarray(split.row(i)))
            axes.set_title(data.classes[int(split.y[i])] if data.classes else str(split.y[i]), fontsize=9)
        picture.suptitle(data.name)
    picture.savefig(out, dpi=120)


def _draw(axes: Any, data: Prepared, row: np.ndarray) -> None:
    image = pixels(row)
    if image is not None:
        axes.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=255)
        axes.set_axis_off()
    else:
        axes.plot(row, linewidth=0.4)
        axes.set_xticks([])
