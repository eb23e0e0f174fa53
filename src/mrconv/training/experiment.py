"""The configuration of a training run: task, model, recipe and machine, as one flat dataclass."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._utils.plugins import is_module_name
from .._utils.suggest import closest
from ..config import BackboneOptions, PoolingOptions, StageOptions, check_constraints, documented, option


@dataclass(kw_only=True)
class TaskOptions:
    """The data."""

    name: str = option("run", "name of the run; by default the experiment and what differs from it")
    task: str = option("listops", "name of the task; `mrconv data list` prints them")
    task_options: dict[str, Any] = option({}, "options of the task; task.KEY=VALUE sets one")
    data: str = option("", 'path of custom data (task "folder")')
    target: str = option(
        "class",
        "what to predict of custom data: one class, any number of labels, numeric values, or a class per position",
        choices=("class", "labels", "values", "positions"),
    )
    data_dir: str | None = option(None, "folder of the tasks' files")
    cache_dir: str | None = option(None, "folder of the arrays prepared from them")
    rate: float = option(1.0, "train on signals decimated to this fraction of their sampling rate: 1, 1/2, 1/3, ...")


@dataclass(kw_only=True)
class ModelOptions(StageOptions, PoolingOptions, BackboneOptions):
    """The model. Image tasks train an MRConvNeXt, set by depths, dims and kernel_sizes."""

    d_model: int = option(128, "number of channels", at_least=1)
    depth: int = option(6, "number of blocks", at_least=1)
    mixer_options: dict[str, Any] = option({}, "options of the baseline; mixer.KEY=VALUE sets one")
    mask_padding: bool | None = option(  # type: ignore[assignment]
        None,
        "hide padding from every layer and statistic, not only from the pooling; null: for custom data (task folder)",
    )
    momentum: float = option(0.1, "momentum of every BatchNorm")
    depths: list[int] = option([], "image models: number of blocks of each stage")
    dims: list[int] = option([], "image models: number of channels of each stage")
    kernel_sizes: list[int] = option([], "image models: l0 of each stage")


@dataclass(kw_only=True)
class RecipeOptions:
    """How the model is trained, with AdamW."""

    init: str = option("", "run or saved model with whose weights training begins")
    lr: float = option(0.003, "learning rate", at_least=0)
    kernel_lr: float = option(0.001, "learning rate of kernels, which have no weight decay", at_least=0)
    mixer_lr: dict[str, float] = option(
        {}, "learning rates of parameters of the baseline, by name; mixer_lr.NAME=VALUE sets one"
    )
    weight_decay: float = option(0.05, "weight decay of the parameters that decay_on names", at_least=0)
    decay_on: str = option(
        "matrices", '"all" but kernels, or "matrices": no biases, norms and alpha either', choices=("matrices", "all")
    )
    batch_size: int = option(50, "examples per step and device", at_least=1)
    epochs: int = option(40, "number of epochs of the schedule", at_least=1)
    stop_after: int = option(0, "end after this many epochs of the schedule; 0: after the last", at_least=0)
    warmup_epochs: float = option(1.0, "epochs of linear warm-up", at_least=0)
    warmup_steps: int = option(0, "steps of linear warm-up; 0: warmup_epochs decides", at_least=0)
    cooldown_epochs: float | None = option(
        None,
        "constant learning rate that falls to 0 over this many epochs at the end; 0: never; null: half a cosine to 0",
    )
    monitor: str = option(
        "", "metric of the validation split that chooses the best epoch, such as loss, f1 or auroc; empty: the score"
    )
    patience: int = option(
        0, "end after this many epochs without a better value of the monitored metric; 0: never", at_least=0
    )
    class_weights: Any = option(
        "none", 'weights of classes in the training loss: "none", "balanced" (by their frequency), or a list'
    )
    clip: float = option(0.0, "largest gradient norm; 0 is off; not with FSDP", at_least=0)
    ema: float = option(0.0, "decay of averaged weights; 0 is off", at_least=0, below=1)
    precise_stats: int = option(
        64, "before each validation, BatchNorms average their statistics over this many training batches", at_least=0
    )
    residual: str = option(
        "auto",
        'dtype of the residual stream with precision bfloat16: "auto" (float32 for tokens only) or "float32"',
        choices=("auto", "float32"),
    )
    label_smoothing: float = option(0.0, "label smoothing", at_least=0, below=1)
    randaugment: float = option(0.0, "images in files: magnitude of RandAugment; 0 is off", at_least=0)
    crop: int = option(0, "images, or their pixels: random shift by up to this many pixels", at_least=0)
    flip: bool = option(False, "images, or their pixels: random horizontal flip")
    rotate: bool = option(False, "square images, or their pixels: rotation by a random multiple of a right angle")
    erasing: float = option(0.0, "images, or their pixels: probability of erasing a rectangle", at_least=0, below=1)
    mixup: float = option(0.0, "images, or their pixels: alpha of mixup; 0 is off", at_least=0)
    cutmix: float = option(0.0, "images, or their pixels: alpha of cutmix; 0 is off", at_least=0)
    seed: int = option(0, "seed of weights, data order and augmentation")
    bucket: bool = option(False, "form batches from sequences of similar length")


@dataclass(kw_only=True)
class MachineOptions:
    """Hardware, precision, data loading and output."""

    precision: str = option(
        "auto",
        '"bfloat16" (parameters stay float32), "float32", or "auto": bfloat16 where a GPU supports it',
        choices=("auto", "float32", "bfloat16"),
    )
    graphs: bool = option(
        True,
        'on one GPU, capture a step as a CUDA graph for each batch shape; off where lengths vary and pad is "batch"',
    )
    compile: bool | None = option(None, "torch.compile the blocks; null: on one GPU with enough steps per shape")
    loader: str = option(
        "auto",
        '"resident" (data on the device), "workers" (processes that read data), or "auto": resident if a GPU has room',
        choices=("auto", "resident", "workers"),
    )
    workers: int = option(0, "number of processes that read data", at_least=0)
    pad: Any = option(
        "batch",
        'pad sequences to the longest of the "batch", to a multiple of a number, or to the task length, "max"',
    )
    accelerator: str = option("auto", "as in Lightning", choices=("auto", "cpu", "gpu"))
    devices: Any = option(1, "as in Lightning")
    strategy: str = option("auto", "as in Lightning")
    nodes: int = option(1, "number of machines", at_least=1)
    checkpoint_minutes: float = option(10.0, "minutes between checkpoints within an epoch", at_least=0)
    limit_train: int = option(0, "batches per training epoch; 0: all", at_least=0)
    limit_eval: int = option(0, "batches per evaluation; 0: all", at_least=0)
    plugins: list[str] = option([], "modules that register custom kernels, mixers and tasks; imported first")
    wandb: str = option("", "project of Weights & Biases")
    out: str = option("runs", "folder in which the run's folder is created")


GROUPS = {"task": TaskOptions, "model": ModelOptions, "recipe": RecipeOptions, "machine": MachineOptions}
"""The options of an experiment by group, in the order of its fields."""


@dataclass(kw_only=True)
class _Options(MachineOptions, RecipeOptions, ModelOptions, TaskOptions):
    """All groups in one flat dataclass; its fields come in the order of `GROUPS`."""


@documented(_Options)
@dataclass(kw_only=True)
class Experiment(_Options):
    """One training run: a task, a model, a recipe and the machine that it runs on.

    `mrconv train KEY=VALUE ...` sets the options by name; `mrconv train --keys` prints them by group.
    """

    def check(self) -> None:
        """Raise ValueError for the first value that is not allowed."""
        check_constraints(self)
        if not self.name or ".." in self.name.split("/"):
            raise ValueError(f"name must be the name of a folder in out; got {self.name!r}")
        if not isinstance(self.plugins, list) or not all(map(is_module_name, self.plugins)):
            raise ValueError(f"plugins must be names of modules such as my_package.kernels; got {self.plugins}")
        for name, rate in self.mixer_lr.items():
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
                raise ValueError(f"mixer_lr.{name} must be a learning rate, 0 or more; got {rate!r}")
        if not self.out:
            raise ValueError("out must not be empty: the run's folder is created in it")
        if self.stop_after > self.epochs:
            raise ValueError(f"stop_after must be at most epochs, {self.epochs}; got {self.stop_after}")
        if self.cooldown_epochs is not None and not 0 <= self.cooldown_epochs <= self.epochs:
            raise ValueError(f"cooldown_epochs must be from 0 to epochs, {self.epochs}; got {self.cooldown_epochs}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to {2**32 - 1}; got {self.seed}")
        if not 0 < self.rate <= 1:
            hint = f"; samples a second are set by task.sample_rate={self.rate:g}" if self.rate >= 1000 else ""
            raise ValueError(f"rate must be 1, 1/2, 1/3, ...; got {self.rate}{hint}")
        if not 0 < self.momentum <= 1:
            raise ValueError(f"momentum must be in (0, 1]; got {self.momentum}")
        if self.clip and "fsdp" in self.strategy:
            raise ValueError(f"clip does not work with strategy={self.strategy}: set clip=0, or strategy=ddp")
        if self.target == "values" and self.label_smoothing:
            raise ValueError("label_smoothing is for classes; target=values has none")
        weights = self.class_weights
        numbers = isinstance(weights, list) and all(isinstance(w, int | float) and 0 < w < math.inf for w in weights)
        if weights not in ("none", "balanced") and not numbers:
            raise ValueError(f"class_weights must be none, balanced or a list of positive numbers; got {weights!r}")
        for name in ("patch_size", "layer_scale"):
            if getattr(self, name) != getattr(Experiment, name) and not self.depths:
                raise ValueError(f"{name} needs depths: both are for image tasks")
        for name in ("heads", "groups", "residual"):
            if getattr(self, name) != getattr(Experiment, name) and self.depths:
                raise ValueError(f"{name} is not an option of image models, which depths sets")
        is_number = isinstance(self.pad, int) and not isinstance(self.pad, bool)
        if self.pad not in ("batch", "max") and (not is_number or self.pad < 1):
            raise ValueError(f"pad must be batch, max or a number of positions; got {self.pad!r}")

    @property
    def masks_padding(self) -> bool:
        """Whether padding is hidden from every layer."""
        return masks_padding(self.task, self.mask_padding)

    @property
    def last_epoch(self) -> int:
        """The number of epochs after which the run ends."""
        return self.stop_after or self.epochs

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Experiment:
        """Build from names and values and check them; an unknown name raises ValueError with a suggestion."""
        for name in values:
            check_key(name)
        experiment = cls(**values)
        experiment.check()
        return experiment


def masks_padding(task: str, mask_padding: bool | None) -> bool:
    """Return the value of mask_padding; null stands for true for custom data and for false otherwise."""
    return task == "folder" if mask_padding is None else mask_padding


def check_key(name: str, also: Sequence[str] = ()) -> None:
    """Raise ValueError for a key that is neither an option of `Experiment` nor in `also`."""
    names = [field.name for field in dataclasses.fields(Experiment)]
    if name not in (*names, *also):
        hint = closest(name, (*names, *also)) or "; `mrconv train --keys` prints all keys"
        raise ValueError(f"unknown key {name!r}{hint}")


def describe_keys() -> str:
    """Return every key with its default and explanation, by group, as `mrconv train --keys` prints them."""
    lines = []
    for title, group in GROUPS.items():
        lines += ["", f"{title}: {(group.__doc__ or '').splitlines()[0]}"]
        for field in dataclasses.fields(group):
            default = field.default_factory() if callable(field.default_factory) else field.default
            shown = "null" if default is None else repr(default) if default == "" else str(default)
            choices = field.metadata["choices"]
            allowed = f" [{', '.join('null' if c is None else str(c) for c in choices)}]" if choices else ""
            text = f"  {field.name}={shown}".ljust(28) + f"  {field.metadata['explanation']}{allowed}"
            lines.append(textwrap.fill(text, 120, subsequent_indent=" " * 30, drop_whitespace=True))
    return "\n".join(lines[1:])
