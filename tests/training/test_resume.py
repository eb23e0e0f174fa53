"""A run that was stopped goes on as if it had not been; what is broken is named."""

import csv
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.exceptions import SIGTERMException

from mrconv.training import checkpoints
from mrconv.training import loop as run
from mrconv.training import rundir as record
from mrconv.training.checkpoints import AtomicIO, last_good
from mrconv.training.module import NotFinite, Training
from mrconv.training.scores import SCORES

from .miniature import listops


def start(folder, epochs=3):
    command = [sys.executable, "-m", "tests.training.miniature", str(folder), str(epochs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def weights(folder):
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    process = start(folder)
    assert process.wait() == 0, process.stdout.read()
    return folder


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_killed_ends_with_the_same_bits(how, unbroken):
    folder = unbroken.parent / f"stopped-{how.name}"
    process = start(folder)
    for line in process.stdout:
        if line.startswith("epoch   2/3" if how == signal.SIGKILL else "epoch   1/3"):
            process.send_signal(how)
            break
    assert process.wait() != 0
    process.stdout.close()
    assert not (folder / "result.json").exists()
    again = start(folder)
    assert again.wait() == 0, again.stdout.read()
    expected, found = weights(unbroken), weights(folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tables = [list(csv.DictReader((each / "metrics.csv").open())) for each in (unbroken, folder)]
    assert tables[0] == tables[1]
    assert [row["epoch"] for row in tables[1]] == ["1", "2", "3"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(unbroken):
    folder = unbroken.parent / "damaged"
    process = start(folder, 2)
    assert process.wait() == 0
    last = folder / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-2000])
    with pytest.warns(UserWarning, match=r"last\.ckpt cannot be read and is not used"):
        assert last_good(folder) == folder / "previous.ckpt"


def test_damaged_tensors_are_noticed(tmp_path):
    torch.save({"mrconv": {}, "weights": torch.full((1000,), 3.0)}, tmp_path / "last.ckpt")
    assert last_good(tmp_path) == tmp_path / "last.ckpt"
    content = bytearray((tmp_path / "last.ckpt").read_bytes())
    content[content.index(torch.full((100,), 3.0).numpy().tobytes()) + 50] ^= 1
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.warns(UserWarning, match=r"last\.ckpt cannot be read .*last/data/0 in it is damaged"):
        assert last_good(tmp_path) is None


@pytest.mark.filterwarnings("ignore:.*last.ckpt cannot be read")
def test_going_on_from_the_previous_checkpoint_keeps_it(tmp_path, monkeypatch):
    experiment, folder = listops(data_dir=str(tmp_path / "data")), tmp_path / "run"
    plain = run.make_trainer
    monkeypatch.setattr(run, "make_trainer", lambda e, f, callbacks: plain(e, f, [*callbacks, Stop(9)]))
    with pytest.raises(SystemExit):
        run.train(experiment, folder, quiet=True)
    monkeypatch.setattr(run, "make_trainer", plain)
    (folder / "last.ckpt").unlink()
    (folder / "last.ckpt").write_bytes(b"damaged")

    def full(checkpoint, file):
        raise OSError(28, "No space left on device")

    save = torch.save
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        run.train(experiment, folder, quiet=True)
    monkeypatch.setattr(torch, "save", save)
    assert last_good(folder) == folder / "previous.ckpt"
    assert run.train(experiment, folder, quiet=True)["epochs_done"] == 3
    steps = [torch.load(folder / name, weights_only=True)["global_step"] for name in ("last.ckpt", "previous.ckpt")]
    assert steps == [12, 8]


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"mrconv": Evil()}, tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert last_good(tmp_path) is None
    with pytest.raises(Exception, match=r"[Ww]eights"):
        AtomicIO().load_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "ran").exists()


