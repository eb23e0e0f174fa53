"""Shared test helpers: seeds, random statistics, gradients."""

import gc
from collections import defaultdict

import pytest
import torch
from torch import nn


def pytest_collection():
    gc.disable()


def pytest_collection_finish():
    """Collect garbage rarely, and never what was imported: it took a tenth of the tests' time."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 50)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark cases of a grid of parameters as slow, except for a few that differ much and have every value once."""
    grids = defaultdict(dict)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            grids[item.nodeid.partition("[")[0]][item] = parameter_values(item)
    for cases in grids.values():
        missing = set().union(*cases.values())
        while missing:
            next_one = max(cases, key=lambda item: len(cases[item] & missing))
            missing -= cases.pop(next_one)
        for item in cases:
            item.add_marker(pytest.mark.slow)


def pytest_make_parametrize_id(val, argname):
    """Name the parameters in a test's name, so that the line that reports a failure describes the configuration."""
    if isinstance(val, torch.dtype):
        return f"{argname}={val}".replace("torch.", "")
    if isinstance(val, dict):
        return " ".join(f"{key}={value}" for key, value in val.items())
    if isinstance(val, bool | int | float | str | None):
        return f"{argname}={val}"
    return f"{argname}={val}" if isinstance(val, list | tuple) and len(str(val)) < 60 else None


def slow_except(values, *fast, key=None):
    """Return the values, or tuples of values, as parameters; all but `fast`, compared by `key`, are marked slow."""
    parameters, found = [], set()
    for value in values:
        name = value if key is None else key(value)
        found.add(name)
        marks = () if name in fast else pytest.mark.slow
        parameters.append(pytest.param(*(value if type(value) is tuple else (value,)), marks=marks))
    assert found >= set(fast), f"unknown: {set(fast) - found}"
    return parameters


def parameter_values(item):
    """Return the values of a test's parameters; those of one `parametrize` belong together."""
    given, groups = item.callspec.params, []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        groups.append([name.strip() for name in names.split(",")] if isinstance(names, str) else list(names))
    grouped = {name for group in groups for name in group}
    groups += [[name] for name in given if name not in grouped]
    return {tuple((name, repr(given[name])) for name in group) for group in groups}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread():
    """Run torch on one thread: for small models, several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_figures(monkeypatch):
    """Train without drawing: figures take most of the time of a small run."""
    monkeypatch.setattr("mrconv.training.loop.draw_run", lambda folder, result: None)


def randomise(module):
    """Randomise statistics and parameters of every BatchNorm; initial ones would hide a wrong merge."""
    with torch.no_grad():
        for m in module.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.running_mean.normal_()
                m.running_var.uniform_(0.2, 3.0)
                m.weight.normal_()
                m.bias.normal_()
    return module


def relative(a, b):
    """Return the norm of a - b relative to the norm of b."""
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def gradients(f, *inputs):
    """Return the output of f and its gradients for a fixed random output gradient."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = f(*inputs)
    return y.detach(), torch.autograd.grad(y, inputs, random_gradient(y), materialize_grads=True)


def random_gradient(y):
    """Return a fixed random gradient for an output, the same for every dtype."""
    return torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(y)


def training_step(layer, u, **kwargs):
    """Return output, input gradient and parameter gradients of one pass in training mode."""
    layer.train()
    layer.zero_grad()
    x = u.detach().clone().requires_grad_()
    y = layer(x, **kwargs)
    y.backward(random_gradient(y))
    return y.detach(), x.grad, {name: p.grad.clone() for name, p in layer.named_parameters()}
