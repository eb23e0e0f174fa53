"""A stopped run resumes with identical results; damaged files are reported."""

import csv
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from mrconv import SequenceClassifier
from mrconv.cli.train import print_result
from mrconv.hub import read_json
from mrconv.training import checkpoints, loop, report, rundir
from mrconv.training.checkpoint_files import latest_valid_checkpoint
from mrconv.training.checkpoints import AtomicIO, Checkpoints
from mrconv.training.figures import draw_run
from mrconv.training.module import NonFiniteError, Training
from mrconv.training.run_names import recipe_changes
from mrconv.training.trainer import logger_errors_raised_once

from ..conftest import slow_except
from ..processes import Command
from .miniature import data, listops, small, stopping_trainer

pytestmark = pytest.mark.usefixtures("without_figures")


def start_process(folder, epochs=3):
    return Command("tests.training.miniature", folder, epochs)


def weights(folder, name="last.ckpt"):
    return torch.load(folder / name, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    process = start_process(folder)
    assert process.wait() == 0, process.communicate()
    return folder


@pytest.mark.parametrize("sent", slow_except([signal.SIGKILL, signal.SIGTERM], signal.SIGKILL))
def test_a_killed_run_resumes_bit_for_bit(sent, uninterrupted):
    folder = uninterrupted.parent / f"stopped-{sent.name}"
    process = start_process(folder)
    for line in process.stdout:
        if line.startswith("epoch   2/3" if sent == signal.SIGKILL else "epoch   1/3"):
            process.send_signal(sent)
            break
    assert process.wait() != 0
    process.stdout.close()
    assert not (folder / "result.json").exists()
    resumed = start_process(folder)
    assert resumed.wait() == 0, resumed.communicate()
    expected, actual = weights(uninterrupted), weights(folder)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    tables = [list(csv.DictReader((each / "metrics.csv").read_text().splitlines())) for each in (uninterrupted, folder)]
    assert tables[0] == tables[1]
    assert [row["epoch"] for row in tables[1]] == ["1", "2", "3"]


def test_a_resumed_run_prints_that_and_from_where(tmp_path, monkeypatch, capsys):
    experiment, folder = listops(data_dir=str(tmp_path)), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_trainer", stopping_trainer(6))
        with pytest.raises(SystemExit):
            loop.train(experiment, folder)
    assert "resuming" not in capsys.readouterr().out
    loop.train(experiment, folder)
    assert f"resuming from {folder / 'last.ckpt'}: 1 of 3 epochs, 6 steps are done\n" in capsys.readouterr().out
    loop.train(experiment, folder)
    assert capsys.readouterr().out == f"{folder} is complete; its recorded result:\n"


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(uninterrupted):
    folder = uninterrupted.parent / "damaged"
    process = start_process(folder, 2)
    assert process.wait() == 0
    last = folder / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-2000])
    with pytest.warns(UserWarning, match=r"last\.ckpt cannot be read and is not used"):
        assert latest_valid_checkpoint(folder) == folder / "previous.ckpt"


