"""Times and peak memory: contestants take turns, times are medians of single, synchronised steps."""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from .candidates import Run

Result = dict[str, Any]
"""One contestant: ms, graph_ms (and compile_ms), MiB, each a number or None, and a word on each failure."""
T = TypeVar("T")

MEMORY = {
    "cuda": "torch.cuda.max_memory_allocated over one step, less what was allocated before it",
    "cpu": "peak of the allocations less frees that torch.profiler(profile_memory=True) sees in one step",
}


def measure(
    runs: Mapping[str, Run], rounds: int, device: str, compiled: Mapping[str, Run] | None = None, label: str = ""
) -> dict[str, Result]:
    """Measure each contestant launched op by op, as a CUDA graph where there is a GPU, and compiled, those given so."""
    results: dict[str, Result] = {name: {"ms": None, "graph_ms": None, "MiB": None} for name in runs}
    ready: dict[tuple[str, str], Run] = {}
    for name, run in runs.items():
        progress(f"{label}: {name}")
        result = results[name]
        result["MiB"] = attempt(functools.partial(first_steps, run, device), result, "error")
        if result["MiB"] is None:
            continue
        ready[name, "ms"] = run
        if compiled is not None and name in compiled:
            result["compile_ms"] = result["compile_graph_ms"] = None
            if attempt(functools.partial(warm_up, compiled[name]), result, "compile_error"):
                ready[name, "compile_ms"] = compiled[name]
    if device == "cuda":
        # One replays at a time: what a step needs, all may have in turn, as the allocator keeps memory by stream.
        pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for name, _ in [key for key in ready if key[1] == "ms"]:
            progress(f"{label}: {name}, CUDA graph")
            for column, each in (("graph_ms", runs), ("compile_graph_ms", compiled or {})):
                if column == "graph_ms" or (name, "compile_ms") in ready:
                    note = column.replace("_ms", "_error")
                    replay = attempt(functools.partial(captured, each[name], pool, side), results[name], note)
                    if replay is not None:
                        ready[name, column] = replay
    times: dict[tuple[str, str], list[float]] = {key: [] for key in ready}
    for i in range(rounds):
        progress(f"{label}: round {i + 1} of {rounds}")
        for key, run in list(ready.items()):
            note = "error" if key[1] == "ms" else key[1].replace("_ms", "_error")
            ms = attempt(functools.partial(timed, run, device), results[key[0]], note)
            if ms is None:
                del ready[key], times[key]
            else:
                times[key].append(ms)
    progress("")
    for (name, column), taken in times.items():
        results[name][column] = statistics.median(taken)
    ready.clear()
    free()
    return results


def attempt(do: Callable[[], T], result: Result, note: str) -> T | None:
    """Return what it returns; if it fails, keep the first line of the error, give memory back and return None."""
    try:
        return do()
    except torch.OutOfMemoryError:
        result[note] = "out of memory"
    except Exception as error:
        result[note] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    free()
    return None


def timed(run: Run, device: str) -> float:
    """Return the milliseconds of one step."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return 1e3 * (time.perf_counter() - start)


def warm_up(run: Run) -> bool:
    """Run a few steps; tells that they went well."""
    for _ in range(3):
        run()
    return True


def first_steps(run: Run, device: str) -> float:
    """Warm up and return the peak memory of one step, in MiB."""
    if device != "cuda":
        run()
        return _peak_on_cpu(run) / 2**20
    warm_up(run)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak_on_cpu(run: Run) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else the profiler writes lines of its own
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Ev Idx"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    held = peak = 0
    for *_, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def captured(run: Run, pool: Any, side: torch.cuda.Stream) -> Run:
    """Return a CUDA graph of it, in a pool of memory: what the device needs, without the host's launches."""
    free()
    stream = torch.cuda.current_stream()
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        warm_up(run)
    stream.wait_stream(side)
    free()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=side):
            run()
    except Exception as error:
        torch.cuda.set_stream(stream)  # a capture that fails may leave its own stream current
        raise (error.__context__ or error) from None
    return functools.partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Run) -> None:
    """Replay, and hold on to what was captured: the graph knows its tensors by address only."""
    graph.replay()


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a large copy, counting what is read and what is written."""
    x = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    y = torch.empty_like(x)
    ms = statistics.median(timed(lambda: y.copy_(x), device) for _ in range(10))
    return 2 * x.numel() * x.element_size() / ms * 1e3


def synchronise(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Give the GPU's memory back that nothing refers to any more."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def progress(text: str) -> None:
    """Show what is being done, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
