"""A layer in training whose statistics come from all sequences of a batch, or from some.

    python benchmarks/stats_fraction.py [--device cuda --dtype bfloat16] [--out FILE.json]

On a CPU the batch is a quarter of the experiment's. *dense* is one FFT convolution with a free kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from mrconv import MRConv
from mrconv.bench import candidates, records, shapes
from mrconv.bench.options import Options
from mrconv.bench.script_options import parse
from mrconv.bench.timing import measure

FRACTIONS = {"1": 1.0, "1/2": 0.5, "1/4": 0.25, "1/8": 0.125}
NAMES = ("ListOps l0=2", "Image dilated", "Image fourier", "Pathfinder", "Speech")


def measure_shape(shape: shapes.Shape, options: Options) -> dict[str, Any]:
    """Measure a training step with each fraction."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    u = torch.randn(shape.batch, shape.length, shape.channels, device=options.device, dtype=dtype, requires_grad=True)
    layers: dict[str, torch.nn.Module] = {
        name: MRConv(shape.channels, shape.length, **shape.options, stats_fraction=part, device=options.device)
        for name, part in FRACTIONS.items()
        if part * shape.batch >= 1
    }
    dense = candidates.DenseConvolution(shape.channels, shape.length, shape.bidirectional, options.device)
    steps = candidates.steps("training", {**layers, "dense": dense}, u, torch.randn_like(u))
    return {"shape": dataclasses.asdict(shape), "training": measure(steps, options, label=shape.name)}


def main() -> int:
    """Measure all layers, print a table and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    given = parse(parser)
    command = shlex.join(["python", *sys.argv])
    options = Options(given.device, given.dtype, given.rounds, out=given.out, command=command)
    results = records.start("stats_fraction", options)
    chosen = shapes.select(shapes.LAYERS, NAMES)
    if given.device == "cpu":
        chosen = [dataclasses.replace(shape, batch=shape.batch // 4) for shape in chosen]
    table = records.Table([*FRACTIONS, "dense"])
    for shape, row in records.measure_each(results, given.out, chosen, lambda shape: measure_shape(shape, options)):
        table.print_shape(shape.name, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
