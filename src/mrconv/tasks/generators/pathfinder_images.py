"""Pathfinder images, drawn anew: two long dashed contours, short distractors, two discs that a contour joins or not.

An independent implementation of the generator behind Long Range Arena's Pathfinder and Path-X (Linsley et al., NeurIPS
2018; Tay et al., ICLR 2021), with its rounding and its quirks, so that the images have the same statistics. Hundreds of
pairs of contours fail for each that succeeds: the search for them is compiled, on tables of all dashes, and works on a
mask of occupied pixels; only what succeeds is drawn. Image i depends on (seed, i) and the options only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numba
import numpy as np

from ..._utils.checks import check_positive_int
from .pathfinder_geometry import Array, Options, Tables, options_for, tables

__all__ = ["Images", "Options", "generate", "options_for"]

FREE = 76  # a pixel is free up to 0.3
CLASH = 459  # mask and footprint may add up to less than 1.8
MAX_ATTEMPTS = 1_000_000  # at a pair of contours; 300 to 400 are usual
CHUNK = 2**17  # pixels a thread draws at a time: some ten milliseconds

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Images:
    """Images and what is in them. Points are (row, column); contour 0 was begun first."""

    images: Array  # (n, size, size) uint8
    labels: Array  # (n,) uint8: 1 if a contour joins the discs
    discs: Array  # (n, 2, 2): at a contour's first end, and at a last end
    tails: Array  # (n, 2, 2): first ends of the long contours
    ends: Array  # (n, 2, 2): last ends of the long contours
    paths: Array  # (n, 2, contour_length, 2, 2): near and far end of each dash
    angles: Array  # (n, 2 + num_distractor_snakes): first angle of each contour, in degrees
    distractors: Array  # (n,)
    distractor_paths: Array  # (n, num_distractor_snakes, distractor_length, 2, 2); -1 for missing ones
    margins: Array  # (n,)
    attempts: Array  # (n,): at a pair of long contours, with those that had no room for a first dash


def generate(
    count: int,
    size: int = 32,
    seed: int = 0,
    workers: int | None = None,
    options: Options | None = None,
    start: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Images:
    """Return images start .. start + count - 1 of the endless sequence that belongs to a seed.

    The bytes are the same for any number of workers (threads; None: one per CPU). `progress` is called, in the calling
    thread, with the number of images finished since it was last called.
    """
    check_positive_int(count=count, size=size, workers=1 if workers is None else workers)
    for name, value in (("seed", seed), ("start", start)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 2**63:
            raise ValueError(f"{name} must be an integer from 0 to 2**63 - 1; got {value!r}")
    options = options_for(size) if options is None else options
    if options.size != size:
        raise ValueError(f"size must be that of the options, {options.size}; got {size}")
    t, out = tables(options), _empty(count, options)
    step = max(1, CHUNK // size**2)
    _draw_all(t, out, np.uint64(seed), np.uint64(start), 0, 0)  # compiles here, not in a thread

    def draw(first: int) -> int:
        last = min(first + step, count)
        _draw_all(t, out, np.uint64(seed), np.uint64(start), first, last)
        if (out.attempts[first:last] < 0).any():
            raise RuntimeError(
                f"no pair of contours fits in {MAX_ATTEMPTS} attempts: a shorter contour_length or paddle_length, or a "
                f"larger size, leaves more room; got {options}"
            )
        return last - first

    with closing(_mapped(draw, range(0, count, step), workers or os.cpu_count() or 1)) as chunks:
        for done in chunks:
            if progress is not None:
                progress(done)
    return Images(**out._asdict())


def _mapped(draw: Callable[[int], int], firsts: range, workers: int) -> Generator[int, None, None]:
    """Yield the results in order; an exception, such as KeyboardInterrupt, waits only for chunks already begun."""
    if workers == 1:
        yield from map(draw, firsts)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(draw, firsts)
    finally:
        pool.shutdown(cancel_futures=True)


class _Out(NamedTuple):
    """The fields of `Images`, to be filled."""

    images: Array
    labels: Array
    discs: Array
    tails: Array
    ends: Array
    paths: Array
    angles: Array
    distractors: Array
    distractor_paths: Array
    margins: Array
    attempts: Array


def _empty(n: int, options: Options) -> _Out:
    short = (options.num_distractor_snakes, options.distractor_length)
    return _Out(
        images=np.zeros((n, options.size, options.size), np.uint8),
        labels=np.zeros(n, np.uint8),
        discs=np.zeros((n, 2, 2), np.int16),
        tails=np.zeros((n, 2, 2), np.int16),
        ends=np.zeros((n, 2, 2), np.int16),
        paths=np.zeros((n, 2, options.contour_length, 2, 2), np.int16),
        angles=np.zeros((n, 2 + options.num_distractor_snakes), np.int16),
        distractors=np.zeros(n, np.int16),
        distractor_paths=np.full((n, *short, 2, 2), -1, np.int16),
        margins=np.zeros(n, np.uint8),
        attempts=np.zeros(n, np.int64),
    )


def _compiled(function: F, inline: Literal["never", "always"] = "never") -> F:
    try:
        return cast(F, numba.njit(nogil=True, cache=True, inline=inline)(function))
    except RuntimeError:  # no folder that a cache could be written to
        return cast(F, numba.njit(nogil=True, inline=inline)(function))


def _inlined(function: F) -> F:
    """Compile into the caller: a call that passes all tables would count references to each, which costs more."""
    return _compiled(function, inline="always")


@_compiled
def _mixed(z: np.uint64) -> np.uint64:
    """Return the output of SplitMix64 for a state."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_compiled
