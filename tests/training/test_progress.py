"""The progress of a run: lines per epoch, a live line on a terminal, a bar while data is prepared."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
import time
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
import torch

from mrconv._utils import status_lines
from mrconv._utils.progress_bar import progress_bar
from mrconv.training import loop, progress
from mrconv.training.scores import SCORES

from ..processes import Command
from . import miniature

CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r")
SIZES = "{train_size: 40, val_size: 10, test_size: 10, min_length: 10, max_length: 60, length: 64}"
SETTINGS = ["d_model=8", "depth=2", "kernel_size=2", "batch_size=10", "epochs=2", "accelerator=cpu"]
EPOCH = r"epoch   \d/2, loss \S+, train \S+%, val \S+%, test \S+%, [\d,]+ examples/s, \d:\d\d:\d\d (left|in total)"


def train(folder, terminal=None, **environment):
    settings = [*SETTINGS, f"out={folder}", f"data_dir={folder / 'data'}", f"task_options={SIZES}"]
    return Command("mrconv", "train", *settings, environment=os.environ | environment, terminal=terminal)


def test_time_left_counts_steps_since_the_start_and_speed_excludes_validation(monkeypatch, capsys):
    clock = SimpleNamespace(now=40.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trainer = SimpleNamespace(
        global_step=15, current_epoch=1, max_epochs=4, num_training_batches=10, is_global_zero=True,
        state=SimpleNamespace(fn="fit"), callback_metrics={"train/loss": 1.0, "val/accuracy": 0.5}
    )  # fmt: skip
    module = SimpleNamespace(device=torch.device("cpu"))
    callback = progress.EpochProgress(SCORES["accuracy"])
    clock.now = 100.0
    callback.on_train_start(trainer, module)  # a run that resumes within an epoch: Lightning does not start the epoch
    assert callback.lines.status == "epoch 2/4: first step"
    callback.examples, trainer.global_step, clock.now = 25, 20, 110.0
    callback.on_validation_start(trainer, module)
    clock.now = 150.0
    callback.on_validation_end(trainer, module)
    # 25 examples in 10 s; 5 steps in 50 s, and 20 steps are left
    assert capsys.readouterr().out == "epoch   2/4, loss 1.0000, val 50.00%, 2 examples/s, 0:03:20 left\n"


def test_the_bar_is_shown_until_it_is_complete(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("preparing listops") as update:
        assert capsys.readouterr().err == ""
        update(10, 40)
        update(40, 40)
        assert "preparing listops" in CONTROL.sub("", capsys.readouterr().err)
        print("training", file=sys.stderr)
    assert CONTROL.sub("", capsys.readouterr().err).strip() == "training"


def wait_for_line(capsys, pattern):
    """Read standard error until one of its lines matches; return the line."""
    lines, deadline = [], time.monotonic() + 20
    while time.monotonic() < deadline:
        lines += capsys.readouterr().err.splitlines()
        if matching := [line for line in lines if re.fullmatch(pattern, line)]:
            return matching[0]
    raise AssertionError(f"no line is {pattern}: {lines}")


def test_a_pipe_gets_plain_lines_while_data_is_prepared(monkeypatch, capsys):
    monkeypatch.setattr(status_lines, "INTERVAL", 0.01)
    with progress_bar("preparing listops") as update:
        wait_for_line(capsys, r"preparing listops \(0:00:00\)")  # nothing was reported yet
        update(1000, 4000)
        wait_for_line(capsys, r"preparing listops: 1,000 of 4,000 \(0:00:00\)")
        update(4000, 4000)
        assert not any(thread.name == "status lines" for thread in threading.enumerate())
    with progress_bar("downloading", "bytes") as update:
        update(1_500_000, None)
        wait_for_line(capsys, r"downloading: 1\.5 MB \(0:00:00\)")


@pytest.mark.usefixtures("without_figures")
def test_every_phase_of_a_run_has_a_status(tmp_path, monkeypatch):
    statuses, started = [], []

    class Recorder(status_lines.StatusLines):
        def __setattr__(self, name, value):
            if name == "status":
                statuses.append(value)
            super().__setattr__(name, value)

        def start(self):
            started.append(self)
            super().start()

    monkeypatch.setattr(progress, "StatusLines", Recorder)
    monkeypatch.setattr("mrconv._utils.progress_bar.StatusLines", Recorder)
    monkeypatch.setattr(progress, "UPDATE_SECONDS", 0)
    loop.train(miniature.listops(epochs=2, data_dir=str(tmp_path), out=str(tmp_path)), tmp_path / "run")
    live = r"epoch 2/2: \d/4, loss \d\.\d{4}, train \d+\.\d\d%, [\d,]+ examples/s, \d:\d\d:\d\d left"
    phases = [
        "epoch 1/2: first step",
        live,
        "epoch 2/2: evaluation",
        r"scoring \S+, merged",
        r"scoring \S+, merged: 1 of 2",
    ]
    for phase in phases:
        assert any(re.fullmatch(phase, status) for status in statuses), (phase, statuses)
    assert len({id(lines) for lines in started}) == 3  # the training, and the scores of two models
    assert not any(thread.name == "status lines" for thread in threading.enumerate())


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
    process = train(tmp_path, FORCE_COLOR="1", TTY_COMPATIBLE="1")
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
