"""What a model is made of: parameters before and after the merge, and floating-point operations, part by part."""

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
from .vision.flattening import DepthwiseConv, FlatMixer


@dataclass(frozen=True)
class Part:
    """One part of a model, for one input: `linear` and `mixing` are floating-point operations, 2 to a multiply-add.

    Mixing is what convolutions and their like take (FFTs: 5/2 n log2 n for n real numbers, and the product of spectra;
    a kernel's own spectrum, once per batch, is left out); linear is all other products of matrices.
    """

    name: str
    what: str
    parameters: int
    merged: int
    linear: int
    mixing: int


def fft_conv_flops(u: Any, kernel: Any, bias: Any, spectrum: Any, lead: int, *rest: Any, **options: Any) -> int:
    """Count `mrconv::fft_conv` of u (B, C, L) and a kernel (C, K) that looks ahead by `lead`."""
    B, C, L = u
    n = ops.fast_length(max(L + min(kernel[1] - lead, L) - 1, L + min(lead, L - 1)))
    return int(B * C * (2 * 2.5 * n * math.log2(n) + 6 * (n // 2 + 1)))


def tap_conv_flops(u: Any, values: Any, *rest: Any, **options: Any) -> int:
    """Count `mrconv::tap_conv` of u (B, C, L) and values (C, T)."""
    return 2 * math.prod(u) * int(values[1])


def attention_flops(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Count attention as torch does on other devices; on a CPU it leaves it out."""
    return sdpa_flop_count(query, key, value)


COUNTED = {
    torch.ops.mrconv.fft_conv: fft_conv_flops,
    torch.ops.mrconv.tap_conv: tap_conv_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
}


@torch.no_grad()
def parts(model: Model) -> list[Part]:
    """Return the parts of a model, merged if it is not yet, on one input."""
    merged = reparameterize(copy.deepcopy(model))
    counter = FlopCounterMode(display=False, custom_mapping=COUNTED)
    with counter:
        merged(*random_inputs(merged))
    found = counter.get_flop_counts()
    mixers = [name for name, module in merged.named_modules() if isinstance(module, Mixer | DepthwiseConv)]
    root = type(merged).__name__

    def operations(name: str) -> int:
        return sum(found.get(f"{root}.{name}", {}).values())

    made = []
    for name, module in _parts(merged):
        mixing = sum(operations(mixer) for mixer in mixers if f"{mixer}.".startswith(f"{name}."))
        before = model.get_submodule(name)
        trained, kept = (sum(p.numel() for p in each.parameters()) for each in (before, module))
        made.append(Part(name, _about(before), trained, kept, operations(name) - mixing, mixing))
    rest = sum(found[root].values()) - sum(part.linear + part.mixing for part in made)
    return [*made, Part("head", "the encoder's weights", 0, 0, rest, 0)] if rest else made


def _parts(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold parameters, lists and backbones taken apart."""
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleList) or name == "backbone":
            yield from _parts(module, f"{prefix}{name}.")
        elif any(True for _ in module.parameters()):
            yield f"{prefix}{name}", module


def _about(module: nn.Module) -> str:
    """Return a word on a part's mixers: how many, and the first one's shape."""
    mixers = [m for m in module.modules() if isinstance(m, FlatMixer | DepthwiseConv | Mixer)]
    mixers = [m for m in mixers if not any(m in other.children() for other in mixers)]
    if not mixers:
        return ""
    first: Any = mixers[0]
    layer = first.layer if isinstance(first, FlatMixer) else first
    grid = f"{first.grid[0]}x{first.grid[1]}, " if isinstance(first, FlatMixer) else ""
    if isinstance(layer, MRConv):
        kind = f"{layer.kernel}, {grid}{layer.d_model} channels, l0 = {layer.kernel_size}, N = {layer.resolutions}"
    else:
        channels = layer.in_channels if isinstance(layer, DepthwiseConv) else layer.d_model
        kind = f"{type(layer).__name__}, {grid}{channels} channels"
    return f"{len(mixers)} x {kind}" if len(mixers) > 1 else kind


def table(found: list[Part]) -> str:
    """Return parts and their sum as an aligned table, operations as billions of multiply-adds."""
    total = [sum(getattr(part, key) for part in found) for key in ("parameters", "merged", "linear", "mixing")]
    rows = [*found, Part("all", "", *total)]
    cells = [["", "parameters", "merged", "linear, G", "mixing, G", ""]]
    for part in rows:
        counts = [f"{part.parameters:,}", f"{part.merged:,}", f"{part.linear / 2e9:.3f}", f"{part.mixing / 2e9:.3f}"]
        cells.append([part.name, *counts, part.what])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *numbers, what in cells:
        middle = [number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *middle, what]).rstrip())
    return "\n".join(lines)
