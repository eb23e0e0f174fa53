"""Time of a training step of the experiments on a GPU, by part.

python benchmarks/step.py [listops-base text-base ...] [--precision bfloat16 float32] [--compile] [--out FILE.json]

The step is the one of `mrconv train`, on random batches of the task's full length: forward and backward, replayed as
a CUDA graph or launched op by op, then AdamW. `epoch` is this time multiplied by the steps of an epoch, without
validation. The times of kernels are added up by purpose, from one replay under torch's profiler.
"""

from __future__ import annotations

import argparse
import gc
import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from mrconv import param_groups
from mrconv.bench.records import record, write
from mrconv.bench.timing import copy_bandwidth, timed
from mrconv.tasks import Batch, Prepared
from mrconv.training.compilation import compile_blocks
from mrconv.training.composition import compose
from mrconv.training.cuda_graphs import GraphedStep
from mrconv.training.experiment import Experiment
from mrconv.training.module import build_model, logits

EXPERIMENTS = ("listops-base", "text-base", "image-base", "pathfinder-base")
# size of the vocabulary (0 for real values), classes, length, training examples
TASKS = {
    "listops": (18, 10, 2048, 96_000),
    "text": (135, 2, 4096, 25_000),
    "image": (0, 10, 1024, 45_000),
    "pathfinder": (0, 2, 1024, 160_000),
}
PARTS = {  # the first pattern that matches the kernel's name
    "branches": r"^_\w+_kernel|fft",
    "matrix products": r"gemm|cutlass|nvjet|splitK",
    "norms": r"batch_norm|layer_norm|GammaBeta",
    "other": r"",
}


def batch(experiment: Experiment) -> tuple[Batch, Prepared]:
    """Return a random batch and the description of a task without data."""
    tokens, classes, length, _ = TASKS[experiment.task]
    size = experiment.batch_size
    x = torch.randint(tokens, (size, length)) if tokens else torch.randn(size, length, 1)
    lengths = torch.randint(length // 4, length + 1, (size,)) if tokens else None
    names = tuple(map(str, range(classes)))
    kind = "tokens" if tokens else "values"
    data = Prepared(experiment.task, kind, names, length, {}, tuple(map(str, range(tokens))))
    return Batch(x, torch.randint(classes, (size,)), lengths).to("cuda"), data


def measure(experiment: Experiment, precision: str, compiled: bool, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step, eager and as a CUDA graph, and of its parts."""
    e = experiment
    inputs, data = batch(e)
    model = build_model(e, data).cuda()
    if compiled:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(param_groups(model, e.lr, e.weight_decay, e.kernel_lr), fused=True)

    def step(inputs: Batch) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = F.cross_entropy(logits(model, inputs).float(), inputs.y)
        loss.backward()
        return (loss.detach(),)

    def eager() -> None:
        optimizer.zero_grad()
        step(inputs)
        optimizer.step()

    graphed = GraphedStep(step, model)

    def replayed() -> None:
        graphed(inputs)
        optimizer.step()

    ms = {name: median(each, rounds) for name, each in (("eager", eager), ("graph", replayed))}
    torch.cuda.reset_peak_memory_stats()
    replayed()
    kernels = kernel_times(replayed)
    parts = dict.fromkeys(PARTS, 0.0)
    for name, us in kernels.items():
        parts[next(part for part, pattern in PARTS.items() if re.search(pattern, name, re.IGNORECASE))] += us / 1e3
    steps = TASKS[e.task][3] // e.batch_size
    return {
        "ms": ms["eager"],
        "graph_ms": ms["graph"],
        "epoch_s": steps * ms["graph"] / 1e3,
        "examples_per_s": e.batch_size / ms["graph"] * 1e3,
        "GiB": torch.cuda.max_memory_reserved() / 2**30,
        "parts_ms": {name: round(ms, 3) for name, ms in parts.items()},
        "kernels_ms": {name[:100]: round(us / 1e3, 3) for name, us in kernels.most_common(12)},
    }


def median(step: Callable[[], None], rounds: int) -> float:
    """Return the median milliseconds of a step."""
    for _ in range(3):
        step()
    return statistics.median(timed(step, "cuda") for _ in range(rounds))


def kernel_times(step: Callable[[], None]) -> Counter[str]:
    """Return the total microseconds of each kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return Counter({e.key: e.self_device_time_total for e in profiler.key_averages() if e.self_device_time_total})


def main() -> int:
    """Measure all experiments, print a table and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiments", nargs="*", default=EXPERIMENTS)
    parser.add_argument("--precision", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--compile", action="store_true", help="measure compiled blocks too")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    command = shlex.join(["python", *sys.argv])
    results = record("step", command, "cuda", "mixed", arguments.rounds, copy_bandwidth("cuda"))
    columns = ("eager, ms", "graph, ms", "epoch, s", "examples/s", "GiB", *PARTS)
    print(f"{'':18s}{'':12s}" + "".join(f"{name:>17s}" for name in columns), flush=True)
    for name in arguments.experiments:
        for precision in arguments.precision:
            for compiled in (False, True) if arguments.compile else (False,):
                row = measure(compose([f"experiment={name}"]), precision, compiled, arguments.rounds)
                results["rows"].append({"name": name, "precision": precision, "compiled": compiled, **row})
                values = [row[key] for key in ("ms", "graph_ms", "epoch_s", "examples_per_s", "GiB")]
                kind = precision + ("*" if compiled else "")
                cells = "".join(f"{value:17,.1f}" for value in (*values, *row["parts_ms"].values()))
                print(f"{name:18s}{kind:12s}{cells}", flush=True)
                write(arguments.out, results)
                gc.collect()
                torch.cuda.empty_cache()
    if arguments.compile:
        print("* compiled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