def test_a_disk_that_is_full_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicIO().save_checkpoint({"x": torch.ones(3)}, path)

    def full(checkpoint, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        AtomicIO().save_checkpoint({"x": torch.zeros(3)}, path)
    assert torch.equal(AtomicIO().load_checkpoint(path)["x"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_rate_and_checkpoint(tmp_path, monkeypatch):
    plain = Training.training_step

    def sick(self, batch, index):
        loss = plain(self, batch, index)
        if self.global_step == 5:
            self.recent[-1] = torch.tensor(math.nan)
        return loss

    monkeypatch.setattr(Training, "training_step", sick)
    experiment = listops(data_dir=str(tmp_path / "data"))
    with pytest.raises(NotFinite, match=r"loss at step 5 is not finite \(learning rate 0\.003\).*last\.ckpt"):
        run.train(experiment, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("when", ["at an epoch's end", "after a while", "asked to stop"])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, when):
    plain, trainer = Training.training_step, run.make_trainer
    step, saved = {"at an epoch's end": (8, 4), "after a while": (6, 5), "asked to stop": (6, 4)}[when]

    def spoils(self, batch, index):
        loss = plain(self, batch, index)
        if self.global_step == step:
            self.model.head.weight.data[0, 0] = math.inf
        return loss

    monkeypatch.setattr(Training, "training_step", spoils)
    if when == "asked to stop":
        monkeypatch.setattr(run, "make_trainer", lambda e, f, callbacks: trainer(e, f, [*callbacks, Stop(step)]))
    minutes = 1e-9 if when == "after a while" else 10
    experiment, folder = listops(data_dir=str(tmp_path / "data"), checkpoint_minutes=minutes), tmp_path / "run"
    told = f"weights after step {step} are not finite .*last.ckpt|143"
    with pytest.raises((NotFinite, SystemExit), match=told):
        run.train(experiment, folder, quiet=True)
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == saved
    assert all(value.isfinite().all() for value in weights(folder).values())


def test_an_epoch_whose_validation_loss_is_not_finite_is_not_the_best(tmp_path, monkeypatch):
    plain = Training._log

    def log(self, scores, name):
        if name == "val" and self.current_epoch == 1:
            self._scores("val").loss.update(math.nan)
        plain(self, scores, name)

    monkeypatch.setattr(Training, "_log", log)
    monkeypatch.setattr(SCORES["accuracy"].__class__, "better", lambda self, new, old: True)
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=2)
    assert run.train(experiment, tmp_path / "run", quiet=True)["best_epoch"] == 1


def test_a_run_can_be_finished_where_it_stands_and_still_go_on(tmp_path, monkeypatch):
    plain = Training.training_step

    def stops(self, batch, index):
        if self.global_step == 6:
            raise RuntimeError("the power is out")
        return plain(self, batch, index)

    experiment = listops(data_dir=str(tmp_path / "data"))
    monkeypatch.setattr(Training, "training_step", stops)
    with pytest.raises(RuntimeError, match="the power is out"):
        run.train(experiment, tmp_path / "run", quiet=True)
    result = run.end(tmp_path / "run")
    assert (result["partial"], result["epochs_done"], result["best_epoch"]) == (True, 1, 1)
    assert result["environment"]["torch"] == torch.__version__
    monkeypatch.setattr(Training, "training_step", plain)
    whole = run.train(experiment, tmp_path / "run", quiet=True)
    assert (whole["partial"], whole["epochs_done"]) == (False, 3)
    assert whole["accuracy"] == run.train(experiment, tmp_path / "unbroken", quiet=True)["accuracy"]


def test_the_best_checkpoint_is_named_after_a_kill_before_that(tmp_path, monkeypatch):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=2)
    monkeypatch.setattr(SCORES["accuracy"].__class__, "better", lambda self, new, old: True)
    plain = checkpoints._link

    def link(source, target):
        if target.name == "best.ckpt" and target.exists():
            raise RuntimeError("killed")
        plain(source, target)

    monkeypatch.setattr(checkpoints, "_link", link)
    with pytest.raises(RuntimeError, match="killed"):
        run.train(experiment, tmp_path / "run", quiet=True)
    monkeypatch.setattr(checkpoints, "_link", plain)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for result in (run.end(copy), run.train(experiment, tmp_path / "run", quiet=True)):
        assert (result["best_epoch"], result["epochs_done"]) == (2, 2)
    for folder in (copy, tmp_path / "run"):
        best = torch.load(folder / "best.ckpt", weights_only=True)["state_dict"]
        assert all(torch.equal(best[name], value) for name, value in weights(folder).items())
        assert len((folder / "metrics.csv").read_text().splitlines()) == 3


def test_a_checkpoint_within_an_epoch_is_not_named_the_best(tmp_path, monkeypatch):
    plain = run.make_trainer
    monkeypatch.setattr(run, "make_trainer", lambda e, f, callbacks: plain(e, f, [*callbacks, Stop(6)]))
    with pytest.raises(SystemExit):  # within the second epoch, and the first is the best
        run.train(listops(data_dir=str(tmp_path / "data")), tmp_path / "run", quiet=True)
    best = (tmp_path / "run" / "best.ckpt").read_bytes()
    checkpoints.settle(tmp_path / "run", tmp_path / "run" / "last.ckpt")
    assert (tmp_path / "run" / "best.ckpt").read_bytes() == best


def test_a_damaged_best_checkpoint_is_named_and_the_record_tells_whose_weights_it_took(tmp_path, monkeypatch):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=2)
    monkeypatch.setattr(SCORES["accuracy"].__class__, "better", lambda self, new, old: False)
    assert run.train(experiment, tmp_path / "run", quiet=True)["best_epoch"] == 1
    best = tmp_path / "run" / "best.ckpt"
    best.unlink()  # it may be the previous one by another name
    best.write_bytes(b"")
    with pytest.warns(UserWarning, match=r"best\.ckpt cannot be read and is not used"):
        assert run.end(tmp_path / "run")["best_epoch"] == 2