def _uniform(state: Array) -> float:
    """Return the next random number in [0, 1)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    return (_mixed(state[0]) >> np.uint64(11)) * 2.0**-53


@_compiled
def _below(state: Array, n: int) -> int:
    """Return a random integer from 0 to n - 1."""
    return int(_uniform(state) * n)


@_compiled
def _inside(y: int, x: int, size: int) -> bool:
    return 0 <= y < size and 0 <= x < size


@_compiled
def _copy(source: Array, target: Array) -> None:
    """Copy a mask; a slice assignment would take numba seconds longer to compile."""
    for y in range(source.shape[0]):
        for x in range(source.shape[1]):
            target[y, x] = source[y, x]


@_compiled
def _put(mask: Array, footprint: Array, row: int, column: int) -> None:
    """Add a footprint to the mask."""
    for i in range(len(footprint)):
        y, x = row + footprint[i, 0], column + footprint[i, 1]
        if _inside(y, x, len(mask)):
            mask[y, x] = max(mask[y, x], footprint[i, 2])


@_compiled
def _fits(mask: Array, footprint: Array, row: int, column: int) -> bool:
    """Tell whether a footprint, of which only the hard pixels are needed, clashes with nothing in the mask."""
    for i in range(len(footprint)):
        y, x = row + footprint[i, 0], column + footprint[i, 1]
        if _inside(y, x, len(mask)) and mask[y, x] + footprint[i, 2] >= CLASH:
            return False
    return True


@_compiled
def _occupied(mask: Array, disc: Array, row: int, column: int) -> int:
    """Return the largest value of the mask in a disc around a point."""
    value = 0
    for i in range(len(disc)):
        y, x = row + disc[i, 0], column + disc[i, 1]
        if _inside(y, x, len(mask)):
            value = max(value, mask[y, x])
    return value


@_compiled
def _has_room(mask: Array, kernel: Array, row: int, column: int) -> bool:
    """Tell whether a first dash, of which all pixels in the kernel must be free, may start at a pixel."""
    seen = False
    for i in range(len(kernel)):
        y, x = row + kernel[i, 0], column + kernel[i, 1]
        if _inside(y, x, len(mask)):
            seen = True
            if mask[y, x] > FREE:
                return False
    return seen


@_inlined
def _begin(t: Tables, m: int, dashes: Array, pivot: Array, number: int, row: int, column: int) -> bool:
    """Set a contour's first dash and the pivot behind it; tell whether head and pivot are inside the picture."""
    dashes[0, 0], dashes[0, 1], dashes[0, 2] = number, row, column
    y = math.ceil(row + t.lengths[m, 0] * t.along[m, number, 0])
    x = math.ceil(column + t.lengths[m, 0] * t.along[m, number, 1])
    pivot[0] = math.ceil(y + t.lengths[m, 1] * t.back[m, number, 0])
    pivot[1] = math.ceil(x + t.lengths[m, 1] * t.back[m, number, 1])
    return _inside(y, x, t.size) and _inside(pivot[0], pivot[1], t.size)


