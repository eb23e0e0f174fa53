"""Plug-ins: modules of other packages that register kernels, mixers and tasks when they are imported.

Only two things import one: its name on the command line, and an entry point of an installed package. A run or a saved
model records the plug-ins that it needs, and an error names them, but reading a record never imports a module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

GROUP = "mrconv.plugins"
"""Group of the entry points whose modules are plug-ins."""
_loaded = False


class NotRegistered(ValueError):
    """A kernel, mixer or task of a name that is not registered."""

    def __init__(self, message: str, kind: str, name: object) -> None:
        super().__init__(message)
        self.kind, self.name = kind, name


def is_module_name(name: object) -> bool:
    """Return whether a name is that of a module, such as my_package.kernels."""
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def load_plugins(names: Iterable[str]) -> None:
    """Import modules by name, from the current folder if they are not installed; the caller vouches for them."""
    for name in names:
        if not is_module_name(name):
            raise ValueError(f"a plug-in is the name of a module such as my_package.kernels; got {name!r}")
        top = name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            sys.path.append(os.getcwd())  # last, so that no file there takes the place of an installed module
            importlib.invalidate_caches()
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):
                where = f"neither installed nor in {os.getcwd()}"
                raise ValueError(f"the plug-in {name} cannot be imported: {error.name} is {where}") from None
            raise ValueError(f"the plug-in {name} needs {error.name}, which is not installed") from error


def load_entry_points() -> None:
    """Import the plug-ins of all installed packages, once; a plug-in that fails is reported as a warning."""
    global _loaded
    if _loaded:
        return
    _loaded = True  # first, because a plug-in may look up a name that is not registered
    from importlib.metadata import entry_points

    for each in entry_points(group=GROUP):
        try:
            each.load()
        except Exception as error:
            warnings.warn(f"the plug-in {each.value} of an installed package fails: {error!r}", stacklevel=2)


@contextmanager
def plugins_of_record(record: object, plugins: object) -> Iterator[None]:
    """If a name is not registered, raise an error with the plug-ins that the record of a run or model names."""
    try:
        yield
    except NotRegistered as error:
        names = [name for name in plugins if is_module_name(name)] if isinstance(plugins, list | tuple) else []
        if not names or all(name in sys.modules for name in names):
            raise
        listed = ",".join(names)
        raise NotRegistered(
            f"{record} needs {error.kind} {error.name!r}, which is not registered; its record names the plug-in "
            f"{listed}. If you trust this code, allow it with --plugins {listed} (in Python: import {listed})",
            error.kind,
            error.name,
        ) from None