def saved_content(**changes):
    """The least that a checkpoint of a run holds."""
    state = {"best_epoch": 0, "history": [{"epoch": 1, "step": 4}], "seconds": 1.0, "random": []}
    weights = {"model.x": torch.full((1000,), 3.0)}
    values = {"mrconv": state, "epoch": 0, "global_step": 4, "optimizer_states": [], "state_dict": weights}
    return values | changes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (3, "it is not a checkpoint of mrconv"),
        ({"state_dict": {}}, "it is not a checkpoint of mrconv"),
        (saved_content(mrconv={}), "it has no best_epoch"),
        (saved_content(mrconv=saved_content()["mrconv"] | {"history": [1]}), "its history is no list of epochs"),
        (saved_content(mrconv=saved_content()["mrconv"] | {"random": [{}]}), "its random states are incomplete"),
        (saved_content(global_step="4"), "its global_step is a str"),
        (saved_content(state_dict={"model.x": 1}), "its weights x are not finite"),
        (saved_content(state_dict={"model.x": torch.tensor([1, math.nan])}), "its weights x are not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_of_wrong_contents_is_named_and_not_used(tmp_path, wrong, message):
    torch.save(saved_content(), tmp_path / "previous.ckpt")
    torch.save(wrong, tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match=rf"last\.ckpt cannot be read and is not used: {message}"):
        assert latest_valid_checkpoint(tmp_path) == tmp_path / "previous.ckpt"


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=1), tmp_path / "run"
    loop.train(experiment, folder, quiet=True)
    (folder / "result.json").unlink()
    for name in ("last.ckpt", "best.ckpt"):
        checkpoint = torch.load(folder / name, weights_only=True)
        checkpoint["state_dict"]["model.head.bias"] = torch.zeros(11)
        torch.save(checkpoint, folder / name)
    message = r"\.ckpt holds the weights of another model: head\.bias has \(11,\) there and \(10,\) here"
    with pytest.raises(ValueError, match=f"last{message}"):
        loop.train(experiment, folder, quiet=True)
    with pytest.raises(ValueError, match=f"best{message}"):
        loop.finish(folder)


def test_damaged_tensors_are_detected(tmp_path):
    torch.save(saved_content(), tmp_path / "last.ckpt")
    assert latest_valid_checkpoint(tmp_path) == tmp_path / "last.ckpt"
    content = bytearray((tmp_path / "last.ckpt").read_bytes())
    content[content.index(torch.full((100,), 3.0).numpy().tobytes()) + 50] ^= 1
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.warns(UserWarning, match=r"last\.ckpt cannot be read .*last/data/0 in it is damaged"):
        assert latest_valid_checkpoint(tmp_path) is None


@pytest.mark.filterwarnings("ignore:.*last.ckpt cannot be read")
def test_resuming_from_the_previous_checkpoint_keeps_it(tmp_path, monkeypatch):
    experiment, folder = listops(data_dir=str(tmp_path / "data")), tmp_path / "run"
    make_trainer = loop.make_trainer
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(9))
    with pytest.raises(SystemExit):
        loop.train(experiment, folder, quiet=True)
    monkeypatch.setattr(loop, "make_trainer", make_trainer)
    (folder / "last.ckpt").unlink()
    (folder / "last.ckpt").write_bytes(b"damaged")

    def fail(checkpoint, file):
        raise OSError(28, "No space left on device")

    save = torch.save
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        loop.train(experiment, folder, quiet=True)
    monkeypatch.setattr(torch, "save", save)
    assert latest_valid_checkpoint(folder) == folder / "previous.ckpt"
    assert loop.train(experiment, folder, quiet=True)["epochs_done"] == 3
    steps = [torch.load(folder / name, weights_only=True)["global_step"] for name in ("last.ckpt", "previous.ckpt")]
    assert steps == [12, 8]


