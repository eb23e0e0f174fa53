"""Stacks of blocks that differ only in their mixer: MRConv, N branches, a dense kernel, or none.

A dense kernel is convolved by torch's FFTs ("dense") and by the algorithms that MRConv uses ("longconv"). For inference
MRConv is merged and, if it keeps its modes then, merged into dense kernels too: a graph expands modes in every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn

from mrconv import MRConvBlock, reparameterize
from mrconv.mixers import freeze

from . import candidates, records, shapes
from .options import Options
from .timing import measure

DENSE = "merged, dense"
S4_NOTE = "S4: measured earlier on an H200 with the S4 authors' code (eager), not in this run"
S4_MS: dict[str, dict[str, dict[str, float]]] = {
    "float32": {
        "training": {"ListOps": 41.9, "Text": 40.4, "Image": 59.3, "Path-X": 126.5},
        "forward": {"ListOps": 16.8, "Text": 14.9, "Image": 24.4, "Path-X": 45.0},
    },
    "bfloat16": {
        "training": {"ListOps": 34.0, "Text": 30.2, "Image": 41.5},
        "forward": {"ListOps": 11.9, "Text": 11.1, "Image": 15.0},
    },
}
PRECISION = {
    "float32": "float32 throughout",
    "bfloat16": "torch.autocast to bfloat16 with a bfloat16 input, TF32 matrix products, float32 parameters",
}


def run(options: Options) -> dict[str, Any]:
    """Measure all stacks, print a table, and return the record."""
    results = records.start("model", options)
    results["precision"] = PRECISION[options.dtype]
    s4 = {} if options.small else S4_MS[options.dtype]
    if s4:
        results["anchors_ms"] = {"what": S4_NOTE, **s4}
    columns = ["S4"] if s4 else []
    mixers = tuple(options.mixers or shapes.STACKS)
    others = [name for name in mixers if name not in ("none", "ours")]
    forms = [DENSE] if "ours" in mixers and "inference" in options.passes else []
    table = records.Table([*mixers, *forms], columns, [*others, *(columns if "H200" in results["hardware"] else [])])
    chosen = shapes.select(shapes.MODELS, options.only)
    if options.small:
        chosen = [shape.small() for shape in chosen]
    with matmul_precision(options.dtype):
        measured = records.measure_each(
            results, options.out, chosen, lambda shape: measure_shape(shape, mixers, options)
        )
        for shape, measurements in measured:
            constants = {name: {"S4": times.get(shape.name)} for name, times in s4.items()}
            table.print_shape(shape.name, measurements, constants)
    if s4:
        print(S4_NOTE)
    return results


def measure_shape(shape: shapes.ModelShape, mixers: Sequence[str], options: Options) -> records.Measurements:
    """Measure the stacks of these mixers at one shape."""
    torch.manual_seed(0)
    device, dtype = options.device, getattr(torch, options.dtype)
    u = torch.randn(shape.batch, shape.length, shape.channels, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(u)
    autocast = dtype if dtype == torch.bfloat16 else None
    measurements: records.Measurements = {"shape": asdict(shape)}
    for name in options.passes:
        stacks = {mixer: stack(shape, mixer, device) for mixer in mixers}
        if name == "inference":
            stacks = {
                "merged" if mixer == "ours" else mixer: freeze(reparameterize(module))
                for mixer, module in stacks.items()
                if mixer != "branches"
            }
            if "merged" in stacks and any(getattr(module, "low_rank", False) for module in stacks["merged"].modules()):
                stacks[DENSE] = reparameterize(stack(shape, "ours", device), dense=True)
        compiled = None
        if options.compile:
            torch.compiler.reset()
            modules = {mixer: compile_blocks(module) for mixer, module in stacks.items() if mixer != "branches"}
            compiled = candidates.steps(name, modules, u, g, autocast)
        steps = candidates.steps(name, stacks, u, g, autocast)
        measurements[name] = measure(steps, options, compiled, f"{shape.name}, {name}")
    return measurements


def compile_blocks(stack: nn.Module) -> nn.Module:
    """Return the stack with each block compiled separately: equal blocks share one compilation."""
    return nn.Sequential(*(cast(nn.Module, torch.compile(block)) for block in stack.children()))


class Mixer(nn.Module):
    """Any map from (B, L, D) to (B, L, D), with the signature of a block's layer."""

    def __init__(self, d_model: int, inner: nn.Module) -> None:
        super().__init__()
        self.d_model, self.inner = d_model, inner

    def forward(
        self, u: Tensor, lengths: Tensor | None = None, rate: float | None = None, gelu: bool = False
    ) -> Tensor:
        """Apply the map, and GELU if asked to."""
        y = self.inner(u)
        return nn.functional.gelu(y) if gelu else y


def stack(shape: shapes.ModelShape, mixer: str, device: str) -> nn.Module:
    """Return blocks in training mode that differ only in their mixer."""
    blocks = []
    for _ in range(shape.depth):
        name = "longconv" if mixer == "longconv" else "mrconv"
        options = {"block_norm": shape.block_norm, "mixer": name, "device": device, **shape.options}
        block = MRConvBlock(shape.channels, shape.length, **options)
        inner: nn.Module | None = None
        if mixer == "none":
            inner = nn.Identity()
        elif mixer == "branches":
            inner = candidates.branches(shape, device, shape.depth)
        elif mixer == "dense":
            inner = candidates.DenseConvolution(shape.channels, shape.length, shape.bidirectional, device)
        if inner is not None:
            block.layer = Mixer(shape.channels, inner)  # type: ignore[assignment]
        blocks.append(block)
    return nn.Sequential(*blocks)


@contextmanager
def matmul_precision(dtype: str) -> Iterator[None]:
    """Allow TF32 in matrix products for a benchmark in bfloat16, forbid it in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "bfloat16" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
