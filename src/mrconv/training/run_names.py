"""Names of runs: the preset and the settings that differ from it, such as listops-base-dilated, listops-base-lr0.01."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .experiment import Experiment, masks_padding
from .presets import find_preset, preset_of_run

REPEATS = {
    "seed", "data_dir", "cache_dir", "loader", "workers", "accelerator", "compile", "graphs", "backend",
    "checkpoint_minutes", "plugins", "wandb", "out", "precision", "pad", "strategy", "stop_after",
}  # fmt: skip
"""Keys that differ between repetitions of one experiment: the seed, the machine and the end of a partial run."""
UNNAMED = REPEATS | {"name", "devices", "nodes"}
"""Keys that enter a run's name only if a sweep varies them; the seed is always part of the folder's name."""
FORMER = {"decay_on": "matrices", "tie_dropout": True}
"""What runs did before there was a key for it; presets have other values since."""
EVALUATION = "evaluate"
LONGEST = 60  # characters of the settings in a name


def flatten_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the options of the task and the mixer as task.KEY and mixer.KEY."""
    flat = dict(values)
    for group in ("task", "mixer"):
        flat |= {f"{group}.{key}": value for key, value in flat.pop(f"{group}_options", {}).items()}
    return flat


def changed_keys(values: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the preset or, for keys it does not set, from the defaults of `Experiment`."""
    expected = flatten_options(dataclasses.asdict(Experiment()) | dict(preset))
    given = flatten_options(FORMER | dict(values))
    for each in (expected, given):
        if "mask_padding" in each:
            each["mask_padding"] = masks_padding(given.get("task", ""), each["mask_padding"])
    return {key: value for key, value in given.items() if value != expected.get(key)}


def recipe_changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that differ from its preset and may change its scores."""
    preset = preset_of_run(values["name"], values["task"])
    changed = changed_keys(values, preset.values() if preset else {})
    return {key: value for key, value in changed.items() if key not in UNNAMED - {"precision", "pad"}}


def run_name(values: Mapping[str, Any], swept: Collection[str] = ()) -> str:
    """Return the name of a run with these values of an `Experiment`, where a sweep varies the keys `swept`.

    The name of a preset is followed by the keys and values that differ from it, for example `listops-base-lr0.01`;
    another mixer appears without its key, `listops-base-s4d`. Without a preset, the task or the file name of `data`
    takes its place. A name that the user chose ("name" is in `swept`, or the name is not a preset's) is kept, followed
    by the swept keys. Keys of the machine appear only if they are swept.
    """
    values = dict(values)
    values |= {key: os.path.normpath(values[key]) if values.get(key) else "" for key in ("data", "init")}
    preset = None if "name" in swept else find_preset(values["name"])
    if preset is not None:
        name, changes = preset.name, changed_keys(values, preset.values())
    elif values["name"] == Experiment.name and "name" not in swept:
        name, changes = _without_preset(values, swept)
    else:
        flat = flatten_options(values)
        return values["name"] + _suffix({key: flat[key] for key in flat if _is_swept(key, swept)})
    return name + _suffix({key: changes[key] for key in changes if key not in UNNAMED or _is_swept(key, swept)})


def evaluation_name(changes: Mapping[str, Any]) -> str:
    """Return the name of an evaluation with settings other than the run's, for example evaluate-rate0.5.

    It ends with a digest if a value has other characters than a name, such as the path of other data.
    """
    texts = setting_texts(changes)
    exact = all(value == _clean(value) for _, _, value in (text.partition("=") for text in texts))
    return EVALUATION + _suffix(changes) + ("" if exact else f"-{_digest(' '.join(texts))}")


def setting_texts(changes: Mapping[str, Any]) -> list[str]:
    """Return KEY=VALUE for each change."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]


def _without_preset(values: Mapping[str, Any], swept: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return the name of the data or the task, and the changed keys that it does not imply."""
    changes = changed_keys(values, {})
    name = "" if "data" in swept else _clean(Path(values["data"]).stem).strip("-")
    if name:
        del changes["data"]
    if not name or "task" not in swept:
        changes.pop("task", None)
    return name or values["task"], changes


def _is_swept(key: str, swept: Collection[str]) -> bool:
    """Return whether a sweep varies a key, by itself or with all options of the task or the mixer."""
    group, dot, _ = key.partition(".")
    return key not in ("name", "seed") and (key in swept or (bool(dot) and f"{group}_options" in swept))


def _suffix(changes: Mapping[str, Any]) -> str:
    """Return "-KEYVALUE" or "-KEY-VALUE" for each change, the mixer first; a digest replaces those that do not fit."""
    keys = sorted(changes, key=lambda key: (key != "mixer", key))
    parts = [f"-{_change(key, changes[key])}" for key in keys]
    text = "".join(parts)
    if len(text) <= LONGEST:
        return text
    digest = f"-{_digest(text)}"
    while len("".join(parts)) > LONGEST - len(digest):
        parts.pop()
    return "".join(parts) + digest


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _change(key: str, value: Any) -> str:
    text = _clean(value if isinstance(value, str) else json.dumps(value))
    if not isinstance(value, int | float):
        text = text.strip("-")
    if key == "mixer":
        return text
    return f"{key}{text}" if text[:1].isdigit() else f"{key}-{text}"


def _clean(text: str) -> str:
    """Replace everything but letters, digits, '.', '_' and '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)
