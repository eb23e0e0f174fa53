"""`mrconv.summary` and `mrconv info`: parameters and operations of every part."""

import json
import re
from pathlib import Path

import pytest
import torch

from mrconv import LanguageModel, MRConvNeXt, SequenceClassifier, TwoTowerClassifier
from mrconv.cli import main
from mrconv.summary import summarize
from mrconv.training import Experiment
from mrconv.training.presets import presets
from mrconv.training.published_data import published_data

RESULTS = Path(__file__).parent.parent / "results"


def test_linear_layers_are_counted_as_torch_counts_them():
    parts = {part.name: part for part in summarize(MRConvNeXt.named("mrconvnext_tiny_fourier", device="meta"))}
    assert sum(part.parameters for part in parts.values()) == 30_365_224
    blocks = 3 * 8 * 96**2 * 56**2
    assert parts["stages.0"].linear == 2 * blocks
    assert parts["stages.1"].linear == 2 * (3 * 8 * 192**2 + 4 * 96 * 192) * 28**2
    assert parts["stages.0"].description == "3 x fourier, 56x56, 96 channels, l0 = 196, N = 5"
    assert parts["stages.0"].merged - 3 * (8 * 96**2 + 9 * 96) - 2 * 96 == 3 * 96 * 2 * 3136


def test_a_depthwise_convolution_is_49_multiply_adds_a_value():
    parts = {part.name: part for part in summarize(MRConvNeXt.named("convnext_tiny", device="meta"))}
    assert parts["stages.3"].mixing == 2 * 3 * 49 * 7 * 7 * 768


def test_an_fft_convolution_counts_two_ffts_and_a_product():
    model = MRConvNeXt(image_size=32, depths=[1], dims=[4], kernel_sizes=[8], n_classes=2)
    n = 128  # the FFT length for 2 * 64 - 1
    (stage,) = (part for part in summarize(model) if part.name == "stages.0")
    assert stage.mixing == 4 * (5 * n * 7 + 6 * (n // 2 + 1))


def test_each_tap_counts_one_multiply_add():
    model = MRConvNeXt(image_size=32, depths=[1], dims=[4], kernel_sizes=[2], kernel="dilated", n_classes=2)
    layer = model.stages[0].blocks[0].mixer.layer
    taps = len(layer.merged_kernel(include_skip=True).lags)
    (stage,) = (part for part in summarize(model) if part.name == "stages.0")
    assert stage.mixing == 2 * 64 * 4 * taps


def test_sequence_models_and_baselines_have_parts_too():
    model = TwoTowerClassifier(vocab_size=9, d_model=8, depth=2, l_max=64, mixer="s4d")
    names = [part.name for part in summarize(model)]
    assert names == ["backbone.encoder", "backbone.blocks.0", "backbone.blocks.1", "hidden", "head"]
    assert sum(part.parameters for part in summarize(model)) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("where", ["folder", "run"])
def test_the_command_reads_folders_and_runs(tmp_path, capsys, where):
    model = SequenceClassifier(n_classes=3, d_input=1, d_model=8, depth=1, l_max=64)
    model.save_pretrained(tmp_path / "model")
    assert main(["info", str(tmp_path / "model" if where == "folder" else tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "SequenceClassifier" in out
    assert f"{sum(p.numel() for p in model.parameters()):,}" in out


def test_the_command_accepts_model_names(capsys):
    assert main(["info", "mrconvnext_tiny_fourier_sparse"]) == 0
    out = capsys.readouterr().out
    assert "32,335,144" in out
    assert "9 x fourier+sparse, 14x14, 384 channels, l0 = 28, N = 4" in out
    with pytest.raises(SystemExit):
        main(["info", "nowhere"])
    assert "nowhere is neither a folder that holds a model, nor an experiment" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["listops-base", "text-base", "shakespeare", "image-base", "pathfinder-base"])
def test_the_command_accepts_experiments(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without any data
    assert main(["info", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: ")
    recorded = json.loads(next(RESULTS.glob(f"{name}*-seed0/result.json")).read_text())
    assert re.search(rf"^all +{recorded['parameters']:,} ", out, re.MULTILINE)


def test_the_data_of_every_experiment_has_a_published_shape():
    for preset in presets():
        data = published_data(Experiment.make(preset.values()))
        assert data.length > 1
        assert bool(data.classes) != (data.name == "characters")


def test_counting_does_not_change_the_model():
    model = MRConvNeXt(image_size=16, depths=[1], dims=[4], kernel_sizes=[8], n_classes=2).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    summarize(model)
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_tied_heads_and_attention_are_counted():
    (head,) = (
        part for part in summarize(LanguageModel(vocab_size=100, d_model=8, depth=1, l_max=32)) if part.name == "head"
    )
    assert (head.linear, head.parameters) == (2 * 32 * 8 * 100, 0)
    options = {"n_classes": 2, "vocab_size": 5, "d_model": 8, "depth": 1, "mixer": "attention"}
    short, long = (sum(part.mixing for part in summarize(SequenceClassifier(l_max=n, **options))) for n in (64, 128))
    assert long > 2 * short
