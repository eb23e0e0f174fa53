"""Parameter groups for PyTorch optimizers, as in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._utils.checks import check_choice
from .branches import Branches
from .kernels import Kernel
from .mixers import Mixer


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    kernel_lr: float = 0.001,
    decay_on: str = "matrices",
    mixer_lr: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return groups for an optimizer such as AdamW; every trainable parameter is in exactly one.

    Kernel parameters, merged kernels included, have `kernel_lr` and no weight decay. All others have `lr` and
    `weight_decay`; with `decay_on="matrices"`, biases, norms, alpha and the layer scale gamma have no weight decay.
    Parameters of mixers whose name is in `mixer_lr` have its learning rate instead, and the same weight decay.
    """
    check_choice("decay_on", decay_on, ("matrices", "all"))
    own_lr = dict(mixer_lr or {})
    members: dict[tuple[str, str], list[nn.Parameter]] = {}  # by kind, and name if it has a learning rate of its own
    seen: set[nn.Parameter] = set()

    def visit(module: nn.Module, in_kernel: bool) -> None:
        in_kernel = in_kernel or isinstance(module, Kernel)
        kernel_names = getattr(module, "kernel_parameters", ())  # of a `Mixer`: parameters or submodules
        for name, p in module.named_parameters(recurse=False):
            if p in seen or not p.requires_grad:
                continue
            seen.add(p)
            if in_kernel or name in kernel_names:
                kind = "kernels"
            elif name in ("bias", "gamma") or isinstance(module, (Branches, _BatchNorm, nn.LayerNorm)):
                kind = "vectors"
            else:
                kind = "matrices"
            own = name if name in own_lr and isinstance(module, Mixer) else ""
            members.setdefault((kind, own), []).append(p)
        for name, child in module.named_children():
            visit(child, in_kernel or name in kernel_names)

    visit(model, False)
    if missing := own_lr.keys() - {own for _, own in members}:
        raise ValueError(f"mixer_lr: the mixer has no parameter {', '.join(sorted(missing))} of its own")
    settings = {
        "matrices": (lr, weight_decay),
        "vectors": (lr, weight_decay if decay_on == "all" else 0.0),
        "kernels": (kernel_lr, 0.0),
    }
    return [
        {"params": members[kind, own], "lr": own_lr.get(own, rate), "weight_decay": decay}
        for own in ("", *own_lr)
        for kind, (rate, decay) in settings.items()
        if (kind, own) in members
    ]
