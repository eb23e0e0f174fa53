"""What a run is made of: one flat dataclass, every value in it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CHOICES: dict[str, tuple[Any, ...]] = {
    "combine": ("sum", "concat"),
    "norm": (None, "batch", "scale", "none"),
    "block_norm": ("batch", "layer"),
    "pool": ("mean", "last"),
    "precision": ("auto", "float32", "bfloat16"),
    "loader": ("auto", "resident", "workers"),
    "accelerator": ("auto", "cpu", "gpu"),
    "backend": ("auto", "torch", "triton", "reference"),
}


@dataclass
class Experiment:
    """One training run.

    The task: `name` is the run's, of its folder and its results; `task` names the task, `task_options` are its own,
    `data` is the path of one's own data (task "folder"); `data_dir` holds the tasks' files, `cache_dir` what is made of
    them; `rate` < 1 trains on decimated signals.

    The model, as `MRConv`, `MRConvBlock` and `SequenceClassifier` explain: `kernel`, `kernel_size` (of the first
    resolution), `bidirectional`, `combine` (branches are added or pieces concatenated), `decay` (of concatenated
    pieces), `norm` (of branches), `depth` (blocks), `d_model` (channels), `block_norm`, `prenorm`, `dropout` (of whole
    channels), `pool` (what the head sees of a sequence), `mask_padding` (hides padding from layers and statistics),
    `momentum` (of every BatchNorm), `backend`. `mixer` puts a peer of `mrconv.baselines` in MRConv's place, with its
    own `mixer_options`.

    The recipe: AdamW with `lr` and `weight_decay`, `kernel_lr` without weight decay for kernels, none for biases and
    norms; `batch_size` per device; `epochs`, cosine to 0 after `warmup_epochs` of linear rise, per step; `clip` (the
    norm of gradients, not with FSDP) and `ema` (averages weights, with this decay) of 0 are off; `seed`; `bucket`
    (batches of rows of similar length).

    The machine: `precision` ("auto": bfloat16 where a GPU has it, with parameters in float32), `graphs` (on one GPU, a
    step is captured for each shape of batch and replayed; not where rows differ in length and `pad` is "batch", which
    gives too many), `compile` (the blocks; null: where that pays, on one GPU and with many steps for each shape),
    `loader` ("auto": on the GPU itself if there is one and the data fits), `workers` (processes that read data), `pad`
    (a batch to its longest row, "batch", to a multiple of a number, or to the task's length, "max"), `accelerator`,
    `devices`, `strategy` and `nodes` as Lightning has them, `sync_stats` (of every BatchNorm, over all processes),
    `checkpoint_minutes` (between checkpoints within an epoch), `limit_train` and `limit_eval` (batches of an epoch and
    of an evaluation; 0: all), `wandb` (a project there), `out` (where the run's folder is made).

    Tasks of pictures train an `MRConvNeXt` of `depths`, `dims` and `kernel_sizes` per stage, with `patch_size`,
    `drop_path` and `layer_scale` (`mixer` "conv" makes it a ConvNeXt), in the place of `kernel_size`, `depth`,
    `d_model` and the rest of the block. Their recipe may have `label_smoothing`, `randaugment` (the magnitude, on
    pictures in files), `crop` (by how many pixels pictures are moved), `flip` (mirrored or not), `erasing` (the share
    of pictures that lose a rectangle), `mixup` and `cutmix` (the strengths of both); 0 is off.
    """

    name: str = "run"
    task: str = "listops"
    task_options: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    data_dir: str | None = None
    cache_dir: str | None = None
    rate: float = 1.0
    # the model
    mixer: str = "mrconv"
    mixer_options: dict[str, Any] = field(default_factory=dict)
    kernel: str = "fourier"
    kernel_size: int = 1
    depth: int = 6
    d_model: int = 128
    bidirectional: bool = False
    combine: str = "sum"
    decay: Any = None
    norm: str | None = None
    block_norm: str = "batch"
    prenorm: bool = False
    dropout: float = 0.0
    pool: str = "mean"
    mask_padding: bool = False
    momentum: float = 0.1
    depths: list[int] = field(default_factory=list)
    dims: list[int] = field(default_factory=list)
    kernel_sizes: list[int] = field(default_factory=list)
    patch_size: int = 4
    drop_path: float = 0.0
    layer_scale: float = 1e-6
    backend: str = "auto"
    # the recipe
    lr: float = 0.003
    kernel_lr: float = 0.001
    weight_decay: float = 0.05
    batch_size: int = 50
    epochs: int = 40
    warmup_epochs: float = 1.0
    clip: float = 0.0
    ema: float = 0.0
    label_smoothing: float = 0.0
    randaugment: float = 0.0
    crop: int = 0
    flip: bool = False
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    seed: int = 0
    # the machine
    precision: str = "auto"
    graphs: bool = True
    compile: bool | None = None
    loader: str = "auto"
    workers: int = 0
    bucket: bool = False
    pad: Any = "batch"
    accelerator: str = "auto"
    devices: Any = 1
    strategy: str = "auto"
    nodes: int = 1
    sync_stats: bool = False
    checkpoint_minutes: float = 10.0
    limit_train: int = 0
    limit_eval: int = 0
    wandb: str = ""
    out: str = "runs"

    def check(self) -> None:
        """Refuse values that make no sense, by name."""
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                known = ", ".join("null" if each is None else str(each) for each in allowed)
                raise ValueError(f"{name} must be one of {known}; got {value!r}")
        for name in ("kernel_size", "depth", "d_model", "batch_size", "epochs", "nodes", "patch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in (
            "lr",
            "kernel_lr",
            "weight_decay",
            "warmup_epochs",
            "clip",
            "checkpoint_minutes",
            "limit_train",
            "limit_eval",
            "workers",
            "layer_scale",
            "randaugment",
            "crop",
            "mixup",
            "cutmix",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                problem = "not be negative" if getattr(self, name) < 0 else "be a finite number"
                raise ValueError(f"{name} must {problem}; got {getattr(self, name)}")
        if not self.name or ".." in self.name.split("/"):
            raise ValueError(f"name must be that of a folder in out; got {self.name!r}")
        if not self.out:
            raise ValueError("out must not be empty: it is where the run's folder is made")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to {2**32 - 1}; got {self.seed}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be 1, 1/2, 1/3, ...; got {self.rate}")
        if not 0 < self.momentum <= 1:
            raise ValueError(f"momentum must be in (0, 1]; got {self.momentum}")
        if self.clip and "fsdp" in self.strategy:
            raise ValueError(f"clip cannot be used with strategy={self.strategy}: set clip=0, or strategy=ddp")
        for name in ("patch_size", "layer_scale"):
            if getattr(self, name) != getattr(Experiment, name) and not self.depths:
                raise ValueError(f"{name} cannot be used without depths: both are for tasks of pictures")
        number = isinstance(self.pad, int) and not isinstance(self.pad, bool)
        if self.pad not in ("batch", "max") and (not number or self.pad < 1):
            raise ValueError(f"pad must be batch, max or a number of positions; got {self.pad!r}")
        for name in ("dropout", "ema", "drop_path", "label_smoothing", "erasing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1); got {getattr(self, name)}")

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Experiment:
        """Build from names and values; a mistyped name is refused with the nearest right one."""
        for name in values:
            check_key(name)
        experiment = cls(**values)
        experiment.check()
        return experiment


def check_key(name: str, also: Sequence[str] = ()) -> None:
    """Refuse a key that neither an experiment has nor is among these."""
    known = [f.name for f in dataclasses.fields(Experiment)]
    if name not in (*known, *also):
        near = difflib.get_close_matches(name, (*known, *also), 1)
        raise ValueError(
            f"there is no key {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; there are {known}")
        )
