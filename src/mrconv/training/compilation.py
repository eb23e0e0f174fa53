"""torch.compile for the blocks of a model."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from mrconv import MRConv
from mrconv.block import MRConvBlock
from mrconv.vision.convnext_blocks import ConvNeXtBlock

MAX_SHAPES = 64  # batch shapes to compile for; torch's default limit of 8 is lower than the number of padded lengths
STEPS_PER_SHAPE = 5000  # minimum: at a few milliseconds per step, this saves several times the cost of compilation


def compile_blocks(model: nn.Module, few_shapes: bool = True) -> None:
    """Compile each block in place, for static shapes if batches have few shapes.

    Blocks of the same configuration share the compiled code. The state dict does not change, and copies of the model
    are not compiled.
    """
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    for module in model.modules():
        if isinstance(module, (MRConvBlock, ConvNeXtBlock)):
            module.compile(dynamic=False if few_shapes else None)


def worth_compiling(model: nn.Module, steps: int, shapes: float) -> bool:
    """Return whether compiled blocks make a run on one GPU faster, given its numbers of steps and batch shapes."""
    blocks = any(isinstance(module, MRConvBlock) and isinstance(module.layer, MRConv) for module in model.modules())
    long_run = shapes <= MAX_SHAPES and steps >= STEPS_PER_SHAPE * shapes
    return blocks and importlib.util.find_spec("triton") is not None and long_run
