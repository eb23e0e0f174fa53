"""Measure the costs of all algorithms and write the table that `mrconv.ops.select` reads.

    python benchmarks/costs.py [--device cuda] [--only triton] [--precision half] [--out src/mrconv/ops/costs.json]

Every algorithm runs on the same number of elements at several lengths. On a GPU it runs as a CUDA graph, so that only
the device's work is measured. `triton` is a GPU with Triton, `cuda` a GPU without, `cpu` any CPU. A new entry replaces
the previous one of its kind of device and precision; the others stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrconv import ops
from mrconv.bench.options import Options
from mrconv.bench.timing import measure
from mrconv.ops import Algorithm, Selection

CHANNELS = 64
PRECISIONS = {"float32": torch.float32, "half": torch.bfloat16}
Run = Callable[[], Any]


def training_step(f: Callable[..., Tensor], *inputs: Tensor) -> Run:
    """Return a forward and backward pass."""
    leaves = [x.requires_grad_() for x in inputs]
    g = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(f(*leaves), leaves, g)


def dense_step(u: Tensor, selection: Selection, bidirectional: bool = False) -> Run:
    """Return a training step of `branch_sum` with dense kernels of lengths 1, 2, ... L."""
    sizes = [2**i for i in range(u.shape[-1].bit_length())]
    lags = [range(n) for n in sizes] + [range(-1, -1 - n, -1) for n in sizes if bidirectional]
    kernels = [torch.randn(CHANNELS, len(at), device=u.device) / len(at) ** 0.5 for at in lags]
    weight = torch.ones(len(lags), CHANNELS, device=u.device)

    def step(u: Tensor, weight: Tensor, *kernels: Tensor) -> Tensor:
        taps = [ops.Taps(values, at) for values, at in zip(kernels, lags, strict=True)]
        return ops.branch_sum(u, taps, ops.Normalization(weight), selection).y

    return training_step(step, u, weight, *kernels)


def mode_step(u: Tensor, modes: int) -> Run:
    """Return a training step of `branch_sum` with kernels of a few modes each."""
    widths = [2**i for i in range(modes - 1, u.shape[-1].bit_length())]
    coefficients = torch.randn(len(widths), CHANNELS, 2 * modes - 1, device=u.device)
    weight = torch.ones(len(widths), CHANNELS, device=u.device)

    def step(u: Tensor, coefficients: Tensor, weight: Tensor) -> Tensor:
        return ops.branch_sum(u, ops.ModeKernels(coefficients, widths, widths), ops.Normalization(weight)).y

    return training_step(step, u, coefficients, weight)


def constant_step(u: Tensor) -> Run:
    """Return a training step of `branch_sum` with constant kernels of lengths 1, 2, ... L."""
    sizes = [2**i for i in range(u.shape[-1].bit_length())]
    heights, weight = (torch.randn(len(sizes), CHANNELS, device=u.device) for _ in range(2))

    def step(u: Tensor, heights: Tensor, weight: Tensor) -> Tensor:
        taps = [ops.Taps(height[:, None], range(n)) for height, n in zip(heights, sizes, strict=True)]
        return ops.branch_sum(u, taps, ops.Normalization(weight), Selection(Algorithm.MOVING_SUM, True)).y

    return training_step(step, u, heights, weight)


def moving_sums(u: Tensor) -> Run:
    """Return a convolution with constant kernels of lengths 1, 2, ... L."""
    widths = [2**i for i in range(u.shape[-1].bit_length())]
    heights, bias = torch.randn(len(widths), CHANNELS, device=u.device), torch.zeros(CHANNELS, device=u.device)
    return lambda: ops.moving_sum_conv(u.detach(), heights, [1.0] * len(widths), widths, None, bias)


def runs(u: Tensor, backend: str) -> dict[tuple[str, ...], Run]:
    """Return a run of every algorithm for kernels as long as the input, by its keys in the table."""
    L, triton = u.shape[-1], backend == "triton"
    kernel = torch.randn(CHANNELS, L, device=u.device) / L**0.5
    spectral, toeplitz = Selection(Algorithm.SPECTRAL, triton), Selection(Algorithm.TOEPLITZ, True)
    steps: dict[tuple[str, ...], Run] = {
        ("conv", "fft"): lambda: ops.fft_conv(u.detach(), kernel, backend=backend),
        ("branch_sum", "spectral"): dense_step(u, spectral),
        ("bidirectional_branch_sum", "spectral"): dense_step(u, spectral, bidirectional=True),
    }
    if triton:
        for modes in (2, 3):
            steps["branch_sum", "moving_modes", str(modes)] = mode_step(u, modes)
        steps["branch_sum", "moving_sum"] = constant_step(u)
        steps["conv", "moving_sum"] = moving_sums(u)
        if (16384 if u.element_size() == 2 else 4096) >= L:
            steps["conv", "toeplitz"] = lambda: ops.toeplitz_conv(u.detach(), kernel)
        if u.dtype == torch.bfloat16 and L <= 16384:
            steps["branch_sum", "toeplitz"] = dense_step(u, toeplitz)
            steps["bidirectional_branch_sum", "toeplitz"] = dense_step(u, toeplitz, bidirectional=True)
    return steps


def tap_runs(u: Tensor, taps: int, backend: str) -> dict[tuple[str, ...], Run]:
    """Return runs of the tap algorithms, for this many taps in eight branches."""
    L, size = u.shape[-1], taps // 8
    lags = [tuple((L // 2 * j // size) // 2**i for j in range(size)) for i in range(8)]
    values = torch.randn(CHANNELS, taps, device=u.device)
    weight = torch.ones(8, CHANNELS, device=u.device)
    selection = Selection(Algorithm.TAPS, backend == "triton")

    def step(u: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        branches = [ops.Taps(branch, at) for branch, at in zip(values.split(size, 1), lags, strict=True)]
        return ops.branch_sum(u, branches, ops.Normalization(weight), selection).y

    spread = [L // 2 * j // taps for j in range(taps)]
    return {
        ("conv", "taps"): lambda: ops.tap_conv(u.detach(), values.detach(), spread, backend=backend),
        ("branch_sum", "taps"): training_step(step, u, values, weight),
    }


def milliseconds(steps: dict[tuple[str, ...], Run], device: str) -> dict[tuple[str, ...], float]:
    """Return the device's time for each run."""
    column, timing, rounds = ("graph_ms", "graph", 10) if device == "cuda" else ("ms", "eager", 3)
    options = Options(device=device, rounds=rounds, timings=[timing])
    measured = measure({"/".join(keys): run for keys, run in steps.items()}, options)
    for name, result in measured.items():
        if result[column] is None:
            raise RuntimeError(f"{name} could not be measured: {result.get('error') or result.get('graph_error')}")
    return {tuple(name.split("/")): result[column] for name, result in measured.items()}


