"""The models of `vision.py` under their names in timm: `timm.create_model("mrconvnext_tiny_fourier")`."""

from __future__ import annotations

import functools
from typing import Any

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NAMES = {
    "num_classes": "n_classes",
    "in_chans": "in_channels",
    "img_size": "image_size",
    "drop_rate": "dropout",
    "drop_path_rate": "drop_path",
}
"""What timm calls our options; all others keep their names."""

default_cfgs: dict[str, dict[str, Any]] = {}


def register() -> None:
    """Make the models known to timm, if it can be imported."""
    try:
        from timm.models import register_model
    except (ImportError, RuntimeError):  # RuntimeError: torchvision without its compiled operators
        return
    from .convnext import variants

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
    def make(pretrained: bool = False, **options: Any) -> Any:
        from timm.models import build_model_with_cfg

        features = {"feature_cls": "getter", "out_indices": (0, 1, 2, 3)}
        build = functools.partial(_build, name)
        return build_model_with_cfg(build, name, pretrained, feature_cfg=features, **options)

    make.__name__ = name
    return make


def _build(name: str, **options: Any) -> Any:
    from .convnext import MRConvNeXt

    return MRConvNeXt.named(name, **{NAMES.get(key, key): value for key, value in options.items()})
