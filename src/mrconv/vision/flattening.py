"""Mixers of feature maps, flattened row by row, and their kernels laid out for maps of another size.

On a map of width W, lag y W + x is a shift by y rows and x columns, -W/2 <= x < W/2. (A shift by x - W columns in row
y + 1 is the same lag: what lies past the end of a row is the beginning of the next.) So a kernel of lags is an image of
shifts (rows, columns), and that image is what can be cut, padded or resampled for another width; a mere rescaling of
lags would stretch columns by the square of what it stretches rows by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..layer import MRConv, as_autocast
from ..mixers import Mixer

Grid = tuple[int, int]
"""Height and width of a map."""
Rate = tuple[float, float]
"""New rows and columns per old one."""
ONE: Rate = (1.0, 1.0)


def shifts(kernel: Tensor, grid: Grid) -> Tensor:
    """Return a kernel (C, 2 H W) of lags -H W .. H W - 1 as an image of shifts (C, 2 H + 1, W), the middle one 0."""
    H, W = grid
    return F.pad(kernel, (W // 2, W - W // 2)).unflatten(1, (2 * H + 1, W))


def lags(image: Tensor, grid: Grid) -> Tensor:
    """Return an image of shifts (C, 2 H + 1, W) as a kernel (C, 2 H W) of lags; inverts `shifts`."""
    H, W = grid
    return image.flatten(1)[:, W // 2 : W // 2 + 2 * H * W]


def laid_out(kernel: Tensor, grid: Grid, new: Grid, rate: Rate = ONE) -> Tensor:
    """Return a kernel (C, 2 H W) for a map of another height and width.

    rate is how many new rows and columns go into an old one. At rate 1 each tap keeps its shift, and those that a
    smaller map has no room for are gone. At any other rate the image of shifts is resampled (cubic, low-pass where it
    gets smaller), its sum kept.
    """
    if grid == new and rate == ONE:
        return kernel
    image = shifts(kernel, grid)
    rows, columns = (
        resampling(old, wanted, by, image) for old, wanted, by in zip(_shifts(grid), _shifts(new), rate, strict=True)
    )
    return lags(rows @ image @ columns.T, new)


def _shifts(grid: Grid) -> tuple[range, range]:
    """Return the shifts by rows and by columns that an image of shifts has."""
    H, W = grid
    return range(-H, H + 1), range(-(W // 2), W - W // 2)


def resampling(old: range, new: range, rate: float, like: Tensor) -> Tensor:
    """Return the matrix (new, old) that samples a function given at old shifts at new ones, each 1 / rate as long.

    Its rows add up to 1 / rate, or to 0 where the new shift lies past the old ones.
    """
    at, known = (torch.arange(r.start, r.stop, dtype=torch.float64, device=like.device) for r in (new, old))
    width = max(1.0, 1 / rate)
    weight = cubic((at[:, None] / rate - known) / width)
    inside = (at / rate >= old.start - 0.5) & (at / rate <= old.stop - 0.5)
    return (weight * inside[:, None] / weight.sum(1, keepdim=True).clamp(min=0.5) / rate).to(like.dtype)


def cubic(x: Tensor) -> Tensor:
    """Return Keys' interpolating kernel, a = -1/2."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def draw(module: nn.Linear | nn.Conv2d) -> None:
    """Draw weights as ConvNeXt does."""
    nn.init.trunc_normal_(module.weight, std=0.02)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


class DepthwiseConv(nn.Conv2d):
    """ConvNeXt's own mixer: a 7x7 depthwise convolution of maps (B, H, W, C)."""

    def __init__(self, channels: int, **factory: Any) -> None:
        super().__init__(channels, channels, 7, padding=3, groups=channels, **factory)

    def reset_parameters(self) -> None:
        """Draw as ConvNeXt does."""
        draw(self)

    def forward(self, x: Tensor, rate: Rate = ONE) -> Tensor:
        """Convolve; the same kernel at every rate."""
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class FlatMixer(nn.Module):
    """A mixer of sequences over maps (B, H, W, C), flattened row by row."""

    def __init__(self, layer: Mixer, grid: Grid) -> None:
        super().__init__()
        self.layer, self.grid = layer, grid

    def forward(self, x: Tensor, rate: Rate = ONE) -> Tensor:
        """Mix a map; of another size than the grid's, with kernels laid out for it."""
        if getattr(self.layer, "rate", 1.0) != 1.0:
            raise ValueError("maps have no sampling rate: for pictures of another size use model.resized(image_size)")
        grid = (x.shape[1], x.shape[2])
        u = x.flatten(1, 2)
        if (grid, rate) == (self.grid, ONE):
            y = self.layer(u)
        else:
            kernel, bias = self.kernel_for(grid, rate)
            L = grid[0] * grid[1]
            y = ops.conv(as_autocast(u).transpose(1, 2), kernel, range(-L, L), bias).transpose(1, 2)
        return y.unflatten(1, grid)

    def kernel_for(self, grid: Grid, rate: Rate) -> tuple[Tensor, Tensor]:
        """Return the merged kernel (C, 2 H W) and bias (C,) for maps of another size, from the running statistics."""
        layer = self.check(rate)
        (past, future), bias = layer.k_rep()
        kernel = laid_out(torch.cat([future.flip(1), past], 1), self.grid, grid, rate)
        if layer.D is not None:
            L = grid[0] * grid[1]
            kernel = kernel + F.pad(layer.D[:, None].to(kernel.dtype), (L, L - 1))
        return kernel, bias

    def check(self, rate: Rate) -> MRConv:
        """Return the layer if it can run on maps of another size or rate; raise an error if it cannot."""
        layer, H, W = self.layer, *self.grid
        if not isinstance(layer, MRConv):
            raise ValueError(f"{type(layer).__name__} runs on maps of {H}x{W} only: resize the pictures")
        if layer.uses_batch_statistics:
            raise ValueError(
                "in training pictures must have the model's image_size: branches are normalised on its grid; call "
                "eval(), or build the model with another image_size"
            )
        if rate != ONE and not layer.continuous:
            raise ValueError(
                f"kernel={layer.kernel!r} has taps at fixed places and cannot be resampled: resize the pictures to the "
                "model's image_size, or pass rate=1 to take them at the scale of training"
            )
        if rate != ONE and layer.merged:
            raise ValueError(
                "a merged model cannot be resampled, as its kernels hold the skip D: resample the trained one, with "
                "model.resized(image_size), or pass rate=1 to take the pictures at the scale of training"
            )
        return layer
