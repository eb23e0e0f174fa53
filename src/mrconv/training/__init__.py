"""Training with Lightning: an experiment is a flat config, a run has one folder."""

from typing import Any

from .experiment import Experiment

__all__ = ["Experiment", "train"]


def __getattr__(name: str) -> Any:
    """Import Lightning on the first use of `train`."""
    if name == "train":
        from .loop import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
