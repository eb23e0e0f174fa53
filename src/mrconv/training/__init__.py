"""Training with Lightning: one flat config, one run folder."""

from typing import Any

from .experiment import Experiment

__all__ = ["Experiment", "train"]


def __getattr__(name: str) -> Any:
    """Import Lightning only for what needs it."""
    if name == "train":
        from .loop import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
