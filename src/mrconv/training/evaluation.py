"""Evaluation and merging of trained runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mrconv import MRConv, MRConvNeXt, inference, reparameterize
from mrconv._utils.accuracy import allowed_error, relative_error, rounded_copies
from mrconv.example_inputs import random_inputs
from mrconv.hub import MERGED, MODEL, Model
from mrconv.inference import load_model
from mrconv.kernels import resampled
from mrconv.mixers import Mixer
from mrconv.tasks import Batch, Prepared
from mrconv.tasks.preprocessing import load_preprocessor
from mrconv.tasks.progress_callback import Progress, ProgressCounter, no_progress

from .composition import compose, hydra_overrides
from .datamodule import NOT_AUGMENTED, TaskData, prepare
from .experiment import Experiment
from .loop import ALL, check_options
from .measurement import Measurement, measure
from .module import average_statistics
from .other_data import as_trained, undrawn, with_vocabulary
from .plugin_records import check_registered
from .run_names import UNNAMED, changed_keys
from .rundir import read_run
from .scores import SCORES

CHANGEABLE_FOR_EVALUATION = {
    "data", "data_dir", "cache_dir", "task", "task_options", "rate", "batch_size", "limit_eval", "pad", "workers",
    "plugins",
}  # fmt: skip
MAX_ERROR = 1e-3
"""Largest relative error of merged logits, unless the model's own errors of rounding are larger."""


def with_settings(experiment: Experiment, settings: Sequence[str]) -> Experiment:
    """Return the experiment with some values changed, KEY=VALUE as on the command line."""
    if not settings:
        return experiment
    changed = compose(settings)  # also checks the settings
    names = {text.partition("=")[0].lstrip("+").split(".")[0] for text in hydra_overrides(settings)}
    fixed = sorted(names - CHANGEABLE_FOR_EVALUATION)
    if fixed:
        allowed = ", ".join(sorted(CHANGEABLE_FOR_EVALUATION))
        raise ValueError(f"{fixed[0]} cannot be changed for an evaluation; {allowed} can")
    changes = {name: getattr(changed, name) for name in names}
    if "task_options" in changes:
        changes["task_options"] = experiment.task_options | changes["task_options"]
    if "data" in changes and experiment.task == "folder":
        options = changes.get("task_options", experiment.task_options)
        changes["task_options"] = undrawn(options, list(changed.task_options))
    return dataclasses.replace(experiment, **changes)


def _score_changes(trained: Experiment, experiment: Experiment, recalibrate: bool) -> dict[str, Any]:
    """Return the settings of an evaluation that differ from the run's and may change its scores.

    `data_dir` and `cache_dir` count as other places of the same data. `limit_eval` is a number of batches, and
    statistics are averages over batches.
    """
    changed = changed_keys(dataclasses.asdict(experiment), dataclasses.asdict(trained))
    same = (UNNAMED - {"pad"}) | (set() if experiment.limit_eval or recalibrate else {"batch_size"})
    return {key: value for key, value in changed.items() if key not in same}


def evaluate(
    folder: Path,
    settings: Sequence[str] = (),
    merged: bool = True,
    device: str | None = None,
    progress: Progress = no_progress,
) -> dict[str, float]:
    """Return the score of a run by split; `measure_run` returns all metrics."""
    measured = measure_run(folder, settings, merged, device=device, progress=progress)
    return {split: values[measured.data.metric] for split, values in measured.metrics.items()}


def measure_run(
    folder: Path,
    settings: Sequence[str] = (),
    merged: bool = True,
    recalibrate: bool = False,
    device: str | None = None,
    progress: Progress = no_progress,
) -> Measurement:
    """Return the metrics and predictions of a run.

    At another rate or image size, the kernels are resampled and merged again. A run may have no merged model, which can
    be much larger than the trained one; the trained model is then merged first. All examples of validation and test are
    scored, unless the settings limit them; of other custom data without given splits, all examples. With `recalibrate`,
    every BatchNorm first averages its statistics over training examples of the evaluated data, or over all examples of
    data without splits, at its rate.
    """
    trained = dataclasses.replace(read_run(folder), limit_eval=0)
    experiment = with_settings(trained, settings)
    check_registered(experiment, folder)
    check_options(experiment)
    options = {"branches": not merged, "recalibrate": recalibrate}
    changes = _score_changes(trained, experiment, recalibrate)
    changes |= {name: True for name, given in options.items() if given}
    target = _device(device)
    rate = experiment.rate / trained.rate
    data = _prepare_as_trained(folder, experiment, rate, progress)
    if rate == 1 and merged and not recalibrate and (folder / MERGED).exists():
        model = load_model(folder / MERGED)
    else:
        model = load_model(folder / MODEL)
        if recalibrate:
            _recalibrate(model, data, experiment, target, rate, progress)
        if rate != 1 and any(isinstance(m, Mixer) and not isinstance(m, MRConv) for m in model.modules()):
            merged = False  # baselines take the rate with every call
        if merged:
            reparameterize(model, rate)
    if merged and isinstance(model, MRConvNeXt) and model.image_size != data.image_size:
        model = load_model(folder / MODEL).resized(data.image_size)  # type: ignore[operator]
    measured = measure(model.to(target), data, experiment, target, None if merged else rate, progress)
    return dataclasses.replace(measured, merged=merged, changes=changes)


