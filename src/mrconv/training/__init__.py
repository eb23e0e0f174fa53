"""Training with Lightning: one flat config, one run folder."""

from .config import Experiment
from .run import train

__all__ = ["Experiment", "train"]