@_inlined
def _grow(t: Tables, m: int, state: Array, mask: Array, dashes: Array, pivot: Array, k: int) -> bool:
    """Add dash k to a contour and put dash k - 1 into the mask; tell whether there was room."""
    last = dashes[k - 1, 0]
    row = math.ceil(pivot[0] + t.lengths[m, 2] * t.along[m, last, 0])
    column = math.ceil(pivot[1] + t.lengths[m, 2] * t.along[m, last, 1])
    disc, sums, total = t.disc[m, : t.disc_count[m]], np.empty(t.candidate_count[m]), 0.0
    for j in range(len(sums)):
        y, x = row + t.candidates[m, j, 0], column + t.candidates[m, j, 1]
        if t.turn[m, last, j] > 0 and _inside(y, x, t.size):
            total += t.turn[m, last, j] * (1 - _occupied(mask, disc, y, x) / 255)
        sums[j] = total
    if total < 1e-4:
        return False
    for _ in range(t.tries):
        point, j = _uniform(state) * total, 0
        while sums[j] <= point:
            j += 1
        y, x = row + t.candidates[m, j, 0], column + t.candidates[m, j, 1]
        if _fits(mask, t.footprint[m, 360 + j, : t.hard_count[m, 360 + j]], y, x):
            _put(mask, t.footprint[m, last, : t.footprint_count[m, last]], dashes[k - 1, 1], dashes[k - 1, 2])
            dashes[k, 0], dashes[k, 1], dashes[k, 2] = 360 + j, y, x
            pivot[0], pivot[1] = row, column
            return True
    return False


@_inlined
def _begin_pair(t: Tables, m: int, state: Array, dashes: Array, pivots: Array) -> bool:
    """Begin both long contours, A near the middle of the picture and B at a fixed distance from it."""
    for _ in range(t.tries):
        a = _below(state, 360)
        top, bottom, left, right = t.room[m, a]
        if t.blocked[m, a] or top > bottom:
            return False
        row, column = top + _below(state, bottom - top + 1), left + _below(state, right - left + 1)
        if _begin(t, m, dashes[0], pivots[0], a, row, column):
            break
    else:
        return False
    for _ in range(t.tries):
        b, f = _below(state, 360), math.radians(_below(state, 360))
        y = round(dashes[0, 0, 1] + t.seed_distance * math.sin(f))
        x = round(dashes[0, 0, 2] + t.seed_distance * math.cos(f))
        if _begin(t, m, dashes[1], pivots[1], b, y, x):
            return True
    return False


@_inlined
def _grow_pair(t: Tables, m: int, state: Array, mask: Array, dashes: Array, pivots: Array) -> bool:
    """Grow both long contours in turn; the footprint of A's last dash stays out of the mask."""
    _copy(t.border, mask)
    for k in range(1, dashes.shape[1]):
        for c in range(2):
            if not _grow(t, m, state, mask, dashes[c], pivots[c], k):
                return False
    last = dashes[1, -1]
    _put(mask, t.footprint[m, last[0], : t.footprint_count[m, last[0]]], last[1], last[2])
    return True


