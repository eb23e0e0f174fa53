"""Saving and loading: safetensors, a JSON config, trained and merged."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from mrconv import LanguageModel, SequenceClassifier, reparameterize
from mrconv.config import ClassifierConfig

from .conftest import randomise

OPTIONS = {"n_classes": 3, "vocab_size": 7, "d_model": 8, "depth": 2, "l_max": 64, "kernel_size": 2}


def build(**options):
    return randomise(SequenceClassifier(**(OPTIONS | options))).eval()


@pytest.mark.parametrize("kind", ["dense", "dilated", "fourier", "sparse", "fourier+sparse"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_saved_model_comes_back_the_same(tmp_path, kind, merged):
    model = build(kernel=kind, bidirectional=True)
    if merged:
        reparameterize(model)
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    tokens = torch.randint(7, (2, 50))
    assert torch.equal(loaded(tokens), model(tokens))
    assert not loaded.training
    assert loaded.backbone.blocks[0].layer.merged is merged
    assert loaded.config.merged is merged
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors"} <= names <= {"config.json", "model.safetensors", "README.md"}


def test_config_file_is_flat_and_versioned(tmp_path):
    build(combine="concat", decay=(1.0, 2.0)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "SequenceClassifier"
    assert config["format_version"] == 1
    assert config["decay"] == [1.0, 2.0]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["mrconv_format_version"] == "1"
    SequenceClassifier.from_pretrained(tmp_path)


def test_a_model_merged_at_a_rate_comes_back_at_that_rate(tmp_path):
    model = reparameterize(build(d_input=1, vocab_size=None, kernel_size=4), rate=0.5)
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    x = torch.randn(2, 30, 1)
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(ValueError, match=r"merged at rate 0\.5"):
        loaded(x, rate=1.0)


def test_options_can_be_overridden_while_loading(tmp_path):
    build().save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path, backend="reference", dtype=torch.float64)
    assert loaded.backbone.blocks[0].layer.backend == "reference"
    assert loaded.head.weight.dtype == torch.float64


def test_wrong_class_and_newer_format_are_refused(tmp_path):
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a SequenceClassifier, not a LanguageModel"):
        LanguageModel.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"format_version": 2}))
    with pytest.raises(ValueError, match="has format 2, newer than this mrconv's 1"):
        SequenceClassifier.from_pretrained(tmp_path)


def test_folders_that_hold_no_model_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        SequenceClassifier.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere holds no config\.json"):
        SequenceClassifier.from_pretrained(tmp_path / "nowhere")


class Mine(SequenceClassifier):
    """A user's own subclass."""


def test_a_subclass_loads_its_parents_checkpoint(tmp_path):
    build().save_pretrained(tmp_path)
    assert isinstance(Mine.from_pretrained(tmp_path), Mine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_comes_back_in_its_dtype(tmp_path, dtype):
    model = build().to(dtype)
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )


def test_config_survives_json(tmp_path):
    model = build(combine="concat", decay=(1.0, 2.0))
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    assert loaded.config == model.config
    saved = json.loads((tmp_path / "config.json").read_text())
    assert SequenceClassifier.from_config(saved).config == model.config
    assert SequenceClassifier.from_config(saved, merged=True).backbone.blocks[0].layer.merged


def test_a_half_merged_model_is_refused_and_what_was_saved_stays(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.backbone.blocks[0].layer.reparameterize()
    with pytest.raises(ValueError, match="not all merged, or not at one rate"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_from_config_takes_a_dataclass_or_a_dictionary():
    config = ClassifierConfig(**OPTIONS)
    for given in (config, OPTIONS):
        assert SequenceClassifier.from_config(given).config == config


def test_saving_and_loading_work_without_huggingface_hub(tmp_path):
    code = f"""
import sys, torch
sys.modules["huggingface_hub"] = None
from mrconv import SequenceClassifier
model = SequenceClassifier(**{OPTIONS!r}).eval()
model.save_pretrained({str(tmp_path)!r})
x = torch.randint(7, (2, 9))
assert torch.equal(SequenceClassifier.from_pretrained({str(tmp_path)!r})(x), model(x))
try:
    SequenceClassifier.from_pretrained("someone/somewhere")
except FileNotFoundError as error:
    assert "install huggingface_hub" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_needs_torch_numpy_and_safetensors_only():
    code = """
import sys
import torch, numpy, safetensors.torch
sys.modules["huggingface_hub"] = None
before = set(sys.modules)
import mrconv
new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new <= {"mrconv", "torch", "numpy", "safetensors"}, new
"""
    subprocess.run([sys.executable, "-c", code], check=True)
