"""Registries of classes by name: kernels, mixers, tasks."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from .plugins import NotRegistered, load_entry_points
from .suggest import closest

T = TypeVar("T")
_Class = TypeVar("_Class", bound=type[Any])


class Registry(Generic[T]):
    """Classes of one kind by name.

    `entry_points` maps names to classes as "module:Class", which are imported on first use.
    """

    def __init__(self, kind: str, entry_points: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self.entries: dict[str, type[T] | str] = dict(entry_points or {})

    def register(self, name: str) -> Callable[[_Class], _Class]:
        """Return a class decorator that registers a class by name; raise ValueError if another class has that name."""

        def decorate(cls: _Class) -> _Class:
            path = _path(cls)
            taken = _path(self.entries.get(name, path))
            if taken != path:
                raise ValueError(f"{self.kind} name {name!r} is taken by {taken.replace(':', '.')}")
            self.entries[name] = cls
            return cls

        return decorate

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self.entries)

    def get(self, name: str) -> type[T]:
        """Return the class of a name; raise NotRegistered for an unknown name and suggest the closest.

        The plug-ins of installed packages are imported first if none has registered the name yet.
        """
        if not isinstance(name, str) or name not in self.entries:
            load_entry_points()
        if not isinstance(name, str) or name not in self.entries:
            hint, names = closest(name, self.entries), ", ".join(self.names())
            raise NotRegistered(f"{self.kind} must be one of {names}; got {name!r}{hint}", self.kind, name)
        entry = self.entries[name]
        if isinstance(entry, str):
            entry = self.entries[name] = pkgutil.resolve_name(entry)
        return entry

    def plugin(self, name: object) -> str | None:
        """Return the module outside of mrconv that registered a name; None for a class of mrconv or of a script."""
        entry = self.entries.get(name) if isinstance(name, str) else None
        module = "mrconv" if entry is None or isinstance(entry, str) else entry.__module__
        return None if module.split(".")[0] in ("mrconv", "__main__") else module


def _path(entry: type[Any] | str) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
