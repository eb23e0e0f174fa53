"""Initial values, dtypes and complex numbers of the baselines' parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops


def as_parameter(x: Tensor, device: Any = None, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a parameter with the values of x, in torch's default dtype if none is given.

    Complex numbers become real pairs (..., 2): optimizers, DDP and half precision do not support complex parameters.
    """
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return nn.Parameter(x.to(device=device, dtype=dtype or torch.get_default_dtype()))


def as_complex(x: Tensor) -> Tensor:
    """Return a parameter of real pairs (..., 2) as complex numbers (...)."""
    return torch.view_as_complex(upcast(x))


def upcast(x: Tensor) -> Tensor:
    """Return x in the dtype to compute in, at least float32."""
    return x.to(ops.compute_dtype(x))


def standard_normal(*shape: int, dtype: torch.dtype = torch.float64, device: Any = None) -> Tensor:
    """Draw standard normal values on the CPU: the same for every dtype and device of the parameter.

    For a parameter on the meta device nothing is drawn.
    """
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(*shape, dtype=dtype, device=device)
    return torch.randn(*shape, dtype=dtype, device="cpu")


def uniform(low: float, high: float, *shape: int) -> Tensor:
    """Draw uniform values on the CPU: the same for every dtype and device of the parameter."""
    return torch.empty(*shape, dtype=torch.float64, device="cpu").uniform_(low, high)


def log_uniform(dt_min: float, dt_max: float, *shape: int) -> Tensor:
    """Draw the logarithms of step sizes that are log-uniform in dt_min .. dt_max."""
    check_step_sizes(dt_min, dt_max)
    return uniform(math.log(dt_min), math.log(dt_max), *shape)


def check_step_sizes(dt_min: float, dt_max: float) -> None:
    """Reject step sizes other than 0 < dt_min <= dt_max."""
    if not 0 < dt_min <= dt_max:
        raise ValueError(f"dt_min and dt_max must satisfy 0 < dt_min <= dt_max; got {dt_min!r} and {dt_max!r}")
