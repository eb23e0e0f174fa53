"""Every baseline can replace MRConv in blocks, models, saved models and experiments."""

import pytest
import torch

from mrconv import MRConvBlock, SequenceClassifier, param_groups, reparameterize
from mrconv.baselines import mixer_names
from mrconv.training import loop
from mrconv.training.composition import compose

from ..training.miniature import data, small

BASELINES = [name for name in mixer_names() if name != "mrconv"]


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_trains_in_a_model_that_can_be_saved(name, tmp_path):
    torch.manual_seed(0)
    model = SequenceClassifier(n_classes=3, d_input=2, d_model=8, depth=2, l_max=40, mixer=name)
    u = torch.randn(2, 33, 2)
    model(u, lengths=torch.tensor([33, 20])).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    reparameterize(model)
    model.save_pretrained(tmp_path)
    again = SequenceClassifier.from_pretrained(tmp_path).eval()
    assert torch.allclose(again(u), model(u), atol=1e-6)


@pytest.mark.parametrize("name", BASELINES)
def test_every_parameter_of_a_baseline_is_in_one_group(name):
    model = SequenceClassifier(n_classes=3, d_input=2, d_model=8, depth=2, l_max=40, mixer=name)
    grouped = [p for group in param_groups(model, 0.01, 0.1) for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))


def test_mixers_with_an_mrconv_take_its_options():
    block = MRConvBlock(8, 40, mixer="mrhyena", kernel="dilated", kernel_size=4, mixer_options={"d_conv": 5})
    assert block.layer.conv.kernel == "dilated"
    assert MRConvBlock(8, 40, mixer="s4d", mixer_options={"d_state": 6}).layer is not None


@pytest.mark.parametrize("name", [name for name in BASELINES if name not in ("mamba", "multiresconv")])
def test_baselines_are_bidirectional_in_a_block(name):
    assert MRConvBlock(8, 40, mixer=name, bidirectional=True).layer.bidirectional


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("s4", {"n_ssm": 2, "dt_min": 0.01}),
        ("liquid-s4", {"d_state": 6, "degree": 3}),
        ("mega-chunk", {"d_ema": 4, "attention": "laplace"}),
        ("sgconv", {"kernel_size": 4}),
    ],
)
def test_options_that_a_mixer_passes_on_are_accepted(name, options):
    block = MRConvBlock(8, 40, mixer=name, mixer_options=options)
    assert block(torch.randn(2, 33, 8)).shape == (2, 33, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "s4e"}, "mixer must be one of .*got 's4e'"),
        ({"mixer": "attention", "mixer_options": {"n_head": 2}}, "did you mean 'n_heads'"),
        ({"mixer": "multiresconv", "bidirectional": True}, "multiresconv runs forwards only"),
        ({"mixer": "s4", "mixer_options": {"d_stat": 2}}, "did you mean 'd_state'"),
        ({"mixer_options": {"d_state": 2}}, "mixer_options are for mixers other than mrconv"),
    ],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(ValueError, match=message):
        MRConvBlock(8, 40, **options)


def test_an_experiment_swaps_the_mixer(tmp_path, monkeypatch):
    experiment = compose(["experiment=listops-base", "mixer=s4d", "mixer.d_state=6"])
    assert experiment.mixer_options == {"d_state": 6}
    tiny = data("listops")
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    result = loop.train(small(experiment), tmp_path / "run", quiet=True)
    assert result["config"]["mixer"] == "s4d"
    assert result["accuracy"] == result["merged_accuracy"]
