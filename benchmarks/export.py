"""Times of exported files and of other dtypes on this CPU, compared with PyTorch.

python benchmarks/export.py [--lengths 256 1024] [--out benchmarks/results/export-cpu-float32.json]

The model has one block, and the input is one sequence of l_max positions, or one position for `step`. AOTInductor files
are only measured with --aoti, since they take long to compile. All times are the minimum of several rounds.
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

LAYERS: dict[str, dict[str, Any]] = {
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


def minimum_ms(run: Callable[[], Any]) -> float:
    """Return the milliseconds of the fastest round."""
    run()
    return min(timed(run, "cpu") for _ in range(ROUNDS))


def measure_files(name: str, length: int, channels: int, formats: list[str]) -> dict[str, float]:
    """Return the milliseconds of a model and of its files, for whole sequences and for steps."""
    model = SequenceClassifier(d_model=channels, depth=1, l_max=length, n_classes=10, vocab_size=18, **LAYERS[name])
    reparameterize(model)
    (x,) = random_inputs(model, 1, length)
    times = {"pytorch": minimum_ms(lambda: model(x))}
    state = model.initial_state(1)
    times["pytorch step"] = minimum_ms(lambda: model.step(x[:, 0], state))
    initial = StepModel(model).initial_state(1)
    with tempfile.TemporaryDirectory() as folder:
        for format in formats:
            for step, inputs in ((False, (x,)), (True, (x[:, 0].contiguous(), *initial))):
                column = f"{format} step" if step else format
                progress(f"{name}, length {length}: {column}")
                path = export(model, Path(folder) / f"model{FORMATS[format].suffix}", format, step=step).path
                run = FORMATS[format].load(path)
                times[column] = minimum_ms(lambda run=run, inputs=inputs: run(*inputs))  # type: ignore[misc]
    progress("")
    return times


def measure_dtypes(channels: int) -> dict[str, dict[str, float]]:
    """Measure four blocks on four sequences of 1,024 in each dtype: milliseconds, and error relative to float32."""
    model = SequenceClassifier(d_model=channels, depth=4, l_max=1024, n_classes=10, vocab_size=18, kernel_size=2)
    reparameterize(model)
    (x,) = random_inputs(model, 4, 1024)
    exact, results = model(x), {}
    for name, cast in CASTS.items():
        converted = cast(copy.deepcopy(model))
        error = float((converted(x).float() - exact).abs().max() / exact.abs().max())
        results[name] = {"ms": minimum_ms(lambda m=converted: m(x)), "error": error}  # type: ignore[misc]
    return results


def main() -> int:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--aoti", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*deprecated.*")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    command = shlex.join(["python", *sys.argv])
    results = record("export", command, "cpu", "float32", ROUNDS, copy_bandwidth("cpu"))
    formats = ["torch", "onnx", *(["aoti"] if arguments.aoti else [])]
    with torch.no_grad():
        for name in LAYERS:
            for length in arguments.lengths:
                times = measure_files(name, length, arguments.d_model, formats)
                cells = ", ".join(f"{column} {ms:.3f} ms" for column, ms in times.items())
                print(f"{name} {length}: {cells}", flush=True)
                results["rows"].append({"kernel": name, "length": length, "channels": arguments.d_model, "ms": times})
        results["dtypes"] = {}
        for channels in (128, 512):
            results["dtypes"][channels] = by_dtype = measure_dtypes(channels)
            cells = ", ".join(f"{name} {x['ms']:.0f} ms, error {x['error']:.1e}" for name, x in by_dtype.items())
            print(f"{channels} channels: {cells}", flush=True)
    write(arguments.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
