"""The progress of a run: lines per epoch, a live line on a terminal, a bar while data is prepared."""

from __future__ import annotations

import os
import pty
import re
import sys
from multiprocessing.connection import wait
from types import SimpleNamespace

import torch
from rich.console import Console

from mrconv._utils.progress_bar import progress_bar
from mrconv.training import progress
from mrconv.training.scores import SCORES

from ..processes import Command

CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r")
SIZES = "{train_size: 40, val_size: 10, test_size: 10, min_length: 10, max_length: 60, length: 64}"
SETTINGS = ["d_model=8", "depth=2", "kernel_size=2", "batch_size=10", "epochs=2", "accelerator=cpu"]
EPOCH = r"epoch   \d/2, loss \S+, train \S+%, val \S+%, test \S+%, [\d,]+ examples/s, \d:\d\d:\d\d (left|in total)"


def train(folder, terminal=None, **environment):
    settings = [*SETTINGS, f"out={folder}", f"data_dir={folder / 'data'}", f"task_options={SIZES}"]
    return Command("mrconv", "train", *settings, environment=os.environ | environment, terminal=terminal)


def test_time_left_counts_steps_since_the_start_and_speed_excludes_validation(monkeypatch, capsys):
    clock = iter([0.0, 100.0, 100.0, 110.0, 150.0]).__next__
    monkeypatch.setattr(progress.time, "monotonic", clock)
    trainer = SimpleNamespace(
        global_step=15, current_epoch=1, max_epochs=4, num_training_batches=10, is_global_zero=True,
        state=SimpleNamespace(fn="fit"), callback_metrics={"train/loss": 1.0, "val/accuracy": 0.5}
    )  # fmt: skip
    module = SimpleNamespace(device=torch.device("cpu"))
    callback = progress.EpochProgress(SCORES["accuracy"])
    callback.on_train_start(trainer, module)
    callback.on_train_epoch_start(trainer, module)
    callback.examples, trainer.global_step = 25, 20
    callback.on_validation_start(trainer, module)
    callback.on_validation_end(trainer, module)
    # 25 examples in 10 s; 5 steps in 50 s, and 20 steps are left
    assert capsys.readouterr().out == "epoch   2/4, loss 1.0000, val 50.00%, 2 examples/s, 0:03:20 left\n"


def test_the_bar_is_shown_until_it_is_complete(monkeypatch, capsys):
    monkeypatch.setattr(Console, "is_terminal", True)
    with progress_bar("preparing listops") as update:
        assert capsys.readouterr().err == ""
        update(10, 40)
        update(40, 40)
        assert "preparing listops" in CONTROL.sub("", capsys.readouterr().err)
        print("training", file=sys.stderr)
    assert CONTROL.sub("", capsys.readouterr().err).strip() == "training"


def test_a_terminal_shows_a_live_line_and_a_line_for_each_epoch(tmp_path):
    screen, inside = pty.openpty()
    process = train(tmp_path, os.ttyname(inside), TERM="xterm", COLUMNS="200")
    wait([screen, process.sentinel])  # until the command has opened the terminal
    os.close(inside)
    output = "".join(_read(screen))
    assert process.wait() == 0, output
    lines = CONTROL.sub("\n", output).splitlines()
    live = r"epoch 1/2: 1/4, loss \d\.\d{4}, train \d+\.\d\d%, [\d,]+ examples/s, \d:\d\d:\d\d left"
    first = next((i for i, line in enumerate(lines) if re.match(live, line)), None)
    assert first is not None, output
    assert not any("preparing" in line for line in lines[first:]), output
    assert sum(re.fullmatch(EPOCH, line) is not None for line in lines) == 2, output


def test_piped_output_has_one_plain_line_for_each_epoch(tmp_path):
    process = train(tmp_path, FORCE_COLOR="")
    output, error = process.communicate()
    assert process.returncode == 0, error
    assert "\x1b" not in output + error
    assert "\r" not in output + error
    lines = [line for line in output.splitlines() if line.startswith("epoch")]
    assert len(lines) == 2
    assert all(re.fullmatch(EPOCH, line) for line in lines)


def _read(screen):
    while True:
        try:
            yield os.read(screen, 65536).decode()
        except OSError:  # no process has the terminal open
            os.close(screen)
            return
