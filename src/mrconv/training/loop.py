"""A whole run: train, evaluate, merge, record."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import yaml
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import nn

from mrconv import inference, reparameterize
from mrconv.hub import MERGED, MODEL, Model, read_json
from mrconv.tasks import Prepared, task_class
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.tasks.progress_callback import Progress, no_progress

from . import rundir as record
from .checkpoints import BEST, LAST, PREVIOUS, AtomicIO, Checkpoints, check_data, last_good, settle
from .datamodule import EVALUATED, TaskData, make_loader, prepare
from .experiment import Experiment
from .figures import draw_run
from .module import NotFinite, Training, build_model, cross_entropy, logits, worth_compiling
from .progress import EpochProgress
from .scores import SCORES

MACHINE = {
    "data_dir", "cache_dir", "loader", "workers", "accelerator", "strategy", "compile", "graphs", "backend",
    "checkpoint_minutes", "wandb", "out",
}  # fmt: skip
"""What may differ when a run goes on."""


def train(
    experiment: Experiment, folder: Path, progress: Progress = no_progress, quiet: bool = False
) -> dict[str, Any]:
    """Train in a run folder, going on from its last checkpoint if there is one; return the result, which it records."""
    experiment.check()
    check_options(experiment)
    check_same(experiment, folder)
    if (folder / record.RESULT).exists() and not read_result(folder)["partial"]:
        return dict(read_result(folder))
    pl.seed_everything(experiment.seed, workers=True, verbose=False)
    data = prepare(experiment, progress)
    progress(1, 1)  # complete, whatever the task has reported
    module, model = TaskData(experiment, data), build_model(experiment, data)
    folder.mkdir(parents=True, exist_ok=True)
    with record.alone(folder):
        return _train(folder, module, model, quiet)


def _train(folder: Path, module: TaskData, model: Model, quiet: bool) -> dict[str, Any]:
    experiment, data, checkpoint = module.experiment, module.data, last_good(folder)
    if checkpoint is not None:
        check_data(checkpoint, data)
    metric = SCORES[data.metric]
    watch = Checkpoints(folder, module, metric, experiment.checkpoint_minutes)
    watch.sound = checkpoint == folder / LAST
    trainer = make_trainer(experiment, folder, [watch] if quiet else [watch, EpochProgress(metric)])
    steps = module.steps_per_epoch(trainer.world_size)
    if steps == 0:
        raise ValueError(
            f"{data.examples_per_epoch('train', True)} training examples do not fill one batch of "
            f"{experiment.batch_size} on each of {trainer.world_size} device(s): lower batch_size"
        )
    compiled = experiment.compile
    if compiled is None:
        alone = isinstance(trainer.accelerator, CUDAAccelerator) and trainer.world_size == 1
        compiled = alone and worth_compiling(model, steps * experiment.epochs, module.shapes)
    few_shapes = module.shapes < math.inf
    training = Training(experiment, model, metric, steps, module.evaluated, few_shapes, compiled)
    if trainer.is_global_zero:
        record.remove_drafts(folder)
        record.write_config(folder / record.CONFIG, dataclasses.asdict(experiment))
        step = 0 if checkpoint is None else settle(folder, checkpoint)
        how = {"precision": trainer.precision, "compiled": compiled, "command": record.command()}
        environment, path = {**record.environment(), **how}, folder / record.ENVIRONMENT
        record.write_json(path, record.going_on(environment, path, step))
    try:
        trainer.fit(training, module, ckpt_path=checkpoint, weights_only=True)
    except SIGTERMException:
        raise SystemExit(143) from None  # not 0, which Lightning leaves it at: the run is not done
    except NotFinite as error:
        kept = last_good(folder)
        where = f"the last good checkpoint is {kept}" if kept else "there is no checkpoint from before that"
        raise NotFinite(f"{error}; {where}") from error
    if not trainer.is_global_zero:
        return {}
    return finish(experiment, folder, data, watch, len(watch.history) < experiment.epochs)


def check_options(experiment: Experiment) -> None:
    """Refuse a task's option that is not a number, or not true or false, where it has to be."""
    for field in dataclasses.fields(task_class(experiment.task)):
        value = experiment.task_options.get(field.name, field.default)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise ValueError(f"task.{field.name} must be true or false; got {value!r}")
        if isinstance(field.default, int | float) and not isinstance(value, int | float):
            raise ValueError(f"task.{field.name} must be a number; got {value!r}")


def check_same(experiment: Experiment, folder: Path) -> None:
    """Refuse a folder that holds the run of another experiment: going on with it would make neither."""
    begun = any((folder / name).exists() for name in (LAST, PREVIOUS, BEST, record.RESULT))
    if not begun or not (folder / record.CONFIG).exists():
        return
    there, here = dataclasses.asdict(read_run(folder)), dataclasses.asdict(experiment)
    other = [name for name in here if name not in MACHINE and there[name] != here[name]]
    if other:
        told = ", ".join(f"{name} is {there[name]!r} there and {here[name]!r} here" for name in other[:3])
        raise ValueError(f"{folder} holds another run ({told}): give another name or out, or remove it")


