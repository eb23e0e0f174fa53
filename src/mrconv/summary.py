"""Parameters of a model, before and after merging, and its floating-point operations, by part."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from . import ops
from .example_inputs import random_inputs
from .hub import Model
from .layer import MRConv, reparameterize
from .mixers import Mixer
from .vision.convnext_blocks import DepthwiseConv
from .vision.flattening import FlattenedMixer


@dataclass(frozen=True)
class Part:
    """One part of a model, with its operations for one input.

    Attributes:
        name: name of the submodule.
        description: number and options of its mixers.
        parameters: number of parameters before merging.
        merged: number of parameters after merging.
        linear: floating-point operations of matrix products, two per multiply-add.
        mixing: floating-point operations of mixers. An FFT of n real numbers counts as 5/2 n log2 n, to which the
            product of spectra is added. The kernel's spectrum, computed once per batch, is not counted.
    """

    name: str
    description: str
    parameters: int
    merged: int
    linear: int
    mixing: int


def fft_conv_flops(
    u: Any, kernel: Any, bias: Any, spectrum: Any, lengths: Any, lead: int, *rest: Any, **options: Any
) -> int:
    """Count the operations of `mrconv::fft_conv` for u (B, C, L) and a kernel (C, K) with `lead` taps before lag 0."""
    B, C, L = u
    n = ops.fast_length(max(L + min(kernel[1] - lead, L) - 1, L + min(lead, L - 1)))
    return int(B * C * (2 * 2.5 * n * math.log2(n) + 6 * (n // 2 + 1)))


def tap_conv_flops(u: Any, values: Any, *rest: Any, **options: Any) -> int:
    """Count the operations of `mrconv::tap_conv` for u (B, C, L) and values (C, T)."""
    return 2 * math.prod(u) * int(values[1])


def attention_flops(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Count the operations of attention on a CPU; torch's counter covers other devices only."""
    return sdpa_flop_count(query, key, value)


FLOP_COUNTERS = {
    torch.ops.mrconv.fft_conv: fft_conv_flops,
    torch.ops.mrconv.tap_conv: tap_conv_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
}


@torch.no_grad()
def summarize(model: Model) -> list[Part]:
    """Return the parts of a model with the operations of its merged form for one input; the model is not changed."""
    merged = reparameterize(copy.deepcopy(model))
    counter = FlopCounterMode(display=False, custom_mapping=FLOP_COUNTERS)
    with counter:
        merged(*random_inputs(merged))
    counts = counter.get_flop_counts()
    mixers = [name for name, module in merged.named_modules() if isinstance(module, Mixer | DepthwiseConv)]
    root = type(merged).__name__

    def operations(name: str) -> int:
        return sum(counts.get(f"{root}.{name}", {}).values())

    parts = []
    for name, module in _submodules(merged):
        mixing = sum(operations(mixer) for mixer in mixers if f"{mixer}.".startswith(f"{name}."))
        unmerged = model.get_submodule(name)
        before, after = (sum(p.numel() for p in each.parameters()) for each in (unmerged, module))
        parts.append(Part(name, _description(unmerged), before, after, operations(name) - mixing, mixing))
    rest = sum(counts[root].values()) - sum(part.linear + part.mixing for part in parts)
    return [*parts, Part("head", "the encoder's weights", 0, 0, rest, 0)] if rest else parts


def _submodules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that have parameters; lists and backbones are replaced by their children."""
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleList) or name == "backbone":
            yield from _submodules(module, f"{prefix}{name}.")
        elif any(True for _ in module.parameters()):
            yield f"{prefix}{name}", module


def _description(module: nn.Module) -> str:
    """Return the number of a part's mixers and the options of the first, or "" for a part without mixers."""
    mixers = [m for m in module.modules() if isinstance(m, FlattenedMixer | DepthwiseConv | Mixer)]
    mixers = [m for m in mixers if not any(m in other.children() for other in mixers)]
    if not mixers:
        return ""
    first: Any = mixers[0]
    layer = first.layer if isinstance(first, FlattenedMixer) else first
    grid = f"{first.grid[0]}x{first.grid[1]}, " if isinstance(first, FlattenedMixer) else ""
    if isinstance(layer, MRConv):
        kind = f"{layer.kernel}, {grid}{layer.d_model} channels, l0 = {layer.kernel_size}, N = {layer.resolutions}"
    else:
        channels = layer.in_channels if isinstance(layer, DepthwiseConv) else layer.d_model
        kind = f"{type(layer).__name__}, {grid}{channels} channels"
    return f"{len(mixers)} x {kind}" if len(mixers) > 1 else kind


def format_table(parts: list[Part]) -> str:
    """Return the parts and their sum as an aligned table, with operations in billions of multiply-adds."""
    total = [sum(getattr(part, key) for part in parts) for key in ("parameters", "merged", "linear", "mixing")]
    cells = [["", "parameters", "merged", "linear, G", "mixing, G", ""]]
    for part in [*parts, Part("all", "", *total)]:
        counts = [f"{part.parameters:,}", f"{part.merged:,}", f"{part.linear / 2e9:.3f}", f"{part.mixing / 2e9:.3f}"]
        cells.append([part.name, *counts, part.description])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *numbers, description in cells:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned, description]).rstrip())
    return "\n".join(lines)