def test_a_run_without_an_epoch_cannot_be_finished(tmp_path, monkeypatch):
    plain = run.make_trainer
    monkeypatch.setattr(run, "make_trainer", lambda e, f, callbacks: plain(e, f, [*callbacks, Stop(2)]))
    with pytest.raises(SystemExit):
        run.train(listops(data_dir=str(tmp_path / "data")), tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match="no epoch has ended yet"):
        run.end(tmp_path / "run")


def test_a_folder_with_another_run_is_refused(tmp_path):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=1)
    run.train(experiment, tmp_path / "run", quiet=True)
    other = listops(data_dir=str(tmp_path / "data"), epochs=1, lr=0.1)
    with pytest.raises(ValueError, match=r"holds another run .*lr is 0\.003 there and 0\.1 here"):
        run.train(other, tmp_path / "run", quiet=True)


def test_drafts_of_killed_processes_are_removed_when_a_run_goes_on(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder = tmp_path / "run"
    folder.mkdir()
    drafts = [folder / f".last.ckpt-{pid}" for pid in (gone.pid, os.getpid(), os.getppid())]
    for path in (*drafts, folder / ".notes-2024"):
        path.write_text("half")
    (folder / "model" / ".saving-abc").mkdir(parents=True)
    run.train(listops(data_dir=str(tmp_path / "data"), epochs=1), folder, quiet=True)
    assert {path.name for path in folder.glob(".*")} == {f".last.ckpt-{os.getppid()}", ".notes-2024", record.LOCK}
    assert not list((folder / "model").glob(".*"))


def test_a_folder_is_worked_in_by_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "PATIENCE", 0)
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=1), tmp_path / "run"
    folder.mkdir()
    with record.alone(folder), pytest.raises(ValueError, match=f"another process is at work in {folder}"):
        run.train(experiment, folder, quiet=True)
    assert [path.name for path in folder.iterdir()] == [record.LOCK]
    run.train(experiment, folder, quiet=True)
    with record.alone(folder), pytest.raises(ValueError, match="another process is at work"):
        run.end(folder)


def test_a_run_does_not_go_on_with_other_data(tmp_path, monkeypatch):
    experiment, folder, plain = listops(data_dir=str(tmp_path / "data")), tmp_path / "run", run.prepare
    monkeypatch.setattr(run, "make_trainer", stopping(run.make_trainer, 6))
    with pytest.raises(SystemExit):
        run.train(experiment, folder, quiet=True)
    grown = dataclasses.replace(plain(experiment), classes=tuple("0123456789x"))
    monkeypatch.setattr(run, "prepare", lambda *_: grown)
    for goes_on in (lambda: run.train(experiment, folder, quiet=True), lambda: run.end(folder)):
        with pytest.raises(ValueError, match=r"last\.ckpt comes from other data: classes were \['0', .* '9', 'x'\]"):
            goes_on()


