"""One layer in training and merged, against the paper's way and against one dense FFT convolution."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from . import candidates as make
from . import shapes
from .options import Options
from .records import Table, record, write
from .timing import copy_bandwidth, free, measure


def run(options: Options) -> dict[str, Any]:
    """Measure all shapes, print a table, write and return what was found."""
    chosen = shapes.select(shapes.LAYERS, options.only)
    bandwidth = copy_bandwidth(options.device)
    found = record("layer", options.command, options.device, options.dtype, options.rounds, bandwidth)
    table = Table(["ours", "branches", "dense"], ["floor"], ["branches", "dense"])
    for shape in chosen:
        row = one_shape(shape.small() if options.small else shape, options, bandwidth)
        found["rows"].append(row)
        write(options.out, found)
        table.row(shape.name, row, {name: {"floor": ms} for name, ms in row["floor_ms"].items()})
        free()
    return found


def one_shape(shape: shapes.Shape, options: Options, bandwidth: float) -> dict[str, Any]:
    """Measure one row."""
    torch.manual_seed(0)
    device, dtype = options.device, getattr(torch, options.dtype)
    u = torch.randn(shape.batch, shape.length, shape.channels, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(u)
    dense = make.DenseConvolution(shape.channels, shape.length, shape.bidirectional, device)
    trained = {"ours": make.layer(shape, "auto", device), "branches": make.branches(shape, device), "dense": dense}
    merged = {"merged": make.layer(shape, "auto", device).reparameterize(), "dense": dense}
    row: dict[str, Any] = {"shape": asdict(shape)}
    for name in options.passes:
        runs = make.runs(name, merged if name == "inference" else trained, u, g)
        row[name] = measure(runs, options.rounds, device, label=f"{shape.name}, {name}")
    # Read u and write y; going back, read u and the gradient of y, write that of u.
    pass_ms = u.numel() * u.element_size() / bandwidth * 1e3
    row["floor_ms"] = {"training": 5 * pass_ms, "forward": 2 * pass_ms, "inference": 2 * pass_ms}
    return row