def entry(table: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the entry of the table at these keys, created if missing."""
    for key in keys:
        table = table.setdefault(key, {})
    return table


def measure_costs(backend: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the costs of every algorithm, in picoseconds per element."""
    elements = 2**24 if device == "cuda" else 2**19
    lengths = (256, 1024, 2048, 4096, 16384, 65536)
    costs: dict[str, Any] = {}

    def batch(L: int) -> Tensor:
        x = torch.randn(max(1, elements // (CHANNELS * L)), L, CHANNELS, device=device, dtype=dtype)
        return x.transpose(1, 2)

    for L in lengths:
        u = batch(L)
        for keys, ms in milliseconds(runs(u, backend), device).items():
            entry(costs, keys)[str(L)] = round(1e9 * ms / u.numel(), 2)
    u = batch(2048)
    few, many = (milliseconds(tap_runs(u, taps, backend), device) for taps in (8, 64))
    for keys in few:
        per_tap = max(0.0, many[keys] - few[keys]) / 56
        scale = 1e9 / u.numel()
        once = round(scale * max(0.0, few[keys] - 8 * per_tap), 2)
        entry(costs, keys).update({"pass": once, "tap": round(scale * per_tap, 3)})
    return costs


def lines(costs: dict[str, Any], name: str = "") -> Iterator[str]:
    """Yield a line for each entry of the table."""
    for key, value in costs.items():
        if isinstance(next(iter(value.values())), dict):
            yield from lines(value, f"{name}{key} ")
        else:
            yield f"{name + key:40s} " + "  ".join(f"{at} {ps:g}" for at, ps in value.items())


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("src/mrconv/ops/costs.json"))
    parser.add_argument("--only", choices=["triton", "cuda"], help="one of the two kinds of GPU")
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    given = parser.parse_args()
    table = json.loads(given.out.read_text()) if given.out.exists() else {}
    kinds = {"triton": "triton", "cuda": "torch"} if given.device == "cuda" else {"cpu": "torch"}
    for kind, backend in kinds.items():
        if given.only and kind != given.only:
            continue
        start = time.perf_counter()
        machine = {
            "hardware": torch.cuda.get_device_name() if given.device == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__.split("+")[0],
        }
        others = set(PRECISIONS) - set(given.precision)
        if others and machine != {name: table.get(kind, {}).get(name) for name in machine}:
            parser.error(
                f"the table's other costs of {kind} come from another machine or torch: measure all precisions"
            )
        table[kind] = table.get(kind, {}) | machine
        for precision in given.precision:
            table[kind][precision] = measure_costs(backend, given.device, PRECISIONS[precision])
        print(f"{kind}: {time.perf_counter() - start:.0f} s")
        for precision in given.precision:
            for line in lines(table[kind][precision]):
                print(f"  {precision:8s} {line}")
    given.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
