"""How fast language models write, against the length of what they have before them.

python benchmarks/generation.py [--device cuda] [--histories 1024 65536] [--out benchmarks/results/generation-cpu.json]

Models of the same width and depth that differ in their mixer, l_max the history: `fourier` as trained, from sliding
sums; `dilated` from its taps; `merged`, the Fourier model with dense kernels; `attention` with a cache of keys and
values. `recompute` runs the whole history again for every token, by the merged model and by attention. Tokens are
drawn, one at a time, after a prompt of that length; `prefill` is the time that the prompt takes. The longest tiles of
merged kernels come more rarely than the steps that are timed here: `benchmarks/streaming.py` has them.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mrconv import LanguageModel, reparameterize
from mrconv.bench.records import record, write
from mrconv.bench.timing import copy_bandwidth, free, progress, timed
from mrconv.generation import sample_tokens

KINDS: dict[str, dict[str, Any]] = {
    "fourier": {"kernel": "fourier", "kernel_size": 32},
    "dilated": {"kernel": "dilated", "kernel_size": 8},
    "merged": {"kernel": "fourier", "kernel_size": 32},
    "attention": {"mixer": "attention"},
}
RECOMPUTED = ("merged", "attention")
VOCABULARY, STEPS, PATIENCE_MS = 256, 128, 20_000


def measured(name: str, history: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return milliseconds a token, tokens a second and the memory held, by streaming and, of some, by recomputing."""
    torch.manual_seed(0)
    shared = {"vocab_size": VOCABULARY, "d_model": options.d_model, "depth": options.depth, "l_max": history}
    model = LanguageModel(**shared, **KINDS[name], device=options.device).eval()
    if name == "merged":
        reparameterize(model)
    prompt = torch.randint(VOCABULARY, (options.batch, history), device=options.device)
    state: Any = None
    token = prompt[:, -1]

    def begin() -> None:
        nonlocal state
        _, state = model.prefill(prompt)

    def step() -> None:
        nonlocal token, state
        logits, state = model.step(token, state)
        token = sample_tokens(logits)

    prefill = timed(begin, options.device)
    found = {name: speed(step, options) | {"prefill_ms": prefill, "MiB": state.nbytes / 2**20}}
    if name in RECOMPUTED:
        found[f"{name}, recomputed"] = speed(lambda: sample_tokens(model(prompt)[:, -1]), options) | {"prefill_ms": 0.0}
    return found


def speed(step: Callable[[], Any], options: argparse.Namespace) -> dict[str, float]:
    """Time a step often, but for no more than some seconds."""
    first = min(timed(step, options.device) for _ in range(2))
    times = [timed(step, options.device) for _ in range(max(3, min(STEPS, int(PATIENCE_MS / max(first, 1e-3)))))]
    ms = statistics.fmean(times)
    return {"ms": ms, "tokens_per_s": 1000 * options.batch / ms}


def main() -> int:
    """Measure all histories, print a table and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--histories", type=int, nargs="+", default=[2**10, 2**12, 2**14, 2**16])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    command = shlex.join(["python", *sys.argv])
    found = record("generation", command, options.device, "float32", STEPS, copy_bandwidth(options.device))
    found["memory"] = "of the state: what is held between two tokens"
    found |= {"batch": options.batch, "d_model": options.d_model, "depth": options.depth}
    names = [*KINDS, *(f"{name}, recomputed" for name in RECOMPUTED)]
    print(f"{'tokens/s':10s}" + "".join(f"{name:>{len(name) + 4}s}" for name in names), flush=True)
    for history in options.histories:
        row: dict[str, Any] = {"history": history}
        with torch.no_grad():
            for name in KINDS:
                progress(f"history {history}: {name}")
                row |= measured(name, history, options)
                free()
        progress("")
        cells = "".join(f"{row[name]['tokens_per_s']:>{len(name) + 4},.1f}" for name in names)
        print(f"{history:<10d}{cells}", flush=True)
        found["rows"].append(row)
        write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
