"""MRConvNeXt: ConvNeXt with MRConv over the flattened map in the place of its 7x7 depthwise convolutions.

Maps are (batch, height, width, channels) throughout, so that flattening one, a linear layer on it and cutting it into
patches move no memory but what the patches need.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils.checks import check_fraction, check_positive_int, check_rate
from ..block import SequenceLayerNorm
from ..config import VisionConfig
from ..hub import Model
from ..mixers import make_mixer
from .flattening import ONE, DepthwiseConv, FlatMixer, Grid, Rate, draw

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (3, 3, 9, 3), "dims": (96, 192, 384, 768)},
    "small": {"depths": (3, 3, 27, 3), "dims": (96, 192, 384, 768)},
    "base": {"depths": (3, 3, 27, 3), "dims": (128, 256, 512, 1024)},
}
KERNELS = ("fourier", "fourier+sparse", "dilated")


def variants() -> dict[str, dict[str, Any]]:
    """Return the options of every named model: mrconvnext_SIZE_KERNEL, with _ for +, and convnext_SIZE."""
    found = {
        f"mrconvnext_{size}_{kernel.replace('+', '_')}": options | {"kernel": kernel}
        for size, options in SIZES.items()
        for kernel in KERNELS
    }
    return found | {f"convnext_{size}": options | {"mixer": "conv"} for size, options in SIZES.items()}


class Linear(nn.Linear):
    """A linear layer that is drawn as ConvNeXt draws it."""

    def reset_parameters(self) -> None:
        """Draw the weights; no bias."""
        draw(self)


class Patches(Linear):
    """Non-overlapping patches of a map, each through one linear layer: (B, H, W, C) -> (B, H // p, W // p, C')."""

    def __init__(self, channels: int, out: int, size: int, **factory: Any) -> None:
        super().__init__(channels * size**2, out, **factory)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Cut and project; rows and columns that do not fill a patch are left out."""
        p, (H, W) = self.size, (n // self.size for n in x.shape[1:3])
        x = x[:, : p * H, : p * W].unflatten(2, (W, p)).unflatten(1, (H, p))  # (B, H, p, W, p, C)
        return super().forward(x.transpose(2, 3).flatten(3))


class DropPath(nn.Module):
    """Stochastic depth: leaves out what a block adds, for some pictures of a batch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        check_fraction("drop_path", p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop whole pictures in training; the identity in eval mode."""
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(x.new_ones(x.shape[0], *(1,) * (x.ndim - 1)), self.p)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"p={self.p:.3g}"


class ConvNeXtBlock(nn.Module):
    """x + gamma * MLP(norm(mixer(x))), for maps (B, H, W, dim)."""

    def __init__(self, dim: int, mixer: nn.Module, drop_path: float, layer_scale: float, **factory: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = SequenceLayerNorm(dim, eps=1e-6, **factory)
        self.expand = Linear(dim, 4 * dim, **factory)
        self.shrink = Linear(4 * dim, dim, **factory)
        self.gamma = nn.Parameter(torch.full((dim,), layer_scale, **factory))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rate: Rate = ONE) -> Tensor:
        """Transform a map."""
        y = self.shrink(F.gelu(self.expand(self.norm(self.mixer(x, rate)))))
        return x + self.drop_path(self.gamma.to(y.dtype) * y)


class Stage(nn.Module):
    """[norm and patches of 2x2] -> blocks."""

    def __init__(self, patches: nn.Module, blocks: Sequence[ConvNeXtBlock]) -> None:
        super().__init__()
        self.patches = patches
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, rate: Rate = ONE) -> Tensor:
        """Transform a map (B, H, W, C)."""
        x = self.patches(x)
        for block in self.blocks:
            x = block(x, rate)
        return x


def _check_pool(config: VisionConfig) -> VisionConfig:
    if config.global_pool not in ("avg", ""):
        raise ValueError(f"global_pool must be 'avg' or ''; got {config.global_pool!r}")
    if config.n_classes and not config.global_pool:
        raise ValueError(f"global_pool='' gives maps, not logits: n_classes must be 0; got {config.n_classes}")
    return config


class MRConvNeXt(Model):
    """Pictures (B, in_channels, H, W) -> logits (B, n_classes)."""

    config_class = VisionConfig
    config: VisionConfig

    @classmethod
    def named(cls, name: str, **options: Any) -> MRConvNeXt:
        """Build a model of the paper, such as "mrconvnext_tiny_fourier_sparse", with some options changed."""
        known = variants()
        if name not in known:
            raise ValueError(f"there is no model {name!r}; there are {', '.join(known)}")
        return cls(**(known[name] | options))

    def build(self, **factory: Any) -> None:
        """Create stem, stages and head."""
        c = self.config
        per_stage = (c.depths, c.dims, c.kernel_sizes)
        if c.mixer == "conv":
            per_stage = (c.depths, c.dims, c.depths)  # no kernel sizes
        if not len(c.depths) or len({len(values) for values in per_stage}) > 1:
            raise ValueError(
                f"depths, dims and kernel_sizes need a value per stage; got {list(c.depths)}, {list(c.dims)} and "
                f"{list(c.kernel_sizes)}"
            )
        check_positive_int(in_channels=c.in_channels, patch_size=c.patch_size)
        for name, values in zip(("depths", "dims"), per_stage, strict=False):
            for value in values:
                check_positive_int(**{name: value})
        if c.n_classes < 0:
            raise ValueError(f"n_classes must not be negative; got {c.n_classes}")
        _check_pool(c)
        grids = self.grids(self.image_size)
        rates = torch.linspace(0, c.drop_path, sum(c.depths), device="cpu").tolist()
        self.stem = Patches(c.in_channels, c.dims[0], c.patch_size, **factory)
        stages, done = [], 0
        for i, (depth, dim, grid) in enumerate(zip(c.depths, c.dims, grids, strict=True)):
            patches: nn.Module = SequenceLayerNorm(dim, eps=1e-6, **factory)
            if i > 0:
                halve = Patches(c.dims[i - 1], dim, 2, **factory)
                patches = nn.Sequential(SequenceLayerNorm(c.dims[i - 1], eps=1e-6, **factory), halve)
            blocks = [
                ConvNeXtBlock(dim, self._mixer(i, j, dim, grid, factory), rates[j], c.layer_scale, **factory)
                for j in range(done, done + depth)
            ]
            stages.append(Stage(patches, blocks))
            done += depth
        self.stages = nn.ModuleList(stages)
        self.norm = SequenceLayerNorm(c.dims[-1], eps=1e-6, **factory)
        self.dropout = nn.Dropout(c.dropout)
        self.head = self._head(**factory)

    def _mixer(self, stage: int, block: int, dim: int, grid: Grid, factory: dict[str, Any]) -> nn.Module:
        c, length = self.config, grid[0] * grid[1]
        if c.mixer == "conv":
            return DepthwiseConv(dim, **factory)
        seed = None if c.seed is None else c.seed + 2 * block  # two directions each
        options = c.layer() | {"kernel_size": c.kernel_sizes[stage], "seed": seed}
        return FlatMixer(make_mixer(c.mixer, dim, length, c.mixer_options, options, **factory), grid)

    @property
    def image_size(self) -> Grid:
        """Height and width of the pictures the kernels are laid out for."""
        size = self.config.image_size
        H, W = (size, size) if isinstance(size, int) else size
        check_positive_int(image_size=H)
        check_positive_int(image_size=W)
        return H, W

    def grids(self, size: Grid) -> list[Grid]:
        """Return height and width of every stage's map for pictures of this size."""
        found = [(size[0] // self.config.patch_size, size[1] // self.config.patch_size)]
        for _ in self.config.depths[1:]:
            found.append((found[-1][0] // 2, found[-1][1] // 2))
        if 0 in found[-1]:
            least = self.config.patch_size * 2 ** (len(found) - 1)
            raise ValueError(f"pictures must be at least {least}x{least} for {len(found)} stages; got {size}")
        return found

    def forward(self, x: Tensor, rate: float | None = None) -> Tensor:
        """Return logits.

        Pictures of another size than image_size are taken to show the same scene in more or fewer pixels, and kernels
        are resampled for them. `rate` tells otherwise: how many pixels go into one of training; 1 for more or less of a
        scene at the same scale, which needs no resampling.
        """
        return self.forward_head(self._maps(x, rate)[-1].permute(0, 3, 1, 2))

    def forward_features(self, x: Tensor, rate: float | None = None) -> Tensor:
        """Return the last stage's map, (B, C, H, W)."""
        return self._maps(x, rate)[-1].permute(0, 3, 1, 2)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool a map (B, C, H, W), normalise and classify; `pre_logits` leaves out the last step."""
        if not self.config.global_pool:
            return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.dropout(self.norm(x.mean((2, 3))))
        return x if pre_logits else self.head(x)

    def features(self, x: Tensor, rate: float | None = None) -> list[Tensor]:
        """Return the maps of all stages, each (B, C, H, W)."""
        return [y.permute(0, 3, 1, 2) for y in self._maps(x, rate)]

    def _maps(self, x: Tensor, rate: float | None, stages: int | None = None) -> list[Tensor]:
        """Return the maps (B, H, W, C) of so many stages."""
        c = self.config
        if x.ndim != 4 or x.shape[1] != c.in_channels or not x.is_floating_point():
            raise ValueError(
                f"pictures must be real, of shape (batch, {c.in_channels}, height, width); got {x.dtype} "
                f"{tuple(x.shape)}"
            )
        size = (x.shape[2], x.shape[3])
        self.grids(size)
        by = self._rate(size, rate)
        x = self.stem(x.permute(0, 2, 3, 1))
        found = []
        for stage in self.stages[:stages]:
            x = stage(x, by)
            found.append(x)
        return found

    @torch.no_grad()
    def resized(self, image_size: int | Sequence[int], rate: float | None = None) -> MRConvNeXt:
        """Return the merged model for pictures of another size, with the kernels that `forward` would use for them."""
        own = next(self.parameters())
        options = vars(self.config) | {"image_size": image_size, "merged": True}
        new = type(self)(**options, device=own.device, dtype=own.dtype)
        by = self._rate(new.image_size, rate)
        mixers = {name: module for name, module in new.named_modules() if isinstance(module, FlatMixer)}
        state = {name: x for name, x in self.state_dict().items() if name.rsplit(".layer.")[0] not in mixers}
        for name, mixer in mixers.items():
            kernel, bias = self.get_submodule(name).kernel_for(mixer.grid, by)  # type: ignore[operator]
            if mixer.layer.lags is not None:
                there = kernel.abs().amax(0).nonzero().flatten()
                state[f"{name}.layer.lags"] = there - kernel.shape[1] // 2
                kernel = kernel[:, there]
            state |= {f"{name}.layer.weight": kernel, f"{name}.layer.bias": bias}
        new.load_state_dict(state)
        return new.eval()

    def _rate(self, size: Grid, rate: float | None) -> Rate:
        if rate is not None:
            check_rate(rate, "", continuous=True)
            return float(rate), float(rate)
        H, W = self.image_size
        return size[0] / H, size[1] / W

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the last map and those of the stages asked for (all, the last few, or by number), as timm's models do.

        norm: the last map goes through the norm before the head. stop_early: stages after those asked for do not run.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be NCHW; got {output_fmt!r}")
        n = len(self.stages)
        chosen = range(n - indices, n) if isinstance(indices, int) else range(n) if indices is None else indices
        wanted = [i % n for i in chosen]
        maps = self._maps(x, None, max(wanted) + 1 if stop_early else n)
        if norm and len(maps) == n:
            maps[-1] = self.norm(maps[-1])
        maps = [y.permute(0, 3, 1, 2) for y in maps]
        found = [maps[i] for i in wanted]
        return found if intermediates_only else (maps[-1], found)

    def get_classifier(self) -> nn.Module:
        """Return the last layer, as timm's models do."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Begin with a new head for so many classes; with 0, none. A `global_pool` given replaces the one there was."""
        pool = self.config.global_pool if global_pool is None else global_pool
        self.config = _check_pool(dataclasses.replace(self.config, n_classes=num_classes, global_pool=pool))
        weight = self.norm.weight
        self.head = self._head(device=weight.device, dtype=weight.dtype)

    def _head(self, **factory: Any) -> nn.Module:
        c = self.config
        return Linear(c.dims[-1], c.n_classes, **factory) if c.n_classes else nn.Identity()

    @property
    def num_classes(self) -> int:
        """timm's name for n_classes."""
        return self.config.n_classes

    @property
    def num_features(self) -> int:
        """Channels of the last stage."""
        return self.config.dims[-1]

    head_hidden_size = num_features

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Return channels, reduction and name of each stage, as timm's feature extraction wants to know."""
        c = self.config
        return [
            {"num_chs": dim, "reduction": c.patch_size * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(c.dims)
        ]


if importlib.util.find_spec("timm") is not None:
    from .timm_models import register

    register()
