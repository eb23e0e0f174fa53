"""One layer in training and merged, against the paper's way and against one dense FFT convolution, in one run.

    python benchmarks/layer.py [--device cuda] [--dtype float32] [--rounds 20] [--small] [--out FILE.json]

*branches*: N convolutions and N BatchNorms in plain PyTorch (conv1d for dilated kernels, FFTs for the others); *dense*:
one FFT convolution with a free kernel of full length, in plain PyTorch; *floor*: the bytes that must move, at the
measured copy bandwidth. *graph* is ours replayed as a CUDA graph. Contestants take turns; times are medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fft import irfft, rfft

from mrconv import MRConv


@dataclass
class Shape:
    """One row of the table."""

    name: str
    batch: int
    length: int
    channels: int
    kernel: str
    kernel_size: int
    bidirectional: bool = False
    combine: str = "sum"

    def layer(self, backend: str, device: str) -> MRConv:
        """Return the layer of this shape."""
        return MRConv(
            self.channels,
            self.length,
            kernel=self.kernel,
            kernel_size=self.kernel_size,
            bidirectional=self.bidirectional,
            combine=self.combine,
            backend=backend,
            device=device,
        )


SHAPES = [
    Shape("ListOps l0=1", 50, 2048, 128, "fourier", 1),
    Shape("ListOps l0=2", 50, 2048, 128, "fourier", 2),
    Shape("Text", 16, 4096, 256, "fourier", 1),
    Shape("Image dilated", 50, 1024, 512, "dilated", 8),
    Shape("Image fourier", 50, 1024, 512, "fourier", 32),
    Shape("Pathfinder", 64, 1024, 256, "fourier+sparse", 16, True),
    Shape("Speech", 16, 16000, 128, "fourier", 32, True),
    Shape("Path-X", 16, 16384, 256, "fourier", 64, True, "concat"),
]


class DilatedBranches(nn.Module):
    """N depthwise dilated conv1d and N BatchNorms: the paper's dilated layer in plain PyTorch."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        D = shape.channels
        self.branches = shape.layer("torch", device)
        self.taps = self.branches._directions()[0].kernel.taps
        self.norms = nn.ModuleList(nn.BatchNorm1d(D, device=device) for _ in range(self.branches.resolutions))
        self.reach = [(shape.kernel_size - 1) * 2**i for i in range(self.branches.resolutions)]

    def forward(self, u: Tensor) -> Tensor:
        """Return the weighted sum of the branches and the skip."""
        x = u.transpose(1, 2).contiguous()
        branches = self.branches._directions()[0]
        assert branches.alpha is not None
        assert self.branches.D is not None
        y = self.branches.D[:, None] * x
        for i, norm in enumerate(self.norms):
            taps = self.taps[i].flip(1)[:, None].to(x.dtype)  # type: ignore[index]
            padded = nn.functional.pad(x, (self.reach[i], 0))
            c = nn.functional.conv1d(padded, taps, groups=x.shape[1], dilation=2**i)
            y = y + branches.alpha[i][:, None] * norm(c)
        return y.transpose(1, 2)


class DenseConvolution(nn.Module):
    """One FFT convolution with a dense kernel, in plain PyTorch."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        taps = shape.length * (1 + shape.bidirectional)
        self.kernel = nn.Parameter(torch.randn(shape.channels, taps, device=device) / taps**0.5)
        self.lead = shape.length if shape.bidirectional else 0

    def forward(self, u: Tensor) -> Tensor:
        """Convolve in float32, as FFTs must."""
        L, n = u.shape[1], 2 * u.shape[1]
        x = u.transpose(1, 2).float()
        y = irfft(rfft(x, n) * rfft(self.kernel, n), n)
        return y.roll(-self.lead, -1)[..., :L].transpose(1, 2).to(u.dtype)


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a CUDA graph of it: what the device needs, without the host's launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return functools.partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], Any]) -> None:
    """Replay, and hold on to what was captured: the graph knows its tensors by address only."""
    graph.replay()


def synchronise(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(contestants: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Return each contestant's median milliseconds and peak memory in MiB, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    peaks: dict[str, float] = {}
    for name, run in contestants.items():
        for _ in range(3):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _ in range(rounds):
        for name, run in contestants.items():
            synchronise(device)
            start = time.perf_counter()
            run()
            synchronise(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: {"ms": statistics.median(ms)} | ({"MiB": peaks[name]} if name in peaks else {})
        for name, ms in times.items()
    }


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a large copy, counting what is read and what is written."""
    x = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    y = torch.empty_like(x)
    ms = measure({"copy": lambda: y.copy_(x)}, 10, device)["copy"]["ms"]
    return 2 * x.numel() * x.element_size() / ms * 1e3


