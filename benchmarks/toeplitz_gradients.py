"""Training steps of a dense convolution in bfloat16, with gradients on the tensor cores or by FFT. Needs a GPU.

    python benchmarks/toeplitz_gradients.py [--out FILE.json]

The kernel is as long as the input, or twice as long (*bidirectional*), and all inputs have the same number of
elements. *fft* computes the output by FFT too.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrconv import ops
from mrconv.bench import records
from mrconv.bench.candidates import Step
from mrconv.bench.options import Options
from mrconv.bench.timing import measure
from mrconv.ops.toeplitz_conv import op

ELEMENTS, CHANNELS = 2**24, 128
LENGTHS = (512, 1024, 2048, 4096, 8192)


def step(u: Tensor, kernel: Tensor, grad: Tensor, lead: int, longest: int | None) -> Step:
    """Return a forward and backward pass; the tensor cores compute gradients of at most `longest` taps."""

    def run() -> tuple[Tensor, ...]:
        if longest is None:
            return torch.autograd.grad(ops.fft_conv(u, kernel, lead), (u, kernel), grad)
        op.LONGEST_BACKWARD = longest
        return torch.autograd.grad(ops.toeplitz_conv(u, kernel, lead), (u, kernel), grad)

    return run


def measure_length(L: int, bidirectional: bool, options: Options) -> dict[str, Any]:
    """Measure one length."""
    torch.manual_seed(0)
    batch = ELEMENTS // (L * CHANNELS)
    u, grad = torch.randn(2, batch, L, CHANNELS, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    K = 2 * L if bidirectional else L
    kernel = (torch.randn(CHANNELS, K, device="cuda") / K**0.5).requires_grad_()
    given = u.requires_grad_(), kernel, grad, K - L
    steps = {
        "toeplitz": step(*given, sys.maxsize),
        "gradients by fft": step(*given, 0),
        "fft": step(*given, None),
    }
    shape = {"batch": len(u), "length": L, "channels": CHANNELS, "bidirectional": bidirectional}
    return {"shape": shape, "training": measure(steps, options, label=str(L))}


def main() -> int:
    """Measure all lengths, print a table and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    options = Options("cuda", "bfloat16", given.rounds, timings=["graph"], command=shlex.join(["python", *sys.argv]))
    record = records.start("toeplitz_gradients", options)
    table = records.Table(["toeplitz", "gradients by fft", "fft"])
    for bidirectional in (False, True):
        for L in LENGTHS:
            row = measure_length(L, bidirectional, options)
            table.print_shape(f"{L}, K={2 * L if bidirectional else L}", row)
            record["rows"].append(row)
            records.write(given.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
