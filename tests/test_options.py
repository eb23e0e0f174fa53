"""Options are defined once: every field of `LayerOptions` reaches the layer, from models and experiments alike."""

import dataclasses
import inspect
import pydoc
import re

import pytest

import mrconv
from mrconv import MRConv, MRConvBlock, MRConvNeXt, SequenceClassifier
from mrconv.config import BranchOptions, LayerConfig, LayerOptions
from mrconv.training.experiment import GROUPS, Experiment, describe_keys
from mrconv.training.module import build_model

from .training.test_experiments import data

CHANGED = {
    "kernel": "dilated",
    "kernel_size": 3,
    "bidirectional": True,
    "combine": "concat",
    "decay": (1.0, 3.0),
    "norm": "scale",
    "backend": "torch",
    "eps": 1e-2,
    "momentum": 0.03,
    "sync_stats": True,
    "stats_fraction": 0.5,
    "heads": 2,
    "groups": 2,
}
NEEDS = {"decay": {"combine": "concat"}, "stats_fraction": {"kernel": "dilated"}}  # options that another one enables
FIELDS = [field.name for field in dataclasses.fields(LayerOptions)]


def value_in(layer, name):
    """Return the value of an option that a built layer runs with."""
    branches = layer.branches[0]
    if name == "decay":
        return branches.decay_range
    if name in ("eps", "momentum"):
        return getattr(branches.norm, name)
    return getattr(layer, name)


def layers(model):
    return [module for module in model.modules() if isinstance(module, MRConv)]


def test_every_option_has_a_test_value_that_is_not_the_default():
    assert set(CHANGED) == set(FIELDS)
    default = LayerConfig(d_model=8, l_max=64)
    assert [name for name in FIELDS if getattr(default, name) == CHANGED[name]] == []


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_of_a_model_reaches_every_layer(name):
    options = {name: CHANGED[name]} | NEEDS.get(name, {})
    model = SequenceClassifier(n_classes=2, d_input=1, d_model=8, l_max=64, depth=2, **options)
    assert [value_in(layer, name) for layer in layers(model)] == [CHANGED[name]] * 2


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(BranchOptions)])
def test_an_option_of_an_image_model_reaches_every_layer(name):
    options = {name: CHANGED[name]} | NEEDS.get(name, {})
    stages = {"depths": [1, 1], "dims": [8, 8], "kernel_sizes": [4, 2]}
    model = MRConvNeXt(n_classes=2, image_size=16, patch_size=2, **stages, **options)
    assert [value_in(layer, name) for layer in layers(model)] == [CHANGED[name]] * 2


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_of_an_experiment_reaches_every_layer(name):
    options = {name: CHANGED[name]} | NEEDS.get(name, {})
    model = build_model(Experiment(d_model=8, depth=2, **options), data("listops"))
    assert [value_in(layer, name) for layer in layers(model)] == [CHANGED[name]] * 2


def test_an_experiment_has_every_option_of_the_layer_and_its_default():
    inherited = {field.name: field.default for field in dataclasses.fields(Experiment)}
    assert {name: inherited[name] for name in FIELDS} == {f.name: f.default for f in dataclasses.fields(LayerOptions)}


def test_keys_are_printed_with_default_and_meaning():
    text = describe_keys()
    for group in GROUPS.values():
        for field in dataclasses.fields(group):
            assert f"  {field.name}=" in text
            assert field.metadata["explanation"]
    assert "  lr=0.003                    learning rate" in text
    assert {f.name for g in GROUPS.values() for f in dataclasses.fields(g)} == {
        f.name for f in dataclasses.fields(Experiment)
    }


MODELS = [cls for name in mrconv.__all__ if hasattr(cls := getattr(mrconv, name), "config_class")]


@pytest.mark.parametrize("cls", [MRConv, MRConvBlock, *MODELS])
def test_help_explains_every_argument(cls):
    text = pydoc.plain(pydoc.render_doc(cls)).partition("Methods defined here")[0]
    names = {name for name in inspect.signature(cls).parameters if name not in ("layer", "device", "dtype")}
    if cls is MRConvBlock:
        names |= set(FIELDS)
    assert sorted(name for name in names if not re.search(rf"\b{name}(, \w+)?: ", text)) == []


def test_dir_shows_the_public_names():
    assert set(mrconv.__all__) <= set(dir(mrconv))
    assert not [name for name in dir(mrconv) if name in ("importlib", "TYPE_CHECKING", "Any")]
