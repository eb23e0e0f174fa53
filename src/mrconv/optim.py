"""Parameter groups for PyTorch optimizers, as in the paper."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._utils.checks import check_choice
from .branches import Branches
from .kernels import Kernel


def param_groups(
    model: nn.Module, lr: float, weight_decay: float, kernel_lr: float = 0.001, decay_on: str = "matrices"
) -> list[dict[str, Any]]:
    """Return up to three groups for an optimizer such as AdamW; every trainable parameter is in exactly one.

    Kernel parameters, merged kernels included, have `kernel_lr` and no weight decay. All others have `lr` and
    `weight_decay`; with `decay_on="matrices"`, biases, norms, alpha and the layer scale gamma have no weight decay.
    """
    check_choice("decay_on", decay_on, ("matrices", "all"))
    kernel: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()

    def visit(module: nn.Module, in_kernel: bool) -> None:
        in_kernel = in_kernel or isinstance(module, Kernel)
        kernel_names = getattr(module, "kernel_parameters", ())  # of a `Mixer`: parameters or submodules
        for name, p in module.named_parameters(recurse=False):
            if p in seen or not p.requires_grad:
                continue
            seen.add(p)
            if in_kernel or name in kernel_names:
                kernel.append(p)
            elif name in ("bias", "gamma") or isinstance(module, (Branches, _BatchNorm, nn.LayerNorm)):
                vectors.append(p)
            else:
                matrices.append(p)
        for name, child in module.named_children():
            visit(child, in_kernel or name in kernel_names)

    visit(model, False)
    groups = [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": vectors, "lr": lr, "weight_decay": weight_decay if decay_on == "all" else 0.0},
        {"params": kernel, "lr": kernel_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
