"""Miniature data in the form of every task, and a run that a process of its own makes."""

from pathlib import Path

import numpy as np

from mrconv.tasks import Prepared, Split
from mrconv.training import Experiment

LENGTH = 128
PAIRS, TOKENS, COLOURS = ("retrieval",), ("listops", "text", "retrieval"), ("scifar",)


def data(task, rows=16):
    """Return data like a task's, its classes told by the first symbol; a text counts up, with some errors."""
    draw = np.random.default_rng(0)
    if task == "characters":
        tokens = (np.arange(10 * LENGTH) + (draw.random(10 * LENGTH) < 0.1)) % 9 + 1
        cuts = {"train": (1, 8 * LENGTH), "val": (8 * LENGTH, 9 * LENGTH + 50), "test": (9 * LENGTH + 50, 10 * LENGTH)}
        parts = {name: Split(name, tokens[a - 1 : b - 1], tokens[a:b]) for name, (a, b) in cuts.items()}
        facts = {"context": 0, "passes": 2}
        return Prepared(task, "text", (), LENGTH, parts, ("<unk>", *"abcdefghi"), metric="bits", facts=facts)
    splits = {}
    for name in ("train", "test") if task == "text" else ("train", "val", "test"):
        y = np.arange(rows) % 2
        if task in TOKENS:
            sides = {}
            for side in ("", "2") if task in PAIRS else ("",):
                lengths = draw.integers(20, LENGTH + 1, rows)
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                x = draw.integers(3, 18, offsets[-1]).astype(np.uint8)
                x[offsets[:-1]] = 1 + y
                sides |= {f"x{side}": x, f"offsets{side}": offsets}
            splits[name] = Split(name, y=y, **sides)
        else:
            channels = 3 if task in COLOURS else 1
            x = draw.integers(0, 256, (rows, LENGTH, channels)).astype(np.uint8)
            x[:, :8] = 255 * y[:, None, None]
            splits[name] = Split(name, x, y)
    tokens = task in TOKENS
    return Prepared(
        task,
        "tokens" if tokens else "values",
        ("no", "yes"),
        LENGTH,
        splits,
        tuple(map(str, range(18))) if tokens else (),
        3 if task in COLOURS else 1,
        1 / 255,
        -0.5,
        pair=task in PAIRS,
    )


def small(experiment: Experiment, **changes) -> Experiment:
    """Return it small enough for a test."""
    values = vars(experiment) | {"d_model": 8, "depth": 2, "batch_size": 4, "epochs": 1, "limit_train": 2}
    values["kernel_size"] = min(experiment.kernel_size, LENGTH)
    if experiment.mixer_options.get("d_state", 0) > 500:
        values["mixer_options"] = experiment.mixer_options | {"d_state": 64}
    return Experiment(**(values | {"accelerator": "cpu"} | changes))


def listops(**changes) -> Experiment:
    """Return a run on real, tiny ListOps."""
    sizes = {"train_size": 40, "val_size": 10, "test_size": 10, "min_length": 10, "max_length": 60, "length": 64}
    values = {"d_model": 8, "depth": 2, "kernel_size": 2, "batch_size": 10, "epochs": 3, "dropout": 0.1}
    return Experiment(task_options=sizes, accelerator="cpu", **(values | changes))


if __name__ == "__main__":
    import sys

    import torch

    from mrconv.training import train

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    train(listops(data_dir=str(folder.parent / "data"), epochs=int(sys.argv[2])), folder)
