"""What a run prints and what it records."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mrconv
from mrconv._utils.revision import revision

from .options import PASSES
from .timing import MEMORY, Result

WAYS = {
    "ms": "eager, ms",
    "graph_ms": "graph, ms",
    "compile_ms": "compiled, ms",
    "compile_graph_ms": "both, ms",
    "MiB": "MiB",
    "examples_per_s": "examples/s",
    "beside_s4": "speed / S4's",
}

SPEEDS = {"ms": "eager", "graph_ms": "graph", "compile_ms": "compiled", "compile_graph_ms": "both"}


class Table:
    """Prints rows as they come: a line per pass and way, a column per contestant, then others as multiples of ours.

    The way "both" is compiled and replayed as a graph.
    """

    def __init__(self, contestants: Sequence[str], known: Sequence[str] = (), ratios: Sequence[str] = ()) -> None:
        self.contestants, self.known, self.ratios = contestants, known, ratios
        self.widths = {name: max(9, len(name) + 2) for name in (*contestants, *known)}
        self.versus = {name: max(9, len(name) + 4) for name in ratios}
        columns = [f"{name:>{width}s}" for name, width in self.widths.items()]
        columns += [f"{'x ' + name:>{width}s}" for name, width in self.versus.items()]
        print(f"{'':15s}{'':10s}{'':13s}" + "".join(columns), flush=True)

    def row(self, name: str, row: Mapping[str, Any], known: Mapping[str, Mapping[str, float | None]]) -> None:
        """Print what was measured of one shape; `known` are times by pass, eager ones but the floor, from elsewhere."""
        failures = []
        for each in PASSES:
            title = each
            results: Mapping[str, Result] = row.get(each, {})
            for way, unit in WAYS.items():
                values = {self._column(key): result.get(way) for key, result in results.items()}
                if any(value is not None for value in values.values()):
                    fixed = known.get(each, {}) if way in SPEEDS else {}
                    values |= {key: ms for key, ms in fixed.items() if way == "ms" or key == "floor"}
                    print(f"{name:15s}{title:10s}{unit:13s}" + self._figures(values), flush=True)
                    name = title = ""
            for key, result in results.items():
                every = ("error", "graph_error", "compile_error", "compile_graph_error")
                notes = [note for note in every if note in result]
                failures += [f"{each}, {key}, {note.replace('_', ' ')}: {result[note]}" for note in notes]
        for failure in failures:
            print(f"{'':15s}{failure}", flush=True)

    def _column(self, contestant: str) -> str:
        """Return its column: a merged layer is ours, unless it has its own."""
        return "ours" if contestant == "merged" and "merged" not in self.contestants else contestant

    def _figures(self, values: Mapping[str, float | None]) -> str:
        ours = values.get("merged") or values.get("ours")
        cells = [_cell(values.get(key), width) for key, width in self.widths.items()]
        for key, width in self.versus.items():
            other = values.get(key)
            cells.append(_cell(other / ours if other is not None and ours else None, width))
        return "".join(cells)


def _cell(value: float | None, width: int) -> str:
    if value is None:
        return f"{'-':>{width}s}"
    return f"{value:{width}.{3 if value < 1 else 2 if value < 100 else 1}f}"


def record(benchmark: str, command: str, device: str, dtype: str, rounds: int, bandwidth: float) -> dict[str, Any]:
    """Return what a run is to be known by: hardware, versions, options; rows are yet to come."""
    return {
        "benchmark": benchmark,
        "command": command,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "device": device,
        "threads": torch.get_num_threads(),
        "mrconv": mrconv.__version__,
        "revision": revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "dtype": dtype,
        "rounds": rounds,
        "copy_bytes_per_s": bandwidth,
        "memory": MEMORY[device],
        "rows": [],
    }


def write(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write what there is, so that a run that is stopped leaves its rows."""
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's name, as well as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def speed(result: Mapping[str, Any], batch: int, ways: tuple[str, ...] = tuple(SPEEDS)) -> float:
    """Return examples a second by the fastest of these ways; 0 if there is none."""
    return max((1e3 * batch / result[way] for way in ways if result.get(way)), default=0.0)
