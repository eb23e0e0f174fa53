"""Stacks of blocks that differ only in their mixer: ours, the paper's way, one dense FFT convolution, none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn

from mrconv import MRConvBlock, reparameterize

from . import candidates as make
from . import shapes
from .options import Options
from .records import Table, record, write
from .timing import copy_bandwidth, free, measure

ANCHOR = "S4: measured before on an H200 with S4's own code (eager), not in this run"
S4: dict[str, dict[str, dict[str, float]]] = {
    "float32": {
        "training": {"ListOps": 41.9, "Text": 40.4, "Image": 59.3, "Path-X": 126.5},
        "forward": {"ListOps": 16.8, "Text": 14.9, "Image": 24.4, "Path-X": 45.0},
    },
    "bfloat16": {
        "training": {"ListOps": 34.0, "Text": 30.2, "Image": 41.5},
        "forward": {"ListOps": 11.9, "Text": 11.1, "Image": 15.0},
    },
}
COMPILED = ("none", "ours", "merged")
PRECISION = {
    "float32": "float32 throughout",
    "bfloat16": "torch.autocast to bfloat16 with a bfloat16 input, TF32 matrix products, float32 parameters",
}


def run(options: Options) -> dict[str, Any]:
    """Measure all stacks, print a table, write and return what was found."""
    chosen = shapes.select(shapes.MODELS, options.only)
    bandwidth = copy_bandwidth(options.device)
    found = record("model", options.command, options.device, options.dtype, options.rounds, bandwidth)
    found["precision"] = PRECISION[options.dtype]
    anchors = {} if options.small else S4[options.dtype]
    if anchors:
        found["anchors_ms"] = {"what": ANCHOR, **anchors}
    names = ["S4"] if anchors else []
    ratios = ["branches", "dense", *(names if "H200" in found["hardware"] else [])]
    table = Table(["none", "ours", "branches", "dense"], names, ratios)
    with matrix_products("high" if options.dtype == "bfloat16" else "highest"):
        for shape in chosen:
            row = one_shape(shape.small() if options.small else shape, options)
            found["rows"].append(row)
            write(options.out, found)
            table.row(shape.name, row, {name: {"S4": by.get(shape.name)} for name, by in anchors.items()})
            free()
    if anchors:
        print(ANCHOR)
    return found


def one_shape(shape: shapes.ModelShape, options: Options) -> dict[str, Any]:
    """Measure one row."""
    torch.manual_seed(0)
    device, dtype = options.device, getattr(torch, options.dtype)
    u = torch.randn(shape.batch, shape.length, shape.channels, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(u)
    autocast = dtype if dtype == torch.bfloat16 else None
    row: dict[str, Any] = {"shape": asdict(shape)}
    for name in options.passes:
        merged = {"none": "none", "merged": "ours", "dense": "dense"}
        trained = {each: each for each in ("none", "ours", "branches", "dense")}
        chosen = merged if name == "inference" else trained
        stacks = {key: stack(shape, mixer, device) for key, mixer in chosen.items()}
        if name == "inference":
            stacks = {key: reparameterize(module) for key, module in stacks.items()}
        compiled = None
        if options.compile:
            torch.compiler.reset()
            compiled = make.runs(
                name, {key: by_block(stacks[key]) for key in stacks if key in COMPILED}, u, g, autocast
            )
        runs = make.runs(name, stacks, u, g, autocast)
        row[name] = measure(runs, options.rounds, device, compiled, label=f"{shape.name}, {name}")
    return row


def by_block(stack: nn.Module) -> nn.Module:
    """Return the stack with every block compiled by itself: as they are alike, that takes no longer than for one."""
    return nn.Sequential(*(cast(nn.Module, torch.compile(block)) for block in stack.children()))


class Mixer(nn.Module):
    """Any map of (B, L, D) in the place of a block's layer."""

    def __init__(self, d_model: int, inner: nn.Module) -> None:
        super().__init__()
        self.d_model, self.inner = d_model, inner

    def forward(
        self, u: Tensor, lengths: Tensor | None = None, rate: float | None = None, gelu: bool = False
    ) -> Tensor:
        """Apply it, and GELU."""
        y = self.inner(u)
        return nn.functional.gelu(y) if gelu else y


def stack(shape: shapes.ModelShape, mixer: str, device: str) -> nn.Module:
    """Return blocks in which only the mixer differs, in training mode."""
    blocks = []
    for _ in range(shape.depth):
        block = MRConvBlock(shape.channels, shape.length, block_norm=shape.block_norm, device=device, **shape.options)
        inner: nn.Module | None = None
        if mixer == "none":
            inner = nn.Identity()
        elif mixer == "branches":
            inner = make.branches(shape, device, shape.depth)
        elif mixer == "dense":
            inner = make.DenseConvolution(shape.channels, shape.length, shape.bidirectional, device)
        if inner is not None:
            block.layer = Mixer(shape.channels, inner)  # type: ignore[assignment]
        blocks.append(block)
    return nn.Sequential(*blocks)


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """Allow ("high") or forbid ("highest") TF32 in matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
