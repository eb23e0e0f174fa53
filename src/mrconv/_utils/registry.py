"""Registries: classes that users refer to by name, such as kernels, mixers and tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .suggest import closest

T = TypeVar("T")
_Class = TypeVar("_Class", bound=type[Any])


class Registry(Generic[T]):
    """A mapping from names to classes of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[_Class], _Class]:
        """Return a class decorator that registers a class under a name; a name that another class has raises."""

        def decorate(cls: _Class) -> _Class:
            taken: type[Any] = self.entries.get(name, cls)
            if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{self.kind} name {name!r} is taken by {taken.__module__}.{taken.__qualname__}")
            self.entries[name] = cls
            return cls

        return decorate

    def names(self) -> list[str]:
        """Return all registered names in order."""
        return sorted(self.entries)

    def get(self, name: str) -> type[T]:
        """Return the class registered under a name; an unknown name raises ValueError with a suggestion."""
        if not isinstance(name, str) or name not in self.entries:
            known = ", ".join(self.names())
            raise ValueError(f"{self.kind} must be one of {known}; got {name!r}{closest(name, self.entries)}")
        return self.entries[name]
