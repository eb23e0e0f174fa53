"""All mixers in the same block: stacks of the paper's shapes, and one block against length."""

from __future__ import annotations

import functools
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from mrconv import MRConvBlock, reparameterize
from mrconv.mixers import freeze, mixer_class, mixer_names

from . import candidates as make
from . import shapes
from .block_stacks import PRECISION, by_block, matrix_products
from .options import Options
from .records import Table, record, speed, write
from .timing import Result, copy_bandwidth, free, measure

LARGE: dict[str, dict[str, Any]] = {"Text": {"channels": 384, "kernel": "fourier+sparse"}, "Image": {"depth": 10}}
"""What differs in the paper's Large models of these shapes."""
OURS = ("ours", "merged", "large", "large merged")


def run(options: Options) -> dict[str, Any]:
    """Measure all mixers, print a table with their speed beside S4's, write and return what was found."""
    names = list(options.mixers or [name for name in mixer_names() if name != "mrconv"])
    for name in names:
        mixer_class(name)
    chosen = shapes.select([*shapes.MODELS, *shapes.LENGTHS], options.only)
    bandwidth = copy_bandwidth(options.device)
    found = record("compare", options.command, options.device, options.dtype, options.rounds, bandwidth)
    found |= {"precision": PRECISION[options.dtype], "large": LARGE}
    table = Table([*OURS, *names])
    with matrix_products("high" if options.dtype == "bfloat16" else "highest"):
        for shape in chosen:
            row = one_shape(shape, names, options)
            found["rows"].append(row)
            write(options.out, found)
            table.row(shape.name, row, {})
            free()
    return found


def one_shape(shape: shapes.ModelShape, names: list[str], options: Options) -> dict[str, Any]:
    """Measure one row; a mixer that cannot be had in this shape says why."""
    torch.manual_seed(0)
    large = replace(shape, **LARGE[shape.name]) if shape.name in LARGE else None
    if options.small:
        shape, large = shape.small(), large and large.small()
    row: dict[str, Any] = {"shape": asdict(shape)}
    for each in options.passes:
        stacks: dict[str, nn.Module] = _ours(shape, each, "", options)
        stacks |= {name: _attempted(shape, name, options.device) for name in names}
        if each == "inference":
            stacks = {key: module if key in OURS else freeze(reparameterize(module)) for key, module in stacks.items()}
        torch.compiler.reset()
        runs, compiled = _runs(shape, each, stacks, options)
        if large:
            more, more_compiled = _runs(large, each, _ours(large, each, "large", options), options)
            runs, compiled = runs | more, compiled | more_compiled
        with torch._dynamo.config.patch(recompile_limit=64):  # each mixer is another compilation of the same block
            row[each] = measure(runs, options.rounds, options.device, compiled, label=f"{shape.name}, {each}")
        add_speeds(row[each], shape.batch)
    return row


def add_speeds(results: dict[str, Result], batch: int) -> None:
    """Add each contestant's examples a second by its fastest way, and how often S4's these are."""
    for result in results.values():
        result["examples_per_s"] = speed(result, batch) or None
    of_s4 = results.get("s4", {}).get("examples_per_s")
    for result in results.values():
        own = result["examples_per_s"]
        result["beside_s4"] = own / of_s4 if own and of_s4 else None


def _ours(shape: shapes.ModelShape, each: str, prefix: str, options: Options) -> dict[str, nn.Module]:
    """Return MRConv's stack as trained and, in inference, merged too."""
    stacks = {prefix or "ours": stack(shape, "mrconv", options.device)}
    if each == "inference":
        stacks[prefix or "ours"].eval()
        stacks[f"{prefix} merged".strip()] = reparameterize(stack(shape, "mrconv", options.device))
    return stacks


def _runs(
    shape: shapes.ModelShape, each: str, stacks: dict[str, nn.Module], options: Options
) -> tuple[dict[str, make.Run], dict[str, make.Run]]:
    """Return the pass of each stack, and of those that are to be compiled too, as they are and compiled by block."""
    dtype = getattr(torch, options.dtype)
    sizes = (shape.batch, shape.length, shape.channels)
    u = torch.randn(*sizes, device=options.device, dtype=dtype, requires_grad=True)
    passes = functools.partial(make.runs, u=u, g=torch.randn_like(u), cast=dtype if dtype == torch.bfloat16 else None)
    there = {key: module for key, module in stacks.items() if options.compile and not isinstance(module, make.Refused)}
    return passes(each, stacks), passes(each, {key: by_block(module) for key, module in there.items()})


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
