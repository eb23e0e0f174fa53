"""A cache of what is derived from a module's parameters, invalidated when they change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

T = TypeVar("T")
A = TypeVar("A", bound=Hashable)

_CACHE: weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[Any, tuple[Any, Any]]]] = weakref.WeakKeyDictionary()


def cached(
    module: Any,
    argument: A,
    build: Callable[[Any, A], T],
    refresh: bool = False,
    tensors: Sequence[Tensor] | None = None,
    latest: bool = False,
) -> T:
    """Return `build(module, argument)`, computed again if one of its tensors has changed or `refresh` is true.

    `tensors` are those that the result depends on, by default all parameters and buffers of the module. Changes are
    detected by identity, address and version of each. Writes to `.data` bypass the version counter: call with
    `refresh`, or `forget`, where they must take effect. The result must not refer to the module, or it is never freed.
    With `latest`, results for other arguments are discarded.
    """
    if tensors is None:
        tensors = (*module.parameters(), *module.buffers())
    key = [(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
    entries = _CACHE.setdefault(module, {}).setdefault(build, {})
    if refresh or entries.get(argument, (None,))[0] != key:
        if latest:
            entries.clear()
        with torch.inference_mode(False), torch.no_grad():
            entries[argument] = (key, build(module, argument))
    return cast(T, entries[argument][1])


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
