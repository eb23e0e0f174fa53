"""Types of the values of a configuration, as its annotations give them."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", types.NoneType: "null"}


def check_types(options: Any) -> None:
    """Raise ValueError for the first field of a dataclass whose value does not have the annotated type.

    Fields with choices are left to `config.check_constraints`.
    """
    annotations = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value, kinds = getattr(options, field.name), list(_alternatives(annotations[field.name]))
        if not field.metadata.get("choices") and not any(_is_a(value, kind) for kind in kinds):
            raise ValueError(f"{field.name} must be {' or '.join(map(_described, kinds))}; got {value!r:.100}")


def _alternatives(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        yield from typing.get_args(annotation)
    else:
        yield annotation


def _is_a(value: object, kind: Any) -> bool:
    if kind is Any:
        return True
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    if kind in NAMES:
        return type(value) is kind
    origin = typing.get_origin(kind)
    if origin is dict:
        return isinstance(value, dict)
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(_is_a(each, typing.get_args(kind)[0]) for each in value)
    return isinstance(value, kind)


def _described(kind: Any) -> str:
    if kind in NAMES:
        return NAMES[kind]
    return "an object" if typing.get_origin(kind) is dict else "a list of integers"
