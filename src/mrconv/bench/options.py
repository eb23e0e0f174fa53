"""Options that all benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PASSES = ("training", "forward", "inference")
TIMINGS = {"ms": "eager", "graph_ms": "graph", "compile_ms": "compiled", "compile_graph_ms": "both"}
"""Ways to execute a step, by their key in a record; "both" is compiled and replayed as a CUDA graph."""


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
        command: the command line, for the record.
        passes: some of PASSES.
        timings: some of the names in TIMINGS; CUDA graphs are measured on a GPU only.
        mixers: names of the mixers of `model` and `compare`; None stands for all of them.
        batch: batch size of `vision`; 0 stands for the shape's default.
    """

    device: str = "cpu"
    dtype: str = "float32"
    rounds: int = 20
    small: bool = False
    only: Sequence[str] | None = None
    out: Path | None = None
    command: str = ""
    passes: Sequence[str] = PASSES
    timings: Sequence[str] = ("eager", "graph")
    mixers: Sequence[str] | None = None
    batch: int = 0

    @property
    def compile(self) -> bool:
        """Whether a timing needs torch.compile."""
        return bool({"compiled", "both"} & set(self.timings))
