"""A cache of what streaming derives from a module's parameters, invalidated when they change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")

_CACHE: weakref.WeakKeyDictionary[nn.Module, dict[float, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def cached(module: Any, rate: float, build: Callable[[Any, float], T], refresh: bool = False) -> T:
    """Return `build(module, rate)`, computed again if a parameter or buffer has changed or `refresh` is true.

    Changes are detected by identity, address and version of each tensor. Writes to `.data` bypass the version counter:
    call with `refresh` where they must take effect. The result must not refer to the module, or it is never freed.
    """
    tensors = (*module.parameters(), *module.buffers())
    key = [(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
    entries = _CACHE.setdefault(module, {})
    if refresh or rate not in entries or entries[rate][0] != key:
        with torch.inference_mode(False), torch.no_grad():
            entries[rate] = (key, build(module, rate))
    return entries[rate][1]
