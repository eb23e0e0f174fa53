"""One layer in training and merged, against the paper's N branches and against one dense FFT convolution."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from . import candidates, records, shapes
from .options import Options
from .timing import measure


def run(options: Options) -> dict[str, Any]:
    """Measure all shapes, print a table, and return the record."""
    results = records.start("layer", options)
    chosen = shapes.select(shapes.LAYERS, options.only)
    if options.small:
        chosen = [shape.small() for shape in chosen]
    table = records.Table(["ours", "branches", "dense"], [records.BANDWIDTH_BOUND], ["branches", "dense"])

    def measure_one(shape: shapes.Shape) -> records.Measurements:
        return measure_shape(shape, options, results["copy_bytes_per_s"])

    for shape, measurements in records.measure_each(results, options.out, chosen, measure_one):
        bounds = {name: {records.BANDWIDTH_BOUND: ms} for name, ms in measurements["bandwidth_bound_ms"].items()}
        table.print_shape(shape.name, measurements, bounds)
    return results


def measure_shape(shape: shapes.Shape, options: Options, bandwidth: float) -> records.Measurements:
    """Measure all candidates at one shape."""
    torch.manual_seed(0)
    device, dtype = options.device, getattr(torch, options.dtype)
    u = torch.randn(shape.batch, shape.length, shape.channels, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(u)
    dense = candidates.DenseConvolution(shape.channels, shape.length, shape.bidirectional, device)
    trained = {
        "ours": candidates.layer(shape, "auto", device),
        "branches": candidates.branches(shape, device),
        "dense": dense,
    }
    merged = {"merged": candidates.layer(shape, "auto", device).reparameterize(), "dense": dense}
    measurements: records.Measurements = {"shape": asdict(shape)}
    for name in options.passes:
        steps = candidates.steps(name, merged if name == "inference" else trained, u, g)
        measurements[name] = measure(steps, options, label=f"{shape.name}, {name}")
    # The forward pass reads u and writes y; the backward pass reads u and y's gradient and writes u's gradient.
    tensor_ms = u.numel() * u.element_size() / bandwidth * 1e3
    measurements["bandwidth_bound_ms"] = {
        "training": 5 * tensor_ms,
        "forward": 2 * tensor_ms,
        "inference": 2 * tensor_ms,
    }
    return measurements
