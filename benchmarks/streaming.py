"""Time of a streaming step and size of the state, by the reach of the kernels.

python benchmarks/streaming.py [--device cuda] [--lengths 1024 65536] [--out benchmarks/results/streaming-cpu.json]

For comparison: `window` computes one output as a product with the whole window of past inputs; `attention` is one step
of attention over as many cached keys and values. `ms` is the mean over many steps. The rare, long tiles of dense
kernels are measured separately, and their share is added to the mean. `slowest` is the longest step.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from mrconv import MRConv
from mrconv.bench.records import measure_each, record
from mrconv.bench.script_options import parse, step_parser
from mrconv.bench.timing import copy_bandwidth, free, progress, timed, warm_up

LAYERS: dict[str, dict[str, Any]] = {
    "fourier 1": {"kernel": "fourier", "kernel_size": 1},
    "fourier 32": {"kernel": "fourier", "kernel_size": 32},
    "dilated 8": {"kernel": "dilated", "kernel_size": 8},
    "dense": {"kernel": "dense", "kernel_size": 32, "merged": True},
}
COLUMNS = (*LAYERS, "window", "attention")
STEPS = 1024
Result = dict[str, float]


@torch.no_grad()
def measure(length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all layers and the two alternatives at one length."""
    results: dict[str, Any] = {"length": length, "batch": arguments.batch, "channels": arguments.d_model}
    sizes = (length, arguments.batch, arguments.d_model, arguments.device)
    for name, options in LAYERS.items():
        progress(f"length {length}: {name}")
        torch.manual_seed(0)
        results[name] = layer_step(options, *sizes)
        free()
    results["window"], results["attention"] = window_step(*sizes), attention_step(*sizes)
    progress("")
    return results


def layer_step(options: dict[str, Any], length: int, batch: int, d_model: int, device: str) -> Result:
    """Measure the steps of a layer."""
    layer = MRConv(d_model, length, device=device, **options).eval()
    state = layer.initial_state(batch)
    u = torch.randn(batch, d_model, device=device)
    size = state.inputs.shape[1]

    def step() -> None:
        layer.step(u, state)

    state.time = size
    warm_up(step)
    state.time = 4 * size if state.future is not None else size
    times = [timed(step, device) for _ in range(STEPS)]
    mean = statistics.fmean(times)
    tile = 2 * STEPS
    while state.future is not None and tile <= size:  # a tile of this size occurs once in twice as many steps
        state.time = 4 * size + tile - 1
        ms = min(timed_at_same_time(step, state, device) for _ in range(3))
        mean += ms / (tile if tile == size else 2 * tile)
        times.append(ms)
        tile *= 2
    return {"ms": mean, "slowest": max(times), "MiB": state.nbytes / 2**20}


def timed_at_same_time(step: Callable[[], None], state: Any, device: str) -> float:
    """Return the milliseconds of a step and set the state's time back."""
    time = state.time
    ms = timed(step, device)
    state.time = time
    return ms


def window_step(length: int, batch: int, d_model: int, device: str) -> Result:
    """Measure one output as the product of the kernel and the last inputs."""
    kernel = torch.randn(length, d_model, device=device)
    past = torch.randn(batch, length, d_model, device=device)
    return repeated(lambda: (past * kernel).sum(1), device, past.nbytes)


def attention_step(length: int, batch: int, d_model: int, device: str) -> Result:
    """Measure one query against the cached keys and values, in heads of 64 channels."""
    heads = max(1, d_model // 64)
    q = torch.randn(batch, heads, 1, d_model // heads, device=device)
    k, v = (torch.randn(batch, heads, length, d_model // heads, device=device) for _ in range(2))
    return repeated(lambda: F.scaled_dot_product_attention(q, k, v), device, k.nbytes + v.nbytes)


def repeated(run: Callable[[], Any], device: str, state_bytes: int) -> Result:
    """Measure up to 200 steps, as many as fit into two seconds."""
    warm_up(run)
    rounds = max(5, min(200, int(2000 / max(timed(run, device), 1e-3))))
    times = [timed(run, device) for _ in range(rounds)]
    return {"ms": statistics.fmean(times), "slowest": max(times), "MiB": state_bytes / 2**20}


def main() -> int:
    """Measure all lengths, print a table and write the record."""
    lengths = [2**10, 2**12, 2**14, 2**16, 2**18, 2**20]
    arguments = parse(step_parser(__doc__ or "", "lengths", lengths, d_model=128))
    command = shlex.join(["python", *sys.argv])
    results = record("streaming", command, arguments.device, "float32", STEPS, copy_bandwidth(arguments.device))
    results["memory"] = "size of the state between two steps"
    print(f"{'':10s}{'':12s}" + "".join(f"{name:>12s}" for name in COLUMNS), flush=True)
    measured = measure_each(results, arguments.out, arguments.lengths, lambda length: measure(length, arguments))
    for length, row in measured:
        title = str(length)
        for key, unit in (("ms", "ms"), ("slowest", "slowest, ms"), ("MiB", "state, MiB")):
            cells = "".join(f"{row[name][key]:12.3f}" for name in COLUMNS)
            print(f"{title:10s}{unit:12s}{cells}", flush=True)
            title = ""
    return 0


if __name__ == "__main__":
    sys.exit(main())
