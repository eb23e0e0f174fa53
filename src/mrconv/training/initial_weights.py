"""Training that begins with the weights of another model: fine-tuning, or a further schedule."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from mrconv.config import LayerOptions, VisionConfig
from mrconv.hub import CONFIG, MODEL, WEIGHTS, Model, model_folder
from mrconv.inference import load_model
from mrconv.layer import MRConv
from mrconv.mixers import mixer_class, option_defaults
from mrconv.tasks import Prepared
from mrconv.tasks.preprocessing import INPUTS_FILE, Preprocessor, load_preprocessor
from mrconv.tasks.vocabulary import END, SPECIAL, UNKNOWN

from . import rundir
from .checkpoint_files import check_same_model
from .other_data import difference, with_vocabulary

FREE = {
    "dropout", "tie_dropout", "drop_path", "layer_scale", "mask_padding", "momentum", "sync_stats", "stats_fraction",
    "backend", "merged", "seed", "mixer_options", "n_classes", "n_outputs", "per_position", "global_pool", "vocab_size",
    "d_input", "in_channels", "l_max", "image_size", "mixer.kernel_dropout", "mixer.init", "mixer.dt_min",
    "mixer.dt_max",
}  # fmt: skip
"""Options of a model that may differ from those of the initial one, or that are compared otherwise."""
HINTS = {"length": "task.length={}", "sample_rate": "task.sample_rate={}"}
"""Settings with which custom data gets a property of the initial model's data."""


def initial_model(init: str, run: Path) -> Path:
    """Return the folder of the model that `init` names, which for a run is the trained one."""
    given = Path(init).expanduser()
    folder = model_folder(given, MODEL)
    if run.resolve() in (given.resolve(), *given.resolve().parents):
        raise ValueError(f"init={init} is the folder of this run: give the run another name")
    if (folder / CONFIG).exists() and (folder / WEIGHTS).exists():
        return folder
    if not (given / rundir.CONFIG).exists():
        raise FileNotFoundError(f"init={init} is neither a run nor a saved model: it has no {CONFIG} and {WEIGHTS}")
    if (given / rundir.RESULT).exists():
        raise FileNotFoundError(f"init={init} is the record of a run without its weights")
    raise FileNotFoundError(f"init={init} is a run that has not ended: `mrconv finish {init}` saves its best weights")


def encoded(data: Prepared, folder: Path) -> Prepared:
    """Return data with the vocabulary of a saved model; raise ValueError if the model takes other inputs."""
    trained = load_preprocessor(folder)
    if trained is None:  # saved by `save_pretrained`: `load_initial_weights` compares what the model's config says
        return data
    _check_inputs(data, trained, folder, ("kind", "channels", "sample_rate", "height", "width", "length"))
    return with_vocabulary(data, trained)


def load_initial_weights(model: Model, data: Prepared, folder: Path) -> dict[str, Any]:
    """Give a new model the weights and statistics of a saved one; return what the run records of it.

    The head keeps its random weights if it predicts something else: other classes, another target, or values, whose
    units are those of the former data.
    """
    source = load_model(folder)
    _check_options(model, source, folder)
    trained = load_preprocessor(folder)
    if trained is None:
        trained = Preprocessor.from_config(source.config)
        if data.vocabulary != trained.vocabulary:
            raise ValueError(f"init: {folder} has no {INPUTS_FILE}, which names the symbols of a model")
        size = () if trained.height is None else ("height", "width")
        _check_inputs(data, trained, folder, ("length", *size, *(() if trained.vocabulary else ("channels",))))
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
    return {"weights_sha256": digest, "new_head": not same_head, "unknown_symbols": _unknown_share(data)}


def describe(init: str, initial: dict[str, Any]) -> str:
    """Return the line that a run prints when it starts."""
    head, share = "a new" if initial["new_head"] else "its", initial["unknown_symbols"]
    unknown = f"; {share:.2%} of the training symbols are {UNKNOWN}" if share else ""
    return f"starting from {init}, with {head} head{unknown}"


def _in_head(name: str) -> bool:
    return name.startswith(("head.", "hidden."))


