"""The files of a run folder besides weights and figures: lock, config, environment and result."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch
import yaml

import mrconv

from .._utils.files import atomic_write
from .._utils.revision import revision
from ..hub import MERGED, MODEL, read_json
from . import result_files
from .experiment import Experiment

CONFIG, ENVIRONMENT, RESULT = "config.yaml", "environment.json", result_files.RESULT
LOCK = ".lock"
LOCK_TIMEOUT = 10  # seconds: the data workers of a killed process exit after five
PACKAGES = ("torch", "pytorch-lightning", "hydra-core", "torchmetrics", "numpy", "safetensors", "triton")
CHANGEABLE_ON_RESUME = {
    "data_dir", "cache_dir", "loader", "workers", "accelerator", "strategy", "compile", "graphs", "backend",
    "checkpoint_minutes", "plugins", "wandb", "out", "stop_after",
}  # fmt: skip
"""Keys of an experiment that may differ when a run resumes."""


def is_rank_zero() -> bool:
    """Return whether this process is the only one of a run, or the first of several."""
    from pytorch_lightning.utilities import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0


@contextmanager
def run_lock(folder: Path, reading: bool = False) -> Iterator[None]:
    """Lock a run folder against other runs; in a distributed run, rank zero holds the lock for all processes.

    A process that only reads the folder leaves no lock file in it: where there is none, nobody trains.
    """
    if not is_rank_zero() or (reading and not (folder / LOCK).exists()):
        yield
        return
    with (folder / LOCK).open("a") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT
        try:
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    raise ValueError(f"another process is training in {folder}")
                time.sleep(0.2)
        except (ImportError, OSError):  # the operating system or the file system has no such locks
            warnings.warn(f"{folder} cannot be locked: make sure that no other process trains there", stacklevel=3)
        yield


def _try_lock(file: IO[str]) -> bool:
    """Lock a file until it is closed; return whether that was possible."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_stale_drafts(folder: Path) -> None:
    """Remove the partly written files of processes that were killed."""
    for name in (MODEL, MERGED):
        for path in (folder / name).glob(".saving-*"):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*-*"):
        draft = re.fullmatch(r"\..+\.(?:ckpt|csv|json|yaml)-(\d{1,9})", path.name)
        if draft and not _is_other_process(int(draft[1])):
            path.unlink(missing_ok=True)


def _is_other_process(pid: int) -> bool:
    """Return whether a process of this id is running and is not this one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_config(path: Path, values: dict[str, Any]) -> None:
    """Write a config as YAML, atomically."""
    with atomic_write(path) as draft:
        draft.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a run folder as it was recorded, without keys that were added later."""
    path = folder / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{folder} is not a run folder: it has no {CONFIG}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no keys and values")
        options = values.get("task_options")
        if values.get("task") == "folder" and isinstance(options, dict) and "rate" in options:  # the former name
            options["sample_rate"] = options.pop("rate")
        Experiment.make(values)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the config of a run: {' '.join(str(error).split())}") from error
    return values


def read_run(folder: Path) -> Experiment:
    """Return the experiment of a run folder."""
    return Experiment.make(read_config(folder))


def read_result(path: Path) -> Mapping[str, Any]:
    """Return a result.json, given its path or its folder; raise ValueError if it is not the result of a run."""
    return result_files.read(path / RESULT if path.is_dir() else path)


def check_same_experiment(experiment: Experiment, folder: Path) -> None:
    """Reject a folder that holds the config of another experiment."""
    if not (folder / CONFIG).exists():
        return
    there, here = (
        dataclasses.asdict(each) | {"mask_padding": each.masks_padding} for each in (read_run(folder), experiment)
    )
    different = [name for name in here if name not in CHANGEABLE_ON_RESUME and there[name] != here[name]]
    if different:
        values = ", ".join(f"{name} is {there[name]!r} there and {here[name]!r} here" for name in different[:3])
        raise ValueError(f"{folder} holds another run ({values}): give another name or out, or remove it")


def environment() -> dict[str, Any]:
    """Return the hardware, the versions of packages and the revision of the code."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "threads": torch.get_num_threads(),
        "mrconv": mrconv.__version__,
        "revision": revision(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **versions,
    }


def environment_history(current: dict[str, Any], path: Path, step: int) -> dict[str, Any]:
    """Return the environment of a run that starts or resumes at a step, with the recorded ones of earlier steps."""
    recorded = read_json(path) if path.exists() else {}
    earlier = [{"from_step": 0} | each for each in (*recorded.pop("before", []), recorded)]
    earlier = [each for each in earlier if each["from_step"] < step]
    if earlier and earlier[-1] == earlier[-1] | current:
        step = earlier.pop()["from_step"]
    return current | {"from_step": step, "before": earlier} if earlier else current


def scalar_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalar facts about data, without the folder, which differs between machines."""
    return {name: z for name, z in facts.items() if isinstance(z, str | int | float) and name != "root"}


def command_line() -> str:
    """Return the command line of this process, without the path of the program."""
    program = Path(sys.argv[0]).name
    return shlex.join(["mrconv" if program in ("mrconv", "__main__.py") else program, *sys.argv[1:]])
