"""Times and peak memory: candidates alternate, and times are medians of single, synchronised steps."""

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

from .candidates import Step
from .options import TIMINGS, Options

Result = dict[str, Any]
"""One candidate: ms, graph_ms (and compile_ms), MiB, each a number or None, and the message of each error."""
T = TypeVar("T")

MEMORY = {
    "cuda": "torch.cuda.max_memory_allocated over one step, less what was allocated before it",
    "cpu": "peak of the allocations less frees that torch.profiler(profile_memory=True) sees in one step",
}


def measure(
    steps: Mapping[str, Step], options: Options, compiled: Mapping[str, Step] | None = None, label: str = ""
) -> dict[str, Result]:
    """Measure each candidate.

    Args:
        steps: one step of each candidate, launched op by op and, on a GPU, replayed as a CUDA graph too.
        options: the device, the number of rounds, and the timings. Memory is measured with eager or graph.
        compiled: compiled steps of some of the candidates.
        label: printed with the progress.
    """
    device = options.device
    results: dict[str, Result] = {name: {"ms": None, "graph_ms": None, "MiB": None} for name in steps}
    runnable = _warmed_up(steps, compiled or {}, options, results, label)
    if device == "cuda":
        runnable |= _graphs(runnable, options, results, label)
    runnable = {key: step for key, step in runnable.items() if TIMINGS[key[1]] in options.timings}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runnable}
    for i in range(options.rounds):
        progress(f"{label}: round {i + 1} of {options.rounds}")
        for (name, timing), step in list(runnable.items()):
            error_key = "error" if timing == "ms" else timing.replace("_ms", "_error")
            ms = attempt(functools.partial(timed, step, device), results[name], error_key)
            if ms is None:
                del runnable[name, timing], times[name, timing]
            else:
                times[name, timing].append(ms)
    progress("")
    for (name, timing), milliseconds in times.items():
        results[name][timing] = statistics.median(milliseconds)
    runnable.clear()
    free()
    return results


def _warmed_up(
    steps: Mapping[str, Step], compiled: Mapping[str, Step], options: Options, results: Mapping[str, Result], label: str
) -> dict[tuple[str, str], Step]:
    """Return the steps that run, by candidate and timing, and record peak memory or an error in the results."""
    runnable: dict[tuple[str, str], Step] = {}
    for name, step in steps.items():
        progress(f"{label}: {name}")
        result = results[name]
        if {"eager", "graph"} & set(options.timings):
            result["MiB"] = attempt(functools.partial(first_steps, step, options.device), result, "error")
            if result["MiB"] is None:
                continue
            runnable[name, "ms"] = step
        if name in compiled and options.compile:
            result["compile_ms"] = result["compile_graph_ms"] = None
            if attempt(functools.partial(warm_up, compiled[name]), result, "compile_error"):
                runnable[name, "compile_ms"] = compiled[name]
    return runnable


def _graphs(
    runnable: Mapping[tuple[str, str], Step], options: Options, results: Mapping[str, Result], label: str
) -> dict[tuple[str, str], Step]:
    """Return CUDA graphs of the runnable steps.

    The graphs share one pool and one stream: only one replays at a time, and the allocator keeps memory by stream.
    """
    graphs: dict[tuple[str, str], Step] = {}
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    for (name, launched), step in runnable.items():
        timing = launched.removesuffix("ms") + "graph_ms"
        if TIMINGS[timing] not in options.timings:
            continue
        progress(f"{label}: {name}, CUDA graph")
        replay = attempt(
            functools.partial(captured, step, pool, stream), results[name], timing.replace("_ms", "_error")
        )
        if replay is not None:
            graphs[name, timing] = replay
    return graphs


def attempt(call: Callable[[], T], result: Result, error_key: str) -> T | None:
    """Return the result of the call; on failure record the error's first line, free memory and return None."""
    try:
        return call()
    except torch.OutOfMemoryError:
        result[error_key] = "out of memory"
    except Exception as error:
        result[error_key] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    free()
    return None


def timed(step: Step, device: str) -> float:
    """Return the milliseconds of one step."""
    synchronise(device)
    start = time.perf_counter()
    step()
    synchronise(device)
    return 1e3 * (time.perf_counter() - start)


def warm_up(step: Step) -> bool:
    """Run a few steps and return True."""
    for _ in range(3):
        step()
    return True


def first_steps(step: Step, device: str) -> float:
    """Warm up and return the peak memory of one step, in MiB."""
    if device != "cuda":
        step()
        return _peak_on_cpu(step) / 2**20
    warm_up(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak_on_cpu(step: Step) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # silences the profiler's log
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Ev Idx"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    allocated = peak = 0
    for *_, change in changes:
        allocated += change
        peak = max(peak, allocated)
    return peak


def captured(step: Step, pool: Any, stream: torch.cuda.Stream) -> Step:
    """Return a step that replays a CUDA graph of the given one: the device's work without the host's launches."""
    free()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        warm_up(step)
    current.wait_stream(stream)
    free()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            step()
    except Exception as error:
        torch.cuda.set_stream(current)  # a failed capture may leave its stream current
        raise (error.__context__ or error) from None
    return functools.partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, step: Step) -> None:
    """Replay the graph; the argument `step` keeps alive the tensors that the graph addresses."""
    graph.replay()


def copy_bandwidth(device: str) -> float:
    """Return the bytes per second of a large copy, counting both reads and writes."""
    x = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    y = torch.empty_like(x)
    ms = statistics.median(timed(lambda: y.copy_(x), device) for _ in range(10))
    return 2 * x.numel() * x.element_size() / ms * 1e3


def synchronise(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Release the GPU memory that no tensor refers to."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def progress(text: str) -> None:
    """Show the current activity if stderr is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
