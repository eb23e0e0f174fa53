"""What is shown of a run while it goes on."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import torch

from mrconv.training import progress
from mrconv.training.scores import SCORES


def test_time_left_goes_by_the_steps_since_a_run_went_on_and_examples_by_training_alone(monkeypatch, capsys):
    clock = iter([0.0, 100.0, 100.0, 110.0, 150.0]).__next__
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
    lines.on_validation_start(trainer, module)
    lines.on_validation_end(trainer, module)
    told = "epoch   2/4, loss 1.0000, val 50.00%, 2 examples/s, 3:20 left\n"  # 25 in 10 s; 5 steps in 50 s, 20 to go
    assert capsys.readouterr().out == told


def test_preparing_is_shown_while_it_counts(monkeypatch, capsys):
    monkeypatch.setattr(progress.time, "monotonic", iter([100.0, 110.0, 110.1, 120.0, 121.0]).__next__)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.preparing("listops") as count:
        for done in (10, 11, 20, 40):
            count(done, 40)
        first = "\r\x1b[Kpreparing listops: 10 of 40, 0:30 left"
        assert capsys.readouterr().err == f"{first}\r\x1b[Kpreparing listops: 20 of 40, 0:20 left\r\x1b[K"
    assert capsys.readouterr().err == ""


def test_on_a_terminal_one_line_is_written_over_and_epochs_have_whole_lines(tmp_path):
    sizes = "{train_size: 40, val_size: 10, test_size: 10, min_length: 10, max_length: 60, length: 64}"
    settings = ["d_model=8", "depth=2", "kernel_size=2", "batch_size=10", "epochs=2", "accelerator=cpu"]
    where = [f"out={tmp_path}", f"data_dir={tmp_path / 'data'}", f"task_options={sizes}"]
    screen, inside = pty.openpty()
    command = [sys.executable, "-m", "mrconv", "train", *settings, *where]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    shown = "".join(_read(screen))
    assert process.wait() == 0, shown
    live = r"\r\x1b\[Kepoch 1/2: 1/4, loss \d\.\d{4}, train \d+\.\d\d%, [\d,]+ examples/s, \d:\d\d left"
    begun = re.search(live, shown)
    assert begun, shown
    assert "preparing" not in shown[begun.start() :]
    whole = r"epoch   \d/2, loss \S+, train \S+%, val \S+%, test \S+%, [\d,]+ examples/s, \d:\d\d (left|in all)"
    lines = [line.rpartition("\x1b[K")[2] for line in shown.splitlines()]
    assert sum(re.fullmatch(whole, line) is not None for line in lines) == 2, shown


def _read(screen):
    while True:
        try:
            yield os.read(screen, 65536).decode()
        except OSError:  # nothing has the terminal open any more
            os.close(screen)
            return
