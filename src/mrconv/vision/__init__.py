"""Image models: MRConvNeXt, mixers on flattened feature maps, and the registration of the models in timm."""

import importlib.util

from .convnext import MRConvNeXt, variants

if importlib.util.find_spec("timm") is not None:
    from .timm_models import register_models

    register_models()

__all__ = ["MRConvNeXt", "variants"]
