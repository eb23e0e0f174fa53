"""Train a small model on generated ListOps, merge it and compare the two forms, in minutes on two CPU cores.

The expressions follow the rules of Long Range Arena, with the same nesting, but are a tenth as long.
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
from mrconv._utils.progress_bar import progress_bar
from mrconv.tasks import Prepared, data_loader
from mrconv.training import Experiment, train
from mrconv.training.datamodule import prepare
from mrconv.training.figures import draw_run

FOLDER = Path("runs/demo")


def describe(data: Prepared) -> None:
    """Print the size of the data and one example."""
    test = data.splits["test"]
    shortest = int(test.lengths.argmin())
    expression = " ".join(data.vocabulary[code] for code in test.example(shortest)[:-1])  # without the end token
    most_common = statistics.mode(test.y.tolist())
    print(
        f"ListOps: {len(data.splits['train']):,} generated expressions for training, {len(test):,} for testing, such as"
    )
    print(f"  {expression} = {test.y[shortest]}")
    print(
        f"always predicting {most_common} scores {(test.y == most_common).mean():.1%} on the test split\n", flush=True
    )


@torch.no_grad()
def predict(model: SequenceClassifier, data: Prepared, batch_size: int) -> tuple[Tensor, float]:
    """Return the logits of the test split and the median milliseconds of a batch."""
    logits, times = [], []
    for batch in data_loader(data, "test", batch_size, train=False):
        start = time.perf_counter()
        logits.append(model(batch.x, lengths=batch.lengths))
        times.append(1e3 * (time.perf_counter() - start))
    return torch.cat(logits), statistics.median(times)


def main() -> None:
    """Run the demo; exit with an error if the model has not learned or the merged model differs."""
    file = resources.files("mrconv.configs") / "experiment" / "demo.yaml"
    experiment = Experiment.make(yaml.safe_load(file.read_text(encoding="utf-8")))
    with progress_bar("generating the data") as progress:
        data = prepare(experiment, progress)
    describe(data)
    shutil.rmtree(FOLDER, ignore_errors=True)  # train() would resume the run in it
    train(experiment, FOLDER)

    trained, merged = (SequenceClassifier.from_pretrained(FOLDER / name) for name in ("model", "merged"))
    layers = [module for module in trained.modules() if isinstance(module, MRConv)]
    for layer in layers:
        layer.backend = "reference"  # N convolutions and N BatchNorms, as in the paper
    n = layers[0].resolutions
    print(f"\n{len(layers)} layers of N = {n} branches; best epoch by validation, on the test split:\n")
    print("            parameters   accuracy   ms / batch")
    outputs, accuracy = [], 0.0
    for name, model in (("N branches", trained), ("merged", merged)):
        logits, ms = predict(model, data, experiment.batch_size)
        outputs.append(logits)
        accuracy = float((logits.argmax(-1).numpy() == data.splits["test"].y).mean())
        print(f"{name:10s} {sum(p.numel() for p in model.parameters()):11,d} {accuracy:10.1%} {ms:12.1f}")
    difference = float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max())
    same = float((outputs[0].argmax(-1) == outputs[1].argmax(-1)).float().mean())
    print(f"\nequal predictions: {same:.1%}; largest relative difference of the logits: {difference:.1e}")

    print("\nfigures:", *draw_run(FOLDER), sep="\n  ")
    mrconv = "mrconv" if shutil.which("mrconv") else os.path.relpath(Path(sys.executable).with_name("mrconv"))
    print("\nnext:", f"evaluate {FOLDER}", f"plot run {FOLDER}", "train experiment=listops-base", sep=f"\n  {mrconv} ")
    if accuracy < 0.3:
        raise SystemExit(f"demo failed: the accuracy is {accuracy:.1%}, less than 30 %")
    if not difference < 1e-4 or same < 0.999:  # ties may break either way
        raise SystemExit("demo failed: the merged model differs from the trained one")


if __name__ == "__main__":
    main()