def test_code_in_a_checkpoint_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"mrconv": Evil()}, tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match="cannot be read .*: it holds code, or other objects") as warned:
        assert latest_valid_checkpoint(tmp_path) is None
    assert "weights_only" not in str(warned[0].message)  # torch's advice is to execute the code
    with pytest.raises(Exception, match=r"[Ww]eights"):
        AtomicIO().load_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicIO().save_checkpoint({"x": torch.ones(3)}, path)

    def fail(checkpoint, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        AtomicIO().save_checkpoint({"x": torch.zeros(3)}, path)
    assert torch.equal(AtomicIO().load_checkpoint(path)["x"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_inside_torch_save_is_an_error_of_the_file(tmp_path, monkeypatch):
    def fail(checkpoint, file):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*last\.ckpt'"):
        AtomicIO().save_checkpoint({}, tmp_path / "last.ckpt")


@pytest.mark.parametrize(("module", "error", "printed"), [("tensorboard.x", OSError, 0), ("x", OSError, 1)])
def test_an_error_of_tensorboards_thread_is_not_printed_twice(monkeypatch, module, error, printed):
    reports = []

    def fail():
        raise error

    writer = type("Writer", (threading.Thread,), {"__module__": module})(target=fail)
    monkeypatch.setattr(threading, "excepthook", reports.append)
    with logger_errors_raised_once():
        writer.start()
        writer.join()
    assert len(reports) == printed


def test_a_non_finite_loss_stops_the_run_and_names_step_rate_and_checkpoint(tmp_path, monkeypatch):
    training_step = Training.training_step

    def step_with_nan(self, batch, index):
        loss = training_step(self, batch, index)
        if self.global_step == 5:
            self.recent[-1] = torch.tensor(math.nan)
        return loss

    monkeypatch.setattr(Training, "training_step", step_with_nan)
    experiment = listops(data_dir=str(tmp_path / "data"))
    with pytest.raises(NonFiniteError, match=r"loss at step 5 is not finite \(learning rate 0\.003\).*last\.ckpt"):
        loop.train(experiment, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("when", ["end of epoch", "interval", "SIGTERM"])
def test_non_finite_weights_are_not_saved(tmp_path, monkeypatch, when):
    training_step = Training.training_step
    step, saved = {"end of epoch": (8, 4), "interval": (6, 5), "SIGTERM": (6, 4)}[when]

    def step_with_inf(self, batch, index):
        loss = training_step(self, batch, index)
        if self.global_step == step:
            self.model.head.weight.data[0, 0] = math.inf
        return loss

    monkeypatch.setattr(Training, "training_step", step_with_inf)
    if when == "SIGTERM":
        monkeypatch.setattr(loop, "make_trainer", stopping_trainer(step))
    minutes = 1e-9 if when == "interval" else 10
    experiment, folder = listops(data_dir=str(tmp_path / "data"), checkpoint_minutes=minutes), tmp_path / "run"
    message = f"weights after step {step} are not finite .*last.ckpt|143"
    with pytest.raises((NonFiniteError, SystemExit), match=message):
        loop.train(experiment, folder, quiet=True)
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == saved
    assert all(value.isfinite().all() for value in weights(folder).values())


def test_an_epoch_with_a_non_finite_validation_loss_is_not_the_best(tmp_path, monkeypatch):
    original = Training._log

    def log(self, score, split):
        if split == "val" and self.current_epoch == 1:
            self.scores["val"].loss.update(math.nan)
        original(self, score, split)

    monkeypatch.setattr(Training, "_log", log)
    monkeypatch.setattr("mrconv.training.checkpoints.is_better", lambda metric, new, old: True)
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=2)
    assert loop.train(experiment, tmp_path / "run", quiet=True)["best_epoch"] == 1


def test_of_epochs_with_equal_scores_the_one_with_the_smallest_loss_is_the_best(tmp_path, monkeypatch):
    """Also if the run is resumed in between."""
    losses, original, make_trainer = [0.7, 0.5, 0.6, 0.3, 0.4], Training._log, loop.make_trainer

    def log(self, score, split):
        if split == "val":
            self.log_dict({"val/accuracy": 0.5, "val/loss": losses[self.current_epoch]}, add_dataloader_idx=False)
        else:
            original(self, score, split)

    monkeypatch.setattr(Training, "_log", log)
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(10))  # within the third epoch
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=5)
    with pytest.raises(SystemExit):
        loop.train(experiment, tmp_path / "run", quiet=True)
    assert loop.finish(tmp_path / "run")["best_epoch"] == 2
    monkeypatch.setattr(loop, "make_trainer", make_trainer)
    assert loop.train(experiment, tmp_path / "run", quiet=True)["best_epoch"] == 4


def test_without_a_validation_split_the_last_epoch_is_recorded_and_the_best_on_test_noted(
    tmp_path, monkeypatch, capsys
):
    """Also if a run is finished within an epoch: its last complete epoch counts."""
    scores, original, tiny, make_trainer = [0.5, 0.75, 0.75, 0.7], Training._log, data("text"), loop.make_trainer

    def log(self, score, split):
        if split == "test":
            epoch = self.current_epoch
            self.log_dict({"test/accuracy": scores[epoch], "test/loss": 1 - 0.1 * epoch}, add_dataloader_idx=False)
        else:
            original(self, score, split)

    monkeypatch.setattr(Training, "_log", log)
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(9))  # within the fifth epoch of 2 steps
    experiment, folder = small(listops(task="text"), epochs=5), tmp_path / "run"
    with pytest.raises(SystemExit):
        loop.train(experiment, folder, quiet=True)
    result = loop.finish(folder)
    assert (result["best_epoch"], result["epochs_done"]) == (4, 4)
    assert result["best_on_test"] == {"epoch": 3, "accuracy": 0.75}
    assert report.notes(result)[-1] == "last epoch; best on test 75.00 at epoch 3"
    assert torch.load(folder / "best.ckpt", weights_only=True)["epoch"] == 3
    scores.append(0.6)
    monkeypatch.setattr(loop, "make_trainer", make_trainer)
    result = loop.train(experiment, folder, quiet=True)
    assert (result["best_epoch"], result["best_on_test"]["epoch"]) == (5, 3)
    print_result(result, folder)
    assert ", last epoch; best on test 75.00% at epoch 3\n" in capsys.readouterr().out
    recorded, last = SequenceClassifier.from_pretrained(folder / "model").state_dict(), weights(folder)
    assert all(torch.equal(value, last[f"model.{name}"]) for name, value in recorded.items())


