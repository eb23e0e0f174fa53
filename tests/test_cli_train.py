"""mrconv train, evaluate and reparameterize as commands."""

import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from itertools import takewhile

import numpy as np
import pytest
import yaml
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from safetensors import SafetensorError

from mrconv.cli import main
from mrconv.training.module import NonFiniteError

from .processes import Command

pytestmark = pytest.mark.usefixtures("without_figures")

SETTINGS = [
    "task=listops",
    "task_options={train_size: 40, val_size: 10, test_size: 10, min_length: 10, max_length: 60, length: 64}",
    "d_model=8",
    "depth=2",
    "kernel_size=2",
    "batch_size=10",
    "epochs=1",
    "accelerator=cpu",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli")
    assert main(["train", *SETTINGS, f"out={out}", f"data_dir={out / 'data'}", "name=mini"]) == 0
    return out


def test_a_run_leaves_its_record(folder, capsys):
    run = folder / "mini-seed0"
    assert json.loads((run / "result.json").read_text())["partial"] is False
    for name in ("config.yaml", "environment.json", "metrics.csv", "best.ckpt", "last.ckpt"):
        assert (run / name).exists(), name
    for name in ("model", "merged"):
        assert (run / name / "model.safetensors").exists()
        assert "| test accuracy | " in (run / name / "README.md").read_text()


def test_evaluate_and_reparameterize(folder, capsys):
    run = str(folder / "mini-seed0")
    assert main(["evaluate", run, "--device", "cpu"]) == 0
    merged = _scores(capsys)
    assert main(["evaluate", run, "--device", "cpu", "--branches"]) == 0
    assert _scores(capsys) == merged
    assert main(["evaluate", run, "--device", "cpu", "batch_size=3"]) == 0
    assert _scores(capsys) == merged
    assert list(merged) == ["val", "test"]
    assert main(["reparameterize", run, "--out", str(folder / "again")]) == 0
    assert "largest difference of the logits" in capsys.readouterr().out
    assert (folder / "again" / "model.safetensors").exists()
    shutil.copytree(run, folder / "lean", ignore=shutil.ignore_patterns("merged", "*.ckpt"))
    assert main(["evaluate", str(folder / "lean"), "--device", "cpu"]) == 0
    assert _scores(capsys) == merged


def _scores(capsys):
    """Return the accuracies by split that evaluate printed."""
    header, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    return {line[0]: line[header.index("accuracy")] for line in takewhile(len, lines)}


def test_a_model_merged_at_a_rate_has_its_own_folder(folder, capsys):
    run = folder / "half-rate"
    shutil.copytree(folder / "mini-seed0", run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("\nrate: 1.0\n", "\nrate: 0.5\n"))  # --rate is relative to it
    for options, name in (([], "merged"), (["--rate", "1"], "merged"), (["--rate", "0.5"], "merged-0.5")):
        assert main(["reparameterize", str(run), *options]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == str(run / name)


@pytest.mark.parametrize("settings", [["devices=0"], ["devices=many"], ["accelerator=gpu"]])
def test_unavailable_devices_are_reported_in_one_line(folder, capsys, settings, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit) as stop:
        main(["train", *SETTINGS, f"out={folder}", f"data_dir={folder / 'data'}", "name=nowhere", *settings])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"{settings[0]} " in error
    assert "is not available on this machine" in error
    assert error.count("\n") == 1


def test_a_missing_logger_is_reported_in_one_line(folder, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "wandb" else find(name, *a))
    with pytest.raises(SystemExit) as stop:
        main(["train", *SETTINGS, f"out={folder}", f"data_dir={folder / 'data'}", "name=logged", "wandb=mine"])
    assert stop.value.code == 2
    assert "wandb=mine needs wandb, which is not installed: pip install wandb" in capsys.readouterr().err


def test_an_option_of_another_type_is_reported_when_evaluating(folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", str(folder / "mini-seed0"), "task.length=abc"])
    assert stop.value.code == 2
    assert "task.length must be a number; got 'abc'" in capsys.readouterr().err


def test_a_sweep_of_two(folder, capsys):
    settings = [*SETTINGS, f"out={folder}", f"data_dir={folder / 'data'}", "name=sweep", "seed=1,2"]
    assert main(["train", "-m", *settings]) == 0
    for seed in (1, 2):
        result = json.loads((folder / f"sweep-seed{seed}" / "result.json").read_text())
        assert (result["name"], result["seed"]) == ("sweep", seed)


def test_other_data_is_normalised_as_the_training_data(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw, y = np.random.default_rng(0), np.arange(200) % 2
    x = (draw.normal(size=(200, 12, 1)) + 2 * y[:, None, None]).astype(np.float32)
    few = np.r_[np.flatnonzero(y == 1), np.flatnonzero(y == 0)[:20]]  # their mean and deviation are others
    np.savez("all.npz", x=x, y=y)
    np.savez("few.npz", x=x[few], y=y[few])
    np.savez("three.npz", x=x[:150], y=np.arange(150) % 3)
    np.savez("wide.npz", x=np.repeat(x, 2, 2), y=y)
    settings = ["depth=1", "d_model=8", "epochs=4", "batch_size=8", "accelerator=cpu", "data=./all.npz"]
    assert main(["train", "task=folder", *settings]) == 0
    run = "runs/all-batch_size8-d_model8-depth1-epochs4-seed0"
    capsys.readouterr()
    assert main(["evaluate", run, "--device", "cpu", "data=few.npz"]) == 0
    scores = _scores(capsys)
    assert list(scores) == ["all"]  # every example is scored
    assert float(scores["all"].rstrip("%")) > 90
    for data, message in (
        ("three", "classes of the data: 0, 1, 2; of the model in"),
        ("wide", "channels of the data: 2;"),
    ):
        with pytest.raises(SystemExit):
            main(["evaluate", run, "--device", "cpu", f"data={data}.npz"])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(folder):
    def losses(name, *settings):
        where = [f"out={folder}", f"data_dir={folder / 'data'}", f"name={name}", "sync_stats=true"]
        command = [sys.executable, "-m", "mrconv", "train", *SETTINGS, *where, *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
        assert done.returncode == 0, done.stderr[-2000:]
        lines = (folder / f"{name}-seed0" / "metrics.csv").read_text().splitlines()
        row = dict(zip(lines[0].split(","), map(float, lines[-1].split(",")), strict=True))
        return [row[f"{split}/loss"] for split in ("train", "val", "test")]

    one = losses("one")
    two = losses("two", "devices=2", "strategy=ddp", "batch_size=5")
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_two_processes_stop_together_and_resume(folder):
    def start(name):
        where = [f"out={folder}", f"data_dir={folder / 'data'}", f"name={name}", "devices=2", "strategy=ddp"]
        command = [sys.executable, "-m", "mrconv", "train", *SETTINGS, *where, "batch_size=5", "epochs=30"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
        return subprocess.Popen(command, **pipes, start_new_session=True)

    stopped = start("stopped")
    assert stopped.stdout.readline().startswith("epoch ")
    os.killpg(stopped.pid, signal.SIGTERM)  # a scheduler signals all of them
    error = stopped.communicate(timeout=100)[1]
    run = folder / "stopped-seed0"
    assert stopped.returncode == 143, error
    assert f"stopped by SIGTERM; the same command resumes from {run / 'last.ckpt'}\n" in error
    assert not (run / "result.json").exists()
    for process in (start("stopped"), start("unbroken")):
        error = process.communicate(timeout=200)[1]
        assert process.returncode == 0, error
    assert (run / "metrics.csv").read_text() == (folder / "unbroken-seed0" / "metrics.csv").read_text()


def test_an_interrupted_run_keeps_a_checkpoint_and_resumes(folder):
    where = [f"out={folder}", f"data_dir={folder / 'data'}", "name=long", "epochs=1000"]
    for attempt in range(2):
        process = Command("mrconv", "train", *SETTINGS, *where)
        if attempt:
            assert process.stdout.readline().startswith(f"resuming from {folder / 'long-seed0' / 'last.ckpt'}: ")
        assert process.stdout.readline().startswith("epoch ")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=100)
        assert process.returncode == 130, error
        last = folder / "long-seed0" / "last.ckpt"
        messages = [
            "stopping after this step (Ctrl-C again: at once)",
            f"stopped; the same command resumes from {last}",
        ]
        assert [line for line in error.splitlines() if line.startswith("stop")] == messages
        assert "Traceback" not in error


def test_an_interrupted_preparation_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mrconv.training.loop.prepare", lambda *_: signal.raise_signal(signal.SIGINT))
    assert main(["train", *SETTINGS, f"out={tmp_path}"]) == 130
    assert capsys.readouterr().err == "stopped; the same command starts again, as there is no checkpoint yet\n"


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def test_experiments_are_listed_and_shown(capsys):
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    (listops,) = [line for line in lines if line.startswith("listops-base ")]
    assert listops.split()[1:3] == ["dilated,", "fourier,"]
    assert "shakespeare" in lines  # without variants
    assert any(line.startswith("demo ") and "ablation-depth" in line for line in lines)
    assert main(["train", "--show", "experiment=listops-base", "variant=ablation-dense"]) == 0
    shown = capsys.readouterr().out
    assert "name: listops-base-ablation-dense\n" in shown
    assert "kernel_size: 2048\n" in shown
    assert main(["train", "--show", "experiment=image-base", "seed=7"]) == 0
    shown = capsys.readouterr().out
    assert "kernel: dilated\n" in shown
    assert "seed: 7\n" in shown
    assert main(["train", "--show", "experiment=listops-base", "mixer=s4d"]) == 0
    assert "name: listops-base-s4d\n" in capsys.readouterr().out
    assert main(["train", "--show", "experiment=listops-s4d"]) == 0
    assert "name: listops-s4d\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "lrr=1"], "unknown key 'lrr'; did you mean 'lr'?"),
        (["train", "experiment=listop-base"], "unknown experiment 'listop-base'; did you mean 'listops-base'?"),
        (["train", "--show", "mixer=s4e"], "s4e"),
        (["train", "task=text", "data_dir=/nowhere"], "text: none of aclImdb"),
        (["train"], "nothing to train: give experiment=NAME"),
        (["train", "task=folder"], "folder"),
        (["train", "task.length=abc"], "task.length must be a number; got 'abc'"),
        (["train", "task=smnist", "task.permuted=1"], "task.permuted must be true or false; got 1"),
        (["evaluate", "/nowhere"], "/nowhere is not a run folder: it has no config.yaml"),
        (["evaluate", "/nowhere", "--device", "cpu", "more"], "unrecognized arguments: more"),
        (["reparameterize", "/nowhere"], "/nowhere is not a run folder: it has no config.yaml"),
        (["reparameterize", "/nowhere", "--rate", "0"], "argument --rate: must be positive; got 0.0"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "lr=0.001,-3"], "lr must not be negative; got -3.0"),
        (["-m", "seed=1,foo"], "seed: Value 'foo'"),
        (["sweep=paper"], "sweep=paper is a sweep: add -m"),
        (["experiments=listops-base"], "unknown key 'experiments'; did you mean 'experiment'?"),
        (["hydra/lancher=basic"], "did you mean 'hydra/launcher'?"),
        (["-m", "hydra/launcher=ray", "seed=1,2"], "ray needs hydra-ray-launcher: pip install hydra-ray-launcher"),
        (["-m", "hydra/sweeper=optuna"], "hydra/sweeper=optuna needs hydra-optuna-sweeper: pip install"),
        (["-m", "hydra/launcher=rocket"], "hydra/launcher=rocket is not installed; Hydra's packages have joblib,"),
        (["hydr/launcher=basic"], "did you mean 'hydra/launcher'?"),
        (["backend=triton", "accelerator=cpu"], "backend=triton cannot run here: "),
        (["out=taken"], "Not a directory"),
        (["-m", "out=taken", "seed=1,2"], "Not a directory"),
        (["task=folder", "data=my data (1) [a]=b.npz"], "data=my data (1) [a]=b.npz does not exist: looked for /"),
        (["task=listops", "data=mine.csv"], "data=mine.csv: listops does not take custom data; set task=folder"),
        (["task=folder"], "set path, or data with `mrconv train`, to a file or folder with your data"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(arguments, message, capsys, tmp_path, monkeypatch):
    (tmp_path / "taken").touch()
    monkeypatch.setattr("mrconv.ops._common.INTERPRETED", False)
    test_mistakes_are_reported_in_one_line(["train", *arguments], message, capsys, tmp_path, monkeypatch)
    assert not list(tmp_path.glob("runs/*/*"))


def test_all_jobs_of_a_sweep_are_shown(capsys):
    assert main(["train", "--show", "-m", "experiment=image-base", "seed=1,2", "lr=0.1,0.2", "data='a,b'"]) == 0
    jobs = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [(job["seed"], job["lr"], job["data"]) for job in jobs] == [
        (1, 0.1, "a,b"), (1, 0.2, "a,b"), (2, 0.1, "a,b"), (2, 0.2, "a,b")
    ]  # fmt: skip


@pytest.mark.parametrize("in_other_process", [False, True])
def test_every_failed_job_is_reported(tmp_path, capfd, monkeypatch, in_other_process):
    (launcher,) = [cls for cls in Plugins.instance().discover(Launcher) if cls.__name__ == "BasicLauncher"]
    launch_here = launcher.launch

    def launch(self, jobs, initial_job_idx):
        """Run the jobs in another process, as other launchers do."""
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=lambda: theirs.send(launch_here(self, jobs, initial_job_idx)))
        process.start()
        returned = ours.recv()
        process.join()
        return returned

    if in_other_process:
        monkeypatch.setattr(launcher, "launch", launch)
    settings = ["task=smnist,text", "data_dir=/nowhere", "task_options={}", "name=bad", "seed=1,2"]
    with pytest.raises(SystemExit) as stop:
        main(["train", "-m", *settings, f"out={tmp_path}"])
    assert stop.value.code == 2
    error = capfd.readouterr().err
    for task in ("smnist", "text"):
        for seed in (1, 2):
            folder = tmp_path / f"bad-task-{task}-seed{seed}"
            assert f"failed: {folder} (task={task} seed={seed}): {task}: none of" in error
    assert "Traceback" not in error
    assert "the first: " in error.splitlines()[-1]


def test_an_unexpected_error_in_a_sweep_is_shown_with_its_traceback(tmp_path, capfd, monkeypatch):
    def broken(experiment, folder, progress):
        raise RuntimeError(f"seed {experiment.seed} is unlucky")

    monkeypatch.setattr("mrconv.training.loop.train", broken)
    with pytest.raises(SystemExit):
        main(["train", "-m", "seed=1,2", f"out={tmp_path}"])
    error = capfd.readouterr().err
    assert error.count("Traceback") == 2
    assert f"failed: {tmp_path / 'listops-seed2'} (seed=2): seed 2 is unlucky" in error
    with pytest.raises(RuntimeError, match="seed 3 is unlucky"):
        main(["train", "seed=3", f"out={tmp_path}"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SafetensorError("No space left on device"), "listops-seed0: cannot write the model: No space left on device"),
        (NonFiniteError("the loss at step 5 is not finite"), "the loss at step 5 is not finite"),
        (OSError(28, "No space left on device"), "listops-seed0: No space left on device"),
    ],
)
def test_the_cause_of_a_stop_is_reported_in_one_line(error, message, tmp_path, capsys, monkeypatch):
    def stops(experiment, folder, progress):
        raise error

    monkeypatch.setattr("mrconv.training.loop.train", stops)
    test_mistakes_are_reported_in_one_line(["train", "task=listops"], message, capsys, tmp_path, monkeypatch)


def test_settings_are_read_without_lightning():
    code = "import sys; from mrconv.training.composition import compose; compose([]); print(*sys.modules)"
    assert "pytorch_lightning" not in subprocess.check_output([sys.executable, "-c", code], text=True).split()
