"""Noise that dropout adds to the features of the classifier's head, beside their differences between examples.

python benchmarks/dropout.py [listops-base pathfinder-base ...] [--examples 24] [--masks 8] [--out FILE.json]

Both are variances of the pooled features at initial weights, in training mode, averaged over features: over random
masks for one example, and over examples for the mean of the masks. Dropout of whole channels is the same at every
position, so that pooling does not average it out. The examples are the first of the validation split, or of test.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from mrconv.bench.records import record, write
from mrconv.bench.timing import copy_bandwidth
from mrconv.tasks import Batch, Prepared
from mrconv.training.composition import compose
from mrconv.training.datamodule import make_loader, prepare
from mrconv.training.experiment import Experiment
from mrconv.training.module import build_model, logits

EXPERIMENTS = ("listops-base", "text-base", "image-base", "scifar-base", "pathfinder-base")


@torch.no_grad()
def measure(experiment: Experiment, data: Prepared, batch: Batch, masks: int) -> dict[str, Any]:
    """Return the variances of the head's inputs over masks and over the examples of a batch."""
    torch.manual_seed(0)
    model = build_model(experiment, data).to(batch.x.device).train()
    features: list[torch.Tensor] = []
    model.get_submodule("head").register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    for _ in range(masks):
        logits(model, batch)
    values = torch.stack(features)  # masks, examples, features
    noise = values.var(0).mean().item()
    signal = values.mean(0).var(0).mean().item() - noise / masks
    return {"dropout": experiment.dropout, "noise": noise, "signal": signal, "ratio": noise / signal}


def main() -> int:
    """Measure both kinds of dropout for each experiment, print a table and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiments", nargs="*", default=EXPERIMENTS)
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--masks", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = shlex.join(["python", *sys.argv])
    results = record("dropout", command, device, "float32", arguments.masks, copy_bandwidth(device))
    print(f"{'':18s}{'dropout':>9s}{'of':>11s}{'noise':>12s}{'signal':>12s}{'ratio':>10s}")
    for name in arguments.experiments:
        experiment = compose([f"experiment={name}"])
        data = prepare(experiment)
        split = "val" if "val" in data.splits else "test"
        batch = next(iter(make_loader(data, split, arguments.examples, None, train=False))).to(device)
        for tied in (True, False):
            row = measure(dataclasses.replace(experiment, tie_dropout=tied), data, batch, arguments.masks)
            results["rows"].append({"name": name, "tied": tied, **row})
            cells = "".join(f"{row[key]:12.3g}" for key in ("noise", "signal")) + f"{row['ratio']:10.2g}"
            print(f"{name:18s}{row['dropout']:9g}{'channels' if tied else 'values':>11s}{cells}", flush=True)
            write(arguments.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
