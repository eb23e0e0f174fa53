"""All mixers in the same block: stacks at the paper's shapes, and one block against length."""

from __future__ import annotations

import functools
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from mrconv import MRConvBlock, reparameterize
from mrconv.mixers import freeze, mixer_class, mixer_names

from . import candidates, records, shapes
from .block_stacks import PRECISION, compile_blocks, matmul_precision
from .options import Options
from .timing import Result, measure

LARGE: dict[str, dict[str, Any]] = {"Text": {"channels": 384, "kernel": "fourier+sparse"}, "Image": {"depth": 10}}
"""Changes that turn these shapes into those of the paper's Large models."""
OURS = ("ours", "merged", "large", "large merged")


def run(options: Options) -> dict[str, Any]:
    """Measure all mixers, print a table with their speed relative to S4, and return the record."""
    mixers = list(options.mixers or [name for name in mixer_names() if name != "mrconv"])
    for name in mixers:
        mixer_class(name)  # raises for an unknown name before anything is measured
    chosen = shapes.select([*shapes.MODELS, *shapes.LENGTHS], options.only)
    results = records.start("compare", options)
    results |= {"precision": PRECISION[options.dtype], "large": LARGE}
    table = records.Table([*OURS, *mixers])

    def measure_one(shape: shapes.ModelShape) -> records.Measurements:
        return measure_shape(shape, mixers, options)

    with matmul_precision(options.dtype):
        for shape, measurements in records.measure_each(results, options.out, chosen, measure_one):
            table.print_shape(shape.name, measurements)
    return results


def measure_shape(shape: shapes.ModelShape, mixers: list[str], options: Options) -> records.Measurements:
    """Measure all mixers at one shape; a mixer that does not support the shape records its error."""
    torch.manual_seed(0)
    large = replace(shape, **LARGE[shape.name]) if shape.name in LARGE else None
    if options.small:
        shape, large = shape.small(), large and large.small()
    measurements: records.Measurements = {"shape": asdict(shape)}
    for name in options.passes:
        stacks: dict[str, nn.Module] = _mrconv_stacks(shape, name, "", options)
        stacks |= {mixer: stack_or_error(shape, mixer, options.device) for mixer in mixers}
        if name == "inference":
            stacks = {key: module if key in OURS else freeze(reparameterize(module)) for key, module in stacks.items()}
        torch.compiler.reset()
        steps, compiled = _steps(shape, name, stacks, options)
        if large:
            large_stacks = _mrconv_stacks(large, name, "large", options)
            large_steps, large_compiled = _steps(large, name, large_stacks, options)
            steps, compiled = steps | large_steps, compiled | large_compiled
        with torch._dynamo.config.patch(recompile_limit=64):  # each mixer compiles the same block again
            measurements[name] = measure(steps, options, compiled, f"{shape.name}, {name}")
        add_speeds(measurements[name], shape.batch)
    return measurements


def add_speeds(results: dict[str, Result], batch: int) -> None:
    """Add each candidate's examples per second with its fastest timing, and the ratio to those of S4."""
    for result in results.values():
        result["examples_per_s"] = records.speed(result, batch) or None
    s4 = results.get("s4", {}).get("examples_per_s")
    for result in results.values():
        speed = result["examples_per_s"]
        result["beside_s4"] = speed / s4 if speed and s4 else None


def _mrconv_stacks(shape: shapes.ModelShape, pass_name: str, prefix: str, options: Options) -> dict[str, nn.Module]:
    """Return MRConv's stack as trained and, for inference, merged too."""
    stacks = {prefix or "ours": stack(shape, "mrconv", options.device)}
    if pass_name == "inference":
        stacks[prefix or "ours"].eval()
        stacks[f"{prefix} merged".strip()] = reparameterize(stack(shape, "mrconv", options.device))
    return stacks


def _steps(
    shape: shapes.ModelShape, pass_name: str, stacks: dict[str, nn.Module], options: Options
) -> tuple[dict[str, candidates.Step], dict[str, candidates.Step]]:
    """Return the steps of all stacks, and those of the stacks compiled block by block."""
    dtype = getattr(torch, options.dtype)
    size = (shape.batch, shape.length, shape.channels)
    u = torch.randn(*size, device=options.device, dtype=dtype, requires_grad=True)
    autocast = dtype if dtype == torch.bfloat16 else None
    steps = functools.partial(candidates.steps, pass_name, u=u, g=torch.randn_like(u), autocast=autocast)
    compiled: dict[str, nn.Module] = {}
    if options.compile:
        available = {key: module for key, module in stacks.items() if not isinstance(module, candidates.Unavailable)}
        compiled = {key: compile_blocks(module) for key, module in available.items()}
    return steps(stacks), steps(compiled)


def stack(shape: shapes.ModelShape, mixer: str, device: str) -> nn.Module:
    """Return blocks in training mode that differ only in their mixer."""
    make_block = functools.partial(
        MRConvBlock, shape.channels, shape.length, block_norm=shape.block_norm, mixer=mixer, device=device
    )
    return nn.Sequential(*(make_block(**shape.options) for _ in range(shape.depth)))


def stack_or_error(shape: shapes.ModelShape, mixer: str, device: str) -> nn.Module:
    """Return the stack, or a candidate that reports why the mixer does not support the shape."""
    try:
        return stack(shape, mixer, device)
    except ValueError as error:
        return candidates.Unavailable(str(error))
