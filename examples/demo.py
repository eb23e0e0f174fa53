"""The whole job in minutes, on two CPU cores: generate ListOps, train, evaluate, merge, compare, draw.

The expressions are drawn as those of Long Range Arena, as deeply nested, but a tenth as long.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from importlib import resources
from pathlib import Path

import torch
import yaml
from torch import Tensor

from mrconv import MRConv, SequenceClassifier
from mrconv.tasks import Prepared, data_loader
from mrconv.training import Experiment, train
from mrconv.training.datamodule import prepare
from mrconv.training.figures import draw_run

FOLDER = Path("runs/demo")


def describe(data: Prepared) -> None:
    """Print what is to be learned, with an example."""
    test = data.splits["test"]
    row = int(test.lengths.argmin())
    expression = " ".join(data.vocabulary[code] for code in test.row(row)[:-1])  # without the mark of the end
    often = statistics.mode(test.y.tolist())
    print(f"ListOps: {len(data.splits['train']):,} generated expressions to learn from, {len(test):,} to test, such as")
    print(f"  {expression} = {test.y[row]}")
    print(f"always answering {often} is right for {(test.y == often).mean():.1%} of the test split\n", flush=True)


@torch.no_grad()
def predict(model: SequenceClassifier, data: Prepared, batch_size: int) -> tuple[Tensor, float]:
    """Return the logits of the test split, and the median of the milliseconds that a batch takes."""
    logits, times = [], []
    for batch in data_loader(data, "test", batch_size, train=False):
        start = time.perf_counter()
        logits.append(model(batch.x, lengths=batch.lengths))
        times.append(1e3 * (time.perf_counter() - start))
    return torch.cat(logits), statistics.median(times)


def main() -> None:
    """Do all of it; exit with an error if the model has not learned, or the merged one answers differently."""
    file = resources.files("mrconv.configs") / "experiment" / "demo.yaml"
    experiment = Experiment.make(yaml.safe_load(file.read_text(encoding="utf-8")))
    data = prepare(experiment)
    describe(data)
    shutil.rmtree(FOLDER, ignore_errors=True)  # train() would go on with what is there
    train(experiment, FOLDER)

    trained, merged = (SequenceClassifier.from_pretrained(FOLDER / name) for name in ("model", "merged"))
    layers = [module for module in trained.modules() if isinstance(module, MRConv)]
    for layer in layers:
        layer.backend = "reference"  # N convolutions and N BatchNorms, as the paper writes it
    n = layers[0].resolutions
    print(f"\n{len(layers)} layers of N = {n} branches; the best epoch by validation, on the test split:\n")
    print("            parameters   accuracy   ms a batch")
    found, accuracy = [], 0.0
    for name, model in (("N branches", trained), ("merged", merged)):
        logits, ms = predict(model, data, experiment.batch_size)
        found.append(logits)
        accuracy = float((logits.argmax(-1).numpy() == data.splits["test"].y).mean())
        print(f"{name:10s} {sum(p.numel() for p in model.parameters()):11,d} {accuracy:10.1%} {ms:12.1f}")
    difference = float((found[0] - found[1]).abs().max() / found[0].abs().max())
    same = float((found[0].argmax(-1) == found[1].argmax(-1)).float().mean())
    print(f"\nsame answers: {same:.1%}; largest difference of the logits, relative: {difference:.1e}")

    print("\nfigures:", *draw_run(FOLDER), sep="\n  ")
    mrconv = "mrconv" if shutil.which("mrconv") else os.path.relpath(Path(sys.executable).with_name("mrconv"))
    print("\nnext:", f"evaluate {FOLDER}", f"plot run {FOLDER}", "train experiment=listops-base", sep=f"\n  {mrconv} ")
    if accuracy < 0.3:
        raise SystemExit(f"demo failed: {accuracy:.1%} of the answers are right, fewer than 30 %")
    if not difference < 1e-4 or same < 0.999:  # a tie may fall either way
        raise SystemExit("demo failed: the merged model differs from the trained one")


if __name__ == "__main__":
    main()
