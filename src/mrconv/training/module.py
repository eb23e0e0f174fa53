"""The Lightning module: model, loss, metrics, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from mrconv import SequenceClassifier, TwoTowerClassifier, param_groups
from mrconv.hub import Model
from mrconv.tasks import Batch, Prepared

from .config import Experiment
from .schedule import cosine_with_warmup

CHECK_EVERY = 100  # steps between looks at the loss, each of which waits for the device


class NotFinite(RuntimeError):
    """The loss is NaN or infinite."""


def build_model(experiment: Experiment, data: Prepared) -> Model:
    """Return the experiment's model for a task's data."""
    e = experiment
    if data.encoder not in ("tokens", "values") or not data.classes:
        raise ValueError(f"{data.name} is not a task of classifying sequences")
    cls = TwoTowerClassifier if data.pair else SequenceClassifier
    inputs: dict[str, Any] = (
        {"vocab_size": len(data.vocabulary)} if data.encoder == "tokens" else {"d_input": data.channels}
    )
    return cls(
        d_model=e.d_model,
        l_max=data.length,
        kernel=e.kernel,
        kernel_size=e.kernel_size,
        bidirectional=e.bidirectional,
        combine=e.combine,
        decay=e.decay,
        norm=e.norm,
        backend=e.backend,
        momentum=e.momentum,
        sync_stats=e.sync_stats,
        depth=e.depth,
        mixer=e.mixer,
        mixer_options=dict(e.mixer_options) or None,
        dropout=e.dropout,
        block_norm=e.block_norm,
        prenorm=e.prenorm,
        mask_padding=e.mask_padding,
        n_classes=len(data.classes),
        pool=e.pool,
        **inputs,
    )


def logits(model: nn.Module, batch: Batch, rate: float | None = None) -> Tensor:
    """Return a model's logits for a batch, of one sequence each or of pairs."""
    if batch.x2 is None:
        return model(batch.x, lengths=batch.lengths, rate=rate)
    return model(batch.x, batch.x2, batch.lengths, batch.lengths2, rate=rate)


class Training(pl.LightningModule):
    """Classification by cross-entropy."""

    run_model: nn.Module

    def __init__(
        self, experiment: Experiment, model: nn.Module, classes: int, steps_per_epoch: int, evaluated: Sequence[str]
    ) -> None:
        super().__init__()
        self.experiment, self.model, self.steps_per_epoch = experiment, model, steps_per_epoch
        self.evaluated = tuple(evaluated)  # the splits that validation goes through
        # beside the module's own parts: compiled or not, checkpoints are the same
        object.__setattr__(self, "run_model", torch.compile(model) if experiment.compile else model)
        self.scores = nn.ModuleDict({name: Scores(classes) for name in ("fitted", *evaluated)})
        self.recent: list[Tensor] = []
        self.recent_from = 1

    def on_train_start(self) -> None:
        """Keep what a checkpoint holds of an epoch's scores, which is all processes', in one of them only."""
        if self.global_rank > 0:
            self._scores("fitted").reset()

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Return the loss."""
        found = logits(self.run_model, batch)
        loss = F.cross_entropy(found.float(), batch.y)
        self._scores("fitted").add(found.detach(), batch.y, loss.detach())
        if not self.recent:
            self.recent_from = self.global_step + 1
        self.recent.append(loss.detach())
        if len(self.recent) == CHECK_EVERY:
            self.check_loss()
        return loss

    def check_loss(self) -> None:
        """Stop if a loss since the last look was not finite."""
        if not self.recent:
            return
        finite = torch.stack(self.recent).isfinite()
        self.recent = []
        if not bool(finite.all()):
            step = self.recent_from + int((~finite).nonzero()[0])
            lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            raise NotFinite(f"the loss at step {step} is not finite (learning rate now {lr:.2g})")

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        """Score a batch of one of the evaluated splits."""
        found = logits(self.model, batch)
        self._scores(self.evaluated[dataloader_idx]).add(found, batch.y, F.cross_entropy(found.float(), batch.y))

    def on_validation_epoch_end(self) -> None:
        """Log all of them, and the training that went before."""
        self.check_loss()
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
        optimizer = torch.optim.AdamW(param_groups(self.model, e.lr, e.weight_decay, e.kernel_lr))
        warmup, total = round(e.warmup_epochs * self.steps_per_epoch), e.epochs * self.steps_per_epoch
        schedule = cosine_with_warmup(optimizer, warmup, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Scores(nn.Module):
    """Mean loss and accuracy of the examples so far; over all processes when computed."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        # without their checks, each of which would wait for the device at every step
        self.loss, self.count = SumMetric(nan_strategy="disable"), SumMetric(nan_strategy="disable")
        self.accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False)
        for metric in self._metrics():
            metric.persistent(True)  # kept in checkpoints, so that an epoch that was interrupted counts whole

    def _metrics(self) -> tuple[Metric, ...]:
        return self.loss, self.count, self.accuracy

    def add(self, found: Tensor, y: Tensor, loss: Tensor) -> None:
        """Take in a batch and its mean loss."""
        self.loss.update(loss * len(y))
        self.count.update(len(y))
        self.accuracy.update(found, y)

    def take(self) -> dict[str, Tensor]:
        """Return both and begin again; nothing if there was no batch."""
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        if alone and not self.count.update_called:
            return {}
        found = {"loss": self.loss.compute() / self.count.compute(), "accuracy": self.accuracy.compute()}
        self.reset()
        return found

    def reset(self) -> None:
        """Begin again."""
        for metric in self._metrics():
            metric.reset()
