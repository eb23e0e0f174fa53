"""What exported files cost on this CPU, beside PyTorch, against the length that the kernels reach; and other dtypes.

python benchmarks/export.py [--lengths 256 1024] [--out benchmarks/results/export-cpu-float32.json]

A model of one block, one sequence of l_max positions; `step` is one position. AOTInductor files are not timed unless
--aoti is given: each takes a while to compile. All times are the best of several rounds.
"""

from __future__ import annotations

import argparse
import copy
import logging
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic

from mrconv import SequenceClassifier, reparameterize
from mrconv.bench.records import record, write
from mrconv.bench.timing import copy_bandwidth, progress, timed
from mrconv.example_inputs import random_inputs
from mrconv.export import FORMATS, export
from mrconv.export.step_model import StepModel

KINDS: dict[str, dict[str, Any]] = {
    "fourier": {"kernel": "fourier", "kernel_size": 2},
    "dilated": {"kernel": "dilated", "kernel_size": 4},
}
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float32": lambda model: model,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.to(torch.float16),
    "int8": lambda model: quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8),
}
ROUNDS = 20


def best(run: Callable[[], Any]) -> float:
    """Return the milliseconds of the fastest round."""
    run()
    return min(timed(run, "cpu") for _ in range(ROUNDS))


def files(kind: str, length: int, channels: int, formats: list[str]) -> dict[str, float]:
    """Time a model and its files, for whole sequences and for steps."""
    model = SequenceClassifier(d_model=channels, depth=1, l_max=length, n_classes=10, vocab_size=18, **KINDS[kind])
    reparameterize(model)
    (x,) = random_inputs(model, 1, length)
    row = {"pytorch": best(lambda: model(x))}
    state = model.initial_state(1)
    row["pytorch step"] = best(lambda: model.step(x[:, 0], state))
    begun = StepModel(model).initial_state(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in formats:
            for step, inputs in ((False, (x,)), (True, (x[:, 0].contiguous(), *begun))):
                title = f"{name} step" if step else name
                progress(f"{kind}, length {length}: {title}")
                path = export(model, Path(folder) / f"model{FORMATS[name].suffix}", name, step=step).path
                run = FORMATS[name].load(path)
                row[title] = best(lambda run=run, inputs=inputs: run(*inputs))  # type: ignore[misc]
    progress("")
    return row


def dtypes(channels: int) -> dict[str, dict[str, float]]:
    """Time four blocks on four sequences of 1,024 in each dtype, and compare their logits with float32's."""
    model = SequenceClassifier(d_model=channels, depth=4, l_max=1024, n_classes=10, vocab_size=18, kernel_size=2)
    reparameterize(model)
    (x,) = random_inputs(model, 4, 1024)
    exact, found = model(x), {}
    for name, cast in CASTS.items():
        other = cast(copy.deepcopy(model))
        error = float((other(x).float() - exact).abs().max() / exact.abs().max())
        found[name] = {"ms": best(lambda other=other: other(x)), "error": error}  # type: ignore[misc]
    return found


def main() -> int:
    """Measure, print, write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--aoti", action="store_true")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*deprecated.*")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    command = shlex.join(["python", *sys.argv])
    found = record("export", command, "cpu", "float32", ROUNDS, copy_bandwidth("cpu"))
    formats = ["torch", "onnx", *(["aoti"] if options.aoti else [])]
    with torch.no_grad():
        for kind in KINDS:
            for length in options.lengths:
                row = files(kind, length, options.d_model, formats)
                print(f"{kind} {length}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in row.items()), flush=True)
                found["rows"].append({"kernel": kind, "length": length, "channels": options.d_model, "ms": row})
        found["dtypes"] = {}
        for channels in (128, 512):
            found["dtypes"][channels] = row_of_dtypes = dtypes(channels)
            told = ", ".join(f"{name} {x['ms']:.0f} ms, error {x['error']:.1e}" for name, x in row_of_dtypes.items())
            print(f"{channels} channels: {told}", flush=True)
    write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