def test_a_run_can_be_finished_early_and_still_resume(tmp_path, monkeypatch):
    training_step = Training.training_step

    def failing_step(self, batch, index):
        if self.global_step == 6:
            raise RuntimeError("power failure")
        return training_step(self, batch, index)

    experiment = listops(data_dir=str(tmp_path / "data"))
    monkeypatch.setattr(Training, "training_step", failing_step)
    with pytest.raises(RuntimeError, match="power failure"):
        loop.train(experiment, tmp_path / "run", quiet=True)
    result = loop.finish(tmp_path / "run")
    assert (result["partial"], result["epochs_done"], result["best_epoch"]) == (True, 1, 1)
    assert result["environment"]["torch"] == version("torch")
    monkeypatch.setattr(Training, "training_step", training_step)
    complete = loop.train(experiment, tmp_path / "run", quiet=True)
    assert (complete["partial"], complete["epochs_done"]) == (False, 3)
    assert complete["accuracy"] == loop.train(experiment, tmp_path / "uninterrupted", quiet=True)["accuracy"]


def test_a_run_that_stops_early_resumes_bit_for_bit(tmp_path):
    folder, data_dir = tmp_path / "run", str(tmp_path / "data")

    def run(folder, **changes):
        return loop.train(listops(data_dir=data_dir, epochs=4, **changes), folder, quiet=True)

    stopped = run(folder, stop_after=2)
    assert (stopped["partial"], stopped["epochs"], stopped["epochs_done"]) == (True, 4, 2)
    assert stopped["config"]["stop_after"] == 2
    written = (folder / "last.ckpt").stat().st_mtime_ns
    assert run(folder, stop_after=2) == stopped
    assert (folder / "last.ckpt").stat().st_mtime_ns == written
    assert run(folder, stop_after=3)["epochs_done"] == 3
    complete = run(folder)
    assert (complete["partial"], complete["epochs_done"], complete["config"]["stop_after"]) == (False, 4, 0)
    assert run(folder, stop_after=2) == complete
    expected = run(tmp_path / "uninterrupted")
    assert complete["accuracy"] == expected["accuracy"]
    actual = weights(folder)
    assert all(torch.equal(actual[name], value) for name, value in weights(tmp_path / "uninterrupted").items())
    assert (folder / "metrics.csv").read_text() == (tmp_path / "uninterrupted" / "metrics.csv").read_text()