def test_a_run_is_done_when_its_figures_are(tmp_path, monkeypatch):
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=1), tmp_path / "run"
    plain, full = run.draw_run, OSError(28, "No space left on device")
    monkeypatch.setattr(run, "draw_run", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space"):
        run.train(experiment, folder, quiet=True)
    monkeypatch.setattr(run, "draw_run", plain)
    assert not (folder / "result.json").exists()
    run.train(experiment, folder, quiet=True)
    assert {path.name for path in (folder / "figures").iterdir()} >= {"curves.png", "kernels.png"}


def test_a_folder_without_a_checkpoint_is_free(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(NotFinite, match="there is no checkpoint"):
        run.train(listops(data_dir=str(tmp_path / "data"), lr=1e30, epochs=1), folder, quiet=True)
    run.train(listops(data_dir=str(tmp_path / "data"), epochs=1), folder, quiet=True)


def test_a_damaged_result_is_named(tmp_path):
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=1), tmp_path / "run"
    folder.mkdir()
    (folder / "result.json").write_text("{partial")
    with pytest.raises(ValueError, match=r"result\.json is not JSON"):
        run.train(experiment, folder, quiet=True)


def stopping(make_trainer, step):
    return lambda e, f, callbacks: make_trainer(e, f, [*callbacks, Stop(step)])


def test_a_finished_run_started_again_ends_at_once_with_the_same_result(tmp_path):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=1)
    first = run.train(experiment, tmp_path / "run", quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.monotonic()
        again = run.train(experiment, tmp_path / "run", quiet=True)
    assert again["accuracy"] == first["accuracy"]
    assert again["seconds"] == first["seconds"]
    assert time.monotonic() - start < 60


def test_a_record_tells_what_trained_a_run_before_it_went_on_elsewhere(tmp_path, monkeypatch):
    experiment, folder = listops(data_dir=str(tmp_path / "data"), epochs=2), tmp_path / "run"
    plain, here = run.make_trainer, record.environment()
    monkeypatch.setattr(record, "environment", lambda: here | {"hardware": "old"})
    monkeypatch.setattr(run, "make_trainer", lambda e, f, callbacks: plain(e, f, [*callbacks, Stop(3)]))
    with pytest.raises(SystemExit):
        run.train(experiment, folder, quiet=True)
    monkeypatch.setattr(record, "environment", lambda: here)
    monkeypatch.setattr(run, "make_trainer", plain)
    found = run.train(experiment, folder, quiet=True)["environment"]
    assert (found["hardware"], found["from_step"]) == (here["hardware"], 3)
    how = {"precision": "32-true", "compiled": False, "command": record.command()}
    assert found["before"] == [here | {"hardware": "old", "from_step": 0} | how]


def test_environments_that_trained_nothing_of_a_run_are_forgotten(tmp_path):
    path = tmp_path / "environment.json"
    for name, step in (("a", 0), ("a", 2), ("b", 5), ("c", 5), ("c", 7), ("d", 7), ("a", 9)):
        record.write_json(path, record.going_on({"hardware": name}, path, step))
    before = [{"from_step": 0, "hardware": "a"}, {"from_step": 5, "hardware": "c"}, {"from_step": 7, "hardware": "d"}]
    assert record.read_json(path) == {"hardware": "a", "from_step": 9, "before": before}
    assert record.going_on({"hardware": "a"}, path, 4) == {"hardware": "a"}
    assert record.going_on({"hardware": "b"}, path, 0) == {"hardware": "b"}


@pytest.mark.parametrize("text", ["", "name: mini\ntask_opt", "name: mini\nepochs:", "name: [", "nam: mini"])
def test_a_damaged_config_is_named(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml is not the config of a run: .+"):
        run.read_run(tmp_path)


def test_a_config_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    record.write_config(path, {"name": "mini"})

    def full(self, text, **_):
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        record.write_config(path, {"name": "other"})
    assert path.read_text() == "name: mini\n"
    assert list(tmp_path.iterdir()) == [path]


class Stop(Callback):
    """Asks to stop as a scheduler does, after some step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.step:
            raise SIGTERMException


@pytest.mark.parametrize("change", [{"dropout": 0.3}, {"ema": 0.9}, {"dropout": 0.3, "loader": "resident"}])
@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_run_stopped_within_an_epoch_ends_with_the_same_bits(tmp_path, monkeypatch, change, step):
    experiment = listops(data_dir=str(tmp_path / "data"), epochs=2, **change)  # 4 steps each
    run.train(experiment, tmp_path / "unbroken", quiet=True)
    plain = run.make_trainer
    monkeypatch.setattr(run, "make_trainer", lambda e, f, callbacks: plain(e, f, [*callbacks, Stop(step)]))
    with pytest.raises(SystemExit) as stopped:
        run.train(experiment, tmp_path / "stopped", quiet=True)
    assert stopped.value.code == 143
    monkeypatch.setattr(run, "make_trainer", plain)
    result = run.train(experiment, tmp_path / "stopped", quiet=True)
    expected, found = weights(tmp_path / "unbroken"), weights(tmp_path / "stopped")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert result["epochs_done"] == 2
    tables = [(tmp_path / each / "metrics.csv").read_text() for each in ("unbroken", "stopped")]
    assert tables[0] == tables[1]
