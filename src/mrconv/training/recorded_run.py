"""The record of a finished run: scores and settings, and the weights with which its evaluation can be repeated."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from .._utils.files import atomic_write
from ..hub import CARD, MODEL, WEIGHTS, read_json
from . import rundir
from .checkpoints import METRICS
from .result_files import EVALUATIONS, ROUNDED, portable

NOTE = "These are the scores before matrices were rounded to bfloat16."


def record(run: Path, out: Path, bfloat16: bool = False) -> Path:
    """Copy settings, scores and trained model of a finished run to `out`/NAME, which must not exist; return it.

    Of evaluations with other settings the metrics are copied, which are those of the weights before rounding. Absolute
    paths of data_dir, cache_dir and out are left out.

    With `bfloat16` the weights of linear layers and embeddings are rounded; result and model card note it. Kernels,
    norms and biases keep their dtype, and the model is loaded in float32 as before.
    """
    rundir.read_run(run)  # raises if it is not a run
    target = out / run.resolve().name
    for path in (run / rundir.RESULT, run / METRICS, run / MODEL / WEIGHTS):
        if not path.exists():
            raise ValueError(f"{run} has no {path.relative_to(run)}: the run is not finished")
    if target.exists():
        raise ValueError(f"{target} exists: remove it, or give another folder")
    with rundir.run_lock(run, reading=True):
        result = rundir.read_result(run)
        if result["partial"]:
            raise ValueError(f"{run} has done {result['epochs_done']} of {result['epochs']} epochs: it is not finished")
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=out) as folder:
            draft = Path(folder, target.name)
            shutil.copytree(run / MODEL, draft / MODEL, ignore=shutil.ignore_patterns(".*"))  # drafts of killed runs
            shutil.copy(run / METRICS, draft / METRICS)
            rundir.write_config(draft / rundir.CONFIG, portable(rundir.read_config(run)))
            if bfloat16:
                _round_matrices(draft / MODEL)
                result = {**result, ROUNDED: "bfloat16"}
            rundir.write_json(draft / rundir.RESULT, portable(result))
            for path in (run / rundir.ENVIRONMENT, *run.glob(EVALUATIONS)):
                if path.exists():
                    (copy := draft / path.relative_to(run)).parent.mkdir(exist_ok=True)
                    rundir.write_json(copy, portable(read_json(path)))
            os.replace(draft, target)
    return target


def _round_matrices(model: Path) -> None:
    """Round the two-dimensional tensors named weight of a saved model to bfloat16."""
    path, card = model / WEIGHTS, model / CARD
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata["results"] = json.dumps(json.loads(metadata["results"]) | {ROUNDED: "bfloat16"})
    tensors = {
        name: tensor.bfloat16() if tensor.ndim == 2 and name.endswith(".weight") else tensor
        for name, tensor in load_file(path).items()
    }
    with atomic_write(path) as draft:  # the tensors are mapped from the file
        save_file(tensors, draft, metadata)
        shutil.copymode(path, draft)  # safetensors makes its file readable by the owner only
    text = card.read_text(encoding="utf-8")
    card.write_text(text.replace("\n## Config", f"\n{NOTE}\n\n## Config", 1), encoding="utf-8")