def test_a_run_beyond_its_stop_is_reported(tmp_path, monkeypatch):
    experiment, folder = listops(data_dir=str(tmp_path / "data")), tmp_path / "run"
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(6))
    with pytest.raises(SystemExit):  # within the second epoch
        loop.train(experiment, folder, quiet=True)
    with pytest.raises(ValueError, match=r"stop_after=1 is before .*last\.ckpt, where the run resumes.*mrconv finish"):
        loop.train(dataclasses.replace(experiment, stop_after=1), folder, quiet=True)


def test_the_best_weights_are_restored_after_a_kill_before_they_are_written(tmp_path, monkeypatch):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=2)
    original = checkpoints.write_best

    def write_best(folder, checkpoint):
        if (folder / "best.ckpt").exists():
            raise RuntimeError("killed")
        original(folder, checkpoint)

    monkeypatch.setattr(Checkpoints, "is_better", lambda *_: True)
    monkeypatch.setattr(checkpoints, "write_best", write_best)
    with pytest.raises(RuntimeError, match="killed"):
        loop.train(experiment, tmp_path / "run", quiet=True)
    monkeypatch.setattr(checkpoints, "write_best", original)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for result in (loop.finish(copy), loop.train(experiment, tmp_path / "run", quiet=True)):
        assert (result["best_epoch"], result["epochs_done"]) == (2, 2)
    for folder in (copy, tmp_path / "run"):
        best, last = weights(folder, "best.ckpt"), weights(folder)
        assert all(torch.equal(value, last[name]) for name, value in best.items())
        assert len((folder / "metrics.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_best_checkpoint_holds_the_weights_of_the_recorded_model_alone(tmp_path, ema):
    loop.train(listops(data_dir=str(tmp_path / "data"), epochs=1, ema=ema), tmp_path / "run", quiet=True)
    best = torch.load(tmp_path / "run" / "best.ckpt", weights_only=True)
    assert best.keys() == {"mrconv", "epoch", "state_dict"}
    recorded = SequenceClassifier.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert best["state_dict"].keys() == {f"model.{name}" for name in recorded}
    assert all(torch.equal(best["state_dict"][f"model.{name}"], value) for name, value in recorded.items())


def test_a_run_does_not_resume_from_its_best_weights(tmp_path):
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=1), tmp_path / "run"
    loop.train(experiment, folder, quiet=True)
    for name in ("last.ckpt", "previous.ckpt", "result.json"):
        (folder / name).unlink(missing_ok=True)
    assert latest_valid_checkpoint(folder) is None
    with pytest.raises(FileNotFoundError, match=r"has no last\.ckpt or previous\.ckpt that can be read"):
        loop.finish(folder)
    assert loop.train(experiment, folder, quiet=True)["epochs_done"] == 1


def test_a_checkpoint_within_an_epoch_does_not_become_the_best(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(6))
    with pytest.raises(SystemExit):  # within the second epoch; the first is the best
        loop.train(listops(data_dir=str(tmp_path / "data")), tmp_path / "run", quiet=True)
    best = (tmp_path / "run" / "best.ckpt").read_bytes()
    checkpoints.restore_files(tmp_path / "run", tmp_path / "run" / "last.ckpt")
    assert (tmp_path / "run" / "best.ckpt").read_bytes() == best


def test_a_damaged_best_checkpoint_is_reported_and_the_record_names_the_used_epoch(tmp_path, monkeypatch, capsys):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=2)
    monkeypatch.setattr(Checkpoints, "is_better", lambda self, new, best: best is None)
    assert loop.train(experiment, tmp_path / "run", quiet=True)["best_epoch"] == 1
    (tmp_path / "run" / "best.ckpt").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"best\.ckpt cannot be read and is not used"):
        result = loop.finish(tmp_path / "run")
    assert result["best_epoch"] == 2
    substitution = {"used": "last.ckpt", "instead_of": "best.ckpt", "why": "File is not a zip file"}
    assert rundir.read_result(tmp_path / "run")["substitution"] == substitution
    assert "last.ckpt instead of best.ckpt" in report.table([result])
    print_result(result, tmp_path / "run")
    assert "epoch 2 (last.ckpt instead of best.ckpt: File is not a zip file)" in capsys.readouterr().out


