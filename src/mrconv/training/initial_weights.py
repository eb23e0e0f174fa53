"""Training that begins with the weights of another model: fine-tuning, or a further schedule."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mrconv.hub import CONFIG, MODEL, WEIGHTS, Model, model_folder, read_json
from mrconv.inference import load_model
from mrconv.tasks import Prepared
from mrconv.tasks.preprocessing import Preprocessor, load_preprocessor

from .checkpoint_files import check_same_model
from .experiment import ARCHITECTURE
from .other_data import with_vocabulary


def inherited(settings: Sequence[str]) -> list[str]:
    """Return the architecture of the initial model as settings, unless an experiment sets the architecture."""
    given = {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in settings)}
    init = given.get("init")
    if not init or "experiment" in given:
        return []
    architecture = _architecture(read_json(_folder(init) / CONFIG))
    for key, value in architecture.items():
        if key in given and yaml.safe_load(given[key]) != value:
            raise ValueError(f"init={init}: its model has {key}={value}; leave out {key}={given[key]}")
    return [f"{key}={json.dumps(value)}" for key, value in architecture.items()]


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `ARCHITECTURE` that a model's config has, and the options of its mixer as mixer.KEY."""
    values = {key: config[key] for key in ARCHITECTURE if key in config}
    if "norm" in values and values["norm"] is None:
        values["norm"] = "scale" if values["combine"] == "concat" else "batch"
    options = values.pop("mixer_options", None) or {}
    return values | {f"mixer.{name}": value for name, value in options.items()}


def encoded_for(data: Prepared, init: str, run: Path) -> Prepared:
    """Return tokens with the vocabulary of the initial model, or of a run that has begun with it."""
    trained = load_preprocessor(run / MODEL) or load_preprocessor(_folder(init))
    return data if trained is None else with_vocabulary(data, trained)


def load_initial_weights(model: Model, data: Prepared, init: str) -> dict[str, Any]:
    """Give a new model the weights and statistics of a saved one; return what the run records of it.

    The head keeps its random weights if it predicts something else: other classes, another target, or values, whose
    units are those of the former data.
    """
    folder = _folder(init)
    source = load_model(folder)
    trained = load_preprocessor(folder) or Preprocessor.from_config(source.config)
    _check_fits(model, data, source, trained, init)
    same_head = type(source) is type(model) and data.target == trained.target != "values"
    same_head = same_head and data.classes == trained.classes
    weights, random = source.state_dict(), model.state_dict()
    if not same_head:
        body = {name: x for name, x in weights.items() if not _in_head(name)}
        weights = body | {name: x for name, x in random.items() if _in_head(name)}
    check_same_model(folder, weights, model)
    model.load_state_dict(weights)
    with (folder / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"weights_sha256": digest, "new_head": not same_head}


def _folder(init: str) -> Path:
    """Return the folder of the model that `init` names, the trained one of a run."""
    folder = model_folder(Path(init).expanduser(), MODEL)
    if not (folder / CONFIG).exists():
        raise FileNotFoundError(f"init={init} is neither a run nor a saved model: {folder} has no {CONFIG}")
    return folder


def _in_head(name: str) -> bool:
    return name.startswith(("head.", "hidden."))


def _check_fits(model: Model, data: Prepared, source: Model, trained: Preprocessor, init: str) -> None:
    """Raise ValueError if a model is not trained further as it is here: other options, length or vocabulary."""
    here, there = (json.loads(json.dumps(dataclasses.asdict(each.config))) for each in (model, source))
    if there.get("merged"):
        raise ValueError(f"init={init}: its model is merged and has no branches to train; give the run itself")
    ours, theirs = _architecture(here), _architecture(there)
    for key in theirs:
        if key in ours and ours[key] != theirs[key]:
            raise ValueError(f"init={init}: its model has {key}={theirs[key]}, this run {key}={ours[key]}")
    rate, current = trained.sample_rate, data.facts.get("sample_rate")
    if rate and current and rate != current:
        raise ValueError(
            f"init={init}: its model takes {rate:,g} samples a second, the data has {current:,g}; custom data takes "
            f"task.sample_rate={rate:g}"
        )
    if (length := there.get("l_max")) != here.get("l_max"):
        raise ValueError(
            f"init={init}: its model has the length {length:,}, the data {data.length:,}; custom data takes "
            f"task.length={length}, with task.cut=true if it has longer examples"
        )
    if data.vocabulary != trained.vocabulary:
        raise ValueError(
            f"init={init}: its vocabulary of {len(trained.vocabulary)} symbols has no <unk> and lacks some of the "
            f"{len(data.vocabulary)} symbols of the data"
        )
