"""Presets: the experiments in configs/experiment and their variants in configs/variants.yaml."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, NamedTuple

import yaml

from .._utils.suggest import closest

CONFIGS = "mrconv.configs"


class Preset(NamedTuple):
    """An experiment and one of its variants; variant "" is the experiment as its file defines it."""

    experiment: str
    variant: str = ""

    @property
    def name(self) -> str:
        """The name of runs with these values, also accepted as `experiment=NAME`."""
        return f"{self.experiment}-{self.variant}" if self.variant else self.experiment

    def values(self) -> dict[str, Any]:
        """Return the keys that the experiment's file and the variant set."""
        changed = variants(self.experiment)[self.variant] if self.variant else {}
        return _read(f"experiment/{self.experiment}.yaml") | changed | {"name": self.name}


@functools.cache
def _read(path: str) -> dict[str, Any]:
    text = (resources.files(CONFIGS) / path).read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@functools.cache
def experiment_names() -> tuple[str, ...]:
    """Return the names of all experiments."""
    folder = resources.files(CONFIGS) / "experiment"
    return tuple(sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")))


def variants(experiment: str) -> dict[str, dict[str, Any]]:
    """Return the keys that each variant of an experiment changes, by the variant's name."""
    return _read("variants.yaml").get(experiment, {})


@functools.cache
def presets() -> tuple[Preset, ...]:
    """Return every experiment, followed by its variants."""
    return tuple(Preset(name, variant) for name in experiment_names() for variant in ("", *variants(name)))


@functools.cache
def _by_name() -> dict[str, Preset]:
    """Return the presets by their current names and by the names of earlier versions."""
    names = {preset.name: preset for preset in presets()}
    for preset in presets():
        if preset.variant.startswith(("ablation-", "causal")):
            names[f"{preset.experiment.removesuffix('-base')}-{preset.variant}"] = preset
        if preset.variant == "fourier-sparse":
            names[f"{preset.experiment}-fourier+sparse"] = preset
    return names


def find_preset(name: str) -> Preset | None:
    """Return the preset of this name, current or former; None if there is none."""
    return _by_name().get(name)


def preset_of_run(name: str, task: str) -> Preset | None:
    """Return the preset of a run: the one with the longest name that the run's name begins with."""
    words = name.split("-")
    for end in range(len(words), 0, -1):
        preset = find_preset("-".join(words[:end]))
        if preset is not None and preset.values()["task"] == task:
            return preset
    return None


def get_preset(experiment: str, variant: str = "") -> Preset:
    """Return a preset by the values of `experiment=` and `variant=`; raise ValueError if either is unknown."""
    preset = find_preset(experiment)
    if preset is None:
        hint = closest(experiment, _by_name()) or "; `mrconv train --list` prints all"
        raise ValueError(f"unknown experiment {experiment!r}{hint}")
    if not variant:
        return preset
    if preset.variant:
        raise ValueError(
            f"experiment={experiment} is variant {preset.variant!r} of {preset.experiment}; "
            f"to use another, write experiment={preset.experiment} variant={variant}"
        )
    names = variants(preset.experiment)
    variant = variant.replace("+", "-")
    if variant not in names:
        known = f"; choose from {', '.join(names)}" if names else f"; {preset.experiment} has no variants"
        raise ValueError(f"unknown variant {variant!r} of {preset.experiment}{closest(variant, names) or known}")
    return Preset(preset.experiment, variant)
