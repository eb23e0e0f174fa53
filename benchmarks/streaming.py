"""What a step of streaming costs, and what the state takes, against the length that the kernels reach.

python benchmarks/streaming.py [--device cuda] [--lengths 1024 65536] [--out benchmarks/results/streaming-cpu.json]

Beside the layer: one output as a product with the whole window of past inputs, and one step of attention over as many
cached keys and values. `ms` is the mean over many steps; rare, long tiles of dense kernels are measured apart and
their share is added. `slowest` is the longest step.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from mrconv import MRConv
from mrconv.bench.records import record, write
from mrconv.bench.timing import copy_bandwidth, free, progress, timed

KINDS: dict[str, dict[str, Any]] = {
    "fourier 1": {"kernel": "fourier", "kernel_size": 1},
    "fourier 32": {"kernel": "fourier", "kernel_size": 32},
    "dilated 8": {"kernel": "dilated", "kernel_size": 8},
    "dense": {"kernel": "fourier", "kernel_size": 32, "merged": True},
}
STEPS = 1024
Result = dict[str, float]


def layer_step(options: dict[str, Any], length: int, batch: int, d_model: int, device: str) -> Result:
    """Measure steps of a layer."""
    layer = MRConv(d_model, length, device=device, **options).eval()
    state = layer.initial_state(batch)
    u = torch.randn(batch, d_model, device=device)
    size = state.inputs.shape[1]

    def step() -> None:
        layer.step(u, state)

    state.time = size
    warm(step)
    state.time = 4 * size if state.future is not None else size
    times = [timed(step, device) for _ in range(STEPS)]
    mean = statistics.fmean(times)
    tile = 2 * STEPS
    while state.future is not None and tile <= size:  # the tile of this size comes once in twice as many steps
        state.time = 4 * size + tile - 1
        ms = min(timed_again(step, state, device) for _ in range(3))
        mean += ms / (tile if tile == size else 2 * tile)
        times.append(ms)
        tile *= 2
    return {"ms": mean, "slowest": max(times), "MiB": state.nbytes / 2**20}


def timed_again(step: Callable[[], None], state: Any, device: str) -> float:
    """Time a step and turn the clock back."""
    time = state.time
    ms = timed(step, device)
    state.time = time
    return ms


def window_step(length: int, batch: int, d_model: int, device: str) -> Result:
    """Measure one output as the kernel times the last inputs."""
    kernel = torch.randn(length, d_model, device=device)
    past = torch.randn(batch, length, d_model, device=device)
    return several(lambda: (past * kernel).sum(1), device, past.nbytes)


def attention_step(length: int, batch: int, d_model: int, device: str) -> Result:
    """Measure one query against the cached keys and values, in heads of 64 channels."""
    heads = max(1, d_model // 64)
    q = torch.randn(batch, heads, 1, d_model // heads, device=device)
    k, v = (torch.randn(batch, heads, length, d_model // heads, device=device) for _ in range(2))
    return several(lambda: F.scaled_dot_product_attention(q, k, v), device, k.nbytes + v.nbytes)


def several(run: Callable[[], Any], device: str, held: int) -> Result:
    """Time a step often, but for no more than a few seconds."""
    warm(run)
    rounds = max(5, min(200, int(2000 / max(timed(run, device), 1e-3))))
    times = [timed(run, device) for _ in range(rounds)]
    return {"ms": statistics.fmean(times), "slowest": max(times), "MiB": held / 2**20}


def warm(run: Callable[[], Any]) -> None:
    """Run a few times."""
    for _ in range(3):
        run()


def main() -> int:
    """Measure all lengths, print a table and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**10, 2**12, 2**14, 2**16, 2**18, 2**20])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    command = shlex.join(["python", *sys.argv])
    found = record("streaming", command, options.device, "float32", STEPS, copy_bandwidth(options.device))
    found["memory"] = "of the state: what is held between two steps"
    print(f"{'':10s}{'':12s}" + "".join(f"{name:>12s}" for name in (*KINDS, "window", "attention")), flush=True)
    for length in options.lengths:
        row: dict[str, Any] = {"length": length, "batch": options.batch, "channels": options.d_model}
        sizes = (length, options.batch, options.d_model, options.device)
        with torch.no_grad():
            for name, kind in KINDS.items():
                progress(f"length {length}: {name}")
                torch.manual_seed(0)
                row[name] = layer_step(kind, *sizes)
                free()
            row["window"], row["attention"] = window_step(*sizes), attention_step(*sizes)
        progress("")
        free()
        title = str(length)
        for key, unit in (("ms", "ms"), ("slowest", "slowest, ms"), ("MiB", "state, MiB")):
            cells = "".join(f"{row[name][key]:12.3f}" for name in (*KINDS, "window", "attention"))
            print(f"{title:10s}{unit:12s}{cells}", flush=True)
            title = ""
        found["rows"].append(row)
        write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
