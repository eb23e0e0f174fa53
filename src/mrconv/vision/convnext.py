"""MRConvNeXt: ConvNeXt with an MRConv over the flattened feature map in place of each 7x7 depthwise convolution."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._utils.checks import check_choice, check_count, check_positive, check_positive_int
from .._utils.suggest import closest
from ..block import SequenceLayerNorm
from ..config import VisionConfig
from ..hub import Model
from ..mixers import make_mixer
from .convnext_blocks import ConvNeXtBlock, DepthwiseConv, Linear, Patches, Stage
from .flattening import FlattenedMixer, Grid, Rate

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"depths": (3, 3, 9, 3), "dims": (96, 192, 384, 768)},
    "small": {"depths": (3, 3, 27, 3), "dims": (96, 192, 384, 768)},
    "base": {"depths": (3, 3, 27, 3), "dims": (128, 256, 512, 1024)},
}
KERNELS = ("fourier", "fourier+sparse", "dilated")


def variants() -> dict[str, dict[str, Any]]:
    """Return the options of every named model: mrconvnext_SIZE_KERNEL, with _ for +, and convnext_SIZE."""
    mrconvnext = {
        f"mrconvnext_{size}_{kernel.replace('+', '_')}": options | {"kernel": kernel}
        for size, options in SIZES.items()
        for kernel in KERNELS
    }
    return mrconvnext | {f"convnext_{size}": options | {"mixer": "conv"} for size, options in SIZES.items()}


class MRConvNeXt(Model):
    """Images (B, in_channels, H, W) -> logits (B, n_classes)."""

    config_class = VisionConfig
    config: VisionConfig

    @classmethod
    def named(cls, name: str, **options: Any) -> MRConvNeXt:
        """Build a model of the paper, such as "mrconvnext_tiny_fourier_sparse", with some options changed."""
        models = variants()
        if name not in models:
            raise ValueError(f"unknown model {name!r}; the models are {', '.join(models)}{closest(name, models)}")
        return cls(**(models[name] | options))

    def build(self, **factory: Any) -> None:
        """Create stem, stages and head."""
        c = self.config
        _check_config(c)
        self.stem = Patches(c.in_channels, c.dims[0], c.patch_size, **factory)
        self.stages = nn.ModuleList(self._stages(**factory))
        self.norm = SequenceLayerNorm(c.dims[-1], eps=1e-6, **factory)
        self.dropout = nn.Dropout(c.dropout)
        self.head = self._head(**factory)

    def _stages(self, **factory: Any) -> Iterator[Stage]:
        c = self.config
        drop_paths = torch.linspace(0, c.drop_path, sum(c.depths), device="cpu").tolist()
        first = 0
        for i, (depth, dim, grid) in enumerate(zip(c.depths, c.dims, self.grids(self.image_size), strict=True)):
            patches: nn.Module = SequenceLayerNorm(dim, eps=1e-6, **factory)
            if i > 0:
                halve = Patches(c.dims[i - 1], dim, 2, **factory)
                patches = nn.Sequential(SequenceLayerNorm(c.dims[i - 1], eps=1e-6, **factory), halve)
            blocks = [
                ConvNeXtBlock(dim, self._mixer(i, j, dim, grid, factory), drop_paths[j], c.layer_scale, **factory)
                for j in range(first, first + depth)
            ]
            yield Stage(patches, blocks)
            first += depth

    def _mixer(self, stage: int, block: int, dim: int, grid: Grid, factory: dict[str, Any]) -> nn.Module:
        c = self.config
        if c.mixer == "conv":
            return DepthwiseConv(dim, **factory)
        seed = None if c.seed is None else c.seed + 2 * block  # the two directions of a layer use seed and seed + 1
        layer = c.layer() | {"kernel_size": c.kernel_sizes[stage], "seed": seed}
        return FlattenedMixer(make_mixer(c.mixer, dim, grid[0] * grid[1], c.mixer_options, layer, **factory), grid)

    def _head(self, **factory: Any) -> nn.Module:
        c = self.config
        return Linear(c.dims[-1], c.n_classes, **factory) if c.n_classes else nn.Identity()

    @property
    def image_size(self) -> Grid:
        """Height and width of the images that the kernels fit."""
        size = self.config.image_size
        H, W = (size, size) if isinstance(size, int) else size
        check_positive_int(image_size=H)
        check_positive_int(image_size=W)
        return H, W

    def grids(self, size: Grid) -> list[Grid]:
        """Return height and width of every stage's feature map for images of this size."""
        grids = [(size[0] // self.config.patch_size, size[1] // self.config.patch_size)]
        for _ in self.config.depths[1:]:
            grids.append((grids[-1][0] // 2, grids[-1][1] // 2))
        if 0 in grids[-1]:
            smallest = self.config.patch_size * 2 ** (len(grids) - 1)
            raise ValueError(f"images must be at least {smallest}x{smallest} for {len(grids)} stages; got {size}")
        return grids

    def forward(self, x: Tensor, rate: float | None = None) -> Tensor:
        """Return logits.

        An image whose size is not image_size is taken as the same scene in more or fewer pixels, and the kernels are
        resampled for it. `rate` overrides the ratio of the sizes: the number of new pixels per pixel of training. Use
        rate=1 for more or less of a scene at the same scale, which needs no resampling.
        """
        return self.forward_head(self.forward_features(x, rate))

    def forward_features(self, x: Tensor, rate: float | None = None) -> Tensor:
        """Return the feature map of the last stage, (B, C, H, W)."""
        return self.features(x, rate)[-1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool a feature map (B, C, H, W), normalise and classify; `pre_logits` omits the last step."""
        if not self.config.global_pool:
            return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.dropout(self.norm(x.mean((2, 3))))
        return x if pre_logits else self.head(x)

    def features(self, x: Tensor, rate: float | None = None) -> list[Tensor]:
        """Return the feature maps of all stages, each (B, C, H, W)."""
        return [y.permute(0, 3, 1, 2) for y in self._feature_maps(x, rate)]

    def _feature_maps(self, x: Tensor, rate: float | None, stages: int | None = None) -> list[Tensor]:
        """Return the feature maps (B, H, W, C) of the first `stages` stages, or of all."""
        c = self.config
        if x.ndim != 4 or x.shape[1] != c.in_channels or not x.is_floating_point():
            raise ValueError(
                f"images must be real, of shape (batch, {c.in_channels}, height, width); got {x.dtype} {tuple(x.shape)}"
            )
        size = (x.shape[2], x.shape[3])
        self.grids(size)
        pixel_rate = self._pixel_rate(size, rate)
        x = self.stem(x.permute(0, 2, 3, 1))
        maps = []
        for stage in self.stages[:stages]:
            x = stage(x, pixel_rate)
            maps.append(x)
        return maps

    def _pixel_rate(self, size: Grid, rate: float | None) -> Rate:
        """Return the new pixels per pixel of training, for images of this size."""
        if rate is not None:
            check_positive(rate=rate)
            return float(rate), float(rate)
        H, W = self.image_size
        return size[0] / H, size[1] / W

    @torch.no_grad()
    def resized(self, image_size: int | Sequence[int], rate: float | None = None) -> MRConvNeXt:
        """Return the merged model for images of another size, with the kernels that `forward` uses for them."""
        parameter = next(self.parameters())
        options = vars(self.config) | {"image_size": image_size, "merged": True}
        new = type(self)(**options, device=parameter.device, dtype=parameter.dtype)
        pixel_rate = self._pixel_rate(new.image_size, rate)
        mixers = {name: module for name, module in new.named_modules() if isinstance(module, FlattenedMixer)}
        state = {name: x for name, x in self.state_dict().items() if name.rsplit(".layer.")[0] not in mixers}
        for name, mixer in mixers.items():
            kernel, bias = self.get_submodule(name).resampled_kernel(mixer.grid, pixel_rate)  # type: ignore[operator]
            if mixer.layer.lags is not None:
                nonzero = kernel.abs().amax(0).nonzero().flatten()
                state[f"{name}.layer.lags"] = nonzero - kernel.shape[1] // 2
                kernel = kernel[:, nonzero]
            state |= {f"{name}.layer.weight": kernel, f"{name}.layer.bias": bias}
        new.load_state_dict(state)
        return new.eval()

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the last feature map and those of some stages, as timm's models do.

        Args:
            x: images.
            indices: stage indices, or the number of last stages to return, or None for all.
            norm: apply the norm before the head to the last feature map.
            stop_early: skip the stages after the last one of `indices`.
            output_fmt: must be "NCHW".
            intermediates_only: return the feature maps of `indices` only.
        """
        check_choice("output_fmt", output_fmt, ("NCHW",))
        n = len(self.stages)
        chosen = range(n - indices, n) if isinstance(indices, int) else range(n) if indices is None else indices
        wanted = [i % n for i in chosen]
        maps = self._feature_maps(x, None, max(wanted) + 1 if stop_early else n)
        if norm and len(maps) == n:
            maps[-1] = self.norm(maps[-1])
        maps = [y.permute(0, 3, 1, 2) for y in maps]
        intermediates = [maps[i] for i in wanted]
        return intermediates if intermediates_only else (maps[-1], intermediates)

    def get_classifier(self) -> nn.Module:
        """Return the last layer, as timm's models do."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by one for `num_classes` classes, or by none for 0; set `global_pool` if it is given."""
        pool = self.config.global_pool if global_pool is None else global_pool
        config = dataclasses.replace(self.config, n_classes=num_classes, global_pool=pool)
        _check_pool(config)
        self.config = config
        weight = self.norm.weight
        self.head = self._head(device=weight.device, dtype=weight.dtype)

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
        """Return channels, reduction and name of each stage, for timm's feature extraction."""
        c = self.config
        return [
            {"num_chs": dim, "reduction": c.patch_size * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(c.dims)
        ]


def _check_config(c: VisionConfig) -> None:
    """Reject options that do not fit together."""
    per_stage: dict[str, Sequence[int]] = {"depths": c.depths, "dims": c.dims}
    if c.mixer != "conv":
        per_stage["kernel_sizes"] = c.kernel_sizes
    if not len(c.depths) or len({len(values) for values in per_stage.values()}) > 1:
        raise ValueError(
            f"depths, dims and kernel_sizes need a value per stage; got {list(c.depths)}, {list(c.dims)} and "
            f"{list(c.kernel_sizes)}"
        )
    check_positive_int(in_channels=c.in_channels, patch_size=c.patch_size)
    for value in c.depths:
        check_positive_int(depths=value)
    for value in c.dims:
        check_positive_int(dims=value)
    check_count(n_classes=c.n_classes)
    _check_pool(c)


def _check_pool(c: VisionConfig) -> None:
    if c.global_pool not in ("avg", ""):
        raise ValueError(f"global_pool must be 'avg' or ''; got {c.global_pool!r}")
    if c.n_classes and not c.global_pool:
        raise ValueError(f"global_pool='' returns feature maps: n_classes must be 0; got {c.n_classes}")
