"""Definitions that all operations share: kernels as taps at lags, dtypes, memory formats, constants, Triton."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

P = ParamSpec("P")
T = TypeVar("T")
Lags = range | tuple[int, ...]
"""Tap positions: a `range` for a dense kernel, a tuple for scattered taps."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INSTALLED = importlib.util.find_spec("triton") is not None


class Taps(NamedTuple):
    """A kernel: values (C, T) at T lags, y[t] = sum_j values[j] u[t - lags[j]].

    Values (C, 1) at several consecutive lags are a constant kernel.
    """

    values: Tensor
    lags: Lags


def use_triton(x: Tensor, backend: str) -> bool:
    """Return whether Triton kernels run for x.

    `backend` "torch" never uses them, "auto" uses them if possible, "triton" raises RuntimeError if not possible.
    """
    if backend == "torch":
        return False
    reason = triton_unavailable(x)
    if reason and backend == "triton":
        raise RuntimeError(f"backend='triton' cannot run here: {reason}")
    return not reason


def triton_unavailable(x: Tensor) -> str | None:
    """Return the reason why Triton kernels cannot run for x, or None if they can."""
    if not _INSTALLED:
        return "Triton is not installed"
    if not x.is_cuda and not INTERPRETED:
        return f"the tensors are on {x.device.type}; Triton runs on GPUs, or anywhere with TRITON_INTERPRET=1"
    return None


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 if any tensor has it, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def reject_forward_mode(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor carries a tangent: the operations have a backward, but no jvp."""
    if forward_ad._current_level >= 0:
        for x in tensors:
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError("mrconv has no forward-mode differentiation (jvp, jacfwd): use reverse mode")


def constants(numbers: Sequence[float], like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a read-only tensor on the device of `like`, copied there once and cached."""
    if torch.compiler.is_compiling() or type(like) not in (Tensor, nn.Parameter):  # tracing: do not cache
        return torch.tensor(numbers, device=like.device, dtype=dtype)
    return _cached_constants(tuple(numbers), like.device, dtype)


def cached_on_device(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Cache tensors on a device that depend on hashable, positional arguments only (decorator).

    The last `maxsize` results are kept, and for good those that a CUDA graph captures: it reads their memory later.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        captured: dict[tuple[Any, ...], T] = {}

        @functools.lru_cache(maxsize)
        def recent(*key: Any) -> T:
            with torch.inference_mode(False):
                return make(*key)  # type: ignore[call-arg]

        @functools.wraps(make)
        def cached(*key: Any) -> T:
            if captured and key in captured:
                return captured[key]
            result = recent(*key)
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                captured[key] = result
            return result

        return cast(Callable[P, T], cached)

    return decorate


@cached_on_device(maxsize=2048)
def _cached_constants(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors contiguous, for Triton kernels that take no strides."""
    return tuple(x if x is None else x.contiguous() for x in tensors)


def empty_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return an uninitialised contiguous tensor like each given one, for fake implementations."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def with_format_of(like: Tensor, x: Tensor) -> Tensor:
    """Return x in the memory format that `torch.empty_like(like)` has."""
    if x.stride() == torch.empty_like(like, device="meta").stride():
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


def bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the gradient of a bias (C,) that was added to (B, C, L)."""
    return None if bias is None else grad.sum((0, 2), dtype=compute_dtype(grad)).to(bias.dtype)
