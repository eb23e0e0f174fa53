"""Options of the Pathfinder generator, and those of Long Range Arena's two sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..._utils.checks import check_count, check_positive_int


@dataclass(frozen=True)
class PathfinderOptions:
    """Arguments of the original generator under their original names; defaults are those of Pathfinder, 32 x 32, hard.

    `border_quirk` reproduces an effect of OpenCV's dilation in the original: an angle whose first dash leaves a corner
    pixel of the image uncovered counts as having no room (at 32 x 32, all but 30 of 360 angles). Without the quirk,
    only that pixel is not free.
    """

    size: int = 32
    padding: int = 1  # border of the occupancy mask, occupied from the start
    antialias_scale: int = 2
    seed_distance: int = 7  # between the first ends of the two long contours
    marker_radius: float = 1.5
    contour_length: int = 14  # dashes of a long contour
    distractor_length: int = 4
    num_distractor_snakes: int = 5
    paddle_length: int = 2  # length of a dash in pixels
    paddle_thickness: float = 0.5
    paddle_margins: tuple[int, ...] = (1,)  # one is drawn per image; gaps are about twice as long
    continuity: float = 1.0  # larger is straighter
    snake_contrast: float = 2.0
    paddle_contrast: float = 0.75  # factor of snake_contrast in the long contours
    max_paddle_retrial: int = 2
    max_distractor_contour_retrial: int = 4
    border_quirk: bool = True

    def __post_init__(self) -> None:
        names = ["size", "padding", "antialias_scale", "seed_distance", "contour_length", "distractor_length"]
        check_positive_int(**{name: getattr(self, name) for name in [*names, "paddle_length"]})
        names = ["num_distractor_snakes", "max_paddle_retrial", "max_distractor_contour_retrial"]
        check_count(**{name: getattr(self, name) for name in names})
        for name in ("marker_radius", "paddle_thickness", "continuity", "snake_contrast", "paddle_contrast"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number; got {value!r}")
        if not isinstance(self.paddle_margins, tuple) or not self.paddle_margins:
            raise ValueError(f"paddle_margins must be a tuple of integers; got {self.paddle_margins!r}")
        for margin in self.paddle_margins:
            check_positive_int(paddle_margins=margin)
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.size < 32:
            raise ValueError(f"size must be at least 32; got {self.size}")
        if 8 * self.marker_radius > self.size:
            raise ValueError(f"marker_radius must be at most size / 8 = {self.size / 8:g}; got {self.marker_radius:g}")
        if not float(self.paddle_thickness * self.antialias_scale).is_integer():
            raise ValueError(
                f"paddle_thickness * antialias_scale must be an integer number of pixels; got "
                f"{self.paddle_thickness:g} * {self.antialias_scale}"
            )
        if self.paddle_length + max(self.paddle_margins) > 2 * self.seed_distance:
            raise ValueError(
                f"seed_distance must be at least half of paddle_length + margin = "
                f"{self.paddle_length + max(self.paddle_margins)}; got {self.seed_distance}"
            )


def options_for(size: int, contour_length: int = 14) -> PathfinderOptions:
    """Return the options of a square image: Long Range Arena's at 32 (Pathfinder) and 128 (Path-X).

    The options of other sizes are interpolated linearly between these two. Each value is rounded to what drawing
    allows: thickness and disc radius to halves, lengths and both margins to integers. Dashes half a pixel thick, which
    appear faint, have the contrast of size 32, thicker ones that of size 128.
    """
    check_positive_int(size=size, contour_length=contour_length)
    if contour_length < 3:
        raise ValueError(f"contour_length must be at least 3, as distractors have a third of it; got {contour_length}")

    def interpolate(small: float, large: float, unit: float = 1) -> float:
        value = small + (large - small) * (size - 32) / 96
        return math.floor(value / unit + 0.5) * unit

    thickness = interpolate(0.5, 1.5, 0.5)
    distractor_length = contour_length // 3
    return PathfinderOptions(
        size=size,
        seed_distance=int(interpolate(7, 20)),
        marker_radius=interpolate(1.5, 3, 0.5),
        contour_length=contour_length,
        distractor_length=distractor_length,
        num_distractor_snakes=int(interpolate(20, 35)) // distractor_length,
        paddle_length=int(interpolate(2, 5)),
        paddle_thickness=thickness,
        paddle_margins=tuple(range(int(interpolate(1, 2)), int(interpolate(1, 3)) + 1)),
        continuity=min(interpolate(1.0, 1.8, 0.1), 1.8),
        snake_contrast=2.0 if thickness == 0.5 else 0.9,
        paddle_contrast=0.75 if thickness == 0.5 else 1.0,
    )
