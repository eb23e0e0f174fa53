"""Lightning's trainer for an experiment."""

from __future__ import annotations

import importlib.util
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import TensorBoardLogger

from .checkpoints import AtomicIO
from .experiment import Experiment
from .weight_averaging import EMAWeightAveraging


def make_trainer(experiment: Experiment, folder: Path, callbacks: list[Callback]) -> pl.Trainer:
    """Return Lightning's trainer for an experiment."""
    e = experiment
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # torchmetrics has summed over processes
    if e.ema:
        callbacks = [EMAWeightAveraging(e.ema), *callbacks]  # first, so that checkpoints hold the current average
    try:
        return pl.Trainer(
            accelerator=e.accelerator,
            devices=e.devices,
            num_nodes=e.nodes,
            strategy=e.strategy,
            precision=precision(e),
            max_epochs=e.last_epoch,
            limit_train_batches=e.limit_train or None,
            num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,  # values are logged per epoch only
            callbacks=callbacks,
            logger=_loggers(e, folder) or False,
            plugins=[AtomicIO(), *_cluster_environment()],
            default_root_dir=folder,
        )
    except (MisconfigurationException, TypeError) as error:
        settings = f"accelerator={e.accelerator} devices={e.devices} strategy={e.strategy}"
        raise ValueError(f"{settings} is not available on this machine: {error}") from error


def _cluster_environment() -> list[SLURMEnvironment]:
    """Return SLURM's environment without Lightning's requeueing in a job of SLURM that torchrun does not start.

    Lightning would save a second checkpoint on SIGUSR1, even within a step, and resume from it where there is no other.
    """
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def _loggers(experiment: Experiment, folder: Path) -> list[Any]:
    loggers: list[Any] = []
    if importlib.util.find_spec("tensorboard") is not None:
        loggers.append(TensorBoardLogger(folder, name="", version="tensorboard"))
    if experiment.wandb:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(f"wandb={experiment.wandb} needs wandb, which is not installed: pip install wandb")
        from pytorch_lightning.loggers import WandbLogger

        loggers.append(WandbLogger(project=experiment.wandb, name=folder.name, save_dir=folder))
    return loggers


@contextmanager
def logger_errors_raised_once() -> Iterator[None]:
    """Context in which an error of a file in TensorBoard's thread is not printed: TensorBoard raises it again."""
    report = threading.excepthook

    def filtered(error: threading.ExceptHookArgs) -> None:
        if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard.")):
            report(error)

    threading.excepthook = filtered
    try:
        yield
    finally:
        threading.excepthook = report


def precision(experiment: Experiment) -> Literal["bf16-mixed", "32-true"]:
    """Return Lightning's name of the experiment's precision; "auto" is bfloat16 where the GPU supports it."""
    on_gpu = experiment.accelerator != "cpu" and torch.cuda.is_available()
    supported = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    chosen = experiment.precision if experiment.precision != "auto" else "bfloat16" if supported else "float32"
    return "bf16-mixed" if chosen == "bfloat16" else "32-true"
