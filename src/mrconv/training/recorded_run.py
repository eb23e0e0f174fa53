"""The record of a finished run: scores and settings, and the weights with which its evaluation can be repeated."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from .._utils.files import atomic_write
from ..hub import MODEL, WEIGHTS, read_json
from . import rundir
from .checkpoints import METRICS

FILES = (rundir.CONFIG, rundir.ENVIRONMENT, METRICS, rundir.RESULT)


def record(run: Path, out: Path, bfloat16: bool = False) -> Path:
    """Copy settings, scores and trained model of a finished run to `out`/NAME, which must not exist; return it.

    With `bfloat16` the weights of linear layers and embeddings are rounded, and the result records it. Kernels, norms
    and biases keep their dtype, and the model is loaded in float32 as before.
    """
    rundir.read_run(run)  # raises if it is not a run
    target = out / run.resolve().name
    for path in (run / rundir.RESULT, run / MODEL / WEIGHTS):
        if not path.exists():
            raise ValueError(f"{run} has no {path.relative_to(run)}: the run is not finished")
    if target.exists():
        raise ValueError(f"{target} exists: remove it, or give another folder")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=out) as folder:
        draft = Path(folder, target.name)
        shutil.copytree(run / MODEL, draft / MODEL)
        for name in FILES:
            if (run / name).exists():
                shutil.copy(run / name, draft / name)
        if bfloat16:
            _round_matrices(draft / MODEL / WEIGHTS)
            rundir.write_json(
                draft / rundir.RESULT, read_json(draft / rundir.RESULT) | {"rounded_matrices": "bfloat16"}
            )
        os.replace(draft, target)
    return target


def _round_matrices(path: Path) -> None:
    """Round the two-dimensional tensors named weight in a safetensors file to bfloat16."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {
        name: tensor.bfloat16() if tensor.ndim == 2 and name.endswith(".weight") else tensor
        for name, tensor in load_file(path).items()
    }
    with atomic_write(path) as draft:  # the tensors are mapped from the file
        save_file(tensors, draft, metadata)
        shutil.copymode(path, draft)  # safetensors makes its file readable by the owner only
