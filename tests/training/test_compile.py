"""`compile=true`: training gives the same results, with one compilation for all blocks of each shape."""

import copy
import csv
import importlib.util
import json
import math

import pytest
import torch
from torch._dynamo.utils import counters

from mrconv.tasks import ResidentLoader
from mrconv.training import loop
from mrconv.training.compilation import compile_blocks, worth_compiling
from mrconv.training.datamodule import TaskData
from mrconv.training.module import Training, build_model, logits
from mrconv.training.scores import SCORES
from mrconv.training.targets import Target, cross_entropy

from .miniature import data, listops, small

pytestmark = pytest.mark.usefixtures("without_figures")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _reset_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_blocks_share_code_and_give_the_same_gradients_and_statistics():
    tiny = data("listops", 64)
    experiment = small(listops(dropout=0.0))
    batches, shapes = [], set()
    for batch in ResidentLoader(tiny, "train", 4, pad=16, device=DEVICE):
        if batch.x.shape not in shapes and len(shapes) < 2:
            shapes.add(batch.x.shape)
            batches += [batch, batch]
    assert len(shapes) == 2
    eager = build_model(experiment, tiny).to(DEVICE).train()
    assert len(eager.backbone.blocks) > 1
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled)
    for batch in batches:
        for model in (eager, compiled):
            model.zero_grad()
            cross_entropy(logits(model, batch), batch.y).backward()
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
        for a, b in zip(eager.buffers(), compiled.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_state_dict_and_copies_are_not_compiled():
    tiny = data("listops")
    modules = []
    for compiled in (False, True):
        model = build_model(listops(), tiny)
        modules.append(Training(listops(), model, Target(), SCORES["accuracy"], 5, ["val"], compiled=compiled))
    assert set(modules[0].state_dict()) == set(modules[1].state_dict())
    assert all(block._compiled_call_impl is not None for block in modules[1].model.backbone.blocks)
    assert all(block._compiled_call_impl is None for block in copy.deepcopy(modules[1].model).backbone.blocks)


def test_a_compiled_run_ends_with_the_losses_of_an_eager_run(tmp_path, monkeypatch):
    tiny = data("listops", 64)
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    losses = []
    for compiled in (False, True):
        options = {"limit_train": 0, "dropout": 0.0, "epochs": 2, "pad": 64, "precision": "float32"}
        loop.train(small(listops(), compile=compiled, **options), tmp_path / str(compiled), quiet=True)
        environment = json.loads((tmp_path / str(compiled) / "environment.json").read_text())
        assert environment["compiled"] is compiled
        assert environment["precision"] == "32-true"
        with (tmp_path / str(compiled) / "metrics.csv").open() as file:
            losses.append([float(row[name]) for row in csv.DictReader(file) for name in ("train/loss", "val/loss")])
    assert counters["stats"]["unique_graphs"] >= 1
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("mixer", "steps", "shapes", "worth"),
    [
        ("mrconv", 5000, 1, True),
        ("mrconv", 5000, 2, False),
        ("mrconv", 10**6, 65, False),
        ("mrconv", 10**6, math.inf, False),
        ("s4d", 10**6, 1, False),
    ],
)
def test_compilation_pays_for_many_steps_of_few_shapes(monkeypatch, mixer, steps, shapes, worth):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    model = build_model(listops(mixer=mixer), data("listops"))
    assert worth_compiling(model, steps, shapes) is worth


@pytest.mark.parametrize(("pad", "shapes"), [("batch", math.inf), ("max", 1), (16, 8)])
def test_number_of_shapes_by_padding(pad, shapes):
    tiny = data("listops", 64)
    assert TaskData(listops(pad=pad), tiny).shapes == shapes
