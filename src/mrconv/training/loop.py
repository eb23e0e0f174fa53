"""A run: train, evaluate, merge and record."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import nn

from mrconv import inference, reparameterize
from mrconv._utils.progress_bar import progress_bar
from mrconv.hub import MERGED, MODEL, Model, read_json
from mrconv.inference.saved_models import save_preprocessor
from mrconv.tasks import BatchLoader, Prepared, task_class
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.tasks.progress_callback import Progress, ProgressCounter, no_progress

from . import rundir
from .checkpoint_files import (
    BEST,
    LAST,
    PREVIOUS,
    check_same_model,
    find_problem,
    latest_valid_checkpoint,
    model_weights,
)
from .checkpoints import Checkpoints, data_of_checkpoint, read_step, restore_files
from .compilation import worth_compiling
from .datamodule import EVALUATION_BATCHES, TaskData, make_loader, prepare
from .experiment import Experiment
from .figures import draw_run
from .initial_weights import describe, encoded, initial_model, load_initial_weights
from .module import NonFiniteError, Training, average_statistics, build_model
from .outputs import model_outputs
from .plugin_records import check_registered
from .progress import EpochProgress
from .run_names import recipe_changes
from .scores import SCORES
from .targets import TARGETS
from .trainer import logger_errors_raised_once, make_trainer

ALL = "all"
"""Split of data that is scored as a whole."""


def train(
    experiment: Experiment, folder: Path, progress: Progress = no_progress, quiet: bool = False
) -> dict[str, Any]:
    """Train in a run folder, resuming from its last checkpoint if there is one; record and return the result.

    Args:
        progress: called with the completed and the total amount while data is prepared.
        quiet: print no progress.
    """
    experiment.check()
    check_options(experiment)
    if any((folder / name).exists() for name in (LAST, PREVIOUS, BEST, rundir.RESULT)):
        rundir.check_same_experiment(experiment, folder)
    if (result := _recorded(experiment, folder)) is not None:
        if not quiet and rundir.is_rank_zero():
            print(f"{folder} is complete; its recorded result:", flush=True)
        return result
    pl.seed_everything(experiment.seed, workers=True, verbose=False)
    data = _training_data(experiment, folder, progress)
    progress(1, 1)  # ends the progress bar, even if the task reported less
    if not quiet and rundir.is_rank_zero() and "changes" in data.facts:
        print(f"{data.name}: {data.facts['changes']}", flush=True)
    datamodule, model = TaskData(experiment, data), build_model(experiment, data)
    folder.mkdir(parents=True, exist_ok=True)
    with rundir.run_lock(folder):
        return _train(folder, datamodule, model, quiet)


def _training_data(experiment: Experiment, folder: Path, progress: Progress = no_progress) -> Prepared:
    """Return the experiment's data, encoded for the model that training begins with."""
    data = prepare(experiment, progress)
    if not experiment.init:
        return data
    resumes = any((folder / name).exists() for name in (LAST, PREVIOUS))  # then the initial model is not needed
    return encoded(data, folder / MODEL if resumes else initial_model(experiment.init, folder))


def _recorded(experiment: Experiment, folder: Path) -> dict[str, Any] | None:
    """Return the recorded result of a run that has reached the experiment's last epoch, else None."""
    if not (folder / rundir.RESULT).exists():
        return None
    result = rundir.read_result(folder)
    ended = not result["partial"] or result.get("epochs_done", 0) >= experiment.last_epoch
    return dict(result) if ended else None


