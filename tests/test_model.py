"""Block, models and their inputs."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from mrconv import (
    Backbone,
    LanguageModel,
    MRConv,
    MRConvBlock,
    SequenceClassifier,
    SequenceLabeller,
    SequenceRegressor,
    TwoTowerClassifier,
    param_groups,
    reparameterize,
)
from mrconv.block import TiedDropout
from mrconv.config import LayerConfig
from mrconv.model import pool
from mrconv.norm import SequenceBatchNorm

from .conftest import randomise, relative

SMALL = {"d_model": 8, "depth": 2, "l_max": 64}
TOKENS = SMALL | {"vocab_size": 11}


def tokens(batch=3, length=40):
    return torch.randint(11, (batch, length))


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("block_norm", ["batch", "layer"])
@pytest.mark.parametrize("heads", [1, 2])
def test_block_computes_the_s4_block(prenorm, block_norm, heads):
    block = MRConvBlock(8, 64, prenorm=prenorm, block_norm=block_norm, heads=heads, dropout=0.5).eval()
    u = torch.randn(2, 50, 8)
    x = block.norm(u) if prenorm else u
    x = u + F.glu(block.mix(F.gelu(block.layer(x))), -1)
    assert torch.allclose(block(u), x if prenorm else block.norm(x), atol=1e-6)
    assert block.mix.weight.shape == (16, 8 * heads)


def test_dropout_is_tied_over_length_and_keeps_the_mean():
    x = torch.ones(64, 10, 32)
    y = TiedDropout(0.25)(x)
    assert (y == y[:, :1]).all()
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(TiedDropout(0.25).eval()(x), x)


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_drop_channels_at_all_positions_or_at_each(tied):
    model = Backbone(d_model=8, depth=2, l_max=16, dropout=0.5, tie_dropout=tied)
    for block in model.blocks:
        dropped = block.dropout(torch.ones(4, 16, 8)) == 0
        assert dropped.any()
        assert not dropped.all()
        assert (dropped == dropped[:, :1]).all() == tied
        assert not (block.eval().dropout(torch.ones(4, 16, 8)) == 0).any()


def test_layer_config_has_the_names_and_defaults_of_the_layer():
    parameters = inspect.signature(MRConv).parameters
    fields = {name: p.default for name, p in inspect.signature(LayerConfig).parameters.items()}
    layer = {name: p.default for name, p in parameters.items() if name not in ("device", "dtype")}
    assert fields == layer


@pytest.mark.parametrize("model_class", [Backbone, SequenceClassifier, SequenceLabeller, SequenceRegressor])
def test_models_accept_every_keyword_of_the_layer(model_class):
    options = {
        "kernel": "fourier",
        "kernel_size": 2,
        "bidirectional": True,
        "combine": "concat",
        "decay": (1.0, 2.0),
        "norm": "none",
        "heads": 2,
        "groups": 2,
        "backend": "torch",
        "eps": 1e-3,
        "momentum": None,
        "sync_stats": False,
        "stats_fraction": 1.0,
        "rate": 0.5,
        "merged": False,
        "seed": 4,
        "device": "cpu",
        "dtype": torch.float64,
    }
    assert set(options) == set(inspect.signature(MRConv).parameters) - {"d_model", "l_max"}
    head = {"n_classes": 3} if "n_classes" in inspect.signature(model_class).parameters else {}
    model = model_class(**SMALL, d_input=5, **head, **options)
    assert model(torch.randn(2, 30, 5, dtype=torch.float64)).dtype == torch.float64
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_shapes():
    lengths = torch.tensor([40, 3, 17])
    x = torch.randn(3, 40, 2)
    assert SequenceClassifier(n_classes=5, **TOKENS)(tokens(), lengths=lengths).shape == (3, 5)
    assert SequenceClassifier(n_classes=5, d_input=2, pool="last", **SMALL)(x, lengths=lengths).shape == (3, 5)
    assert SequenceLabeller(n_classes=5, d_input=2, **SMALL)(x, lengths=lengths).shape == (3, 40, 5)
    assert SequenceRegressor(n_outputs=2, d_input=2, **SMALL)(x).shape == (3, 2)
    assert SequenceRegressor(d_input=2, per_position=True, **SMALL)(x).shape == (3, 40, 1)
    assert Backbone(**TOKENS)(tokens()).shape == (3, 40, 8)
    assert Backbone(**SMALL)(torch.randn(3, 40, 8)).shape == (3, 40, 8)
    assert TwoTowerClassifier(**TOKENS)(tokens(), tokens(length=25)).shape == (3, 2)
    assert LanguageModel(**TOKENS)(tokens()).shape == (3, 40, 11)


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_lengths_pool_only_unless_padding_is_masked(pool):
    lengths = torch.tensor([40, 3, 17])
    x = tokens()
    x[torch.arange(40) >= lengths[:, None]] = 0
    other = x.clone()
    other[torch.arange(40) >= lengths[:, None]] = 7
    options = TOKENS | {"n_classes": 5, "pool": pool, "bidirectional": True}
    plain = SequenceClassifier(**options).eval()
    assert not torch.allclose(plain(x, lengths=lengths), plain(other, lengths=lengths))
    features = plain.backbone(x)
    expected = [f[:n].mean(0) if pool == "mean" else f[n - 1] for f, n in zip(features, lengths, strict=True)]
    assert torch.allclose(plain(x, lengths=lengths), plain.head(torch.stack(expected)), atol=1e-5)
    masked = SequenceClassifier(mask_padding=True, **options).double()
    for model in (masked.train(), masked.eval()):
        assert torch.allclose(model(x, lengths=lengths), model(other, lengths=lengths), atol=1e-10)


@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize(
    ("bidirectional", "mask_padding", "same"),
    [(True, True, True), (False, True, True), (False, False, True), (True, False, False)],
)
def test_a_padded_batch_gives_what_its_sequences_give_if_masked_or_causal(bidirectional, mask_padding, same, pool):
    options = TOKENS | {"n_classes": 5, "pool": pool, "bidirectional": bidirectional, "mask_padding": mask_padding}
    model, x, lengths = randomise(SequenceClassifier(**options)).eval().double(), tokens(), [40, 3, 17]
    alone = torch.cat([model(x[i : i + 1, :n]) for i, n in enumerate(lengths)])
    assert torch.allclose(model(x, lengths=torch.tensor(lengths)), alone, atol=1e-10) == same


@pytest.mark.parametrize("prenorm", [False, True])
def test_masked_training_does_not_depend_on_the_amount_of_padding(prenorm):
    model = SequenceClassifier(n_classes=5, mask_padding=True, prenorm=prenorm, dtype=torch.float64, **TOKENS)
    lengths = torch.tensor([30, 3, 17])
    x = tokens(length=30)
    y = model(x, lengths=lengths)
    wider = model(F.pad(x, (0, 20)), lengths=lengths)
    assert torch.allclose(y, wider, atol=1e-10)


def test_masked_batchnorm_is_batchnorm_of_the_valid_positions():
    masked = randomise(SequenceBatchNorm(4)).double()
    plain = torch.nn.BatchNorm1d(4).double()
    plain.load_state_dict(masked.state_dict())
    x = torch.randn(3, 20, 4, dtype=torch.float64)
    valid = torch.arange(20) < torch.tensor([20, 1, 7])[:, None]
    assert torch.allclose(masked(x, valid[..., None])[valid], plain(x[valid]))
    for a, b in zip(masked.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(a, b)


def test_two_towers_share_the_backbone_and_ignore_padding_in_pooling():
    model = TwoTowerClassifier(mask_padding=True, **TOKENS).eval().double()
    a, b = tokens(), tokens(length=25)
    x1, x2 = model.backbone(a).mean(1), model.backbone(b).mean(1)
    expected = model.head(F.gelu(model.hidden(torch.cat([x1, x2, x1 - x2, x1 * x2], -1))))
    assert torch.allclose(model(a, b), expected, atol=1e-10)
    lengths = torch.tensor([40, 2, 3])
    cut = model(a[1:2, :2], b[1:2])
    assert torch.allclose(model(a, b, first_lengths=lengths)[1:2], cut, atol=1e-10)


def test_language_model_is_causal_and_tied():
    model = LanguageModel(**TOKENS).eval().double()
    x = tokens()
    changed = x.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 11
    assert torch.allclose(model(x)[:, :20], model(changed)[:, :20], atol=1e-12)
    assert not torch.allclose(model(x)[:, 20:], model(changed)[:, 20:])
    assert torch.allclose(model(x), model.backbone(x) @ model.backbone.encoder.weight.t())


def test_a_trained_model_keeps_its_predictions_when_merged():
    """Which token stood first, 60 positions of noise ago?"""
    torch.manual_seed(1)
    model = SequenceClassifier(n_classes=2, vocab_size=6, d_model=16, depth=2, l_max=64, kernel_size=2)
    optimizer = torch.optim.AdamW(param_groups(model, lr=0.01, weight_decay=0.01, kernel_lr=0.01))
    for _ in range(60):
        x = torch.randint(2, 6, (64, 64))
        answer = torch.randint(2, (64,))
        x[:, 0] = answer
        loss = F.cross_entropy(model(x), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        before = model(x)
        assert (before.argmax(1) == answer).float().mean() > 0.9
        assert relative(reparameterize(model)(x), before) < 1e-5


def test_masked_mean_does_not_overflow_in_half_precision():
    h = 2 * torch.ones(1, 40_000, 2, dtype=torch.float16)
    assert torch.equal(pool(h, torch.tensor([40_000]), "mean"), torch.full((1, 2), 2.0, dtype=torch.float16))


def test_lengths_may_be_lists_everywhere():
    lengths = [40, 3, 17]
    tensor = torch.tensor(lengths)
    for pooling in ("mean", "last"):
        model = SequenceClassifier(n_classes=5, mask_padding=True, pool=pooling, **TOKENS).eval()
        x = tokens()
        assert torch.equal(model(x, lengths=lengths), model(x, lengths=tensor.to(torch.uint8)))
    block = MRConvBlock(8, 64).eval()
    u = torch.randn(3, 40, 8)
    assert torch.equal(block(u, lengths=lengths), block(u, lengths=tensor))


def test_models_run_at_another_rate():
    model = SequenceClassifier(n_classes=5, d_input=1, bidirectional=True, kernel_size=4, dtype=torch.float64, **SMALL)
    x = torch.randn(2, 32, 1, dtype=torch.float64)
    randomise(model).eval()
    assert relative(reparameterize(model, rate=0.5)(x), model(x, rate=0.5)) == 0
    fresh = SequenceClassifier(n_classes=5, d_input=1, rate=0.5, **SMALL).eval()
    x = x.float()
    assert torch.equal(fresh(x), fresh(x, rate=0.5))
    assert not torch.allclose(fresh(x), fresh(x, rate=1.0))


def test_seeded_models_draw_the_same_positions_and_each_layer_its_own():
    def positions(seed):
        model = Backbone(kernel="sparse", kernel_size=4, bidirectional=True, seed=seed, **SMALL)
        return [branches.kernel.positions for block in model.blocks for branches in block.layer.branches]

    assert positions(3) == positions(3) != positions(30)
    assert len(set(positions(3))) == 4


@pytest.mark.parametrize("kind", ["dense", "dilated", "fourier", "sparse", "fourier+sparse"])
@pytest.mark.parametrize("merged", [False, True])
def test_param_groups_contain_every_parameter_once(kind, merged):
    model = SequenceClassifier(n_classes=5, kernel=kind, kernel_size=2, merged=merged, **TOKENS)
    groups = param_groups(model, lr=0.01, weight_decay=0.05, kernel_lr=0.001)
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [names[id(p)] for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(names.values())
    settings = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    for name, setting in settings.items():
        last = name.rsplit(".", 1)[-1]
        if ".kernel." in name or name.endswith("layer.weight"):
            assert setting == (0.001, 0.0), name
        elif last in ("alpha", "bias") or ".norm." in name:
            assert setting == (0.01, 0.0), name
        else:
            assert last in ("weight", "D")
            assert setting == (0.01, 0.05), name
    torch.optim.AdamW(groups).step()


@pytest.mark.parametrize("token", [-1, 11, 70])
def test_errors_name_tokens_outside_of_the_vocabulary(token):
    x = tokens()
    x[1, 3] = token
    message = rf"tokens must lie in 0 \.\. vocab_size - 1 = 10; got {token}"
    model = Backbone(**TOKENS).eval()
    for call in (model, model.prefill, lambda x: model.step(x[:, 3], model.initial_state(3))):
        with pytest.raises(ValueError, match=message):
            call(x)
    with pytest.raises(ValueError, match=message):
        TwoTowerClassifier(**TOKENS)(tokens(), x)
