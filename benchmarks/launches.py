"""Kernels that one layer launches in a training step and merged, on a GPU.

python benchmarks/launches.py [ListOps Text ...] [--precision bfloat16 float32] [--kernels] [--out FILE.json]

A training step is forward and backward, without optimizer, with gradients that are not allocated yet; a merged call
includes GELU. Copies and fills count as launches. `eager` is the time of the step, launched op by op.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import shlex
import sys
from pathlib import Path

import torch

from mrconv.bench.launches import host_ms, launches, layer_step
from mrconv.bench.records import record, write
from mrconv.bench.shapes import LAYERS, select
from mrconv.bench.timing import copy_bandwidth


def main() -> int:
    """Count the launches of all shapes, print a table and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=None, help="names of layers, or the start of names")
    parser.add_argument("--precision", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--kernels", action="store_true", help="print the kernels and how often each is launched")
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    command = shlex.join(["python", *sys.argv])
    results = record("launches", command, "cuda", "mixed", 1, copy_bandwidth("cuda"))
    columns = f"{'launches':>10s}{'GPU, ms':>10s}{'eager, ms':>11s}"
    print(f"{'':16s}{'':10s}{'lengths':9s}{'pass':10s}{'algorithm':14s}" + columns)
    cases = itertools.product(
        select(LAYERS, arguments.shapes or None), arguments.precision, (False, True), (False, True)
    )
    for shape, precision, merged, masked in cases:
        algorithm, step = layer_step(shape, getattr(torch, precision), masked, merged)
        kernels, gpu_ms = launches(step)
        eager = host_ms(step)
        row = {
            "name": shape.name,
            "precision": precision,
            "lengths": masked,
            "pass": "merged" if merged else "training",
        }
        row |= {"algorithm": algorithm, "launches": kernels.total(), "gpu_ms": gpu_ms, "eager_ms": eager}
        results["rows"].append(row | {"kernels": {name[:80]: n for name, n in kernels.most_common()}})
        cells = f"{row['algorithm']:14s}{kernels.total():10d}{gpu_ms:10.3f}{eager:11.3f}"
        print(f"{shape.name:16s}{precision:10s}{'yes' if masked else 'no':9s}{row['pass']:10s}{cells}", flush=True)
        if arguments.kernels:
            print("".join(f"    {n:4d} {name[:110]}\n" for name, n in kernels.most_common()), flush=True)
        write(arguments.out, results)
        del step
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