@_compiled
def _free_pixel(mask: Array, kernel: Array, state: Array) -> int:
    """Return y * size + x of a pixel drawn uniformly from those where a first dash may start; -1 if there is none."""
    size, count = len(mask), 0
    for _ in range(32):  # quick while many are free
        pixel = _below(state, size**2)
        if _has_room(mask, kernel, pixel // size, pixel % size):
            return pixel
    free = np.empty(size**2, np.int64)
    for pixel in range(size**2):
        if _has_room(mask, kernel, pixel // size, pixel % size):
            free[count] = pixel
            count += 1
    return free[_below(state, count)] if count > 0 else -1


@_inlined
def _distractor(t: Tables, m: int, state: Array, mask: Array, dashes: Array) -> bool:
    """Find a short contour and put it into the mask; after a failure the mask is good for nothing."""
    free = 0
    for y in range(t.size):
        for x in range(t.size):
            free += mask[y, x] <= FREE
    if 100 * free < t.size**2:
        return False
    pivot = np.empty(2, np.int64)
    for _ in range(t.tries):
        number = _below(state, 360)
        if t.blocked[m, number]:
            return False
        pixel = _free_pixel(mask, t.kernel[m, number, : t.kernel_count[m, number]], state)
        if pixel < 0:
            return False
        if _begin(t, m, dashes, pivot, number, pixel // t.size, pixel % t.size):
            break
    else:
        return False
    for k in range(1, len(dashes)):
        if not _grow(t, m, state, mask, dashes, pivot, k):
            return False
    last = dashes[-1]
    _put(mask, t.footprint[m, last[0], : t.footprint_count[m, last[0]]], last[1], last[2])
    return True


@_inlined
def _draw(t: Tables, m: int, picture: Array, contrast: float, dashes: Array, path: Array) -> None:
    """Draw a contour's ink and note both ends of its dashes."""
    for k in range(len(dashes)):
        number, row, column = dashes[k]
        for i in range(t.ink_count[m, number]):
            y, x = row + t.ink[m, number, i, 0], column + t.ink[m, number, i, 1]
            if _inside(y, x, t.size):
                picture[y, x] = max(picture[y, x], t.ink[m, number, i, 2] / 255 * contrast)
        near = 0 if number < 360 else 1  # where the dash was pasted
        other = t.along[m, number] if number < 360 else t.back[m, number]
        path[k, near, 0], path[k, near, 1] = row, column
        path[k, 1 - near, 0] = math.ceil(row + t.lengths[m, 0] * other[0])
        path[k, 1 - near, 1] = math.ceil(column + t.lengths[m, 0] * other[1])


@_inlined
def _draw_pair(t: Tables, out: _Out, state: Array, i: int, m: int, mask: Array, picture: Array) -> None:
    """Search for two long contours until they succeed, and draw them."""
    dashes, pivots = np.empty((2, out.paths.shape[2], 3), np.int64), np.empty((2, 2), np.int64)
    found = False
    while not found:
        if out.attempts[i] == MAX_ATTEMPTS:
            out.attempts[i] = -1
            return
        out.attempts[i] += 1
        found = _begin_pair(t, m, state, dashes, pivots)
        found = found and _grow_pair(t, m, state, mask, dashes, pivots)
    for c in range(2):
        _draw(t, m, picture, t.contrast, dashes[c], out.paths[i, c])
        out.angles[i, c] = dashes[c, 0, 0] - 180
        for axis in range(2):
            out.tails[i, c, axis], out.ends[i, c, axis] = dashes[c, 0, 1 + axis], dashes[c, -1, 1 + axis]


@_inlined
def _draw_distractors(t: Tables, out: _Out, state: Array, i: int, m: int, mask: Array, picture: Array) -> None:
    dashes, trial = np.empty((out.distractor_paths.shape[2], 3), np.int64), np.empty_like(mask)
    for _ in range(out.distractor_paths.shape[1]):
        for _ in range(t.distractor_tries):
            _copy(mask, trial)
            if _distractor(t, m, state, trial, dashes):
                _copy(trial, mask)
                n = out.distractors[i]
                _draw(t, m, picture, t.distractor_contrast, dashes, out.distractor_paths[i, n])
                out.angles[i, 2 + n] = dashes[0, 0] - 180
                out.distractors[i] += 1
                break


@_inlined
def _draw_discs(t: Tables, out: _Out, state: Array, i: int, picture: Array) -> None:
    first = _below(state, 2)
    last = first if out.labels[i] == 1 else 1 - first
    side, reach = len(t.markers), t.markers.shape[2] // 2
    for axis in range(2):
        out.discs[i, 0, axis], out.discs[i, 1, axis] = out.tails[i, first, axis], out.ends[i, last, axis]
    for row, column in out.discs[i]:
        v = min(row, max(side // 2, row - t.size + side))  # the table has one entry for all pixels far from the border
        h = min(column, max(side // 2, column - t.size + side))
        for dy in range(-reach, reach + 1):
            for dx in range(-reach, reach + 1):
                if _inside(row + dy, column + dx, t.size):
                    value = t.markers[v, h, reach + dy, reach + dx] / 255
                    picture[row + dy, column + dx] = max(picture[row + dy, column + dx], value)


@_compiled
def _save(picture: Array, image: Array) -> None:
    """Write a picture stretched to 0 .. 255."""
    low, high = picture[0, 0], picture[0, 0]
    for y in range(len(picture)):
        for x in range(len(picture)):
            low, high = min(low, picture[y, x]), max(high, picture[y, x])
    for y in range(len(picture)):
        for x in range(len(picture)):
            image[y, x] = int((picture[y, x] - low) * (255 / (high - low)) + 0.5)


@_compiled
def _draw_all(t: Tables, out: _Out, seed: np.uint64, start: np.uint64, first: int, last: int) -> None:
    """Fill images first .. last - 1 of `out`, each from a random stream of its own."""
    state, mask = np.empty(1, np.uint64), np.empty_like(t.border)
    for i in range(first, last):
        state[0] = _mixed(_mixed(seed) + start + np.uint64(i))
        picture = np.zeros(mask.shape)
        out.labels[i] = _below(state, 2)
        m = _below(state, len(t.lengths))
        out.margins[i] = t.lengths[m, 1] - t.lengths[m, 0]
        _draw_pair(t, out, state, i, m, mask, picture)
        if out.attempts[i] < 0:
            return
        _draw_distractors(t, out, state, i, m, mask, picture)
        _draw_discs(t, out, state, i, picture)
        _save(picture, out.images[i])
