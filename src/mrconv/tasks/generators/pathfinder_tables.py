"""Lookup tables of the Pathfinder generator: every dash and disc that can occur in an image, drawn once with Pillow.

The angle of a first dash is an integer in degrees; the angle of a later dash is that of one of a few integer offsets.
The ink of a dash is the pixels that it draws; its footprint is the pixels that it occupies in the mask. All values have
8 bits. Coordinates are (row, column); a point moved by d along the angle a is offset by d * (sin a, cos a), rounded up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from .pathfinder_options import PathfinderOptions

Array = NDArray[Any]

DEGREES = np.arange(-180, 180)  # angles of first dashes: dash d < 360 starts a contour along DEGREES[d]
FULL = 255
CLASHING = 204  # a smaller value (0.8) of a footprint cannot clash with the mask, which needs a sum of 1.8


class Tables(NamedTuple):
    """Parameters of the search, and tables of the D dashes for each of M margins and of the discs.

    Lists of pixels are padded to equal lengths; `*_count` holds the true lengths. Dash 360 + j ends at candidate j. A
    first dash (d < 360) is placed at its near end, a later one at its far end.
    """

    size: int
    tries: int  # attempts to place a dash
    distractor_tries: int
    seed_distance: int
    contrast: float
    distractor_contrast: float
    border: Array  # (size, size): the mask of an empty image
    lengths: Array  # (M, 3): length of a dash, distance from pivot to far end, distance from pivot to pivot
    along: Array  # (M, D, 2): sin and cos of the angle
    back: Array  # (M, D, 2): sin and cos of the angle + 180 degrees
    candidates: Array  # (M, C, 2): offsets of the far end from the pivot
    candidate_count: Array  # (M,)
    turn: Array  # (M, D, C): weight of a candidate after a dash, smaller for sharper turns
    disc: Array  # (M, n, 2): offsets within the margin
    disc_count: Array  # (M,)
    ink: Array  # (M, D, n, 3): row, column, value
    ink_count: Array  # (M, D)
    footprint: Array  # (M, D, n, 3), largest values first
    footprint_count: Array  # (M, D)
    clashing_count: Array  # (M, D): number of values of at least CLASHING
    clearance: Array  # (M, 360, n, 2): offsets that must be free for a first dash
    clearance_count: Array  # (M, 360)
    blocked: Array  # (M, 360): whether the border quirk forbids a first dash
    start_area: Array  # (M, 360, 4): first and last row, first and last column of contour A's first dash
    markers: Array  # (E, E, P, P): disc at a row and column of an E x E image


@functools.lru_cache(maxsize=8)
def make_tables(options: PathfinderOptions) -> Tables:
    """Draw all dashes and discs."""
    parts = [_margin_tables(options, margin) for margin in options.paddle_margins]
    joined = {name: _as_int16(_pad([part[name] for part in parts])) for name in parts[0]}
    if not ((joined["start_area"][..., 0] <= joined["start_area"][..., 1]) & ~joined["blocked"]).any(-1).all():
        raise ValueError(
            f"size must leave room for a dash inside a frame of 2 * seed_distance = {2 * options.seed_distance} pixels "
            f"on all sides; got size {options.size}, paddle_length {options.paddle_length}, "
            f"paddle_margins {options.paddle_margins}"
        )
    border = np.full((options.size, options.size), FULL, np.uint8)
    border[options.padding : -options.padding, options.padding : -options.padding] = 0
    return Tables(
        size=options.size,
        tries=options.max_paddle_retrial + 1,
        distractor_tries=options.max_distractor_contour_retrial + 1,
        seed_distance=options.seed_distance,
        contrast=float(options.snake_contrast * options.paddle_contrast),
        distractor_contrast=float(options.snake_contrast),
        border=border,
        markers=_draw_markers(options),
        **joined,
    )


def _margin_tables(options: PathfinderOptions, margin: int) -> dict[str, Array]:
    """Return the fields of `Tables` that depend on the margin, without the first axis."""
    L = options.paddle_length
    candidates = _candidates(L + margin)
    later = np.arctan2(candidates[:, 0], candidates[:, 1])
    angles = np.concatenate([np.radians(DEGREES), later])
    back = np.concatenate([np.radians(DEGREES + 180), later + np.pi])
    ink, ink_count, footprint, footprint_count = _draw_dashes(
        np.concatenate([angles[:360], back[360:]]), options, margin
    )
    clearances = [_clearance(pixels, L + margin) for pixels in footprint[:360]]
    turns = np.abs((later - angles[:, None] + np.pi) % (2 * np.pi) - np.pi)
    return {
        "lengths": np.array([L, L + margin, L + 2 * margin]),
        "along": np.stack([np.sin(angles), np.cos(angles)], -1),
        "back": np.stack([np.sin(back), np.cos(back)], -1),
        "candidates": candidates,
        "candidate_count": np.array(len(candidates)),
        "turn": np.where(turns * options.continuity < np.pi / 2, np.cos(turns * options.continuity) ** 2, 0.0),
        "disc": _disc(margin),
        "disc_count": np.array(len(_disc(margin))),
        "ink": ink,
        "ink_count": ink_count,
        "footprint": footprint,
        "footprint_count": footprint_count,
        "clashing_count": (footprint[..., 2] >= CLASHING).sum(-1),
        "clearance": _pad(clearances),
        "clearance_count": np.array([len(offsets) for offsets in clearances]),
        "blocked": np.array([options.border_quirk and _misses_a_corner(offsets) for offsets in clearances]),
        "start_area": np.stack([_start_area(offsets, options) for offsets in clearances]),
    }


def _candidates(radius: int) -> Array:
    """Return the offsets of points about one pixel apart on a circle, rounded down."""
    angles = np.radians(np.arange(0, 360, 360 / (2 * np.pi * radius)))
    points = np.stack([np.sin(angles), np.cos(angles)], -1) * radius
    return np.unique(np.floor(points).astype(np.int64), axis=0)


def _draw_dashes(angles: Array, options: PathfinderOptions, margin: int) -> tuple[Array, Array, Array, Array]:
    """Return ink and footprint of a dash along each angle, and how many pixels they have."""
    middle = options.paddle_length + math.ceil(options.paddle_thickness) + margin
    scale, side = options.antialias_scale, 2 * middle + 1
    c, length = middle * scale, options.paddle_length * scale
    ends = np.ceil(c + length * np.stack([np.cos(angles), np.sin(angles)], -1)).astype(int)
    ends, which = np.unique(ends, axis=0, return_inverse=True)  # far fewer than angles
    canvases = []
    for x, y in ends.tolist():
        image = Image.new("L", (2 * c + 1, 2 * c + 1))
        ImageDraw.Draw(image).line([(c, c), (x, y)], fill=FULL, width=round(options.paddle_thickness * scale))
        canvases.append(np.asarray(image))
    ink, ink_count = _pixels([_shrink(canvas, side) for canvas in canvases], middle)
    dilated = _dilate(np.stack(canvases), margin * scale)
    footprint, footprint_count = _pixels([_shrink(canvas, side) for canvas in dilated], middle)
    return ink[which], ink_count[which], footprint[which], footprint_count[which]


def _disc(radius: float) -> Array:
    """Return the integer offsets (n, 2) within a radius."""
    reach = np.arange(-math.floor(radius), math.floor(radius) + 1)
    offsets = np.stack(np.meshgrid(reach, reach, indexing="ij"), -1).reshape(-1, 2)
    return offsets[(offsets**2).sum(-1) <= radius**2]


def _dilate(canvases: Array, radius: int) -> Array:
    """Return the maximum over a disc around each pixel."""
    side = canvases.shape[-1]
    padded = np.pad(canvases, ((0, 0), (radius, radius), (radius, radius)))
    shifted = (padded[:, y : y + side, x : x + side] for y, x in _disc(radius) + radius)
    return functools.reduce(np.maximum, shifted)


def _shrink(canvas: Array, side: int) -> Array:
    return np.asarray(Image.fromarray(canvas).resize((side, side), Image.Resampling.LANCZOS))


def _pixels(squares: Iterable[Array], middle: int) -> tuple[Array, Array]:
    """Return (row, column, value) of the nonzero pixels, relative to the middle, brightest first; and their counts."""
    lists = []
    for square in squares:
        rows, columns = np.nonzero(square)
        values = square[rows, columns].astype(np.int64)
        lists.append(np.stack([rows - middle, columns - middle, values], -1)[np.argsort(-values, kind="stable")])
    return _pad(lists), np.array([len(pixels) for pixels in lists])


def _clearance(footprint: Array, reach: int) -> Array:
    """Return the offsets, within `reach` of a pixel, where the footprint of a dash started one pixel off is full."""
    offsets = footprint[footprint[:, 2] == FULL, :2] + 1
    return offsets[(np.abs(offsets) <= reach).all(-1)]


def _misses_a_corner(clearance: Array) -> bool:
    """Return whether the clearance around some corner pixel of the image lies entirely outside of the image."""
    signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    return any(not (clearance * sign >= 0).all(-1).any() for sign in signs)


def _start_area(clearance: Array, options: PathfinderOptions) -> Array:
    """Return the rectangle of pixels whose clearance does not touch a frame of 2 * seed_distance pixels."""
    first, last = 2 * options.seed_distance, options.size - 1 - 2 * options.seed_distance
    if len(clearance) == 0:
        return np.array([1, 0, 1, 0])
    low, high = first - clearance.min(0), last - clearance.max(0)
    if (low > high).any():
        return np.array([1, 0, 1, 0])
    return np.array([low[0], high[0], low[1], high[1]])


def _draw_markers(options: PathfinderOptions) -> Array:
    """Draw a disc at each pixel of the smallest image whose middle disc does not reach the border."""
    reach = math.ceil(options.marker_radius) + 3  # 3: support of Lanczos
    side, scale = 2 * (reach + 3) + 1, options.antialias_scale
    grid = np.arange(side * scale)
    patches = np.zeros((side, side, 2 * reach + 1, 2 * reach + 1), np.uint8)
    for y, x in np.ndindex(side, side):
        inside = (grid[:, None] - y * scale) ** 2 + (grid - x * scale) ** 2 <= (options.marker_radius * scale) ** 2
        image = np.pad(_shrink(inside.astype(np.uint8) * FULL, side), reach)
        patches[y, x] = image[y : y + 2 * reach + 1, x : x + 2 * reach + 1]
    return patches


def _pad(arrays: Sequence[Array]) -> Array:
    """Stack arrays of different shapes, padded with zeros."""
    shape = np.max([array.shape for array in arrays], axis=0, initial=0).astype(int)
    out = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for i, array in enumerate(arrays):
        corner: tuple[int | slice, ...] = (i, *map(slice, array.shape))
        out[corner] = array
    return out


def _as_int16(array: Array) -> Array:
    return array.astype(np.int16) if array.dtype == np.int64 else array