def _train(folder: Path, datamodule: TaskData, model: Model, quiet: bool) -> dict[str, Any]:
    experiment, data, checkpoint = datamodule.experiment, datamodule.data, latest_valid_checkpoint(folder)
    if checkpoint is not None:
        data = data_of_checkpoint(checkpoint, data)
        datamodule = TaskData(experiment, data)
        content = torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)
        check_same_model(checkpoint, model_weights(content), model)
    initial = None
    if experiment.init and checkpoint is None:
        initial = load_initial_weights(model, data, initial_model(experiment.init, folder))
    elif experiment.init and (folder / rundir.ENVIRONMENT).exists():
        initial = read_json(folder / rundir.ENVIRONMENT).get("initial")
    metric = SCORES[data.metric]
    checkpoints = Checkpoints(folder, datamodule, experiment.checkpoint_minutes)
    checkpoints.last_is_valid = checkpoint == folder / LAST
    trainer = make_trainer(experiment, folder, [checkpoints] if quiet else [checkpoints, EpochProgress(metric)])
    steps = datamodule.steps_per_epoch(trainer.world_size)
    if steps == 0:
        raise ValueError(
            f"{data.examples_per_epoch('train', True)} training examples do not fill one batch of "
            f"{experiment.batch_size} on each of {trainer.world_size} device(s): lower batch_size"
        )
    if checkpoint is not None and read_step(checkpoint) > experiment.last_epoch * steps:
        raise ValueError(
            f"stop_after={experiment.stop_after} is before {checkpoint}, where the run resumes: give a larger one, or "
            f"record the run as it is with `mrconv finish {folder}`"
        )
    compiled = experiment.compile
    if compiled is None:  # stop_after does not matter, so that a run computes the same with and without a stop
        single_gpu = isinstance(trainer.accelerator, CUDAAccelerator) and trainer.world_size == 1
        compiled = single_gpu and worth_compiling(model, steps * experiment.epochs, datamodule.shapes)
    few_shapes = datamodule.shapes < math.inf
    target = TARGETS[data.target](data, experiment.label_smoothing, experiment.class_weights)
    training = Training(experiment, model, target, metric, steps, datamodule.evaluated, few_shapes, compiled)
    if datamodule.monitored_metric not in ("loss", metric.name):
        training.monitor(datamodule.monitored, data)
    if trainer.is_global_zero:
        facts = {"precision": trainer.precision, "compiled": compiled, **({"initial": initial} if initial else {})}
        _write_start(experiment, folder, checkpoint, Preprocessor.from_data(data), facts)
        if checkpoint is not None and not quiet:
            done = read_step(checkpoint)
            epochs = f"{done // steps} of {experiment.epochs} epochs"
            print(f"resuming from {checkpoint}: {epochs}, {done:,} steps are done", flush=True)
        elif initial and not quiet:
            print(describe(experiment.init, initial), flush=True)
    try:
        with logger_errors_raised_once():
            trainer.fit(training, datamodule, ckpt_path=checkpoint, weights_only=True)
    except SIGTERMException:
        raise SystemExit(143) from None  # Lightning would exit with 0, but the run is not complete
    except NonFiniteError as error:
        valid = latest_valid_checkpoint(folder)
        where = f"the last valid checkpoint is {valid}" if valid else "there is no earlier checkpoint"
        raise NonFiniteError(f"{error}; {where}") from error
    if not trainer.is_global_zero:
        return {}
    return _record(folder, datamodule, checkpoints, quiet)


def _write_start(
    experiment: Experiment, folder: Path, checkpoint: Path | None, preprocessor: Preprocessor, facts: dict[str, Any]
) -> None:
    """Write the config, the environment and the description of the inputs of a run that starts or resumes."""
    rundir.remove_stale_drafts(folder)
    save_preprocessor(preprocessor, folder / MODEL)  # before hours of training, should it be impossible
    config = dataclasses.asdict(experiment)
    rundir.write_config(folder / rundir.CONFIG, config)
    step = 0 if checkpoint is None else restore_files(folder, checkpoint)
    changes = recipe_changes(config)  # recorded, because presets change
    environment = {**rundir.environment(), **facts, "changes": changes, "command": rundir.command_line()}
    path = folder / rundir.ENVIRONMENT
    rundir.write_json(path, rundir.environment_history(environment, path, step))


def check_options(experiment: Experiment) -> None:
    """Reject task options whose type differs from that of their default."""
    for field in dataclasses.fields(task_class(experiment.task)):
        value = experiment.task_options.get(field.name, field.default)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise ValueError(f"task.{field.name} must be true or false; got {value!r}")
        if isinstance(field.default, int | float) and not isinstance(value, int | float):
            raise ValueError(f"task.{field.name} must be a number; got {value!r}")


