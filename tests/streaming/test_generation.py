"""Generated tokens follow the parallel form's probabilities and the sampling options."""

import json

import pytest
import torch

from mrconv import LanguageModel, reparameterize
from mrconv.cli import main
from mrconv.generation import filter_logits

from ..conftest import randomise
from .helpers import greedy_continuation


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = LanguageModel(vocab_size=11, d_model=8, depth=2, l_max=30, kernel_size=2, dtype=torch.float64)
    return randomise(model).eval()


@pytest.mark.parametrize("merged", [False, True])
def test_greedy_tokens_equal_those_of_the_parallel_form(model, merged):
    prompt = torch.randint(11, (3, 7))
    expected = greedy_continuation(model, prompt, 50)
    if merged:
        reparameterize(model)
    assert torch.equal(model.generate(prompt, 50, temperature=0), expected)
    assert torch.equal(model.generate(prompt, 50, top_k=1), expected)
    assert torch.equal(model.generate(prompt, 50, top_p=1e-9), expected)


def test_extreme_options_are_greedy_or_uniform(model):
    prompt = torch.randint(11, (3, 7))
    expected = greedy_continuation(model, prompt, 5)
    assert torch.equal(model.generate(prompt, 5, temperature=1e-40), expected)
    assert torch.equal(model.generate(prompt, 5, top_p=1e-300), expected)
    sampled = model.generate(prompt[:1].repeat(200, 1), 1, temperature=10**400)
    assert len(sampled.unique()) == 11


def test_the_same_generator_gives_the_same_tokens(model):
    prompt = torch.randint(11, (2, 1))
    a, b, c = (model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_samples_follow_the_probabilities(model):
    prompt = torch.zeros(20_000, 1, dtype=torch.long)
    sampled = model.generate(prompt, 1, temperature=0.7, generator=torch.Generator().manual_seed(0))
    expected = (model(prompt[:1])[0, -1] / 0.7).softmax(-1)
    frequencies = torch.bincount(sampled[:, 0], minlength=11) / len(sampled)
    assert (frequencies - expected).abs().max() < 0.02


def test_each_sequence_stops_at_its_stop_token(model):
    prompt = torch.arange(4)[:, None]
    steps = []
    generator = torch.Generator().manual_seed(0)
    tokens = model.generate(prompt, 200, stop=[3, 5], generator=generator, callback=steps.append)
    assert torch.equal(torch.stack(steps, 1), tokens)
    for sequence in tokens.tolist():
        end = next(i for i, token in enumerate(sequence) if token in (3, 5))
        assert set(sequence[end:]) == {sequence[end]}
    assert tokens.shape[1] < 200


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    assert filter_logits(logits, top_k=2).isfinite().tolist() == [[False, True, False, True]]
    assert filter_logits(logits, top_p=0.6).isfinite().tolist() == [[False, True, False, True]]
    assert filter_logits(logits, top_p=0.5).isfinite().tolist() == [[False, True, False, False]]
    assert filter_logits(logits, top_k=9, top_p=1.0).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": 0}, "new_tokens"),
        ({"temperature": -1.0}, "temperature must not be negative; got -1.0"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]; got 1.5"),
        ({"prompt": torch.zeros(2, 0, dtype=torch.long)}, r"prompt must be tokens .*got \(2, 0\)"),
        ({"prompt": torch.tensor([[3, 11]])}, "tokens must lie in 0 .. vocab_size - 1 = 10; got 11"),
    ],
)
def test_errors_name_the_wrong_argument(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(**({"prompt": torch.zeros(2, 3, dtype=torch.long), "new_tokens": 2} | options))


def test_the_command_merges_unless_branches_are_requested(model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pytorch_lightning")
    inputs = json.dumps({"kind": "text", "length": 30, "vocabulary": [*"abcdefghijk"]})
    for name in ("run/model", "merged"):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "inputs.json").write_text(inputs)
        reparameterize(model)
    models, generate = [], LanguageModel.generate
    monkeypatch.setattr(LanguageModel, "generate", lambda self, *a, **k: models.append(self) or generate(self, *a, **k))
    for options in (["run"], ["run", "--branches"], ["merged"]):
        command = ["generate", str(tmp_path / options[0]), *options[1:], "--prompt", "abc", "--tokens", "5"]
        assert main([*command, "--device", "cpu"]) == 0
    assert [each.backbone.blocks[0].layer.merged for each in models] == [True, False, True]
    with pytest.raises(SystemExit):
        main(["generate", str(tmp_path / "merged"), "--branches", "--prompt", "abc"])
    assert "is merged: it has no branches" in capsys.readouterr().err