def _unknown_share(data: Prepared) -> float:
    """Return which part of the training symbols is <unk>; 0 for values."""
    if UNKNOWN not in data.vocabulary:
        return 0.0
    return float((data.splits["train"].x == data.vocabulary.index(UNKNOWN)).mean())


def _check_inputs(data: Prepared, trained: Preprocessor, folder: Path, names: tuple[str, ...]) -> None:
    """Raise ValueError if a model does not take this data: another property of `names`, or other symbols."""
    current = Preprocessor.from_data(data)
    for name in names:
        if text := difference(current, trained, name, str(folder)):
            hint = HINTS.get(name, "").format(f"{getattr(trained, name):g}" if name in HINTS else "")
            raise ValueError(f"init: {text}" + (f"; custom data takes {hint}" if hint else ""))
    ends = [END in each.vocabulary for each in (current, trained)]
    if ends[0] != ends[1]:
        which = ("the model", "the data") if ends[1] else ("the data", "the model")
        raise ValueError(f"init: sequences of {which[0]} end with {END}, those of {which[1]} do not ({folder})")
    known = {*trained.vocabulary, *SPECIAL}
    lacking = [symbol for symbol in current.vocabulary if symbol not in known]
    characters = current.kind == trained.kind == "text"
    if lacking and not (characters and UNKNOWN in trained.vocabulary):
        why = f"and has no {UNKNOWN}" if characters else f"and only texts may have {UNKNOWN}"
        raise ValueError(
            f"init: the vocabulary of {folder} lacks {len(lacking)} of the data's symbols, the first {lacking[0]!r}, "
            f"{why}"
        )


def _check_options(model: Model, source: Model, folder: Path) -> None:
    """Raise ValueError if two models compute something else with the same weights; name the settings to add."""
    here, there = (json.loads(json.dumps(dataclasses.asdict(each.config))) for each in (model, source))
    if there["merged"]:
        raise ValueError(f"init: {folder} holds a merged model, without branches to train; give the run itself")
    if isinstance(model.config, VisionConfig) != isinstance(source.config, VisionConfig):
        kinds = (type(each).__name__ for each in (source, model))
        raise ValueError("init: {} holds a {}, this run trains a {}; task.sequence decides".format(folder, *kinds))
    if there.get("rate", 1) != 1:
        raise ValueError(f"init: the model in {folder} runs at rate {there['rate']:g}; give the one that was trained")
    for each in (here, there):
        if each["norm"] is None:
            each["norm"] = "scale" if each["combine"] == "concat" else "batch"
    if here["mixer"] != there["mixer"]:
        here["mixer_options"] = None
    given = {name for each in (there, here) for name in each["mixer_options"] or {}}
    theirs, ours = (_with_mixer_options(each, there["mixer"], given) for each in (there, here))
    compared = (theirs.keys() & ours.keys()) - _free(source)
    different = [name for name in theirs if name in compared and theirs[name] != ours[name]]
    values = [theirs[name] if isinstance(theirs[name], str) else json.dumps(theirs[name]) for name in different]
    settings = [shlex.quote(f"{name}={value}") for name, value in zip(different, values, strict=True)]
    if settings:
        raise ValueError(f"init: the model in {folder} has other settings; add {' '.join(settings)}")


def _free(model: Model) -> set[str]:
    """Return the options that may differ from a model's: those of MRConv too if it has none."""
    if any(isinstance(module, MRConv) for module in model.modules()):
        return FREE
    return FREE | {field.name for field in dataclasses.fields(LayerOptions)} - {"bidirectional"}


def _with_mixer_options(config: dict[str, Any], mixer: str, given: set[str]) -> dict[str, Any]:
    """Return a model's options and, as mixer.NAME, those of its baseline, shared ones only if they are given."""
    if mixer in ("mrconv", "conv"):
        return config
    cls = mixer_class(mixer)
    shared = set(config) if MRConv in cls.option_sources else {"bidirectional"}
    defaults = {name: z for name, z in option_defaults(cls).items() if name not in shared or name in given}
    options = defaults | {name: config[name] for name in defaults if name in shared} | (config["mixer_options"] or {})
    return config | {f"mixer.{name}": json.loads(json.dumps(z, default=str)) for name, z in options.items()}
