"""Reparameterized multi-resolution convolutions for long sequences."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block import MRConvBlock
    from .kernels import Kernel, register_kernel
    from .layer import MRConv, reparameterize
    from .model import (
        Backbone,
        LanguageModel,
        SequenceClassifier,
        SequenceLabeller,
        SequenceRegressor,
        TwoTowerClassifier,
    )
    from .optim import param_groups
    from .vision.convnext import MRConvNeXt

__version__ = "0.1.0"

__all__ = [
    "Backbone",
    "Kernel",
    "LanguageModel",
    "MRConv",
    "MRConvBlock",
    "MRConvNeXt",
    "SequenceClassifier",
    "SequenceLabeller",
    "SequenceRegressor",
    "TwoTowerClassifier",
    "param_groups",
    "register_kernel",
    "reparameterize",
]

_MODULES = ("layer", "block", "kernels", "model", "optim", "vision")


def __getattr__(name: str) -> Any:
    """Import on first use: the command line answers --help without torch."""
    if name in __all__:
        for each in _MODULES:
            module = importlib.import_module(f".{each}", __name__)
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
