"""Classes known by name: kernels, mixers, tasks."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_Class = TypeVar("_Class", bound=type[Any])


class Registry(Generic[T]):
    """Names of one kind of class."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[_Class], _Class]:
        """Class decorator: make a class known by a name; another class of that name is refused."""

        def register(cls: _Class) -> _Class:
            taken: type[Any] = self.entries.get(name, cls)
            if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{self.kind} name {name!r} is taken by {taken.__module__}.{taken.__qualname__}")
            self.entries[name] = cls
            return cls

        return register

    def names(self) -> list[str]:
        """Return all names."""
        return sorted(self.entries)

    def get(self, name: str) -> type[T]:
        """Return the class of a name; an unknown one is refused with the nearest right one."""
        if not isinstance(name, str) or name not in self.entries:
            near = difflib.get_close_matches(str(name), self.entries, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{self.kind} must be one of {', '.join(self.names())}; got {name!r}{hint}")
        return self.entries[name]
