"""The Lightning module: model, loss, metrics, optimizer."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, SumMetric

from mrconv import LanguageModel, MRConv, SequenceClassifier, TwoTowerClassifier, param_groups, reparameterize
from mrconv.block import MRConvBlock
from mrconv.config import BackboneOptions, values_of
from mrconv.hub import Model
from mrconv.tasks import Batch, Prepared
from mrconv.tasks.window_loader import IGNORED
from mrconv.vision.convnext_blocks import ConvNeXtBlock

from .cuda_graphs import GraphedStep
from .experiment import Experiment
from .image_model import build_image_model
from .schedule import cosine_with_warmup
from .scores import Score

CHECK_EVERY = 100  # steps between looks at losses and weights, each of which waits for the device
MOST_SHAPES = 64  # of batches that blocks are compiled for; torch's own limit of 8 is fewer than paddings may make
WORTH_COMPILING = 5000  # steps of each shape: at some milliseconds saved each, they are a few times what it takes


class NotFinite(RuntimeError):
    """The loss or a weight is NaN or infinite."""


def build_model(experiment: Experiment, data: Prepared) -> Model:
    """Return the experiment's model for a task's data."""
    e = experiment
    if data.encoder == "image":
        return build_image_model(e, data)
    if data.encoder not in ("tokens", "values", "text") or bool(data.classes) == (data.encoder == "text"):
        raise ValueError(f"{data.name} is not a task of classifying sequences or pictures, or of predicting text")
    options: dict[str, Any] = (
        {"d_input": data.channels} if data.encoder == "values" else {"vocab_size": len(data.vocabulary)}
    )
    cls: type[Model] = LanguageModel
    if data.classes:
        cls = TwoTowerClassifier if data.pair else SequenceClassifier
        options |= {"n_classes": len(data.classes), "pool": e.pool}
    shared = values_of(e, BackboneOptions) | {"mixer_options": dict(e.mixer_options) or None}
    return cls(l_max=data.length, **shared, **options)


def logits(model: nn.Module, batch: Batch, rate: float | None = None) -> Tensor:
    """Return a model's logits for a batch, of one sequence each, of pairs or of pictures."""
    if batch.x.ndim == 4:
        return model(batch.x)
    if batch.x2 is None:
        return model(batch.x, lengths=batch.lengths, rate=rate)
    return model(batch.x, batch.x2, batch.lengths, batch.lengths2, rate=rate)


