"""Generation: the tokens that the parallel form would give, drawn as asked."""

import json

import pytest
import torch

from mrconv import LanguageModel, reparameterize
from mrconv.cli import main
from mrconv.generation import restricted

from ..conftest import randomise


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = LanguageModel(vocab_size=11, d_model=8, depth=2, l_max=30, kernel_size=2, dtype=torch.float64)
    return randomise(made).eval()


def by_forward(model, prompt, count):
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize("merged", [False, True])
def test_the_likeliest_tokens_are_those_of_the_parallel_form(model, merged):
    prompt = torch.randint(11, (3, 7))
    expected = by_forward(model, prompt, 50)
    if merged:
        reparameterize(model)
    assert torch.equal(model.generate(prompt, 50, temperature=0), expected)
    assert torch.equal(model.generate(prompt, 50, top_k=1), expected)
    assert torch.equal(model.generate(prompt, 50, top_p=1e-9), expected)


def test_options_at_the_end_of_their_range_give_the_likeliest_or_anything(model):
    prompt = torch.randint(11, (3, 7))
    expected = by_forward(model, prompt, 5)
    assert torch.equal(model.generate(prompt, 5, temperature=1e-40), expected)
    assert torch.equal(model.generate(prompt, 5, top_p=1e-300), expected)
    drawn = model.generate(prompt[:1].repeat(200, 1), 1, temperature=10**400)
    assert len(drawn.unique()) == 11


def test_the_same_generator_gives_the_same_tokens(model):
    prompt = torch.randint(11, (2, 1))
    a, b, c = (model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_draws_follow_the_probabilities(model):
    prompt = torch.zeros(20_000, 1, dtype=torch.long)
    drawn = model.generate(prompt, 1, temperature=0.7, generator=torch.Generator().manual_seed(0))
    expected = (model(prompt[:1])[0, -1] / 0.7).softmax(-1)
    found = torch.bincount(drawn[:, 0], minlength=11) / len(drawn)
    assert (found - expected).abs().max() < 0.02


def test_sequences_stop_at_their_own_time(model):
    prompt = torch.arange(4)[:, None]
    seen = []
    found = model.generate(prompt, 200, stop=[3, 5], generator=torch.Generator().manual_seed(0), callback=seen.append)
    assert torch.equal(torch.stack(seen, 1), found)
    for row in found.tolist():
        end = next(i for i, token in enumerate(row) if token in (3, 5))
        assert set(row[end:]) == {row[end]}
    assert found.shape[1] < 200


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    assert restricted(logits, top_k=2).isfinite().tolist() == [[False, True, False, True]]
    assert restricted(logits, top_p=0.6).isfinite().tolist() == [[False, True, False, True]]
    assert restricted(logits, top_p=0.5).isfinite().tolist() == [[False, True, False, False]]
    assert restricted(logits, top_k=9, top_p=1.0).isfinite().all()


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
def test_bad_arguments_are_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(**({"prompt": torch.zeros(2, 3, dtype=torch.long), "new_tokens": 2} | options))


def test_the_command_merges_unless_branches_are_asked_for(model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pytorch_lightning")
    inputs = json.dumps({"kind": "text", "length": 30, "vocabulary": [*"abcdefghijk"]})
    for name in ("run/model", "merged"):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "inputs.json").write_text(inputs)
        reparameterize(model)
    wrote, plain = [], LanguageModel.generate
    monkeypatch.setattr(LanguageModel, "generate", lambda self, *a, **k: wrote.append(self) or plain(self, *a, **k))
    for options in (["run"], ["run", "--branches"], ["merged"]):
        asked = ["generate", str(tmp_path / options[0]), *options[1:], "--prompt", "abc", "--tokens", "5"]
        assert main([*asked, "--device", "cpu"]) == 0
    assert [each.backbone.blocks[0].layer.merged for each in wrote] == [True, False, True]
    with pytest.raises(SystemExit):
        main(["generate", str(tmp_path / "merged"), "--branches", "--prompt", "abc"])
    assert "is merged: it has no branches" in capsys.readouterr().err
