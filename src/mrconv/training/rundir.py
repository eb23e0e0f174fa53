"""What a run leaves behind besides its weights: its config, its environment, its result."""

from __future__ import annotations

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

CONFIG, ENVIRONMENT, RESULT = "config.yaml", "environment.json", "result.json"
LOCK = ".lock"
PATIENCE = 10  # seconds: the processes that read data for one that was killed live on for five
PACKAGES = ("torch", "pytorch-lightning", "hydra-core", "torchmetrics", "numpy", "safetensors", "triton")


def first_process() -> bool:
    """Whether this process is alone or, of several that train together, the one that writes and tells."""
    from pytorch_lightning.utilities import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Refuse a run folder that another process works in; of several that train together, the first stands for all."""
    if not first_process():
        yield
        return
    with (folder / LOCK).open("a") as file:
        late = time.monotonic() + PATIENCE
        try:
            while not _locked(file):
                if time.monotonic() > late:
                    raise ValueError(f"another process is at work in {folder}")
                time.sleep(0.2)
        except (ImportError, OSError):  # no such locks on this system, or this file system
            warnings.warn(f"{folder} cannot be locked: see to it that no other process trains there", stacklevel=3)
        yield


def _locked(file: IO[str]) -> bool:
    """Whether a file could be locked for this process, which lets it go when it closes the file or ends."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_drafts(folder: Path) -> None:
    """Remove what processes that are gone were writing when they were killed."""
    for name in (MODEL, MERGED):
        for path in (folder / name).glob(".saving-*"):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*-*"):
        draft = re.fullmatch(r"\..+\.(?:ckpt|csv|json|yaml)-(\d{1,9})", path.name)
        if draft and not _lives(int(draft[1])):
            path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    """Whether a process is there, besides this one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def write_json(path: Path, value: Any) -> None:
    """Write JSON, all of it or nothing."""
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_config(path: Path, values: dict[str, Any]) -> None:
    """Write a config as YAML, all of it or nothing."""
    with atomic_write(path) as draft:
        draft.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def environment() -> dict[str, Any]:
    """Return hardware, versions and the revision of the code."""
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


def going_on(now: dict[str, Any], path: Path, step: int) -> dict[str, Any]:
    """Return the environment of a start at some step, with those before it, in a file, that trained those steps."""
    there = read_json(path) if path.exists() else {}
    earlier = [{"from_step": 0} | each for each in (*there.pop("before", []), there)]
    earlier = [each for each in earlier if each["from_step"] < step]
    if earlier and earlier[-1] == earlier[-1] | now:
        step = earlier.pop()["from_step"]
    return now | {"from_step": step, "before": earlier} if earlier else now


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts on data that are plain values; the folder they lie in is the machine's."""
    return {name: z for name, z in facts.items() if isinstance(z, str | int | float) and name != "root"}


def command() -> str:
    """Return the command that was typed, without the path of the program."""
    program = Path(sys.argv[0]).name
    return shlex.join(["mrconv" if program in ("mrconv", "__main__.py") else program, *sys.argv[1:]])
