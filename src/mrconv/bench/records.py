"""The table that a benchmark prints and the record that it writes."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import mrconv
from mrconv._utils.revision import revision

from .options import PASSES, TIMINGS, Options
from .timing import MEMORY, Result, copy_bandwidth, free

T = TypeVar("T")
Measurements = dict[str, Any]
"""The shape that was measured and, for each pass, the `Result` of each candidate."""

METRICS = {
    **{key: f"{name}, ms" for key, name in TIMINGS.items()},
    "MiB": "MiB",
    "examples_per_s": "examples/s",
    "beside_s4": "speed / S4's",
}
ERRORS = ("error", "graph_error", "compile_error", "compile_graph_error")
BANDWIDTH_BOUND = "bandwidth bound"


class Table:
    """Table with a line per pass and metric, a column per candidate, and ratios of other candidates to ours.

    Args:
        candidates: columns of measured values.
        constants: columns of values that are not measured, such as the bandwidth bound.
        ratios: candidates and constants that are printed as multiples of ours too.
    """

    def __init__(self, candidates: Sequence[str], constants: Sequence[str] = (), ratios: Sequence[str] = ()) -> None:
        self.candidates = candidates
        self.widths = {name: max(9, len(name) + 2) for name in (*candidates, *constants)}
        self.ratio_widths = {name: max(9, len(name) + 4) for name in ratios}
        columns = [f"{name:>{width}s}" for name, width in self.widths.items()]
        columns += [f"{'x ' + name:>{width}s}" for name, width in self.ratio_widths.items()]
        print(f"{'':15s}{'':10s}{'':13s}" + "".join(columns), flush=True)

    def print_shape(
        self,
        name: str,
        measurements: Measurements,
        constants: Mapping[str, Mapping[str, float | None]] | None = None,
    ) -> None:
        """Print the measurements of one shape.

        Args:
            name: name of the shape.
            measurements: results by pass and candidate.
            constants: milliseconds by pass and column; the bandwidth bound holds for all timings, others for eager.
        """
        for pass_name in PASSES:
            title = pass_name
            results: Mapping[str, Result] = measurements.get(pass_name, {})
            for metric, label in METRICS.items():
                values = {self._column(candidate): result.get(metric) for candidate, result in results.items()}
                if any(value is not None for value in values.values()):
                    if constants and metric in TIMINGS:
                        given = constants.get(pass_name, {})
                        values |= {key: ms for key, ms in given.items() if metric == "ms" or key == BANDWIDTH_BOUND}
                    print(f"{name:15s}{title:10s}{label:13s}" + self._cells(values), flush=True)
                    name = title = ""
        for pass_name in PASSES:
            for failure in failures(measurements.get(pass_name, {})):
                print(f"{'':15s}{pass_name}, {failure}", flush=True)

    def _column(self, candidate: str) -> str:
        """Return the candidate's column: a merged layer goes under "ours" unless it has its own column."""
        return "ours" if candidate == "merged" and "merged" not in self.candidates else candidate

    def _cells(self, values: Mapping[str, float | None]) -> str:
        ours = values.get("merged") or values.get("ours")
        cells = [_cell(values.get(key), width) for key, width in self.widths.items()]
        for key, width in self.ratio_widths.items():
            other = values.get(key)
            cells.append(_cell(other / ours if other is not None and ours else None, width))
        return "".join(cells)


def _cell(value: float | None, width: int) -> str:
    if value is None:
        return f"{'-':>{width}s}"
    return f"{value:{width}.{3 if value < 1 else 2 if value < 100 else 1}f}"


def failures(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield a line for each error among the results of one pass."""
    for candidate, result in results.items():
        for key in ERRORS:
            if key in result:
                yield f"{candidate}, {key.replace('_', ' ')}: {result[key]}"


def record(benchmark: str, command: str, device: str, dtype: str, rounds: int, bandwidth: float) -> dict[str, Any]:
    """Return a record without measurements: hardware, versions and options."""
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


def start(benchmark: str, options: Options) -> dict[str, Any]:
    """Return the record of a benchmark with these options."""
    bandwidth = copy_bandwidth(options.device)
    return record(benchmark, options.command, options.device, options.dtype, options.rounds, bandwidth)


def measure_each(
    results: dict[str, Any], out: Path | None, items: Iterable[T], measure: Callable[[T], Measurements]
) -> Iterator[tuple[T, Measurements]]:
    """Measure the items in turn and add each to the record.

    The record is written after each item, so that an interrupted benchmark keeps what it has measured.
    """
    for item in items:
        measurements = measure(item)
        results["rows"].append(measurements)
        write(out, results)
        yield item, measurements
        free()


def write(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write a record as JSON, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's name, as precisely as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def speed(result: Mapping[str, Any], batch: int, timings: Sequence[str] = tuple(TIMINGS)) -> float:
    """Return the examples per second of the fastest of these timings, 0 if none was measured."""
    return max((1e3 * batch / result[timing] for timing in timings if result.get(timing)), default=0.0)
