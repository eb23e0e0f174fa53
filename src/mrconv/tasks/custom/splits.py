"""Splits of custom examples: drawn at random, in the proportions of the classes, or by whole groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import DataError
from ..packing import random_split
from .file_readers import Examples


def draw_splits(
    examples: Examples, fractions: Mapping[str, float], seed: int, stratify: bool = False, group: str = ""
) -> dict[str, Examples]:
    """Return train, and val and test unless their fraction is 0.

    Args:
        examples: all examples.
        fractions: fractions of val and test, of the examples or, with `group`, of the groups.
        seed: seed of the draw.
        stratify: draw the fractions from each class, at least one example of each.
        group: keep examples of a group in one split; see `groups_of`.
    """
    drawn = {"train": 0.0} | {split: fraction for split, fraction in fractions.items() if fraction}
    parts = tuple(drawn.values())
    if stratify:
        indices = _stratified(examples, parts, seed)
    elif group:
        names, members = np.unique(groups_of(examples, group), return_inverse=True)
        chosen = random_split(len(names), parts, seed)
        _check_sizes(examples.where, f"{len(names)} groups", drawn, chosen)
        indices = [np.flatnonzero(np.isin(members, some)) for some in chosen]
    else:
        indices = random_split(len(examples), parts, seed)
        _check_sizes(examples.where, f"{len(examples)} examples", drawn, indices)
    return {split: examples.take(some) for split, some in zip(drawn, indices, strict=True)}


def groups_of(examples: Examples, group: str) -> Sequence[str]:
    """Return the group of each example: as the table or array has it, or as the pattern `group` finds in file names."""
    if examples.groups or not examples.names:
        return examples.groups
    try:
        pattern = re.compile(group)
    except re.error as error:
        raise DataError(f"group {group!r} is not a regular expression: {error}") from None
    found = []
    for i, name in enumerate(examples.names):
        match = pattern.search(name)
        if match is None:
            raise DataError(f"{examples.describe(i)}: the regular expression group={group} does not match")
        found.append(match[1 if pattern.groups else 0] or "")
    return found


def _stratified(examples: Examples, fractions: Sequence[float], seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = np.array(examples.labels)
    parts: list[list[np.ndarray]] = [[] for _ in fractions]
    for name in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == name))
        sizes = [max(1, round(fraction * len(members))) for fraction in fractions[1:]]
        if sum(sizes) >= len(members):
            raise DataError(
                f"{examples.where}: class {name} has {len(members)} examples; stratify needs at least one for each of "
                f"the {len(fractions)} splits"
            )
        *others, train = np.split(members, np.cumsum(sizes))
        for part, some in zip(parts, (train, *others), strict=True):
            part.append(some)
    return [np.sort(np.concatenate(part)) for part in parts]


def _check_sizes(where: str, count: str, drawn: Mapping[str, float], parts: Sequence[np.ndarray]) -> None:
    for (split, fraction), part in zip(drawn.items(), parts, strict=True):
        if len(part) == 0:
            raise DataError(f"{where} has {count}: too few for {split} with {split}_fraction={fraction:g}")
