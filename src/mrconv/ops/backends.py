"""Which backend can run here."""

from __future__ import annotations

import importlib.util
import os

from torch import Tensor

_INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: Tensor, backend: str) -> bool:
    """Tell whether Triton kernels run for x; `backend` "triton" insists, "torch" never does, "auto" does if it can."""
    if backend == "torch":
        return False
    why_not = triton_unavailable(x)
    if why_not and backend == "triton":
        raise RuntimeError(f"backend='triton' cannot run here: {why_not}")
    return not why_not


def triton_unavailable(x: Tensor) -> str | None:
    """Return why Triton kernels cannot run for x, or None if they can."""
    if not _INSTALLED:
        return "Triton is not installed"
    if not x.is_cuda and not INTERPRETED:
        return f"the tensors are on {x.device.type}; Triton runs on GPUs, or anywhere with TRITON_INTERPRET=1"
    return None
