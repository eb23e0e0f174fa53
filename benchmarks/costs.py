"""Measure what the ops cost and write the table that the dispatcher chooses by.

    python benchmarks/costs.py [--device cuda] [--only triton] [--precision half] [--out src/mrconv/ops/costs.json]

Every op runs on the same number of elements at several lengths, on a GPU as a CUDA graph, so that what counts is the
device's work. `triton` is a GPU with Triton, `cuda` one without, `cpu` any CPU. An entry replaces the one there was
for that kind of device and precision; the others stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrconv import ops
from mrconv.bench.timing import measure

CHANNELS = 64
PRECISIONS = {"float32": torch.float32, "half": torch.bfloat16}
Run = Callable[[], Any]


def stepped(f: Callable[..., Tensor], *inputs: Tensor) -> Run:
    """Return a step forward and backward."""
    leaves = [x.requires_grad_() for x in inputs]
    g = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(f(*leaves), leaves, g)


def branches(L: int, device: str) -> list[Tensor]:
    """Return kernels of lengths 1, 2, ... L."""
    return [torch.randn(CHANNELS, 2**i, device=device) / 2 ** (i / 2) for i in range(L.bit_length())]


def runs(u: Tensor, backend: str) -> dict[str, Run]:
    """Return a run of every op for an input of its own length."""
    L, device = u.shape[-1], str(u.device)
    kernels = branches(L, device)
    weight = torch.ones(len(kernels), CHANNELS, device=device)

    def written_out(op: Callable[..., tuple[Tensor, ...]], both: bool, **options: str) -> Run:
        own, w = kernels * (1 + both), torch.cat([weight.detach()] * (1 + both))
        n = len(kernels)

        def step(u: Tensor, w: Tensor, *own: Tensor) -> Tensor:
            return op(u, own[:n], own[n:], w, **options)[0]

        return stepped(step, u, w, *own)

    kernel = torch.randn(CHANNELS, L, device=device) / L**0.5
    found: dict[str, Run] = {
        "fft": lambda: ops.fft_conv(u.detach(), kernel, backend=backend),
        "spectral": written_out(ops.spectral_branch_sum, False, backend=backend),
        "spectral both ways": written_out(ops.spectral_branch_sum, True, backend=backend),
    }
    if backend == "triton":
        heights = torch.randn(len(kernels), CHANNELS, device=device)
        widths = [k.shape[1] for k in kernels]
        for M in (2, 3):
            some = widths[M - 1 :]
            waves = torch.randn(len(some), CHANNELS, 2 * M - 1, device=device)
            found[f"{M} waves"] = stepped(
                lambda u, c, w, some=some: ops.mode_branch_sum(u, c, some, some, w)[0],
                u,
                waves,
                weight[M - 1 :].clone(),
            )
        found["windows"] = stepped(lambda u, h, w: ops.window_branch_sum(u, h, widths, w)[0], u, heights, weight)
        if (16384 if u.element_size() == 2 else 4096) >= L:
            found["toeplitz"] = lambda: ops.toeplitz_conv(u.detach(), kernel)
        if u.dtype == torch.bfloat16 and L <= 16384:
            found["toeplitz sum"] = written_out(ops.toeplitz_branch_sum, False)
            found["toeplitz sum both ways"] = written_out(ops.toeplitz_branch_sum, True)
    return found


def tap_runs(u: Tensor, taps: int, backend: str) -> dict[str, Run]:
    """Return runs of the ops on taps, for this many taps in eight branches."""
    L, own = u.shape[-1], taps // 8
    lags = [(L // 2 * j // own) // 2**i for i in range(8) for j in range(own)]
    values = torch.randn(CHANNELS, taps, device=u.device)
    weight = torch.ones(8, CHANNELS, device=u.device)

    def step(u: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        return ops.tap_branch_sum(u, values, lags, [own] * 8, weight, backend=backend)[0]

    spread = [L // 2 * j // taps for j in range(taps)]
    return {
        "taps": lambda: ops.tap_conv(u.detach(), values.detach(), spread, backend=backend),
        "tap sum": stepped(step, u, values, weight),
    }


def milliseconds(found: dict[str, Run], device: str) -> dict[str, float]:
    """Return the device's time for each."""
    rounds = 10 if device == "cuda" else 3
    result = measure(found, rounds, device)
    way = "graph_ms" if device == "cuda" else "ms"
    for name, row in result.items():
        if row[way] is None:
            raise RuntimeError(f"{name} could not be measured: {row.get('error') or row.get('graph_error')}")
    return {name: row[way] for name, row in result.items()}


def price(backend: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the costs of every op, in picoseconds per element."""
    elements = 2**24 if device == "cuda" else 2**19
    lengths = (256, 1024, 2048, 4096, 16384, 65536)
    costs: dict[str, Any] = {}

    def batch(L: int) -> Tensor:
        x = torch.randn(max(1, elements // (CHANNELS * L)), L, CHANNELS, device=device, dtype=dtype)
        return x.transpose(1, 2)

    for L in lengths:
        u = batch(L)
        for op, ms in milliseconds(runs(u, backend), device).items():
            costs.setdefault(op, {})[str(L)] = round(1e9 * ms / u.numel(), 2)
    u = batch(2048)
    few, many = (milliseconds(tap_runs(u, taps, backend), device) for taps in (8, 64))
    for op in few:
        per_tap = max(0.0, many[op] - few[op]) / 56
        scale = 1e9 / u.numel()
        costs[op] = {"pass": round(scale * max(0.0, few[op] - 8 * per_tap), 2), "tap": round(scale * per_tap, 3)}
    return costs


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
        kept = set(PRECISIONS) - set(given.precision)
        if kept and machine != {name: table.get(kind, {}).get(name) for name in machine}:
            parser.error(f"the table's other prices of {kind} are another machine's or torch's: measure all precisions")
        table[kind] = table.get(kind, {}) | machine
        for precision in given.precision:
            table[kind][precision] = price(backend, given.device, PRECISIONS[precision])
        print(f"{kind}: {time.perf_counter() - start:.0f} s")
        for precision in given.precision:
            for op, row in table[kind][precision].items():
                print(f"  {precision:8s} {op:20s} " + "  ".join(f"{at} {ps:g}" for at, ps in row.items()))
    given.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
