"""A trained run, scored and merged again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mrconv import MRConv, MRConvNeXt, inference, reparameterize
from mrconv.example_inputs import random_inputs
from mrconv.hub import MERGED, MODEL, Model
from mrconv.inference import load_model
from mrconv.kernels import resampled
from mrconv.mixers import Mixer
from mrconv.tasks import Prepared
from mrconv.tasks.preprocessing import Preprocessor, load_preprocessor

from .composition import compose, hydra_overrides
from .datamodule import prepare
from .experiment import Experiment
from .loop import check_options, read_run, score
from .scores import SCORES

CHANGEABLE = {
    "data", "data_dir", "cache_dir", "task", "task_options", "rate", "batch_size", "limit_eval", "pad", "workers"
}  # fmt: skip


def with_settings(experiment: Experiment, settings: Sequence[str]) -> Experiment:
    """Return the experiment with some values changed, KEY=VALUE as on the command line."""
    if not settings:
        return experiment
    typed = compose(settings)  # also checks them
    names = {text.partition("=")[0].lstrip("+").split(".")[0] for text in hydra_overrides(settings)}
    fixed = sorted(names - CHANGEABLE)
    if fixed:
        raise ValueError(f"{fixed[0]} cannot be changed when evaluating; {', '.join(sorted(CHANGEABLE))} can")
    changes = {name: getattr(typed, name) for name in names}
    if "task_options" in changes:
        changes["task_options"] = experiment.task_options | changes["task_options"]
    return dataclasses.replace(experiment, **changes)


def evaluate(
    folder: Path, settings: Sequence[str] = (), merged: bool = True, device: str | None = None
) -> dict[str, float]:
    """Return a run's score by split; at another rate or picture size, the model is sampled anew and merged there.

    A run whose merged model was left out, which can be many times larger than the trained one, is merged again. All
    rows are scored, also of a run that was trained with a limit, unless the settings have one.
    """
    trained = dataclasses.replace(read_run(folder), limit_eval=0)
    experiment = with_settings(trained, settings)
    check_options(experiment)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data, known, rate = prepare(experiment), load_preprocessor(folder / MODEL), experiment.rate / trained.rate
    if known is not None:
        data = as_trained(data, known if rate == 1 else known.at_rate(rate), f"the model in {folder}")
    if rate == 1 and merged and (folder / MERGED).exists():
        model = load_model(folder / MERGED)
    else:
        model = load_model(folder / MODEL)
        if rate != 1 and any(isinstance(m, Mixer) and not isinstance(m, MRConv) for m in model.modules()):
            merged = False  # a baseline takes its rate with every call
        if merged:
            reparameterize(model, rate)
    size = data.facts.get("size")
    if merged and isinstance(model, MRConvNeXt) and model.image_size != (size, size):
        model = load_model(folder / MODEL).resized(size)  # type: ignore[operator]
    return score(model.to(place), data, experiment, place, None if merged else rate)


def as_trained(data: Prepared, known: Preprocessor, model: str) -> Prepared:
    """Return data normalised as a model's own was; refuse data of another kind than the model takes."""
    own = Preprocessor.from_data(data)
    if known.vocabulary != own.vocabulary:
        raise ValueError(
            f"the data has {len(own.vocabulary)} symbols, other ones than the {len(known.vocabulary)} that {model} "
            "knows"
        )
    for name in ("kind", "channels", "sampling_rate", "classes"):
        there, here = _told(known, name), _told(own, name)
        if there != here:
            raise ValueError(f"{name.replace('_', ' ')} of the data: {here:.200}; of {model}: {there:.200}")
    each = known.scale.ndim == 2 and len(known.scale) > 1  # position its own way, which is a part of the task
    if own.vocabulary or data.facts.get("files") or each:
        return data
    return dataclasses.replace(data, scale=known.scale, shift=known.shift)


def _told(inputs: Preprocessor, name: str) -> str:
    """Return a value as a message tells it; pictures are values of another name where they are not decimated."""
    value = getattr(inputs, name)
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(value) if isinstance(value, tuple) else str(value).replace("image", "values")


def merge(folder: Path, rate: float | None = None, out: Path | None = None) -> tuple[Path, float, tuple[int, int]]:
    """Merge a run's model, compare it with the branches on random inputs, save it; return where, error and sizes."""
    read_run(folder)  # or tell that it is none
    rate = None if rate == 1 else rate
    model, merged = load_model(folder / MODEL).eval(), load_model(folder / MODEL)
    if rate is not None and isinstance(model, MRConvNeXt):
        raise ValueError("images have no sampling rate: for images of another size use model.resized(image_size)")
    reparameterize(merged, rate)
    for layer in model.modules():
        if isinstance(layer, MRConv):
            layer.backend = "reference"  # N convolutions and N BatchNorms, to compare with
    error = difference(model, merged, rate)
    if not error < 1e-3:
        raise ValueError(f"{folder}: merged and unmerged logits differ by {error:.1e}, relative; nothing was saved")
    out = out or folder / (MERGED if rate is None else f"{MERGED}-{rate:g}")
    inputs = load_preprocessor(folder / MODEL)
    if rate is not None:
        for metric in SCORES:
            merged.results.pop(metric, None)  # it was that at the rate of training
    inference.save(merged, out, inputs if inputs is None or rate is None else inputs.at_rate(rate))
    before, after = (sum(p.numel() for p in each.parameters()) for each in (model, merged))
    return out, error, (before, after)


@torch.no_grad()
def difference(model: Model, merged: Model, rate: float | None) -> float:
    """Return the largest difference of two models' logits on random inputs, relative to the largest logit."""
    config: Any = model.config
    inputs = random_inputs(model, 2, None if rate is None else resampled(config.l_max, rate))
    a, b = model(*inputs, rate=rate), merged(*inputs)
    return float((a - b).abs().max() / a.abs().max())
