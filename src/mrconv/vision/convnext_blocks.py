"""The parts of ConvNeXt: patches, depthwise convolution, stochastic depth, block and stage.

Feature maps are (batch, height, width, channels) throughout: flattening, linear layers and patches need no transposed
copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..block import SequenceLayerNorm, TiedDropout
from .flattening import UNIT_RATE, Rate


def init_weights(module: nn.Linear | nn.Conv2d) -> None:
    """Initialise weights and bias as ConvNeXt does."""
    nn.init.trunc_normal_(module.weight, std=0.02)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


class Linear(nn.Linear):
    """A linear layer with ConvNeXt's initialisation."""

    def reset_parameters(self) -> None:
        """Initialise the weights and set the bias to zero."""
        init_weights(self)


class Patches(Linear):
    """A linear layer on non-overlapping patches of a feature map: (B, H, W, C) -> (B, H // p, W // p, C')."""

    def __init__(self, channels: int, out: int, size: int, **factory: Any) -> None:
        super().__init__(channels * size**2, out, **factory)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Cut into patches and project; pixels that do not fill a patch are dropped."""
        p, (H, W) = self.size, (n // self.size for n in x.shape[1:3])
        x = x[:, : p * H, : p * W].unflatten(2, (W, p)).unflatten(1, (H, p))  # (B, H, p, W, p, C)
        return super().forward(x.transpose(2, 3).flatten(3))


class DepthwiseConv(nn.Conv2d):
    """ConvNeXt's mixer: a 7x7 depthwise convolution of feature maps (B, H, W, C)."""

    def __init__(self, channels: int, **factory: Any) -> None:
        super().__init__(channels, channels, 7, padding=3, groups=channels, **factory)

    def reset_parameters(self) -> None:
        """Initialise the weights and set the bias to zero."""
        init_weights(self)

    def forward(self, x: Tensor, rate: Rate = UNIT_RATE) -> Tensor:
        """Convolve, with the same kernel at every rate."""
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class DropPath(TiedDropout):
    """Stochastic depth: drops the output of a block for some images of a batch."""

    option = "drop_path"

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return a shape with one value per image."""
        return (x.shape[0], *(1,) * (x.ndim - 1))


class ConvNeXtBlock(nn.Module):
    """x + gamma * MLP(norm(mixer(x))), for feature maps (B, H, W, dim)."""

    def __init__(self, dim: int, mixer: nn.Module, drop_path: float, layer_scale: float, **factory: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = SequenceLayerNorm(dim, eps=1e-6, **factory)
        self.expand = Linear(dim, 4 * dim, **factory)
        self.shrink = Linear(4 * dim, dim, **factory)
        self.gamma = nn.Parameter(torch.full((dim,), layer_scale, **factory))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rate: Rate = UNIT_RATE) -> Tensor:
        """Transform a feature map."""
        y = self.shrink(F.gelu(self.expand(self.norm(self.mixer(x, rate)))))
        return x + self.drop_path(self.gamma.to(y.dtype) * y)


class Stage(nn.Module):
    """Norm and, after the first stage, 2x2 patches; then blocks."""

    def __init__(self, patches: nn.Module, blocks: Sequence[ConvNeXtBlock]) -> None:
        super().__init__()
        self.patches = patches
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, rate: Rate = UNIT_RATE) -> Tensor:
        """Transform a feature map (B, H, W, C)."""
        x = self.patches(x)
        for block in self.blocks:
            x = block(x, rate)
        return x