def _device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _prepare_as_trained(folder: Path, experiment: Experiment, rate: float, progress: Progress) -> Prepared:
    """Return an experiment's data as the model of a run takes it at a rate; a split ALL if there is none to score."""
    data, preprocessor = prepare(experiment, progress), load_preprocessor(folder / MODEL)
    if not {"val", "test"} & set(data.splits):  # other data, of which all is scored
        data = dataclasses.replace(
            data, splits={**data.splits, ALL: dataclasses.replace(data.splits["train"], name=ALL)}
        )
    if preprocessor is None:
        return data
    if experiment.init and experiment.data == read_run(folder).data:
        data = with_vocabulary(data, preprocessor)  # as in training
    return as_trained(data, preprocessor if rate == 1 else preprocessor.at_rate(rate), f"the model in {folder}")


def _recalibrate(
    model: Model, data: Prepared, experiment: Experiment, device: torch.device, rate: float, progress: Progress
) -> None:
    """Average the statistics of every BatchNorm over training examples of `data`, as before a validation."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ValueError("the model has no BatchNorm, so there are no statistics to recalibrate")
    if isinstance(model, MRConvNeXt) and model.image_size != data.image_size:
        raise ValueError(
            f"statistics can be recalibrated for images of the training size, {model.image_size}; got {data.image_size}"
        )
    examples = data.examples_per_epoch("train", True) if "train" in data.splits else 0
    if not examples:
        raise ValueError(f"{data.name} has no training examples to recalibrate with; it has {', '.join(data.splits)}")
    size = min(experiment.batch_size, examples)
    count = min(experiment.precise_stats or Experiment.precise_stats, examples // size)
    experiment = dataclasses.replace(experiment, precise_stats=count, batch_size=size, monitor="", **NOT_AUGMENTED)
    # TaskData requires a split to monitor, which other data may lack; it is not used
    splits = dict.fromkeys(("train", "val"), data.splits["train"])
    datamodule = TaskData(experiment, dataclasses.replace(data, splits=splits))
    counter = ProgressCounter(progress, count)

    def batches() -> Iterator[Batch]:
        for batch in datamodule.statistics_batches(0, device):
            yield batch
            counter()

    average_statistics(model.to(device), batches(), None if rate == 1 else rate)


def merge(
    folder: Path,
    rate: float | None = None,
    out: Path | None = None,
    recalibrate: bool = False,
    device: str | None = None,
    progress: Progress = no_progress,
) -> tuple[Path, float, tuple[int, int]]:
    """Merge a run's model, compare it with its branches on random inputs and save it.

    With `recalibrate`, every BatchNorm first averages its statistics over training examples of the run, at the rate.

    Returns:
        The folder, the largest relative difference of the logits, and the parameters before and after.
    """
    trained = read_run(folder)  # raises if it is not a run
    rate = None if rate == 1 else rate
    model = load_model(folder / MODEL)
    if rate is not None and isinstance(model, MRConvNeXt):
        raise ValueError("images have no sampling rate: for images of another size use model.resized(image_size)")
    if recalibrate:
        experiment = dataclasses.replace(trained, rate=trained.rate * (rate or 1))
        check_registered(experiment, folder)
        data = _prepare_as_trained(folder, experiment, rate or 1, progress)
        _recalibrate(model, data, experiment, _device(device), rate or 1, progress)
        model.cpu()
    merged = reparameterize(copy.deepcopy(model), rate)
    for layer in model.eval().modules():
        if isinstance(layer, MRConv):
            layer.backend = "reference"  # N convolutions and N BatchNorms
    error, allowed = merging_error(model, merged, rate)
    if not error < allowed:
        raise ValueError(f"{folder}: the logits of the merged model differ by {error:.1e}, relative; nothing was saved")
    name = MERGED + ("" if rate is None else f"-{rate:g}") + ("-recalibrated" if recalibrate else "")
    out = out or folder / name
    preprocessor = load_preprocessor(folder / MODEL)
    if rate is not None or recalibrate:
        for metric in SCORES:
            merged.results.pop(metric, None)  # the score at the rate of training, with its statistics
    if preprocessor is not None and rate is not None:
        preprocessor = preprocessor.at_rate(rate)
    inference.save(merged, out, preprocessor)
    before, after = (sum(p.numel() for p in each.parameters()) for each in (model, merged))
    return out, error, (before, after)


@torch.no_grad()
def merging_error(model: Model, merged: Model, rate: float | None) -> tuple[float, float]:
    """Return the error of a merged model's logits for random inputs, relative to float64, and the one allowed."""
    config: Any = model.config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = random_inputs(model, 2, None if rate is None else resampled(config.l_max, rate))
        models = rounded_copies(model)
    wide = (x.double() if x.is_floating_point() else x for x in inputs)
    exact = copy.deepcopy(model).double()(*wide, rate=rate)
    return relative_error(merged(*inputs), exact), allowed_error(
        MAX_ERROR, models, lambda each: each(*inputs, rate=rate), exact
    )