def _record(folder: Path, datamodule: TaskData, checkpoints: Checkpoints, quiet: bool = False) -> dict[str, Any]:
    """Score the best weights, merge them, score again, and write models, figures and result."""
    experiment, data = datamodule.experiment, datamodule.data
    seconds, environment = checkpoints.seconds, read_json(folder / rundir.ENVIRONMENT)
    model, best_epoch, substitution = load_best_model(folder, data, experiment)
    parameters = sum(p.numel() for p in model.parameters())
    device = torch.device("cuda" if torch.cuda.is_available() and experiment.accelerator != "cpu" else "cpu")
    if experiment.precise_stats and environment.get("precision") == "bf16-mixed":
        # the statistics of the checkpoint are those of activations in bfloat16; the saved model computes in float32
        average_statistics(model.to(device), datamodule.statistics_batches(best_epoch - 1, device))
    epochs_done, preprocessor = len(checkpoints.history), Preprocessor.from_data(data)
    ended = epochs_done < experiment.epochs  # before its last epoch
    facts = {"name": experiment.name, "task": experiment.task, "epochs": epochs_done, "seed": experiment.seed}
    scores = {}
    for name in (MODEL, MERGED):
        if name == MERGED:
            reparameterize(model)
        with nullcontext(no_progress) if quiet else progress_bar(f"scoring {experiment.name}, {name}") as progress:
            scores[name] = score(model.to(device), data, experiment, device, progress=progress)
        model.results = facts | {data.metric: scores[name]}
        inference.save(model.cpu(), folder / name, preprocessor)
    result = {
        "name": experiment.name,
        "task": experiment.task,
        "partial": ended and not checkpoints.stops_early,
        **({"stopped_early": True} if ended and checkpoints.stops_early else {}),
        "metric": data.metric,
        data.metric: scores[MODEL],
        f"merged_{data.metric}": scores[MERGED],
        "best_epoch": best_epoch,
        **({"substitution": substitution} if substitution else {}),
        "watched": checkpoints.monitored,  # a key of recorded results; codespell:ignore watched
        "epochs": experiment.epochs,
        "epochs_done": epochs_done,
        "parameters": parameters,
        "merged_parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds, 1),
        "seed": experiment.seed,
        "command": environment.pop("command", None),
        "examples": {name: len(split) for name, split in data.splits.items()},
        "classes": len(data.classes),
        "data": rundir.scalar_facts(data.facts),
        "environment": environment,
        **({"rounded_moments_at": rounded} if (rounded := checkpoints.rounded_moments_at) else {}),
        "config": dataclasses.asdict(experiment),
    }
    best = checkpoints.best_scores()
    if checkpoints.keeps_last_epoch and best_epoch == epochs_done and best is not None:
        result["best_on_test"] = {"epoch": best["epoch"], data.metric: best[f"test/{data.metric}"]}
    draw_run(folder, result=result)
    rundir.write_json(folder / rundir.RESULT, result)  # last: its presence marks the run as recorded
    return result


def finish(folder: Path) -> dict[str, Any]:
    """Record the result of a run at its last checkpoint; `train` can still resume it.

    The recorded environment remains that of the training.
    """
    experiment, checkpoint = rundir.read_run(folder), latest_valid_checkpoint(folder)
    check_registered(experiment, folder)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder} has no {LAST} or {PREVIOUS} that can be read")
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["mrconv"]
    if not state["history"]:
        raise ValueError(f"{folder}: no epoch is complete yet")
    data = data_of_checkpoint(checkpoint, _training_data(experiment, folder))
    with rundir.run_lock(folder):
        restore_files(folder, checkpoint)
        datamodule = TaskData(experiment, data)
        checkpoints = Checkpoints(folder, datamodule, 0)
        checkpoints.restore(state)
        return _record(folder, datamodule, checkpoints)


def load_best_model(folder: Path, data: Prepared, experiment: Experiment) -> tuple[Model, int, dict[str, Any]]:
    """Return the model with the best readable weights of a run, unmerged and in eval mode, and their epoch.

    Its outputs are in the units of the data. The last value is empty, or names the checkpoint that was used in place of
    the best weights, and why.
    """
    path = latest_valid_checkpoint(folder, (BEST, LAST, PREVIOUS))
    if path is None:
        raise FileNotFoundError(f"{folder} has no checkpoint that can be read")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model, weights = build_model(experiment, data), model_weights(checkpoint)
    check_same_model(path, weights, model)
    model.load_state_dict(weights)
    TARGETS[data.target](data).fold_units(model)
    substitution = {}
    if path.name != BEST:
        substitution = {"used": path.name, "instead_of": BEST, "why": find_problem(folder / BEST)}
    return model.eval(), checkpoint["epoch"] + 1, substitution


def evaluation_loaders(data: Prepared, experiment: Experiment) -> dict[str, BatchLoader]:
    """Return loaders of validation and test, or of ALL, over all examples or `limit_eval` batches of the split."""
    e = experiment
    size, options = EVALUATION_BATCHES * e.batch_size, {"bucket": True, "pad": e.pad, "train": False}
    return {
        name: make_loader(data, name, size, None, e.workers, e.limit_eval, **options)
        for name in ("val", "test", ALL)
        if name in data.splits
    }


@torch.no_grad()
def score(
    model: nn.Module,
    data: Prepared,
    experiment: Experiment,
    device: torch.device,
    rate: float | None = None,
    progress: Progress = no_progress,
) -> dict[str, float]:
    """Return the score on validation and test, over all examples or `limit_eval` batches of the split."""
    model.eval()
    metric, scores = SCORES[data.metric], {}
    target = TARGETS[data.target](data).to(device)
    loaders = evaluation_loaders(data, experiment)
    count = ProgressCounter(progress, sum(len(loader) for loader in loaders.values()))
    for name, loader in loaders.items():
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for _, output, y in model_outputs(model, loader, device, rate, count):
            sums += torch.stack(metric.sums(output, y, target.loss(output, y)))
        scores[name] = float(sums[0] / sums[1])
    return scores
