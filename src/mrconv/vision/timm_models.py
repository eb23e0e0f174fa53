"""The models of `convnext.py` registered in timm: `timm.create_model("mrconvnext_tiny_fourier")`."""

from __future__ import annotations

import functools
from typing import Any

from .convnext import MRConvNeXt, variants

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPTION_NAMES = {
    "num_classes": "n_classes",
    "in_chans": "in_channels",
    "img_size": "image_size",
    "drop_rate": "dropout",
    "drop_path_rate": "drop_path",
}
"""timm's option names -> ours; all other options have the same name."""

default_cfgs: dict[str, dict[str, Any]] = {}
"""Default configuration by model; timm reads this variable of the module."""


def register_models() -> None:
    """Register the models in timm, if timm can be imported."""
    try:
        from timm.models import register_model
    except (ImportError, RuntimeError):  # RuntimeError: torchvision without its compiled operators
        return

    for name in variants():
        if name.startswith("mrconvnext"):
            default_cfgs[name] = {
                "url": "",
                "num_classes": 1000,
                "input_size": (3, 224, 224),
                "pool_size": (7, 7),
                "crop_pct": 0.875,
                "interpolation": "bicubic",
                "mean": MEAN,
                "std": STD,
                "first_conv": "stem",
                "classifier": "head",
            }
            register_model(_entry_point(name))


def _entry_point(name: str) -> Any:
    def create(pretrained: bool = False, **options: Any) -> Any:
        from timm.models import build_model_with_cfg

        features = {"feature_cls": "getter", "out_indices": (0, 1, 2, 3)}
        build = functools.partial(_build, name)
        return build_model_with_cfg(build, name, pretrained, feature_cfg=features, **options)

    create.__name__ = name
    return create


def _build(name: str, **options: Any) -> MRConvNeXt:
    return MRConvNeXt.named(name, **{OPTION_NAMES.get(key, key): value for key, value in options.items()})