def make_trainer(experiment: Experiment, folder: Path, callbacks: list[Callback]) -> pl.Trainer:
    """Return Lightning's trainer for this experiment."""
    e = experiment
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # torchmetrics has added up over processes
    if e.ema:
        from pytorch_lightning.callbacks import EMAWeightAveraging

        callbacks = [EMAWeightAveraging(decay=e.ema), *callbacks]  # first, so that what is saved is up to date
    loggers: list[Any] = []
    if importlib.util.find_spec("tensorboard") is not None:
        loggers.append(TensorBoardLogger(folder, name="", version="tensorboard"))
    if e.wandb:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(f"wandb={e.wandb} needs wandb, which is not installed: pip install wandb")
        from pytorch_lightning.loggers import WandbLogger

        loggers.append(WandbLogger(project=e.wandb, name=e.name, save_dir=folder))
    try:
        return pl.Trainer(
            accelerator=e.accelerator,
            devices=e.devices,
            num_nodes=e.nodes,
            strategy=e.strategy,
            precision=precision(e),
            max_epochs=e.epochs,
            limit_train_batches=e.limit_train or None,
            num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,  # nothing is logged per step
            callbacks=callbacks,
            logger=loggers or False,
            plugins=[AtomicIO()],
            default_root_dir=folder,
        )
    except (MisconfigurationException, TypeError) as error:
        told = f"accelerator={e.accelerator} devices={e.devices} strategy={e.strategy}"
        raise ValueError(f"{told} cannot be had here: {error}") from error


def precision(experiment: Experiment) -> Literal["bf16-mixed", "32-true"]:
    """Return Lightning's name of the experiment's precision, where "auto" goes by the machine."""
    on_gpu = experiment.accelerator != "cpu" and torch.cuda.is_available()
    suits = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    chosen = experiment.precision if experiment.precision != "auto" else "bfloat16" if suits else "float32"
    return "bf16-mixed" if chosen == "bfloat16" else "32-true"


def finish(experiment: Experiment, folder: Path, data: Prepared, watch: Checkpoints, partial: bool) -> dict[str, Any]:
    """Evaluate the best weights, merge them, compare, and record all of it."""
    seconds, environment = watch.seconds, read_json(folder / record.ENVIRONMENT)
    model, best_epoch = load_model(folder, data, experiment)
    device = torch.device("cuda" if torch.cuda.is_available() and experiment.accelerator != "cpu" else "cpu")
    scores = score(model.to(device), data, experiment, device)
    inputs = Preprocessor.from_data(data)
    known = {"name": experiment.name, "task": experiment.task, "epochs": len(watch.history), "seed": experiment.seed}
    model.results = known | {data.metric: scores}
    inference.save(model.cpu(), folder / MODEL, inputs)
    parameters = sum(p.numel() for p in model.parameters())
    reparameterize(model)
    merged = score(model.to(device), data, experiment, device)
    model.results = known | {data.metric: merged}
    inference.save(model.cpu(), folder / MERGED, inputs)
    result = {
        "name": experiment.name,
        "task": experiment.task,
        "partial": partial,
        "metric": data.metric,
        data.metric: scores,
        f"merged_{data.metric}": merged,
        "best_epoch": best_epoch,
        "watched": watch.watched,
        "epochs": experiment.epochs,
        "epochs_done": len(watch.history),
        "parameters": parameters,
        "merged_parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds, 1),
        "seed": experiment.seed,
        "command": environment.pop("command"),
        "examples": {name: len(split) for name, split in data.splits.items()},
        "data": record.plain(data.facts),
        "environment": environment,
        "config": dataclasses.asdict(experiment),
    }
    draw_run(folder, result=result)
    record.write_json(folder / record.RESULT, result)  # last: with it a run is done
    return result


def end(folder: Path) -> dict[str, Any]:
    """Finish a run where it stands; `train` can still go on with it. What trained it is what is recorded of it."""
    experiment, checkpoint = read_run(folder), last_good(folder)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint")
    own = torch.load(checkpoint, map_location="cpu", weights_only=True)["mrconv"]
    if not own["history"]:
        raise ValueError(f"{folder}: no epoch has ended yet")
    data = prepare(experiment)
    check_data(checkpoint, data)
    with record.alone(folder):
        settle(folder, checkpoint)
        watch = Checkpoints(folder, TaskData(experiment, data), SCORES[data.metric], 0)
        watch.restore(own)
        return finish(experiment, folder, data, watch, len(watch.history) < experiment.epochs)


def load_model(folder: Path, data: Prepared, experiment: Experiment) -> tuple[Model, int]:
    """Return the model with the best weights of a run that can be read, unmerged, in eval mode, and their epoch."""
    path = last_good(folder, (BEST, LAST, PREVIOUS))
    if path is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    state = checkpoint["state_dict"]
    model = build_model(experiment, data)
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")})
    return model.eval(), checkpoint["epoch"] + 1


@torch.no_grad()
def score(
    model: nn.Module, data: Prepared, experiment: Experiment, device: torch.device, rate: float | None = None
) -> dict[str, float]:
    """Return the score on validation and test, every example of the batches to evaluate once."""
    model.eval()
    metric, found = SCORES[data.metric], {}
    for name in [name for name in ("val", "test") if name in data.splits]:
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        size, options = EVALUATED * experiment.batch_size, {"train": False, "bucket": True, "pad": experiment.pad}
        for batch in make_loader(data, name, size, None, experiment.workers, experiment.limit_eval, **options):
            batch = batch.to(device)
            answers = logits(model, batch, rate)
            sums += torch.stack(metric.sums(answers, batch.y, cross_entropy(answers, batch.y)))
        found[name] = float(sums[0] / sums[1])
    return found


def read_run(folder: Path) -> Experiment:
    """Return the experiment of a run folder."""
    path = folder / record.CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{folder} is no run: it has no {record.CONFIG}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no keys and values")
        return Experiment.make(values)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the config of a run: {' '.join(str(error).split())}") from error


def read_result(path: Path) -> Mapping[str, Any]:
    """Return a result.json, given it or its folder."""
    return read_json(path / record.RESULT if path.is_dir() else path)
