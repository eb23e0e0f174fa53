"""The paper's optimizer groups, for plain PyTorch."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .branches import Branches
from .kernels import Kernel


def param_groups(model: nn.Module, lr: float, weight_decay: float, kernel_lr: float = 0.001) -> list[dict[str, Any]]:
    """Return three groups for an optimizer such as AdamW, with every trainable parameter in exactly one.

    Kernel parameters (a merged kernel too) get `kernel_lr` and no weight decay; biases, norms, alpha and the
    layer scale gamma get `lr` and no weight decay; the rest gets both.
    """
    kernel: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()

    def visit(module: nn.Module, in_kernel: bool) -> None:
        in_kernel = in_kernel or isinstance(module, Kernel)
        named = getattr(module, "kernel_parameters", ())  # of a mixer: its parameters or modules that make the kernel
        for name, p in module.named_parameters(recurse=False):
            if p in seen or not p.requires_grad:
                continue
            seen.add(p)
            if in_kernel or name in named:
                kernel.append(p)
            elif name in ("bias", "gamma") or isinstance(module, (Branches, _BatchNorm, nn.LayerNorm)):
                plain.append(p)
            else:
                decayed.append(p)
        for name, child in module.named_children():
            visit(child, in_kernel or name in named)

    visit(model, False)
    groups = [
        {"params": decayed, "lr": lr, "weight_decay": weight_decay},
        {"params": plain, "lr": lr, "weight_decay": 0.0},
        {"params": kernel, "lr": kernel_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
