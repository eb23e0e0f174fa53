"""The plug-ins that an experiment needs for its task, kernel and mixer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._utils.plugins import plugins_of_record
from .._utils.registry import Registry
from ..kernels.protocol import KERNELS
from ..mixers import MIXERS
from ..tasks.base import TASKS
from .experiment import Experiment


def used_plugins(experiment: Experiment) -> list[str]:
    """Return the modules outside of mrconv that register its task, kernel and mixer.

    Raises:
        NotRegistered: one of the three is not registered.
    """
    chosen: list[tuple[Registry[Any], str]] = [(TASKS, experiment.task), (KERNELS, experiment.kernel)]
    if experiment.mixer != "conv":  # ConvNeXt's convolution, which only image models have
        chosen.append((MIXERS, experiment.mixer))
    for registry, name in chosen:
        registry.get(name)
    return sorted({module for registry, name in chosen if (module := registry.plugin(name)) is not None})


def add_used_plugins(experiment: Experiment) -> None:
    """Add the plug-ins that the experiment does not name, such as those of entry points."""
    for module in used_plugins(experiment):
        if not any(f"{module}.".startswith(f"{name}.") for name in experiment.plugins):
            experiment.plugins.append(module)


def check_registered(experiment: Experiment, folder: Path) -> None:
    """Raise NotRegistered, with the plug-ins that a run names, if its task, kernel or mixer is not registered."""
    with plugins_of_record(folder, experiment.plugins):
        used_plugins(experiment)
