"""Mixers on flattened feature maps, and their kernels resampled for feature maps of another size.

A feature map is flattened along its rows. On a map of width W, lag y W + x is a shift by y rows and x columns, with
-W/2 <= x < W/2. (A shift by y + 1 rows and x - W columns is the same lag: after the end of a row comes the next one.)
So a kernel of lags is an image of shifts (rows, columns), and this image can be cropped, padded or resampled for
another width. Rescaling the lags themselves would scale the shifts by rows and by columns differently.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..layer import MRConv, as_autocast
from ..mixers import Mixer

Grid = tuple[int, int]
"""Height and width of a feature map."""
Rate = tuple[float, float]
"""New pixels per old one, vertically and horizontally."""
UNIT_RATE: Rate = (1.0, 1.0)


def lags_to_shifts(kernel: Tensor, grid: Grid) -> Tensor:
    """Return a kernel (C, 2 H W) of lags -H W .. H W - 1 as an image of shifts (C, 2 H + 1, W), centred on shift 0."""
    H, W = grid
    return F.pad(kernel, (W // 2, W - W // 2)).unflatten(1, (2 * H + 1, W))


def shifts_to_lags(image: Tensor, grid: Grid) -> Tensor:
    """Return an image of shifts (C, 2 H + 1, W) as a kernel (C, 2 H W) of lags; the inverse of `lags_to_shifts`."""
    H, W = grid
    return image.flatten(1)[:, W // 2 : W // 2 + 2 * H * W]


def resample_kernel(kernel: Tensor, grid: Grid, new_grid: Grid, rate: Rate = UNIT_RATE) -> Tensor:
    """Return a kernel (C, 2 H W) of one grid for another one.

    At rate 1 each tap keeps its shift; taps whose shift exceeds a smaller grid are dropped. At any other rate the image
    of shifts is resampled (cubic, with a low-pass filter when it shrinks) and keeps its sum.
    """
    if grid == new_grid and rate == UNIT_RATE:
        return kernel
    image = lags_to_shifts(kernel, grid)
    rows, columns = (
        resampling_matrix(old, new, by, image)
        for old, new, by in zip(shift_ranges(grid), shift_ranges(new_grid), rate, strict=True)
    )
    return shifts_to_lags(rows @ image @ columns.T, new_grid)


def shift_ranges(grid: Grid) -> tuple[range, range]:
    """Return the shifts by rows and by columns that an image of shifts contains."""
    H, W = grid
    return range(-H, H + 1), range(-(W // 2), W - W // 2)


def resampling_matrix(old: range, new: range, rate: float, like: Tensor) -> Tensor:
    """Return the matrix (new, old) that interpolates values given at the old shifts to the points new shift / rate.

    Each of its rows sums to 1 / rate, or to 0 if the new shift lies outside of the old range.
    """
    old_shifts, new_shifts = (
        torch.arange(shifts.start, shifts.stop, dtype=torch.float64, device=like.device) for shifts in (old, new)
    )
    at = new_shifts / rate
    weight = cubic((at[:, None] - old_shifts) / max(1.0, 1 / rate))
    inside = (at >= old.start - 0.5) & (at <= old.stop - 0.5)
    return (weight * inside[:, None] / weight.sum(1, keepdim=True).clamp(min=0.5) / rate).to(like.dtype)


def cubic(x: Tensor) -> Tensor:
    """Return Keys' cubic interpolation kernel, a = -1/2."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


class FlattenedMixer(nn.Module):
    """A mixer of sequences applied to feature maps (B, H, W, C), flattened along their rows."""

    def __init__(self, layer: Mixer, grid: Grid) -> None:
        super().__init__()
        self.layer, self.grid = layer, grid

    def forward(self, x: Tensor, rate: Rate = UNIT_RATE) -> Tensor:
        """Mix a feature map; use a resampled kernel if its size or rate differs from training."""
        if getattr(self.layer, "rate", 1.0) != 1.0:
            raise ValueError("images have no sampling rate: for images of another size use model.resized(image_size)")
        grid = (x.shape[1], x.shape[2])
        u = x.flatten(1, 2)
        if (grid, rate) == (self.grid, UNIT_RATE):
            y = self.layer(u)
        else:
            kernel, bias = self.resampled_kernel(grid, rate)
            L = grid[0] * grid[1]
            y = ops.conv(as_autocast(u).transpose(1, 2), kernel, range(-L, L), bias).transpose(1, 2)
        return y.unflatten(1, grid)

    def resampled_kernel(self, grid: Grid, rate: Rate) -> tuple[Tensor, Tensor]:
        """Return the merged kernel (C, 2 H W) and bias (C,) for another grid, from the running statistics."""
        layer = self._resampled_layer(rate)
        (past, future), bias = layer.k_rep()
        kernel = resample_kernel(torch.cat([future.flip(1), past], 1), self.grid, grid, rate)
        if layer.D is not None:
            L = grid[0] * grid[1]
            kernel = kernel + F.pad(layer.D[:, None].to(kernel.dtype), (L, L - 1))
        return kernel, bias

    def _resampled_layer(self, rate: Rate) -> MRConv:
        """Return the layer; raise an error if its kernel cannot be resampled."""
        layer, H, W = self.layer, *self.grid
        if not isinstance(layer, MRConv):
            raise ValueError(f"{type(layer).__name__} runs on feature maps of {H}x{W} only: resize the images")
        if layer.uses_batch_statistics:
            raise ValueError(
                "in training mode images must have the model's image_size, because branches are normalised on its "
                "grid: call eval(), or build the model with another image_size"
            )
        if rate != UNIT_RATE and not layer.continuous:
            raise ValueError(
                f"kernel={layer.kernel!r} has taps at fixed positions and cannot be resampled: resize the images to "
                "the model's image_size, or pass rate=1 to take them at the scale of training"
            )
        if rate != UNIT_RATE and layer.D is None:
            raise ValueError(
                "a merged model cannot be resampled, because its kernels include the skip D: resample the trained "
                "model with model.resized(image_size), or pass rate=1 to take the images at the scale of training"
            )
        return layer
