"""Image models: MRConvNeXt, mixers on flattened feature maps, and the models' registration in timm."""

from .convnext import MRConvNeXt

__all__ = ["MRConvNeXt"]
