"""Reparameterized multi-resolution convolutions for long sequences."""

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

__version__ = "0.1.0"

__all__ = [
    "Backbone",
    "Kernel",
    "LanguageModel",
    "MRConv",
    "MRConvBlock",
    "SequenceClassifier",
    "SequenceLabeller",
    "SequenceRegressor",
    "TwoTowerClassifier",
    "param_groups",
    "register_kernel",
    "reparameterize",
]
