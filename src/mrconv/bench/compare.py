"""All mixers in the same block: stacks of the paper's shapes, and one block against length."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from mrconv import MRConvBlock, reparameterize
from mrconv.baselines import mixer_class, mixer_names

from . import contestants as make
from . import shapes
from .model import PRECISION, matrix_products
from .options import Options
from .report import Table, record, write
from .timing import copy_bandwidth, free, measure


def run(options: Options) -> dict[str, Any]:
    """Measure all mixers, print a table with S4's time over ours, write and return what was found."""
    names = list(options.mixers or [name for name in mixer_names() if name != "mrconv"])
    for name in names:
        mixer_class(name)
    chosen = shapes.select([*shapes.MODELS, *shapes.LENGTHS], options.only)
    bandwidth = copy_bandwidth(options.device)
    found = record("compare", options.command, options.device, options.dtype, options.rounds, bandwidth)
    found["precision"] = PRECISION[options.dtype]
    table = Table(["ours", *names], ratios=[name for name in ("s4", "attention") if name in names])
    with matrix_products("high" if options.dtype == "bfloat16" else "highest"):
        for shape in chosen:
            row = one_shape(shape.small() if options.small else shape, names, options)
            found["rows"].append(row)
            write(options.out, found)
            table.row(shape.name, row, {})
            free()
    return found


def one_shape(shape: shapes.ModelShape, names: list[str], options: Options) -> dict[str, Any]:
    """Measure one row; a mixer that cannot be had in this shape says why."""
    torch.manual_seed(0)
    device, dtype = options.device, getattr(torch, options.dtype)
    u = torch.randn(shape.batch, shape.length, shape.channels, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(u)
    row: dict[str, Any] = {"shape": asdict(shape)}
    for each in options.passes:
        stacks: dict[str, nn.Module] = {"ours": stack(shape, "mrconv", device)}
        stacks |= {name: _attempted(shape, name, device) for name in names}
        if each == "inference":
            stacks = {"merged" if key == "ours" else key: reparameterize(module) for key, module in stacks.items()}
        runs = make.runs(each, stacks, u, g, dtype if dtype == torch.bfloat16 else None)
        row[each] = measure(runs, options.rounds, device, label=f"{shape.name}, {each}")
    return row


def stack(shape: shapes.ModelShape, mixer: str, device: str) -> nn.Module:
    """Return blocks in which only the mixer differs, in training mode."""
    make_block = functools.partial(
        MRConvBlock, shape.channels, shape.length, block_norm=shape.block_norm, mixer=mixer, device=device
    )
    return nn.Sequential(*(make_block(**shape.options) for _ in range(shape.depth)))


def _attempted(shape: shapes.ModelShape, mixer: str, device: str) -> nn.Module:
    try:
        return stack(shape, mixer, device)
    except ValueError as error:
        return make.Refused(str(error))
