"""Options that all benchmarks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PASSES = ("training", "forward", "inference")


@dataclass(frozen=True)
class Options:
    """Where, how and what to measure; `only` holds beginnings of names, `passes` some of PASSES, `mixers` names.

    batch: of `vision`; 0 for the shape's own.
    """

    device: str = "cpu"
    dtype: str = "float32"
    rounds: int = 20
    small: bool = False
    only: Sequence[str] | None = None
    out: Path | None = None
    compile: bool = False
    command: str = ""
    passes: Sequence[str] = PASSES
    mixers: Sequence[str] | None = None
    batch: int = 0
