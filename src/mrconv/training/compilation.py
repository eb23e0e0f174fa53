"""torch.compile for the blocks of a model."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from mrconv import MRConv
from mrconv.block import MRConvBlock
from mrconv.vision.convnext_blocks import ConvNeXtBlock

MAX_SHAPES = 64  # of batches to compile for; torch's default limit of 8 is lower than the number of padded lengths
STEPS_PER_SHAPE = 5000  # from which compilation pays: at some milliseconds saved per step, a few times its cost


def compile_blocks(model: nn.Module, few_shapes: bool = True) -> None:
    """Compile each block in place, for static shapes if batches have few.

    Blocks of the same configuration share the compiled code. State dict and copies of the model stay uncompiled.
    """
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    for module in model.modules():
        if isinstance(module, (MRConvBlock, ConvNeXtBlock)):
            module.compile(dynamic=False if few_shapes else None)


def worth_compiling(model: nn.Module, steps: int, shapes: float) -> bool:
    """Return whether compiled blocks make a run on one GPU faster, given its steps and shapes of batches."""
    blocks = any(isinstance(module, MRConvBlock) and isinstance(module.layer, MRConv) for module in model.modules())
    long_run = shapes <= MAX_SHAPES and steps >= STEPS_PER_SHAPE * shapes
    return blocks and importlib.util.find_spec("triton") is not None and long_run
