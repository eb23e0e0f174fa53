"""The Lightning module: model, loss, scores and optimizer."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mrconv import LanguageModel, TwoTowerClassifier, param_groups, reparameterize
from mrconv.config import BackboneOptions, values_of
from mrconv.hub import Model
from mrconv.tasks import Batch, Prepared

from .compilation import compile_blocks
from .cuda_graphs import GraphedStep
from .experiment import Experiment
from .image_model import build_image_model
from .metrics import activated, computed, make_metrics
from .schedule import rate_schedule
from .scores import RunningScore, Score
from .targets import TARGETS, Target

CHECK_EVERY = 100  # steps between checks of losses and weights, each of which synchronises with the device


class NonFiniteError(RuntimeError):
    """The loss or a weight is NaN or infinite."""


def build_model(experiment: Experiment, data: Prepared) -> Model:
    """Return the experiment's model for a task's data."""
    e = experiment
    if data.encoder == "image":
        return build_image_model(e, data)
    if data.encoder not in ("tokens", "values", "text") or bool(data.classes) == (data.encoder == "text"):
        raise ValueError(
            f"{data.name} is neither a task of labelled sequences or images, nor a language modelling task"
        )
    options: dict[str, Any] = (
        {"d_input": data.channels} if data.encoder == "values" else {"vocab_size": len(data.vocabulary)}
    )
    cls: type[Model] = LanguageModel
    if data.classes:
        target = TARGETS[data.target](data)
        cls = TwoTowerClassifier if data.pair else target.model
        options |= target.model_options(len(data.classes), e.pool)
    shared = values_of(e, BackboneOptions)
    shared |= {"mixer_options": dict(e.mixer_options) or None, "mask_padding": e.masks_padding}
    return cls(l_max=data.length, **shared, **options)


def logits(model: nn.Module, batch: Batch, rate: float | None = None) -> Tensor:
    """Return the outputs of a model for a batch of sequences, pairs or images."""
    if batch.x.ndim == 4:
        return model(batch.x)
    if batch.x2 is None:
        return model(batch.x, lengths=batch.lengths, rate=rate)
    return model(batch.x, batch.x2, batch.lengths, batch.lengths2, rate=rate)


@torch.no_grad()
def average_statistics(model: nn.Module, batches: Iterable[Batch], rate: float | None = None) -> None:
    """Set the running statistics of every BatchNorm to their averages over batches, with the present weights.

    Running averages of training come from weights that have changed since. Dropout is off, as in inference.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return
    momenta, training = [norm.momentum for norm in norms], model.training
    model.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # a plain average
    for batch in batches:
        logits(model, batch, rate)
    model.train(training)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _as_float32(encoder: nn.Module, inputs: tuple[Tensor, ...], h: Tensor) -> Tensor:
    """Cast the encoder's output to float32 under autocast, so that the residual stream is float32; a forward hook."""
    return h.float()


class Monitored(nn.Module):
    """A metric that is computed for one split after each epoch."""

    def __init__(self, split: str, data: Prepared, name: str) -> None:
        super().__init__()
        self.split, self.target, self.name, self.metric = split, data.target, name, make_metrics(data)[name]


