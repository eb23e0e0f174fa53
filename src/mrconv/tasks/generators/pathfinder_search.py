"""Search for the contours of a Pathfinder image on a mask of occupied pixels, compiled by numba.

A contour is an array of dashes (number, row, column), numbered as in `Tables`, and a pivot, from which the next dash
continues. `t` are the tables, `m` is the index of the image's margin, and `state` (1,) the state of its random stream.
"""

from __future__ import annotations

import math

import numpy as np

from .compiled import compiled, inlined, mix
from .pathfinder_tables import Array, Tables

FREE = 76  # largest value (0.3) of the mask at a free pixel
CLASH = 459  # smallest sum (1.8) of mask and footprint that clashes


@compiled
def random_uniform(state: Array) -> float:
    """Return the next random number in [0, 1) of a stream, whose state is updated."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    return (mix(state[0]) >> np.uint64(11)) * 2.0**-53


@compiled
def random_below(state: Array, n: int) -> int:
    """Return a random integer from 0 to n - 1."""
    return int(random_uniform(state) * n)


@compiled
def is_inside(y: int, x: int, size: int) -> bool:
    """Return whether a pixel lies in the image."""
    return 0 <= y < size and 0 <= x < size


@compiled
def copy_mask(source: Array, target: Array) -> None:
    """Copy a mask by a loop: numba takes seconds longer to compile a slice assignment."""
    for y in range(source.shape[0]):
        for x in range(source.shape[1]):
            target[y, x] = source[y, x]


@compiled
def _occupy(mask: Array, footprint: Array, row: int, column: int) -> None:
    """Add a footprint at a point to the mask."""
    for i in range(len(footprint)):
        y, x = row + footprint[i, 0], column + footprint[i, 1]
        if is_inside(y, x, len(mask)):
            mask[y, x] = max(mask[y, x], footprint[i, 2])


@compiled
def _fits(mask: Array, footprint: Array, row: int, column: int) -> bool:
    """Return whether a footprint, given by its clashing values, fits into the mask at a point."""
    for i in range(len(footprint)):
        y, x = row + footprint[i, 0], column + footprint[i, 1]
        if is_inside(y, x, len(mask)) and mask[y, x] + footprint[i, 2] >= CLASH:
            return False
    return True


@compiled
def _occupancy(mask: Array, disc: Array, row: int, column: int) -> int:
    """Return the largest value of the mask in a disc around a point."""
    value = 0
    for i in range(len(disc)):
        y, x = row + disc[i, 0], column + disc[i, 1]
        if is_inside(y, x, len(mask)):
            value = max(value, mask[y, x])
    return value


@compiled
def _has_room(mask: Array, clearance: Array, row: int, column: int) -> bool:
    """Return whether the clearance of a first dash at a pixel is free; pixels outside of the image are ignored."""
    any_inside = False
    for i in range(len(clearance)):
        y, x = row + clearance[i, 0], column + clearance[i, 1]
        if is_inside(y, x, len(mask)):
            any_inside = True
            if mask[y, x] > FREE:
                return False
    return any_inside


@inlined
def _start_contour(t: Tables, m: int, dashes: Array, pivot: Array, number: int, row: int, column: int) -> bool:
    """Set a contour's first dash and the pivot behind it; return whether head and pivot lie in the image."""
    dashes[0, 0], dashes[0, 1], dashes[0, 2] = number, row, column
    y = math.ceil(row + t.lengths[m, 0] * t.along[m, number, 0])
    x = math.ceil(column + t.lengths[m, 0] * t.along[m, number, 1])
    pivot[0] = math.ceil(y + t.lengths[m, 1] * t.back[m, number, 0])
    pivot[1] = math.ceil(x + t.lengths[m, 1] * t.back[m, number, 1])
    return is_inside(y, x, t.size) and is_inside(pivot[0], pivot[1], t.size)


