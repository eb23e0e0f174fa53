"""Options that all benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PASSES = ("training", "forward", "inference")


@dataclass(frozen=True)
class Options:
    """Options of one benchmark.

    Args:
        device: "cpu" or "cuda".
        dtype: dtype of the activations, "float32" or "bfloat16".
        rounds: number of rounds; times are medians over them.
        small: use shapes that suit a CPU.
        only: prefixes of the names to measure; None measures everything.
        out: JSON file of the record; None writes no file.
        compile: also measure with torch.compile.
        command: the command line, for the record.
        passes: some of PASSES.
        mixers: names of the mixers of `model` and `compare`; None stands for all of them.
        batch: batch size of `vision`; 0 stands for the shape's default.
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