def one_shape(shape: Shape, dtype: torch.dtype, rounds: int, device: str, bandwidth: float) -> dict[str, Any]:
    """Measure one row."""
    torch.manual_seed(0)
    u = torch.randn(shape.batch, shape.length, shape.channels, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(u)
    paper = DilatedBranches(shape, device) if shape.kernel == "dilated" else shape.layer("reference", device)
    modules: dict[str, nn.Module] = {
        "ours": shape.layer("auto", device),
        "branches": paper,
        "dense": DenseConvolution(shape, device),
    }

    def step(module: nn.Module) -> Callable[[], Any]:
        wanted = [u, *(p for p in module.parameters() if p.requires_grad)]
        return lambda: torch.autograd.grad(module(u), wanted, g, allow_unused=True)

    steps = {name: step(module) for name, module in modules.items()}
    if device == "cuda":
        steps["graph"] = captured(step(shape.layer("auto", device)))
    training = measure(steps, rounds, device)
    modules["merged"] = shape.layer("auto", device).reparameterize()

    def infer(module: nn.Module) -> Callable[[], Any]:
        def run() -> Tensor:
            with torch.no_grad():
                return module(u)

        return run

    inference = measure({name: infer(modules[name]) for name in ("merged", "dense")}, rounds, device)
    moved = u.numel() * u.element_size()
    floor = {"training": 5 * moved / bandwidth * 1e3, "inference": 2 * moved / bandwidth * 1e3}
    return {"shape": asdict(shape), "training": training, "inference": inference, "floor_ms": floor}


def main() -> None:
    """Measure all shapes, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="an eighth of the batch, for CPUs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    bandwidth = copy_bandwidth(given.device)
    columns = f"{'ours':>8s}{'graph':>8s}{'branches':>9s}{'dense':>8s}{'floor':>8s}"
    print(f"{'':15s} {'training, ms':^41s} {'x branches':>10s} {'x dense':>8s} {'memory':>7s}  {'merged, ms':^24s}")
    print(f"{'':15s} {columns} {'':28s}{'ours':>8s}{'dense':>9s}{'x':>6s}")
    rows = []
    for shape in SHAPES:
        if given.small:
            shape.batch = max(1, shape.batch // 8)
        row = one_shape(shape, getattr(torch, given.dtype), given.rounds, given.device, bandwidth)
        rows.append(row)
        t, i = row["training"], row["inference"]
        memory = t["ours"]["MiB"] / t["branches"]["MiB"] if "MiB" in t["ours"] else float("nan")
        print(
            f"{shape.name:15s} {t['ours']['ms']:8.2f}{t.get('graph', t['ours'])['ms']:8.2f}{t['branches']['ms']:9.2f}"
            f"{t['dense']['ms']:8.2f}{row['floor_ms']['training']:8.3f} {t['branches']['ms'] / t['ours']['ms']:10.1f} "
            f"{t['dense']['ms'] / t['ours']['ms']:8.2f} {memory:7.2f}  {i['merged']['ms']:9.2f}{i['dense']['ms']:9.2f}"
            f"{i['dense']['ms'] / i['merged']['ms']:6.2f}",
            flush=True,
        )
    if given.out:
        hardware = (
            torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine()
        )
        record = {
            "command": " ".join(["python benchmarks/layer.py", *sys.argv[1:]]),
            "hardware": hardware,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "dtype": given.dtype,
            "copy_bytes_per_s": bandwidth,
            "rows": rows,
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