@inlined
def _extend_contour(t: Tables, m: int, state: Array, mask: Array, dashes: Array, pivot: Array, k: int) -> bool:
    """Add dash k to a contour and dash k - 1 to the mask; return whether there was room."""
    last = dashes[k - 1, 0]
    row = math.ceil(pivot[0] + t.lengths[m, 2] * t.along[m, last, 0])
    column = math.ceil(pivot[1] + t.lengths[m, 2] * t.along[m, last, 1])
    disc, sums, total = t.disc[m, : t.disc_count[m]], np.empty(t.candidate_count[m]), 0.0
    for j in range(len(sums)):
        y, x = row + t.candidates[m, j, 0], column + t.candidates[m, j, 1]
        if t.turn[m, last, j] > 0 and is_inside(y, x, t.size):
            total += t.turn[m, last, j] * (1 - _occupancy(mask, disc, y, x) / 255)
        sums[j] = total
    if total < 1e-4:
        return False
    for _ in range(t.tries):
        point, j = random_uniform(state) * total, 0
        while sums[j] <= point:
            j += 1
        y, x = row + t.candidates[m, j, 0], column + t.candidates[m, j, 1]
        if _fits(mask, t.footprint[m, 360 + j, : t.clashing_count[m, 360 + j]], y, x):
            _occupy(mask, t.footprint[m, last, : t.footprint_count[m, last]], dashes[k - 1, 1], dashes[k - 1, 2])
            dashes[k, 0], dashes[k, 1], dashes[k, 2] = 360 + j, y, x
            pivot[0], pivot[1] = row, column
            return True
    return False


@inlined
def start_pair(t: Tables, m: int, state: Array, dashes: Array, pivots: Array) -> bool:
    """Start both long contours, A near the middle of the image and B at a fixed distance from A; return success."""
    for _ in range(t.tries):
        a = random_below(state, 360)
        top, bottom, left, right = t.start_area[m, a]
        if t.blocked[m, a] or top > bottom:
            return False
        row, column = top + random_below(state, bottom - top + 1), left + random_below(state, right - left + 1)
        if _start_contour(t, m, dashes[0], pivots[0], a, row, column):
            break
    else:
        return False
    for _ in range(t.tries):
        b, f = random_below(state, 360), math.radians(random_below(state, 360))
        y = round(dashes[0, 0, 1] + t.seed_distance * math.sin(f))
        x = round(dashes[0, 0, 2] + t.seed_distance * math.cos(f))
        if _start_contour(t, m, dashes[1], pivots[1], b, y, x):
            return True
    return False


@inlined
def extend_pair(t: Tables, m: int, state: Array, mask: Array, dashes: Array, pivots: Array) -> bool:
    """Extend both long contours in turn; the mask omits the footprint of A's last dash. Return success."""
    copy_mask(t.border, mask)
    for k in range(1, dashes.shape[1]):
        for c in range(2):
            if not _extend_contour(t, m, state, mask, dashes[c], pivots[c], k):
                return False
    last = dashes[1, -1]
    _occupy(mask, t.footprint[m, last[0], : t.footprint_count[m, last[0]]], last[1], last[2])
    return True


@compiled
def _free_pixel(mask: Array, clearance: Array, state: Array) -> int:
    """Return y * size + x of a random pixel where a first dash may start; -1 if none exists."""
    size, count = len(mask), 0
    for _ in range(32):  # fast while many pixels are free
        pixel = random_below(state, size**2)
        if _has_room(mask, clearance, pixel // size, pixel % size):
            return pixel
    free = np.empty(size**2, np.int64)
    for pixel in range(size**2):
        if _has_room(mask, clearance, pixel // size, pixel % size):
            free[count] = pixel
            count += 1
    return free[random_below(state, count)] if count > 0 else -1


@inlined
def find_distractor(t: Tables, m: int, state: Array, mask: Array, dashes: Array) -> bool:
    """Find a distractor and add it to the mask; return success. After a failure the mask is invalid."""
    free = 0
    for y in range(t.size):
        for x in range(t.size):
            free += mask[y, x] <= FREE
    if 100 * free < t.size**2:
        return False
    pivot = np.empty(2, np.int64)
    for _ in range(t.tries):
        number = random_below(state, 360)
        if t.blocked[m, number]:
            return False
        pixel = _free_pixel(mask, t.clearance[m, number, : t.clearance_count[m, number]], state)
        if pixel < 0:
            return False
        if _start_contour(t, m, dashes, pivot, number, pixel // t.size, pixel % t.size):
            break
    else:
        return False
    for k in range(1, len(dashes)):
        if not _extend_contour(t, m, state, mask, dashes, pivot, k):
            return False
    last = dashes[-1]
    _occupy(mask, t.footprint[m, last[0], : t.footprint_count[m, last[0]]], last[1], last[2])
    return True
