"""Speed of text generation by language models, by the length of the history.

python benchmarks/generation.py [--device cuda] [--histories 1024 65536] [--out benchmarks/results/generation-cpu.json]

The models have the same width and depth and differ in their mixer; l_max is the length of the history. `fourier` is the
unmerged model, which streams by sliding sums; `dilated` reads its taps; `merged` is the Fourier model with dense
kernels; `attention` has a cache of keys and values. `recomputed` runs the whole history again for every token.

Tokens are sampled one at a time after a prompt of that length; `prefill_ms` is the time of the prompt. The longest
tiles of merged kernels occur more rarely than the steps measured here: `benchmarks/streaming.py` measures them.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from mrconv import LanguageModel, reparameterize
from mrconv.bench.records import measure_each, record
from mrconv.bench.script_options import parse, step_parser
from mrconv.bench.timing import copy_bandwidth, free, progress, timed
from mrconv.generation import sample_tokens

MODELS: dict[str, dict[str, Any]] = {
    "fourier": {"kernel": "fourier", "kernel_size": 32},
    "dilated": {"kernel": "dilated", "kernel_size": 8},
    "merged": {"kernel": "fourier", "kernel_size": 32},
    "attention": {"mixer": "attention"},
}
RECOMPUTED = ("merged", "attention")
COLUMNS = (*MODELS, *(f"{name}, recomputed" for name in RECOMPUTED))
VOCABULARY, STEPS, MAX_MS = 256, 128, 20_000


@torch.no_grad()
def measure(history: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all models at one length of the history."""
    results: dict[str, Any] = {"history": history}
    for name in MODELS:
        progress(f"history {history}: {name}")
        results |= measure_model(name, history, arguments)
        free()
    progress("")
    return results


def measure_model(name: str, history: int, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return speed and state size of one model when streaming and, for some, the speed when recomputing."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": arguments.d_model, "depth": arguments.depth, "l_max": history}
    model = LanguageModel(**sizes, **MODELS[name], device=arguments.device).eval()
    if name == "merged":
        reparameterize(model, dense=True)
    prompt = torch.randint(VOCABULARY, (arguments.batch, history), device=arguments.device)
    state: Any = None
    token = prompt[:, -1]

    def prefill() -> None:
        nonlocal state
        _, state = model.prefill(prompt)

    def step() -> None:
        nonlocal token, state
        logits, state = model.step(token, state)
        token = sample_tokens(logits)

    prefill_ms = timed(prefill, arguments.device)
    results = {name: speed(step, arguments) | {"prefill_ms": prefill_ms, "MiB": state.nbytes / 2**20}}
    if name in RECOMPUTED:
        recomputed = speed(lambda: sample_tokens(model(prompt)[:, -1]), arguments)
        results[f"{name}, recomputed"] = recomputed | {"prefill_ms": 0.0}
    return results


def speed(step: Callable[[], Any], arguments: argparse.Namespace) -> dict[str, float]:
    """Return the mean milliseconds of up to STEPS steps, as many as fit into MAX_MS, and the tokens per second."""
    first = min(timed(step, arguments.device) for _ in range(2))
    times = [timed(step, arguments.device) for _ in range(max(3, min(STEPS, int(MAX_MS / max(first, 1e-3)))))]
    ms = statistics.fmean(times)
    return {"ms": ms, "tokens_per_s": 1000 * arguments.batch / ms}


def main() -> int:
    """Measure all histories, print a table and write the record."""
    parser = step_parser(__doc__ or "", "histories", [2**10, 2**12, 2**14, 2**16], d_model=256)
    parser.add_argument("--depth", type=int, default=4)
    arguments = parse(parser)
    command = shlex.join(["python", *sys.argv])
    results = record("generation", command, arguments.device, "float32", STEPS, copy_bandwidth(arguments.device))
    results["memory"] = "size of the state between two tokens"
    results |= {"batch": arguments.batch, "d_model": arguments.d_model, "depth": arguments.depth}
    print(f"{'tokens/s':10s}" + "".join(f"{name:>{len(name) + 4}s}" for name in COLUMNS), flush=True)
    measured = measure_each(results, arguments.out, arguments.histories, lambda history: measure(history, arguments))
    for history, row in measured:
        cells = "".join(f"{row[name]['tokens_per_s']:>{len(name) + 4},.1f}" for name in COLUMNS)
        print(f"{history:<10d}{cells}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