def test_a_run_without_an_epoch_cannot_be_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(2))
    with pytest.raises(SystemExit):
        loop.train(listops(data_dir=str(tmp_path / "data")), tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match="no epoch is complete yet"):
        loop.finish(tmp_path / "run")


def test_a_folder_with_another_run_is_rejected(tmp_path):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=1)
    loop.train(experiment, tmp_path / "run", quiet=True)
    other = listops(data_dir=str(tmp_path / "data"), epochs=1, lr=0.1)
    with pytest.raises(ValueError, match=r"holds another run .*lr is 0\.003 there and 0\.1 here"):
        loop.train(other, tmp_path / "run", quiet=True)


def test_drafts_of_killed_processes_are_removed_when_a_run_resumes(tmp_path):
    exited = subprocess.Popen(["true"])
    exited.wait()
    folder = tmp_path / "run"
    folder.mkdir()
    drafts = [folder / f".last.ckpt-{pid}" for pid in (exited.pid, os.getpid(), os.getppid())]
    for path in (*drafts, folder / ".notes-2024"):
        path.write_text("half")
    (folder / "model" / ".saving-abc").mkdir(parents=True)
    loop.train(listops(data_dir=str(tmp_path / "data"), epochs=1), folder, quiet=True)
    assert {path.name for path in folder.glob(".*")} == {f".last.ckpt-{os.getppid()}", ".notes-2024", rundir.LOCK}
    assert not list((folder / "model").glob(".*"))


def test_only_one_process_trains_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "LOCK_TIMEOUT", 0)
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=1), tmp_path / "run"
    folder.mkdir()
    with rundir.run_lock(folder), pytest.raises(ValueError, match=f"another process is training in {folder}"):
        loop.train(experiment, folder, quiet=True)
    assert [path.name for path in folder.iterdir()] == [rundir.LOCK]
    loop.train(experiment, folder, quiet=True)
    with rundir.run_lock(folder), pytest.raises(ValueError, match="another process is training"):
        loop.finish(folder)


def test_a_run_does_not_resume_with_other_data(tmp_path, monkeypatch):
    experiment, folder, prepare = listops(data_dir=str(tmp_path / "data")), tmp_path / "run", loop.prepare
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(6))
    with pytest.raises(SystemExit):
        loop.train(experiment, folder, quiet=True)
    changed = dataclasses.replace(prepare(experiment), classes=tuple("0123456789x"))
    monkeypatch.setattr(loop, "prepare", lambda *_: changed)
    for resume in (lambda: loop.train(experiment, folder, quiet=True), lambda: loop.finish(folder)):
        with pytest.raises(
            ValueError, match=r"last\.ckpt was trained on other data: classes were \['0', .* '9', 'x'\]"
        ):
            resume()