def cross_entropy(found: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean over labels y (...) that are not ignored, or shares (..., classes), for logits (..., classes)."""
    labels = y.flatten(0, -2) if y.is_floating_point() else y.flatten()
    found = found.float().flatten(0, -2)
    return F.cross_entropy(found, labels, ignore_index=IGNORED, label_smoothing=smoothing)


def compile_blocks(model: nn.Module, few_shapes: bool = True) -> None:
    """Have each block run compiled, by code for the very shape of a batch if there are few.

    Blocks that are alike share it. Weights, their names and copies of the model are what they were, not compiled.
    """
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    for module in model.modules():
        if isinstance(module, (MRConvBlock, ConvNeXtBlock)):
            module.compile(dynamic=False if few_shapes else None)


def worth_compiling(model: nn.Module, steps: int, shapes: float) -> bool:
    """Tell whether a run of so many steps on one GPU, in so many shapes of batches, is faster with compiled blocks."""
    blocks = any(isinstance(module, MRConvBlock) and isinstance(module.layer, MRConv) for module in model.modules())
    many = shapes <= MOST_SHAPES and steps >= WORTH_COMPILING * shapes
    return blocks and importlib.util.find_spec("triton") is not None and many


class Training(pl.LightningModule):
    """Training by cross-entropy, of a class for every example or of every next token."""

    def __init__(
        self,
        experiment: Experiment,
        model: nn.Module,
        metric: Score,
        steps_per_epoch: int,
        evaluated: Sequence[str],
        few_shapes: bool = True,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.experiment, self.model, self.steps_per_epoch = experiment, model, steps_per_epoch
        self.evaluated = tuple(evaluated)  # the splits that validation goes through
        self.few_shapes = few_shapes  # of batches, so that a graph can be kept for each
        if compiled:
            compile_blocks(model, few_shapes)
        self.automatic_optimization = False  # a graph holds forward and backward
        self.graphed: GraphedStep | None = None
        self.merged: list[nn.Module] = []  # while validating; a list, so that it is no part of this module
        self.scores = nn.ModuleDict({name: Scores(metric) for name in ("fitted", *evaluated)})
        self.recent: list[Tensor] = []  # losses since the last look
        self.rates: list[float] = []  # the learning rate of each

    def on_train_start(self) -> None:
        """Keep what a checkpoint holds of an epoch's scores, the first process's, in that one only; prepare graphs."""
        if self.global_rank > 0:
            self._scores("fitted").reset()
        alone = self.device.type == "cuda" and self.trainer.world_size == 1
        if self.experiment.graphs and alone and self.few_shapes:
            self.graphed = GraphedStep(self.pass_through, self.model)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Take a step; return the loss."""
        e, optimizer = self.experiment, self.optimizers(use_pl_optimizer=True)
        assert isinstance(optimizer, LightningOptimizer)
        if self.graphed is None:
            optimizer.zero_grad()
            loss, found = self.pass_through(batch)
        else:
            loss, found = (x.clone() for x in self.graphed(batch))
        if e.clip:
            self.clip_gradients(optimizer.optimizer, e.clip, "norm")
        rate = optimizer.optimizer.param_groups[0]["lr"]
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]
        labels = batch.y.argmax(-1) if batch.y.is_floating_point() else batch.y  # of mixed pictures, the larger share's
        self._scores("fitted").add(found, labels, loss)
        self.recent.append(loss)
        self.rates.append(rate)
        if len(self.recent) == CHECK_EVERY:
            self.check_finite()
        return loss

    def pass_through(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Go forward and back; return the loss and the logits."""
        found = logits(self.model, batch)
        loss = cross_entropy(found, batch.y, self.experiment.label_smoothing)
        with torch.autocast(self.device.type, enabled=False):
            self.manual_backward(loss)
        return loss.detach(), found.detach()

    @torch.no_grad()
    def check_finite(self) -> None:
        """Stop if a loss since the last look was not finite, or a weight is not; this waits for the device once."""
        if not self.recent:
            return
        weights = [x for x in (*self.model.parameters(), *self.model.buffers()) if x.is_floating_point()]
        norms = torch.stack(torch._foreach_norm(weights))
        finite = torch.cat([torch.stack(self.recent), norms]).isfinite().tolist()
        rates, self.recent, self.rates = self.rates, [], []
        if all(finite):
            return
        bad, last = finite.index(False), len(rates) - 1
        step = self.global_step - last + min(bad, last)
        what = f"the loss at step {step} is" if bad <= last else f"weights after step {step} are"
        raise NotFinite(f"{what} not finite (learning rate {rates[min(bad, last)]:.2g})")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Have a checkpoint hold an epoch's scores so far of all processes: the first one goes on with them."""
        if self.trainer.world_size == 1:
            return
        for name, value in self._scores("fitted").state_dict(prefix="scores.fitted.").items():
            total = value.clone()
            torch.distributed.all_reduce(total)
            for states in ("state_dict", "current_model_state"):  # with averaged weights, the second has the others
                if name in checkpoint.get(states, {}):
                    checkpoint[states][name] = total

    def on_validation_epoch_start(self) -> None:
        """Look at losses and weights, before spoilt ones are merged; go by what is saved, the first process's."""
        self.check_finite()
        if self.trainer.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        """Score a batch of one of the evaluated splits, with kernels merged once for all batches where possible."""
        if not self.merged:
            alone = self.trainer.world_size == 1  # else parameters may be in pieces
            self.merged.append(reparameterize(copy.deepcopy(self.model)) if alone else self.model)
        found = logits(self.merged[0], batch)
        self._scores(self.evaluated[dataloader_idx]).add(found, batch.y, cross_entropy(found, batch.y))

    def on_validation_epoch_end(self) -> None:
        """Log all of them, and the training that went before."""
        self.merged.clear()
        self._log("fitted", "train")
        for name in self.evaluated:
            self._log(name, name)

    def _log(self, scores: str, name: str) -> None:
        found = self._scores(scores).take()
        self.log_dict({f"{name}/{key}": value for key, value in found.items()}, add_dataloader_idx=False)

    def _scores(self, name: str) -> Scores:
        return self.scores[name]  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        """Return AdamW with the paper's groups, and its schedule."""
        e = self.experiment
        groups = param_groups(self.model, e.lr, e.weight_decay, e.kernel_lr)
        optimizer = torch.optim.AdamW(groups, fused=(self.device.type == "cuda" and not e.clip) or None)
        warmup, total = round(e.warmup_epochs * self.steps_per_epoch), e.epochs * self.steps_per_epoch
        schedule = cosine_with_warmup(optimizer, warmup, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Scores(nn.Module):
    """Mean loss and score of the examples so far; over all processes when computed."""

    def __init__(self, metric: Score) -> None:
        super().__init__()
        self.metric = metric
        # without its checks, each of which would wait for the device at every step
        self.loss, self.total, self.count = (SumMetric(nan_strategy="disable") for _ in range(3))
        for each in self._metrics():
            each.set_dtype(torch.float64)
            each.persistent(True)  # kept in checkpoints, so that an epoch that was interrupted counts whole

    def _metrics(self) -> tuple[Metric, ...]:
        return self.loss, self.total, self.count

    def add(self, found: Tensor, y: Tensor, loss: Tensor) -> None:
        """Take in a batch and its mean loss."""
        total, count = self.metric.sums(found, y, loss)
        for each, value in zip(self._metrics(), (loss * count, total, count), strict=True):
            each.update(value)

    def take(self) -> dict[str, Tensor]:
        """Return both and begin again; nothing if there was no batch."""
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if alone and not self.count.update_called:
            return {}
        loss, total, count = (each.compute() for each in self._metrics())
        self.reset()
        return {"loss": loss / count, self.metric.name: total / count}

    def reset(self) -> None:
        """Begin again."""
        for each in self._metrics():
            each.reset()
