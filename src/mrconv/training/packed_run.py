"""Runs that travel: what a run needs to resume on another machine, as files of limited size with checksums."""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

from .._utils.files import link
from ..hub import MODEL, read_json
from ..tasks.archives import copy_exactly, tar_files
from ..tasks.errors import DataError
from ..tasks.reading import reading
from . import rundir
from .checkpoint_files import BEST, LAST, PREVIOUS, find_problem, latest_valid_checkpoint
from .checkpoints import METRICS, has_best_weights, read_step

MANIFEST, PART, FORMAT = "manifest.json", "part-{:03d}", 1
FILES = (rundir.CONFIG, rundir.ENVIRONMENT, METRICS, BEST, rundir.RESULT)
"""What is packed beside checkpoint and model, where it exists; a resumed run writes everything else again."""
MOMENTS = ("exp_avg", "exp_avg_sq")
ATTEMPTS = 10  # to link the best weights and the last checkpoint of the same time


def pack(run: Path, out: Path, max_bytes: int, bfloat16_moments: bool = False) -> dict[str, Any]:
    """Write what a run needs to resume elsewhere into a new folder, in files of at most `max_bytes`.

    With `bfloat16_moments` the optimizer's moments are rounded to bfloat16, and the run's result records at which step;
    otherwise resuming is bit-exact. A run that is training goes on, and is packed as of its last checkpoint.

    Returns:
        The manifest: the run's name, its step, and the size and checksum of each part.
    """
    rundir.read_run(run)  # raises if it is not a run
    if out.exists():
        raise ValueError(f"{out} exists: give a folder that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as draft:
        name = run.resolve().name
        held, archive, target = Path(draft, "held", name), Path(draft, "run.tar"), Path(draft, "out")
        held.mkdir(parents=True)
        target.mkdir()
        checkpoint = _hold(run, held)
        if checkpoint is None:
            raise ValueError(f"{run} has no checkpoint to resume from")
        step = read_step(checkpoint)
        with tarfile.open(archive, "w") as tar:
            if bfloat16_moments:
                checkpoint = _with_rounded_moments(checkpoint, Path(draft, LAST))
            tar.add(checkpoint, LAST)
            for file in (*FILES, MODEL):
                if (held / file).exists():
                    tar.add(held / file, file)
        parts = _split(archive, target, max_bytes)
        manifest = {"format": FORMAT, "run": name, "step": step, "parts": parts}
        rundir.write_json(target / MANIFEST, manifest)
        os.replace(target, out)
    return manifest


def unpack(packed: Path, run: Path | None = None) -> tuple[Path, int]:
    """Restore a packed run as a folder that does not exist yet, by default runs/NAME; return the folder and its step.

    Nothing is written if a part is missing or damaged.
    """
    if not (packed / MANIFEST).exists():
        raise FileNotFoundError(f"{packed} is not a packed run: it has no {MANIFEST}")
    manifest = read_json(packed / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{packed} has format {manifest.get('format')!r}, this mrconv reads {FORMAT}")
    with reading(packed / MANIFEST, "does not describe a packed run", ""):
        name, step = Path(str(manifest["run"])).name, int(manifest["step"])
        sums = [str(part["sha256"]) for part in manifest["parts"]]
    run = run or Path("runs") / name
    if run.exists():
        raise ValueError(f"{run} exists: give another folder, or remove it")
    run.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{run.name}-", dir=run.parent) as draft:
        archive, target = Path(draft, "run.tar"), Path(draft, "run")
        _join(packed, sums, archive)
        _extract(archive, target, packed)
        rundir.read_run(target)
        if latest_valid_checkpoint(target, (LAST,)) is None:
            raise ValueError(f"{packed} holds no readable checkpoint")
        os.replace(target, run)
    return run, step


def _hold(run: Path, held: Path) -> Path | None:
    """Link the files of a run, which may go on; return the link to its checkpoint, None if it has none.

    Training replaces each file as a whole, the last checkpoint first.
    """
    (held / MODEL).mkdir(exist_ok=True)
    for path in (run / MODEL).glob("[!.]*"):
        if path.is_file():
            link(path, held / MODEL / path.name)
    for _ in range(ATTEMPTS):
        for name in (*FILES, PREVIOUS, LAST):
            if (run / name).exists():
                link(run / name, held / name)
        checkpoint = latest_valid_checkpoint(held, (LAST, PREVIOUS))
        if checkpoint != held / LAST or find_problem(held / BEST) is not None:  # missing, or damaged in the run
            break
        last, best = (
            torch.load(path, map_location="meta", weights_only=True, mmap=True) for path in (checkpoint, held / BEST)
        )
        if last["mrconv"]["best_epoch"] == best["epoch"] or has_best_weights(last):
            break
    return checkpoint


def _split(archive: Path, folder: Path, max_bytes: int) -> list[dict[str, Any]]:
    """Write a file as parts of at most `max_bytes`; return the name, size and checksum of each."""
    parts: list[dict[str, Any]] = []
    with archive.open("rb") as file:
        while data := file.read(max_bytes):
            name = PART.format(len(parts))
            (folder / name).write_bytes(data)
            parts.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    return parts


def _join(folder: Path, sums: list[str], archive: Path) -> None:
    """Write the parts as one file, after checking each."""
    with archive.open("wb") as file:
        for i, expected in enumerate(sums):
            path = folder / PART.format(i)
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing: {folder} has {len(sums)} parts")
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise ValueError(f"{path} is damaged: its checksum differs from that in {MANIFEST}; copy it again")
            file.write(data)


def _extract(archive: Path, target: Path, packed: Path) -> None:
    """Write the files of a tar into a folder."""
    try:
        for name, size, stream in tar_files(archive):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with (target / name).open("wb") as file:
                copy_exactly(stream, file, size, name)
    except DataError as error:
        raise ValueError(f"{packed} holds no run: {error}") from error


def _with_rounded_moments(checkpoint: Path, target: Path) -> Path:
    """Write a checkpoint whose optimizer moments are bfloat16; an optimizer that loads it casts them back."""
    content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    content["mrconv"]["rounded_moments_at"] = [*content["mrconv"].get("rounded_moments_at", []), content["global_step"]]
    for optimizer in content["optimizer_states"]:
        for state in optimizer["state"].values():
            state |= {name: state[name].bfloat16() for name in MOMENTS if name in state}
    torch.save(content, target)
    return target