def test_the_result_is_written_after_the_figures(tmp_path, monkeypatch):
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=1), tmp_path / "run"
    monkeypatch.setattr(loop, "draw_run", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        loop.train(experiment, folder, quiet=True)
    monkeypatch.setattr(loop, "draw_run", draw_run)
    assert not (folder / "result.json").exists()
    loop.train(experiment, folder, quiet=True)
    assert {path.name for path in (folder / "figures").iterdir()} >= {"curves.png", "kernels.png"}


def test_a_folder_without_a_checkpoint_can_be_used_again(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteError, match="there is no earlier checkpoint"):
        loop.train(listops(data_dir=str(tmp_path / "data"), lr=1e30, epochs=1), folder, quiet=True)
    loop.train(listops(data_dir=str(tmp_path / "data"), epochs=1), folder, quiet=True)


def test_a_damaged_result_is_reported(tmp_path):
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=1), tmp_path / "run"
    folder.mkdir()
    (folder / "result.json").write_text("{partial")
    with pytest.raises(ValueError, match=r"result\.json is not JSON"):
        loop.train(experiment, folder, quiet=True)
    (folder / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result\.json is not the result of a run: key 'name' is missing"):
        loop.train(experiment, folder, quiet=True)


def test_a_complete_run_started_again_returns_the_same_result(tmp_path):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=1)
    first = loop.train(experiment, tmp_path / "run", quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.monotonic()
        again = loop.train(experiment, tmp_path / "run", quiet=True)
    assert again["accuracy"] == first["accuracy"]
    assert again["seconds"] == first["seconds"]
    assert time.monotonic() - start < 60


def test_the_record_lists_the_environments_before_a_run_resumed_elsewhere(tmp_path, monkeypatch):
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=2), tmp_path / "run"
    make_trainer, current = loop.make_trainer, rundir.environment()
    monkeypatch.setattr(rundir, "environment", lambda: current | {"hardware": "old"})
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(3))
    with pytest.raises(SystemExit):
        loop.train(experiment, folder, quiet=True)
    monkeypatch.setattr(rundir, "environment", lambda: current)
    monkeypatch.setattr(loop, "make_trainer", make_trainer)
    recorded = loop.train(experiment, folder, quiet=True)["environment"]
    assert (recorded["hardware"], recorded["from_step"]) == (current["hardware"], 3)
    facts = {"precision": "32-true", "compiled": False, "command": rundir.command_line()}
    facts["changes"] = recipe_changes(dataclasses.asdict(experiment))
    assert recorded["before"] == [current | {"hardware": "old", "from_step": 0} | facts]


def test_environments_whose_steps_were_lost_are_removed(tmp_path):
    path = tmp_path / "environment.json"
    for name, step in (("a", 0), ("a", 2), ("b", 5), ("c", 5), ("c", 7), ("d", 7), ("a", 9)):
        rundir.write_json(path, rundir.environment_history({"hardware": name}, path, step))
    before = [{"from_step": 0, "hardware": "a"}, {"from_step": 5, "hardware": "c"}, {"from_step": 7, "hardware": "d"}]
    assert read_json(path) == {"hardware": "a", "from_step": 9, "before": before}
    assert rundir.environment_history({"hardware": "a"}, path, 4) == {"hardware": "a"}
    assert rundir.environment_history({"hardware": "b"}, path, 0) == {"hardware": "b"}


@pytest.mark.parametrize("text", ["", "name: mini\ntask_opt", "name: mini\nepochs:", "name: [", "title: mini"])
def test_a_damaged_config_is_reported(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml is not the config of a run: .+"):
        rundir.read_run(tmp_path)


def test_a_config_with_the_former_name_of_the_sampling_rate_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "name: mine\ntask: folder\nrate: 0.5\ntask_options: {rate: 8000, cut: true}\n"
    )
    experiment = rundir.read_run(tmp_path)
    assert (experiment.task_options, experiment.rate) == ({"sample_rate": 8000, "cut": True}, 0.5)


def test_a_config_is_written_atomically(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    rundir.write_config(path, {"name": "mini"})

    def fail(self, text, **_):
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        rundir.write_config(path, {"name": "other"})
    assert path.read_text() == "name: mini\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("change", [{"dropout": 0.3}, {"ema": 0.9}, {"dropout": 0.3, "loader": "resident"}])
@pytest.mark.parametrize("step", slow_except([3, 4, 6], 6))
def test_a_run_stopped_within_an_epoch_resumes_bit_for_bit(tmp_path, monkeypatch, change, step):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=2, **change)  # 4 steps each
    loop.train(experiment, tmp_path / "uninterrupted", quiet=True)
    make_trainer = loop.make_trainer
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(step))
    with pytest.raises(SystemExit) as stopped:
        loop.train(experiment, tmp_path / "stopped", quiet=True)
    assert stopped.value.code == 143
    monkeypatch.setattr(loop, "make_trainer", make_trainer)
    result = loop.train(experiment, tmp_path / "stopped", quiet=True)
    expected, actual = weights(tmp_path / "uninterrupted"), weights(tmp_path / "stopped")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert result["epochs_done"] == 2
    tables = [(tmp_path / each / "metrics.csv").read_text() for each in ("uninterrupted", "stopped")]
    assert tables[0] == tables[1]
