"""Reparameterized multi-resolution convolutions for long sequences."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block import MRConvBlock
    from .inference import load
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
    from .vision import MRConvNeXt

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
    "load",
    "param_groups",
    "register_kernel",
    "reparameterize",
]

_MODULES = {
    "block": ["MRConvBlock"],
    "inference": ["load"],
    "kernels": ["Kernel", "register_kernel"],
    "layer": ["MRConv", "reparameterize"],
    "model": [
        "Backbone",
        "LanguageModel",
        "SequenceClassifier",
        "SequenceLabeller",
        "SequenceRegressor",
        "TwoTowerClassifier",
    ],
    "optim": ["param_groups"],
    "vision": ["MRConvNeXt"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `mrconv --help` does not import torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
