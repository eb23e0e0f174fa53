"""Options that all benchmarks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """Where, how and what to measure; `only` holds beginnings of names."""

    device: str = "cpu"
    dtype: str = "float32"
    rounds: int = 20
    small: bool = False
    only: Sequence[str] | None = None
    out: Path | None = None
    compile: bool = False
    command: str = ""