class Training(pl.LightningModule):
    """Training by the loss of the data's target.

    Args:
        target: loss and units of the outputs.
        metric: the score of the task.
        evaluated: the splits that validation scores.
        few_shapes: whether batches have few shapes, so that a CUDA graph can be kept for each.
        compiled: whether to compile the blocks.
    """

    def __init__(
        self,
        experiment: Experiment,
        model: nn.Module,
        target: Target,
        metric: Score,
        steps_per_epoch: int,
        evaluated: Sequence[str],
        few_shapes: bool = True,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.experiment, self.model, self.steps_per_epoch = experiment, model, steps_per_epoch
        self.target = target
        self.evaluated, self.few_shapes = tuple(evaluated), few_shapes
        self.compiled = compiled
        if experiment.residual == "float32":
            model.backbone.encoder.register_forward_hook(_as_float32)  # type: ignore[union-attr]
        if compiled:
            compile_blocks(model, few_shapes)
        self.automatic_optimization = False  # a CUDA graph contains forward and backward
        self.graphed_step: GraphedStep | None = None
        self.merged: list[nn.Module] = []  # during validation; in a list, so that it is not a submodule
        self.scores = nn.ModuleDict({name: RunningScore(metric) for name in ("fitted", *evaluated)})
        self.monitored: Monitored | None = None
        self.recent: list[Tensor] = []  # losses since the last check
        self.rates: list[float] = []  # their learning rates

    def monitor(self, split: str, data: Prepared) -> None:
        """Compute the experiment's monitored metric for an evaluated split, after each epoch."""
        self.monitored = Monitored(split, data, self.experiment.monitor)

    def on_train_start(self) -> None:
        """Keep the scores of a checkpoint, which are those of all processes, in rank zero only; set up CUDA graphs."""
        if self.global_rank > 0:
            self._score("fitted").reset()
        single_gpu = self.device.type == "cuda" and self.trainer.world_size == 1
        if self.experiment.graphs and single_gpu and self.few_shapes:
            self.graphed_step = GraphedStep(self.forward_backward, self.model)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Run an optimizer step; return the loss."""
        e, optimizer = self.experiment, self.optimizers(use_pl_optimizer=True)
        assert isinstance(optimizer, LightningOptimizer)
        if self.graphed_step is None:
            optimizer.zero_grad()
            loss, output = self.forward_backward(batch)
        else:
            loss, output = (x.clone() for x in self.graphed_step(batch))
        if e.clip:
            self.clip_gradients(optimizer.optimizer, e.clip, "norm")
        rate = optimizer.optimizer.param_groups[0]["lr"]
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]
        self._score("fitted").update(output, self.target.labels(batch.y), loss)
        self.recent.append(loss)
        self.rates.append(rate)
        if len(self.recent) == CHECK_EVERY:
            self.check_finite()
        return loss

    def forward_backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the gradients; return the loss and the outputs."""
        output = self.target.in_units(logits(self.model, batch))
        loss = self.target.training_loss(output, batch.y)
        with torch.autocast(self.device.type, enabled=False):
            self.manual_backward(loss)
        return loss.detach(), output.detach()

    @torch.no_grad()
    def check_finite(self) -> None:
        """Raise NonFiniteError if a loss since the last check, or a weight, is not finite."""
        if not self.recent:
            return
        weights = [x for x in (*self.model.parameters(), *self.model.buffers()) if x.is_floating_point()]
        norms = torch.stack(torch._foreach_norm(weights))
        finite = torch.cat([torch.stack(self.recent), norms]).isfinite().tolist()
        rates, self.recent, self.rates = self.rates, [], []
        if all(finite):
            return
        first, last = finite.index(False), len(rates) - 1
        step = self.global_step - last + min(first, last)
        what = f"the loss at step {step} is" if first <= last else f"weights after step {step} are"
        raise NonFiniteError(f"{what} not finite (learning rate {rates[min(first, last)]:.2g})")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scores of all processes in the checkpoint, from which rank zero resumes."""
        if self.trainer.world_size == 1:
            return
        for name, value in self._score("fitted").state_dict(prefix="scores.fitted.").items():
            total = value.clone()
            torch.distributed.all_reduce(total)
            for states in ("state_dict", "current_model_state"):  # with averaged weights, the second holds the scores
                if name in checkpoint.get(states, {}):
                    checkpoint[states][name] = total

    def on_validation_epoch_start(self) -> None:
        """Check losses and weights, and average statistics; use the buffers of rank zero, which checkpoints hold."""
        trainer = self.trainer
        self.check_finite()
        if self.experiment.precise_stats:
            batches = trainer.datamodule.statistics_batches(  # type: ignore[attr-defined]
                trainer.current_epoch, self.device, trainer.global_rank, trainer.world_size
            )
            # a few batches in this mode are not worth a compilation
            eager = torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()
            with eager, trainer.precision_plugin.val_step_context():
                average_statistics(self.model, batches)
        if trainer.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        """Score a batch of an evaluated split, with kernels merged once for all batches where possible."""
        if not self.merged:
            single = self.trainer.world_size == 1  # otherwise parameters may be sharded
            self.merged.append(reparameterize(copy.deepcopy(self.model)) if single else self.model)
        output = self.target.in_units(logits(self.merged[0], batch))
        split = self.evaluated[dataloader_idx]
        self._score(split).update(output, batch.y, self.target.loss(output, batch.y))
        if self.monitored is not None and self.monitored.split == split:
            self.monitored.metric.update(*activated(output, batch.y, self.monitored.target))

    def on_validation_epoch_end(self) -> None:
        """Log the scores of training and of all evaluated splits."""
        self.merged.clear()
        self._log("fitted", "train")
        for name in self.evaluated:
            self._log(name, name)
        if self.monitored is not None:
            metric = self.monitored.metric
            self.log(f"{self.monitored.split}/{self.monitored.name}", computed(metric), add_dataloader_idx=False)
            metric.reset()

    def _log(self, score: str, split: str) -> None:
        means = self._score(score).compute_and_reset()
        self.log_dict({f"{split}/{key}": value for key, value in means.items()}, add_dataloader_idx=False)

    def _score(self, name: str) -> RunningScore:
        return self.scores[name]  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        """Return AdamW with the paper's parameter groups, and the schedule."""
        e = self.experiment
        groups = param_groups(self.model, e.lr, e.weight_decay, e.kernel_lr, e.decay_on, e.mixer_lr)
        optimizer = torch.optim.AdamW(groups, fused=(self.device.type == "cuda" and not e.clip) or None)
        warmup = e.warmup_steps or round(e.warmup_epochs * self.steps_per_epoch)
        cooldown = None if e.cooldown_epochs is None else math.ceil(e.cooldown_epochs * self.steps_per_epoch)
        schedule = rate_schedule(optimizer, warmup, e.epochs * self.steps_per_epoch, cooldown)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
