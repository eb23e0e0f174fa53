"""Argument checks; their errors name the argument, the value given and the values allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

MAX_RATE = 1000


def first_not_finite(tensors: Mapping[str, object]) -> str | None:
    """Return the name of the first value that is no tensor, or holds NaN or infinity; None if there is none."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or (x.is_floating_point() and not x.isfinite().all()):
            return name
    return None


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError for a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def check_positive_int(**values: object) -> None:
    """Raise ValueError for anything but positive integers."""
    _check_integers(1, values)


def check_count(**values: object) -> None:
    """Raise ValueError for anything but non-negative integers."""
    _check_integers(0, values)


def _check_integers(least: int, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")


def check_positive(**values: float) -> None:
    """Raise ValueError for anything but positive finite numbers."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number; got {value!r}")


def positive_pair(name: str, value: float | Sequence[float]) -> tuple[float, float]:
    """Return a pair (min, max) of positive numbers; a single number stands for both."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(isinstance(x, Real) and 0 < x < float("inf") for x in pair):
        raise ValueError(f"{name} must be a positive number or a pair (min, max) of them; got {value!r}")
    return float(pair[0]), float(pair[1])


def check_decay(decay: float | Sequence[float] | None, combine: str) -> tuple[float, float] | None:
    """Return the decay as a pair (min, max), or None."""
    if decay is None:
        return None
    if combine != "concat":
        raise ValueError(f"decay needs combine='concat'; got decay={decay!r} with combine={combine!r}")
    return positive_pair("decay", decay)


def check_rate(rate: float, kernel: str, continuous: bool) -> None:
    """Raise ValueError for a rate that is not positive, too high, or not 1 for a kernel that cannot be resampled."""
    check_positive(rate=rate)
    if rate > MAX_RATE:
        raise ValueError(f"rate must be at most {MAX_RATE:,}, as kernels get this many times as long; got {rate:g}")
    if rate != 1 and not continuous:
        raise ValueError(
            f"rate={rate:g} needs a continuous kernel such as 'fourier'; kernel={kernel!r} has taps at fixed positions "
            f"and runs at rate 1 only"
        )


def check_input(u: Tensor, d_model: int) -> None:
    """Raise ValueError unless u is a real tensor of shape (batch >= 1, length >= 1, d_model)."""
    if u.ndim != 3 or u.shape[2] != d_model:
        raise ValueError(f"u must have shape (batch, length, d_model = {d_model}); got {tuple(u.shape)}")
    if u.shape[0] == 0 or u.shape[1] == 0:
        raise ValueError(f"u must have a batch and a length of at least 1; got shape {tuple(u.shape)}")
    if not u.is_floating_point():
        raise ValueError(f"u must be real floating point; got {u.dtype}")


def check_lengths(lengths: Tensor | Sequence[int], batch: int, length: int) -> Tensor:
    """Return lengths as int64 on their device; raise ValueError unless they are (batch,) integers in 0 .. length.

    Values are checked only where reading them needs no synchronisation: on the CPU, outside of compiled code.
    """
    lengths = torch.as_tensor(lengths)
    if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths must be integers of shape ({batch},), one per sequence; got {lengths.dtype} of shape "
            f"{tuple(lengths.shape)}"
        )
    lengths = lengths.long()
    if readable(lengths) and (lengths.min() < 0 or lengths.max() > length):
        raise ValueError(f"lengths must lie in 0 .. {length}, the input's length; got {lengths.tolist()}")
    return lengths


def readable(x: Tensor) -> bool:
    """Return whether the values of x can be read without a device synchronisation or a graph break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def valid_mask(lengths: Tensor, x: Tensor) -> Tensor:
    """Return a mask (B, L, 1) that is true at the valid positions of x (B, L, D)."""
    return (torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None])[..., None]


def check_fraction(name: str, value: float) -> None:
    """Raise ValueError for a number outside of [0, 1)."""
    if not isinstance(value, Real) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1); got {value!r}")


def check_part(name: str, value: float) -> None:
    """Raise ValueError for a number outside of (0, 1]."""
    if not isinstance(value, Real) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a number in (0, 1]; got {value!r}")


def check_momentum(momentum: float | None) -> None:
    """Raise ValueError for anything but a number in [0, 1] or None."""
    if momentum is not None and not (isinstance(momentum, Real) and 0 <= momentum <= 1):
        raise ValueError(f"momentum must be a number in [0, 1] or None; got {momentum!r}")
