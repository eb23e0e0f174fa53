"""Generator of Pathfinder images: two long dashed contours, distractors, and two discs that a contour joins or not.

An independent implementation of the generator behind Long Range Arena's Pathfinder and Path-X (Linsley et al., NeurIPS
2018; Tay et al., ICLR 2021), including its rounding and quirks, so that the images have the same statistics. The search
fails for hundreds of pairs of contours before it finds one. It is therefore compiled and works on a mask of occupied
pixels, and only successful contours are drawn. Image i depends on (seed, i) and the options alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..._utils.checks import check_positive_int
from .compiled import compiled, inlined, mix
from .pathfinder_options import PathfinderOptions, options_for
from .pathfinder_search import copy_mask, extend_pair, find_distractor, is_inside, random_below, start_pair
from .pathfinder_tables import Array, Tables, make_tables

MAX_ATTEMPTS = 1_000_000  # to find a pair of contours; 300 to 400 are usual
CHUNK = 2**17  # pixels that a thread draws at a time, in some tens of milliseconds


@dataclass(frozen=True)
class PathfinderImages:
    """Images and their contents. Points are (row, column); contour 0 was started first."""

    images: Array  # (n, size, size) uint8
    labels: Array  # (n,) uint8: 1 if a contour joins the discs
    discs: Array  # (n, 2, 2): at the first end of a contour, and at a last end
    tails: Array  # (n, 2, 2): first ends of the long contours
    ends: Array  # (n, 2, 2): last ends of the long contours
    paths: Array  # (n, 2, contour_length, 2, 2): near and far end of each dash
    angles: Array  # (n, 2 + num_distractor_snakes): first angle of each contour, in degrees
    distractors: Array  # (n,)
    distractor_paths: Array  # (n, num_distractor_snakes, distractor_length, 2, 2); -1 for missing ones
    margins: Array  # (n,)
    attempts: Array  # (n,): attempts to find a pair of long contours, including those without room for a first dash


def generate(
    count: int,
    size: int = 32,
    seed: int = 0,
    workers: int | None = None,
    options: PathfinderOptions | None = None,
    start: int = 0,
    progress: Callable[[int], None] | None = None,
) -> PathfinderImages:
    """Return images start .. start + count - 1 of the infinite sequence of a seed.

    The images do not depend on the number of workers (threads; None: one per CPU). `progress` is called in the calling
    thread with the number of images finished since its last call.
    """
    check_positive_int(count=count, size=size, workers=1 if workers is None else workers)
    for name, value in (("seed", seed), ("start", start)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 2**63:
            raise ValueError(f"{name} must be an integer from 0 to 2**63 - 1; got {value!r}")
    options = options_for(size) if options is None else options
    if options.size != size:
        raise ValueError(f"size must be that of the options, {options.size}; got {size}")
    t, out = make_tables(options), _allocate(count, options)
    step = max(1, CHUNK // size**2)
    _draw_images(t, out, np.uint64(seed), np.uint64(start), 0, 0)  # compile before threads start

    def draw(first: int) -> int:
        last = min(first + step, count)
        _draw_images(t, out, np.uint64(seed), np.uint64(start), first, last)
        if (out.attempts[first:last] < 0).any():
            raise RuntimeError(
                f"found no pair of contours in {MAX_ATTEMPTS} attempts: use a shorter contour_length or "
                f"paddle_length, or a larger size; got {options}"
            )
        return last - first

    with closing(_map_in_order(draw, range(0, count, step), workers or os.cpu_count() or 1)) as chunks:
        for done in chunks:
            if progress is not None:
                progress(done)
    return PathfinderImages(**out._asdict())


def _map_in_order(draw: Callable[[int], int], firsts: range, workers: int) -> Generator[int, None, None]:
    """Yield the results in order; after an exception, such as KeyboardInterrupt, no further chunk is started."""
    if workers == 1:
        yield from map(draw, firsts)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(draw, firsts)
    finally:
        pool.shutdown(cancel_futures=True)


class _Arrays(NamedTuple):
    """The fields of `PathfinderImages`, as a type that numba accepts."""

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


def _allocate(n: int, options: PathfinderOptions) -> _Arrays:
    distractors = (options.num_distractor_snakes, options.distractor_length)
    return _Arrays(
        images=np.zeros((n, options.size, options.size), np.uint8),
        labels=np.zeros(n, np.uint8),
        discs=np.zeros((n, 2, 2), np.int16),
        tails=np.zeros((n, 2, 2), np.int16),
        ends=np.zeros((n, 2, 2), np.int16),
        paths=np.zeros((n, 2, options.contour_length, 2, 2), np.int16),
        angles=np.zeros((n, 2 + options.num_distractor_snakes), np.int16),
        distractors=np.zeros(n, np.int16),
        distractor_paths=np.full((n, *distractors, 2, 2), -1, np.int16),
        margins=np.zeros(n, np.uint8),
        attempts=np.zeros(n, np.int64),
    )


@inlined
def _draw_contour(t: Tables, m: int, canvas: Array, contrast: float, dashes: Array, path: Array) -> None:
    """Draw the ink of a contour and record both ends of its dashes."""
    for k in range(len(dashes)):
        number, row, column = dashes[k]
        for i in range(t.ink_count[m, number]):
            y, x = row + t.ink[m, number, i, 0], column + t.ink[m, number, i, 1]
            if is_inside(y, x, t.size):
                canvas[y, x] = max(canvas[y, x], t.ink[m, number, i, 2] / 255 * contrast)
        near = 0 if number < 360 else 1  # the end at which the dash was placed
        other = t.along[m, number] if number < 360 else t.back[m, number]
        path[k, near, 0], path[k, near, 1] = row, column
        path[k, 1 - near, 0] = math.ceil(row + t.lengths[m, 0] * other[0])
        path[k, 1 - near, 1] = math.ceil(column + t.lengths[m, 0] * other[1])


@inlined
def _draw_pair(t: Tables, out: _Arrays, state: Array, i: int, m: int, mask: Array, canvas: Array) -> None:
    """Find two long contours and draw them; after MAX_ATTEMPTS failures, set attempts to -1."""
    dashes, pivots = np.empty((2, out.paths.shape[2], 3), np.int64), np.empty((2, 2), np.int64)
    success = False
    while not success:
        if out.attempts[i] == MAX_ATTEMPTS:
            out.attempts[i] = -1
            return
        out.attempts[i] += 1
        success = start_pair(t, m, state, dashes, pivots)
        success = success and extend_pair(t, m, state, mask, dashes, pivots)
    for c in range(2):
        _draw_contour(t, m, canvas, t.contrast, dashes[c], out.paths[i, c])
        out.angles[i, c] = dashes[c, 0, 0] - 180
        for axis in range(2):
            out.tails[i, c, axis], out.ends[i, c, axis] = dashes[c, 0, 1 + axis], dashes[c, -1, 1 + axis]


@inlined
def _draw_distractors(t: Tables, out: _Arrays, state: Array, i: int, m: int, mask: Array, canvas: Array) -> None:
    """Find and draw distractors beside the long contours."""
    dashes, trial = np.empty((out.distractor_paths.shape[2], 3), np.int64), np.empty_like(mask)
    for _ in range(out.distractor_paths.shape[1]):
        for _ in range(t.distractor_tries):
            copy_mask(mask, trial)
            if find_distractor(t, m, state, trial, dashes):
                copy_mask(trial, mask)
                n = out.distractors[i]
                _draw_contour(t, m, canvas, t.distractor_contrast, dashes, out.distractor_paths[i, n])
                out.angles[i, 2 + n] = dashes[0, 0] - 180
                out.distractors[i] += 1
                break


@inlined
def _draw_discs(t: Tables, out: _Arrays, state: Array, i: int, canvas: Array) -> None:
    """Draw one disc at a first end and one at a last end, of the same contour if the label is 1."""
    first = random_below(state, 2)
    last = first if out.labels[i] == 1 else 1 - first
    side, reach = len(t.markers), t.markers.shape[2] // 2
    for axis in range(2):
        out.discs[i, 0, axis], out.discs[i, 1, axis] = out.tails[i, first, axis], out.ends[i, last, axis]
    for row, column in out.discs[i]:
        # all pixels far from the border share one entry of the table
        v = min(row, max(side // 2, row - t.size + side))
        h = min(column, max(side // 2, column - t.size + side))
        for dy in range(-reach, reach + 1):
            for dx in range(-reach, reach + 1):
                if is_inside(row + dy, column + dx, t.size):
                    value = t.markers[v, h, reach + dy, reach + dx] / 255
                    canvas[row + dy, column + dx] = max(canvas[row + dy, column + dx], value)


@compiled
def _stretch(canvas: Array, image: Array) -> None:
    """Write a canvas to an image, stretched to 0 .. 255."""
    low, high = canvas[0, 0], canvas[0, 0]
    for y in range(len(canvas)):
        for x in range(len(canvas)):
            low, high = min(low, canvas[y, x]), max(high, canvas[y, x])
    for y in range(len(canvas)):
        for x in range(len(canvas)):
            image[y, x] = int((canvas[y, x] - low) * (255 / (high - low)) + 0.5)


@compiled
def _draw_images(t: Tables, out: _Arrays, seed: np.uint64, start: np.uint64, first: int, last: int) -> None:
    """Fill images first .. last - 1 of `out`, each from its own random stream."""
    state, mask = np.empty(1, np.uint64), np.empty_like(t.border)
    for i in range(first, last):
        state[0] = mix(mix(seed) + start + np.uint64(i))
        canvas = np.zeros(mask.shape)
        out.labels[i] = random_below(state, 2)
        m = random_below(state, len(t.lengths))
        out.margins[i] = t.lengths[m, 1] - t.lengths[m, 0]
        _draw_pair(t, out, state, i, m, mask, canvas)
        if out.attempts[i] < 0:
            return
        _draw_distractors(t, out, state, i, m, mask, canvas)
        _draw_discs(t, out, state, i, canvas)
        _stretch(canvas, out.images[i])
