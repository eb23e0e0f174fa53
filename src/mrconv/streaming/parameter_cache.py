"""A cache of what is derived from a module's parameters, invalidated when they change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

_CACHE: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def cached(
    module: Any,
    rate: float,
    build: Callable[[Any, float], T],
    refresh: bool = False,
    tensors: Sequence[Tensor] | None = None,
) -> T:
    """Return `build(module, rate)`, computed again if one of its tensors has changed or `refresh` is true.

    `tensors` are those that the result depends on, by default all parameters and buffers of the module. Changes are
    detected by identity, address and version of each. Writes to `.data` bypass the version counter: call with
    `refresh`, or `forget`, where they must take effect. The result must not refer to the module, or it is never freed.
    """
    if tensors is None:
        tensors = (*module.parameters(), *module.buffers())
    key = [(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
    entries = _CACHE.setdefault(module, {})
    if refresh or entries.get((build, rate), (None,))[0] != key:
        with torch.inference_mode(False), torch.no_grad():
            entries[build, rate] = (key, build(module, rate))
    return entries[build, rate][1]


def cacheable(tensors: Sequence[Tensor]) -> bool:
    """Return whether a call may keep what it derives from these: it needs no gradients, and no graph records it."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001 (there is no public name)
        return False
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    grad = torch.is_grad_enabled()
    return not any(
        type(x) not in (Tensor, nn.Parameter) or x.is_inference() or (grad and x.requires_grad) for x in tensors
    )


def forget(module: nn.Module) -> None:
    """Discard what is cached of a module."""
    _CACHE.pop(module, None)
