"""One layer against length, at a constant number of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mrconv import MRConv

from . import candidates as make
from . import shapes
from .options import Options
from .records import Table, record, write
from .timing import copy_bandwidth, free, measure


def run(options: Options) -> dict[str, Any]:
    """Measure all lengths, print a table, write and return what was found."""
    kinds = shapes.select(shapes.KINDS, options.only)
    bandwidth = copy_bandwidth(options.device)
    found = record("length", options.command, options.device, options.dtype, options.rounds, bandwidth)
    table = Table([kind.name for kind in kinds])
    for batch, length, channels in shapes.lengths(options.device, options.small):
        row = one_length(kinds, batch, length, channels, options)
        found["rows"].append(row)
        write(options.out, found)
        table.row(f"{length}", row, {})
        free()
    return found


def one_length(
    kinds: Sequence[shapes.Kind], batch: int, length: int, channels: int, options: Options
) -> dict[str, Any]:
    """Measure all kinds at one length."""
    torch.manual_seed(0)
    device, dtype = options.device, getattr(torch, options.dtype)
    u = torch.randn(batch, length, channels, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(u)

    def module(kind: shapes.Kind, merged: bool) -> nn.Module:
        if kind.kernel is None:
            return make.DenseConvolution(channels, length, False, device)
        layer = MRConv(channels, length, kernel=kind.kernel, kernel_size=kind.kernel_size, device=device)
        return layer.reparameterize() if merged else layer

    row: dict[str, Any] = {"shape": {"batch": batch, "length": length, "channels": channels}}
    for name in options.passes:
        modules = {kind.name: module(kind, merged=name == "inference") for kind in kinds}
        row[name] = measure(make.runs(name, modules, u, g), options.rounds, device, label=f"length {length}, {name}")
    return row
