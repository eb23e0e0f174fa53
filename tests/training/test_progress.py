"""The line of an epoch."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mrconv.training import progress
from mrconv.training.metrics import SCORES


def test_time_left_is_told_by_the_steps_since_a_run_went_on(monkeypatch, capsys):
    clock = iter([0.0, 100.0, 100.0, 150.0]).__next__
    monkeypatch.setattr(progress.time, "monotonic", clock)
    trainer = SimpleNamespace(
        global_step=15, current_epoch=1, max_epochs=4, num_training_batches=10, is_global_zero=True,
        state=SimpleNamespace(fn="fit"), callback_metrics={"train/loss": 1.0, "val/accuracy": 0.5}
    )  # fmt: skip
    module = SimpleNamespace(device=torch.device("cpu"))
    lines = progress.EpochLines(SCORES["accuracy"])
    lines.on_train_start(trainer, module)
    lines.on_train_epoch_start(trainer, module)
    lines.examples, trainer.global_step = 25, 20
    lines.on_validation_end(trainer, module)
    told = "epoch   2/4, loss 1.0000, val 50.00%, 0 examples/s, 3:20 left\n"  # 5 steps in 50 s, 20 to go
    assert capsys.readouterr().out == told
