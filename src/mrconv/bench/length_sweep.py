"""One layer against length, at a constant number of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mrconv import MRConv

from . import candidates, records, shapes
from .options import Options
from .timing import measure


def run(options: Options) -> dict[str, Any]:
    """Measure all lengths, print a table, and return the record."""
    kinds = shapes.select(shapes.KINDS, options.only)
    results = records.start("length", options)
    table = records.Table([kind.name for kind in kinds])
    sizes = shapes.lengths(options.device, options.small)

    def measure_one(size: tuple[int, int, int]) -> records.Measurements:
        return measure_length(kinds, *size, options)

    for (_, length, _), measurements in records.measure_each(results, options.out, sizes, measure_one):
        table.print_shape(f"{length}", measurements)
    return results


def measure_length(
    kinds: Sequence[shapes.Kind], batch: int, length: int, channels: int, options: Options
) -> records.Measurements:
    """Measure all kinds of layer at one length."""
    torch.manual_seed(0)
    device, dtype = options.device, getattr(torch, options.dtype)
    u = torch.randn(batch, length, channels, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(u)

    def module(kind: shapes.Kind, merged: bool) -> nn.Module:
        if kind.kernel is None:
            return candidates.DenseConvolution(channels, length, False, device)
        layer = MRConv(channels, length, kernel=kind.kernel, kernel_size=kind.kernel_size, device=device)
        return layer.reparameterize() if merged else layer

    measurements: records.Measurements = {"shape": {"batch": batch, "length": length, "channels": channels}}
    for name in options.passes:
        modules = {kind.name: module(kind, merged=name == "inference") for kind in kinds}
        steps = candidates.steps(name, modules, u, g)
        measurements[name] = measure(steps, options, label=f"length {length}, {name}")
    return measurements
