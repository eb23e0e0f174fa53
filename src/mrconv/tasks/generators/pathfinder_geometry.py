"""What a Pathfinder image is made of: its options, and tables of every dash and disc that can occur.

A first dash has a whole-degree angle; every later one has the angle of a whole offset from a short list. So ink and
footprint of all dashes are drawn once, with Pillow, and the generator only looks them up. All values are 8 bits.
Coordinates are (row, column); the angle a steps by (sin a, cos a); a point moved by d along a is rounded up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ..._utils.checks import check_positive_int

Array = NDArray[Any]

DEGREES = np.arange(-180, 180)  # angles of first dashes; dash number d < 360 starts a contour along DEGREES[d]
FULL = 255
HARD = 204  # a footprint under 0.8 cannot reach 1.8 together with the mask


@dataclass(frozen=True)
class Options:
    """Arguments of the original generator, by its names; the defaults are those of Pathfinder at 32 x 32, hard.

    `border_quirk` keeps what OpenCV's dilation did to the original: an angle whose first dash leaves a corner pixel
    of the picture uncovered counts as having no room (at 32 x 32 all but 30 of 360). Off, that pixel is just not free.
    """

    size: int = 32
    padding: int = 1  # border of the occupancy mask, closed from the start
    antialias_scale: int = 2
    seed_distance: int = 7  # between the first ends of the two long contours
    marker_radius: float = 1.5
    contour_length: int = 14  # dashes in a long contour
    distractor_length: int = 4
    num_distractor_snakes: int = 5
    paddle_length: int = 2  # a dash in pixels
    paddle_thickness: float = 0.5
    paddle_margins: tuple[int, ...] = (1,)  # one is drawn per image; gaps are about twice as long
    continuity: float = 1.0  # larger is straighter
    snake_contrast: float = 2.0
    paddle_contrast: float = 0.75  # multiplies snake_contrast in the long contours
    max_paddle_retrial: int = 2
    max_distractor_contour_retrial: int = 4
    border_quirk: bool = True

    def __post_init__(self) -> None:
        names = ["size", "padding", "antialias_scale", "seed_distance", "contour_length", "distractor_length"]
        check_positive_int(**{name: getattr(self, name) for name in [*names, "paddle_length"]})
        for name in ("num_distractor_snakes", "max_paddle_retrial", "max_distractor_contour_retrial"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be an integer of at least 0; got {getattr(self, name)!r}")
        for name in ("marker_radius", "paddle_thickness", "continuity", "snake_contrast", "paddle_contrast"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number; got {value!r}")
        if not isinstance(self.paddle_margins, tuple) or not self.paddle_margins:
            raise ValueError(f"paddle_margins must be a tuple of integers; got {self.paddle_margins!r}")
        for margin in self.paddle_margins:
            check_positive_int(paddle_margins=margin)
        if self.size < 32:
            raise ValueError(f"size must be at least 32; got {self.size}")
        if 8 * self.marker_radius > self.size:
            raise ValueError(f"marker_radius must be at most size / 8 = {self.size / 8:g}; got {self.marker_radius:g}")
        if not float(self.paddle_thickness * self.antialias_scale).is_integer():
            raise ValueError(
                f"paddle_thickness times antialias_scale must be a whole number of pixels; got "
                f"{self.paddle_thickness:g} x {self.antialias_scale}"
            )
        if self.paddle_length + max(self.paddle_margins) > 2 * self.seed_distance:
            raise ValueError(
                f"seed_distance must be at least half of paddle_length + margin = "
                f"{self.paddle_length + max(self.paddle_margins)}; got {self.seed_distance}"
            )


def options_for(size: int, contour_length: int = 14) -> Options:
    """Return the options of a square image: Long Range Arena's at 32 (Pathfinder) and 128 (Path-X).

    Other sizes lie on the straight line through these two, each number rounded to what the drawing allows: thickness
    and disc radius to halves, lengths to whole pixels, the smaller and the larger margin each to whole pixels.
    Contrast is that of 32 for dashes of half a pixel, which come out faint, and that of 128 for thicker ones.
    """
    check_positive_int(size=size, contour_length=contour_length)
    if contour_length < 3:
        raise ValueError(f"contour_length must be at least 3, distractors have a third of it; got {contour_length}")

    def between(small: float, large: float, unit: float = 1) -> float:
        value = small + (large - small) * (size - 32) / 96
        return math.floor(value / unit + 0.5) * unit

    thickness = between(0.5, 1.5, 0.5)
    distractor_length = contour_length // 3
    return Options(
        size=size,
        seed_distance=int(between(7, 20)),
        marker_radius=between(1.5, 3, 0.5),
        contour_length=contour_length,
        distractor_length=distractor_length,
        num_distractor_snakes=int(between(20, 35)) // distractor_length,
        paddle_length=int(between(2, 5)),
        paddle_thickness=thickness,
        paddle_margins=tuple(range(int(between(1, 2)), int(between(1, 3)) + 1)),
        continuity=min(between(1.0, 1.8, 0.1), 1.8),
        snake_contrast=2.0 if thickness == 0.5 else 0.9,
        paddle_contrast=0.75 if thickness == 0.5 else 1.0,
    )


class Tables(NamedTuple):
    """All that the search needs: rules, and the dashes (number d of D, with margin number m of M) and discs.

    Lists of pixels are padded to equal lengths; `*_count` has the true ones. Dash 360 + j is the one grown to
    candidate j; it is pasted at its far end, a first dash at its near end.
    """

    size: int
    tries: int  # at a dash
    distractor_tries: int
    seed_distance: int
    contrast: float
    distractor_contrast: float
    border: Array  # (size, size): the mask of an empty picture
    lengths: Array  # (M, 3): from end to end, from pivot to far end, from pivot to pivot
    along: Array  # (M, D, 2): sin and cos of the angle
    back: Array  # (M, D, 2): of the angle + 180 degrees
    candidates: Array  # (M, C, 2): offsets of the far end from the pivot
    candidate_count: Array  # (M,)
    turn: Array  # (M, D, C): weight of a candidate after a dash
    disc: Array  # (M, n, 2): offsets no further than the margin
    disc_count: Array  # (M,)
    ink: Array  # (M, D, n, 3): row, column, value
    ink_count: Array  # (M, D)
    footprint: Array  # (M, D, n, 3), largest values first
    footprint_count: Array  # (M, D)
    hard_count: Array  # (M, D): how many are at least HARD
    kernel: Array  # (M, 360, n, 2): pixels that have to be free for a first dash
    kernel_count: Array  # (M, 360)
    blocked: Array  # (M, 360): the border quirk forbids a first dash
    room: Array  # (M, 360, 4): first and last row, first and last column for contour A
    markers: Array  # (E, E, P, P): disc at a row and column of an E x E picture


@functools.lru_cache(maxsize=8)
def tables(options: Options) -> Tables:
    """Draw all dashes and discs."""
    parts = [_margin_tables(options, margin) for margin in options.paddle_margins]
    joined = {name: _compact(_padded([part[name] for part in parts])) for name in parts[0]}
    if not ((joined["room"][..., 0] <= joined["room"][..., 1]) & ~joined["blocked"]).any(-1).all():
        raise ValueError(
            f"size must leave room for a dash inside a frame of 2 x seed_distance = {2 * options.seed_distance} pixels "
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
        markers=_markers(options),
        **joined,
    )


def _margin_tables(options: Options, margin: int) -> dict[str, Array]:
    """Return the fields of `Tables` that depend on the margin, without the first axis."""
    L = options.paddle_length
    candidates = _candidates(L + margin)
    later = np.arctan2(candidates[:, 0], candidates[:, 1])
    angles = np.concatenate([np.radians(DEGREES), later])
    back = np.concatenate([np.radians(DEGREES + 180), later + np.pi])
    ink, ink_count, footprint, footprint_count = _drawn(np.concatenate([angles[:360], back[360:]]), options, margin)
    kernels = [_kernel(pixels, L + margin) for pixels in footprint[:360]]
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
        "hard_count": (footprint[..., 2] >= HARD).sum(-1),
        "kernel": _padded(kernels),
        "kernel_count": np.array([len(kernel) for kernel in kernels]),
        "blocked": np.array([options.border_quirk and _misses_a_corner(kernel) for kernel in kernels]),
        "room": np.stack([_room(kernel, options) for kernel in kernels]),
    }


def _candidates(radius: int) -> Array:
    """Return the whole offsets of points about one pixel apart on a circle, rounded down."""
    angles = np.radians(np.arange(0, 360, 360 / (2 * np.pi * radius)))
    points = np.stack([np.sin(angles), np.cos(angles)], -1) * radius
    return np.unique(np.floor(points).astype(np.int64), axis=0)


def _drawn(angles: Array, options: Options, margin: int) -> tuple[Array, Array, Array, Array]:
    """Return ink and footprint of a dash along each angle, as `Tables` has them."""
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
    ink, ink_count = _pixels([_shrunk(canvas, side) for canvas in canvases], middle)
    dilated = _dilated(np.stack(canvases), margin * scale)
    footprint, footprint_count = _pixels([_shrunk(canvas, side) for canvas in dilated], middle)
    return ink[which], ink_count[which], footprint[which], footprint_count[which]


def _disc(radius: float) -> Array:
    """Return the whole offsets (n, 2) no longer than the radius."""
    reach = np.arange(-math.floor(radius), math.floor(radius) + 1)
    offsets = np.stack(np.meshgrid(reach, reach, indexing="ij"), -1).reshape(-1, 2)
    return offsets[(offsets**2).sum(-1) <= radius**2]


def _dilated(canvases: Array, radius: int) -> Array:
    """Return the maximum over a disc around each pixel."""
    side = canvases.shape[-1]
    wide = np.pad(canvases, ((0, 0), (radius, radius), (radius, radius)))
    shifted = (wide[:, y : y + side, x : x + side] for y, x in _disc(radius) + radius)
    return functools.reduce(np.maximum, shifted)


def _shrunk(canvas: Array, side: int) -> Array:
    return np.asarray(Image.fromarray(canvas).resize((side, side), Image.Resampling.LANCZOS))


def _pixels(squares: Iterable[Array], middle: int) -> tuple[Array, Array]:
    """Return (row, column, value) of all pixels above 0, counted from the middle, brightest first; and how many."""
    lists = []
    for square in squares:
        rows, columns = np.nonzero(square)
        values = square[rows, columns].astype(np.int64)
        lists.append(np.stack([rows - middle, columns - middle, values], -1)[np.argsort(-values, kind="stable")])
    return _padded(lists), np.array([len(pixels) for pixels in lists])


def _kernel(footprint: Array, reach: int) -> Array:
    """Return where a footprint is 1 in a square around a pixel, when started one pixel right of and below it."""
    offsets = footprint[footprint[:, 2] == FULL, :2] + 1
    return offsets[(np.abs(offsets) <= reach).all(-1)]


def _misses_a_corner(kernel: Array) -> bool:
    """Tell whether the kernel, put on some corner of the picture, lies outside of it altogether."""
    signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    return any(not (kernel * sign >= 0).all(-1).any() for sign in signs)


def _room(kernel: Array, options: Options) -> Array:
    """Return the rectangle of pixels from which the kernel stays off a frame of 2 x seed_distance pixels."""
    first, last = 2 * options.seed_distance, options.size - 1 - 2 * options.seed_distance
    if len(kernel) == 0:
        return np.array([1, 0, 1, 0])
    low, high = first - kernel.min(0), last - kernel.max(0)
    if (low > high).any():
        return np.array([1, 0, 1, 0])
    return np.array([low[0], high[0], low[1], high[1]])


def _markers(options: Options) -> Array:
    """Draw a disc at each pixel of a picture just large enough that its middle pixel is out of reach of the border."""
    reach = math.ceil(options.marker_radius) + 3  # 3: Lanczos
    side, scale = 2 * (reach + 3) + 1, options.antialias_scale
    grid = np.arange(side * scale)
    patches = np.zeros((side, side, 2 * reach + 1, 2 * reach + 1), np.uint8)
    for y, x in np.ndindex(side, side):
        inside = (grid[:, None] - y * scale) ** 2 + (grid - x * scale) ** 2 <= (options.marker_radius * scale) ** 2
        picture = np.pad(_shrunk(inside.astype(np.uint8) * FULL, side), reach)
        patches[y, x] = picture[y : y + 2 * reach + 1, x : x + 2 * reach + 1]
    return patches


def _padded(arrays: Sequence[Array]) -> Array:
    """Stack arrays of different shapes, with zeros behind the shorter ones."""
    shape = np.max([array.shape for array in arrays], axis=0, initial=0).astype(int)
    out = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for i, array in enumerate(arrays):
        corner: tuple[int | slice, ...] = (i, *map(slice, array.shape))
        out[corner] = array
    return out


def _compact(array: Array) -> Array:
    return array.astype(np.int16) if array.dtype == np.int64 else array
