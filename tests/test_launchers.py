"""Sweeps with Hydra's launchers and the environment of SLURM, as docs/cluster.md describes them."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus

from mrconv.cli import main
from mrconv.training.experiment import Experiment
from mrconv.training.trainer import make_trainer

from .test_cli_train import SETTINGS

PAGE = (Path(__file__).parent.parent / "docs/cluster.md").read_text()
SLURM = {
    "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "mrconv", "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


def command_on_page(word):
    """Return the one shell command of the page that contains a word, as one line."""
    commands = re.findall(r"^\$ ((?:[^\\\n]|\\\n)+)", PAGE, re.MULTILINE)
    (command,) = [each for each in commands if word in each]
    return command.replace("\\\n", " ")


def need(package):
    if importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
        pytest.skip(f"{package} is not installed: pip install {package}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "package"), [("joblib", "hydra-joblib-launcher"), ("submitit_local", "hydra-submitit-launcher")]
)
def test_jobs_of_a_launcher_are_recorded_and_failures_reported(launcher, package, tmp_path, capfd, monkeypatch):
    need(package)
    monkeypatch.setattr("sys.argv", ["mrconv", "train", "-m"])
    where = [f"out={tmp_path}", f"data_dir={tmp_path / 'data'}", "name=sweep", "batch_size=5,10,100"]
    with pytest.raises(SystemExit) as stop:
        main(["train", "-m", f"hydra/launcher={launcher}", *SETTINGS, *where])
    assert stop.value.code == 2
    for size in (5, 10):
        result = json.loads((tmp_path / f"sweep-batch_size{size}-seed0" / "result.json").read_text())
        assert (result["name"], result["config"]["batch_size"]) == (f"sweep-batch_size{size}", size)
        assert result["command"] == "mrconv train -m"
    error = capfd.readouterr().err.splitlines()[-1]
    assert f"the first: {tmp_path / 'sweep-batch_size100-seed0'} (batch_size=100): 40 training examples" in error


@pytest.mark.slow
def test_a_submitted_job_resumes_when_requeued_and_is_reported_when_stopped(tmp_path):
    need("hydra-submitit-launcher")
    where = [f"out={tmp_path}", f"data_dir={tmp_path / 'data'}", "name=long", "seed=3", "hydra/launcher=submitit_local"]
    last = tmp_path / "long-seed3" / "last.ckpt"
    command = [sys.executable, "-m", "mrconv", "train", "-m", *SETTINGS, *where, "epochs=2000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait_for(condition):
        while not condition():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.2)

    wait_for(last.exists)
    (folder,) = [each for each in (tmp_path / ".submitit").iterdir() if each.name.isdigit()]
    controller, output = int(folder.name), folder / f"{folder.name}_0_log.out"
    children = Path(f"/proc/{controller}/task/{controller}/children")
    os.kill(int(children.read_text()), signal.SIGUSR2)  # submitit's signal before the time limit: requeue
    wait_for(lambda: re.search(rf"^resuming from {last}.*^epoch ", output.read_text(), re.MULTILINE | re.DOTALL))
    os.kill(int(children.read_text()), signal.SIGTERM)
    error = process.communicate(timeout=100)[1]
    assert process.returncode == 2, error
    assert f"stopped by SIGTERM; the same command resumes from {last}" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_slurm_command_of_the_page_makes_this_job(tmp_path, monkeypatch):
    need("hydra-submitit-launcher")
    import submitit

    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/submitted\necho Submitted batch job 7\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(submitit.SlurmJob, "results", lambda self: [JobReturn(status=JobStatus.COMPLETED)])
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command_on_page("submitit_slurm"))[1:], f"out={tmp_path}"]) == 0
    script = (tmp_path / "submitted").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.+)$", script, re.MULTILINE))
    wanted = {"partition": "gpu", "gpus-per-node": "1", "cpus-per-task": "8", "time": "720", "signal": "USR2@120"}
    assert options | wanted == options
    assert options["array"] == "0-8%4"


def test_the_loop_of_the_page_gives_each_running_job_its_own_gpu(tmp_path, monkeypatch):
    if shutil.which("xargs") is None or "--process-slot-var" not in subprocess.getoutput("xargs --help"):
        pytest.skip("xargs has no --process-slot-var, an option of GNU findutils")
    program = tmp_path / "mrconv"
    lock = "mkdir $CUDA_VISIBLE_DEVICES && sleep 0.05 && rmdir $CUDA_VISIBLE_DEVICES"  # fails if the GPU is in use
    program.write_text(f'#!/bin/sh\necho $CUDA_VISIBLE_DEVICES "$@" >> log; {lock}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    subprocess.run(command_on_page("--process-slot-var"), shell=True, check=True, cwd=tmp_path)
    lines = [line.split(maxsplit=1) for line in (tmp_path / "log").read_text().splitlines()]
    assert {gpu for gpu, _ in lines} == set("0123")
    assert sorted(rest for _, rest in lines) == [f"train experiment=listops-base seed={seed}" for seed in range(8)]


@pytest.mark.slow
def test_a_queue_saves_a_run_that_trains_and_resumes_it_on_another_machine(tmp_path):
    tiny = "d_model=8 depth=2 batch_size=10 accelerator=cpu task.train_size=40 task.val_size=10 task.test_size=10"
    (tmp_path / "jobs").write_text(
        f"# jobs\n100 train {tiny} seed=1 d_model=0\n\n"
        f"100 train {tiny} name=short\n100 train {tiny} name=long epochs=5000"
    )
    last = Path("runs/long-seed0/last.ckpt")

    def queue(machine, seconds, *packed):
        place = tmp_path / machine
        place.mkdir(exist_ok=True)
        script = Path(__file__).parent.parent / "examples/queue.sh"
        command = ["bash", script, "../jobs", str(seconds), "saved", *packed]
        environment = os.environ | {"MRCONV": f"{sys.executable} -m mrconv"}
        process = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        return process.stdout + process.stderr

    def wait_for(machine, condition):
        until = time.monotonic() + 100
        while not condition():
            assert time.monotonic() < until, queue(machine, 0)
            time.sleep(0.2)

    def stop(machine):
        os.killpg(int((tmp_path / machine / "runs/.queue/jobs/pid").read_text()), signal.SIGKILL)

    try:
        assert queue("one", 0).endswith("jobs go on: \n")
        wait_for("one", (tmp_path / "one" / last).exists)
        shown = queue("one", 0)
        lines = r"d_model=0\n\S+ status 2: .*got 0.*\n.*name=short\n\S+ status 0: in runs/short.*\n.*name=long"
        assert re.search(lines, shown), shown
        saved = tmp_path / "one/saved"
        assert sorted(path.name for path in saved.iterdir()) == ["packed-long-seed0", "short-seed0"]
    finally:
        stop("one")
    try:
        queue("two", 0, "../one/saved/packed-long-seed0")
        assert (tmp_path / "two" / last).exists()
        log = tmp_path / "two/runs/.queue/jobs/output"
        wait_for("two", lambda: f"resuming from {last}" in log.read_text())
    finally:
        stop("two")
    (tmp_path / "jobs").write_text("100 train")
    assert "other jobs named jobs have been started here" in queue("two", 0)
    assert "is not a packed run: it has no manifest.json" in queue("three", 0, "../one/saved/short-seed0")
    assert not (tmp_path / "three/runs").exists()


def test_lightning_does_not_requeue_jobs_of_slurm(tmp_path, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(Experiment(accelerator="cpu"), tmp_path, [])
    environment = trainer._accelerator_connector.cluster_environment
    assert type(environment).__name__ == "SLURMEnvironment"
    assert not environment.auto_requeue


def test_torchrun_starts_the_processes_within_a_job_of_slurm(tmp_path, monkeypatch):
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in (SLURM | torchrun).items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(Experiment(accelerator="cpu"), tmp_path, [])
    assert type(trainer._accelerator_connector.cluster_environment).__name__ == "TorchElasticEnvironment"
