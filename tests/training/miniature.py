"""Miniature data in the form of every task; as a script, a small run for tests of killed processes."""

from pathlib import Path

import numpy as np
import pytest
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.exceptions import SIGTERMException

from mrconv.tasks import Prepared, Split
from mrconv.training import Experiment, loop
from mrconv.training.trainer import make_trainer

LENGTH = 128
PAIRS, TOKENS, COLOURS = ("retrieval",), ("listops", "text", "retrieval"), ("scifar",)


def data(task, examples=16):
    """Return data like a task's, classified by the first symbol; a text is a noisy sequence of successive tokens."""
    generator = np.random.default_rng(0)
    if task == "characters":
        tokens = (np.arange(10 * LENGTH) + (generator.random(10 * LENGTH) < 0.1)) % 9 + 1
        cuts = {"train": (1, 8 * LENGTH), "val": (8 * LENGTH, 9 * LENGTH + 50), "test": (9 * LENGTH + 50, 10 * LENGTH)}
        parts = {name: Split(name, tokens[a - 1 : b - 1], tokens[a:b]) for name, (a, b) in cuts.items()}
        facts = {"context": 0, "passes": 2}
        return Prepared(task, "text", (), LENGTH, parts, ("<unk>", *"abcdefghi"), metric="bits", facts=facts)
    splits = {}
    for name in ("train", "test") if task == "text" else ("train", "val", "test"):
        y = np.arange(examples) % 2
        if task in TOKENS:
            sides = {}
            for side in ("", "2") if task in PAIRS else ("",):
                lengths = generator.integers(20, LENGTH + 1, examples)
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                x = generator.integers(3, 18, offsets[-1]).astype(np.uint8)
                x[offsets[:-1]] = 1 + y
                sides |= {f"x{side}": x, f"offsets{side}": offsets}
            splits[name] = Split(name, y=y, **sides)
        else:
            channels = 3 if task in COLOURS else 1
            x = generator.integers(0, 256, (examples, LENGTH, channels)).astype(np.uint8)
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
    """Return an experiment small enough for a test."""
    values = vars(experiment) | {"d_model": 8, "depth": 2, "batch_size": 4, "epochs": 1, "limit_train": 2}
    values["precise_stats"] = 2
    values["kernel_size"] = min(experiment.kernel_size, LENGTH)
    if experiment.mixer_options.get("d_state", 0) > 500:
        values["mixer_options"] = experiment.mixer_options | {"d_state": 64}
    return Experiment(**(values | {"accelerator": "cpu"} | changes))


def listops(**changes) -> Experiment:
    """Return an experiment on generated, small ListOps data."""
    sizes = {"train_size": 40, "val_size": 10, "test_size": 10, "min_length": 10, "max_length": 60, "length": 64}
    values = {"d_model": 8, "depth": 2, "kernel_size": 2, "batch_size": 10, "epochs": 3, "dropout": 0.1}
    values["precise_stats"] = 2
    return Experiment(task_options=sizes, accelerator="cpu", **(values | changes))


def train_without_figures(experiment: Experiment, folder: Path) -> dict:
    """Train for a fixture of a module, which cannot use the fixture without_figures."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "draw_run", lambda folder, result: None)
        return loop.train(experiment, folder, quiet=True)


class Stop(Callback):
    """Stops a run after a step, as SIGTERM does."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.step:
            raise SIGTERMException


def stopping_trainer(step):
    """Return a replacement of loop.make_trainer whose runs stop after a step."""
    return lambda experiment, folder, callbacks: make_trainer(experiment, folder, [*callbacks, Stop(step)])


if __name__ == "__main__":
    import sys

    import torch

    from mrconv.training import train

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    train(listops(data_dir=str(folder.parent / "data"), epochs=int(sys.argv[2])), folder)
