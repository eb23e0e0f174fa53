"""Size and time of a merged layer that keeps its Fourier modes, against the same layer with a dense kernel.

    python benchmarks/merged_forms.py [--device cuda] [--rounds 25] [--out benchmarks/results/merged-cpu-float32.json]

`ms` is a call with one sequence of l_max positions without gradients, `first_ms` the first call after a change of the
parameters, `step_ms` a streaming step without the longest tiles of a dense kernel, which are rare. The two forms
alternate, and times are minima.
"""

from __future__ import annotations

import argparse
import copy
import functools
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from mrconv import MRConv
from mrconv.bench.records import measure_each, record
from mrconv.bench.script_options import parse
from mrconv.bench.timing import copy_bandwidth, timed

LAYERS: dict[str, dict[str, Any]] = {
    "Text": {"d_model": 256, "l_max": 4096, "kernel_size": 1},
    "ListOps": {"d_model": 128, "l_max": 2048, "kernel_size": 2},
    "Speech, causal": {"d_model": 128, "l_max": 16000, "kernel_size": 32},
}
STEPS = 64


@torch.no_grad()
def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both forms of one layer."""
    torch.manual_seed(0)
    trained = MRConv(**LAYERS[name], device=arguments.device).eval()
    u = torch.randn(1, trained.l_max, trained.d_model, device=arguments.device)
    forms = {"modes": copy.deepcopy(trained).reparameterize(), "dense": trained.reparameterize(dense=True)}
    states = {form: layer.initial_state(1) for form, layer in forms.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for form, layer in forms.items():
            layer.eval()  # discards the expanded kernel
            for key in ("first_ms", "ms"):
                times.setdefault((form, key), []).append(timed(functools.partial(layer, u), arguments.device))
            ms = timed(functools.partial(steps, layer, u[:, 0], states[form]), arguments.device)
            times.setdefault((form, "step_ms"), []).append(ms / STEPS)
    row: dict[str, Any] = {"layer": name}
    for form, layer in forms.items():
        row[form] = {key: min(each) for (of, key), each in times.items() if of == form}
        row[form]["parameters"] = sum(p.numel() for p in layer.parameters())
        row[form]["state_MiB"] = states[form].nbytes / 2**20
    return row


def steps(layer: MRConv, x: torch.Tensor, state: Any) -> None:
    """Run STEPS streaming steps."""
    for _ in range(STEPS):
        layer.step(x, state)


def main() -> int:
    """Measure all layers, print a table and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    arguments = parse(parser)
    command = shlex.join(["python", *sys.argv])
    results = record(
        "merged_forms", command, arguments.device, "float32", arguments.rounds, copy_bandwidth(arguments.device)
    )
    results["memory"] = "size of the streaming state"
    print("modes / dense: parameters, ms per call, of the first call, per step, MiB of the state", flush=True)
    for name, row in measure_each(results, arguments.out, list(LAYERS), lambda name: measure(name, arguments)):
        keys = ("parameters", "ms", "first_ms", "step_ms", "state_MiB")
        print(
            f"{name:16s}" + "   ".join(f"{row['modes'][key]:.3g} / {row['dense'][key]:.3g}" for key in keys), flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
