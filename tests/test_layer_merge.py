"""Merged == branches, and the properties of a merged layer."""

import copy
import io
import json
import warnings
from pathlib import Path

import pytest
import torch

from mrconv import MRConv, MRConvBlock, SequenceClassifier, ops, reparameterize
from mrconv.ops import Algorithm, select

from .conftest import randomise, relative

KINDS = ["dense", "dilated", "fourier", "sparse", "fourier+sparse"]
COMBINATIONS = [
    {"combine": "sum"},
    {"combine": "sum", "norm": "scale"},
    {"combine": "sum", "norm": "none"},
    {"combine": "concat"},
    {"combine": "concat", "decay": 2.0},
    {"combine": "concat", "decay": (0.5, 2.0), "norm": "none"},
]
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
L_MAX = 200


def layer(kind, bidirectional=False, combination=None, heads=1, groups=1, dtype=torch.float64, kernel_size=4, **kw):
    built = MRConv(
        4,
        L_MAX,
        kernel=kind,
        kernel_size=kernel_size,
        bidirectional=bidirectional,
        heads=heads,
        groups=groups,
        dtype=dtype,
        **(combination or {}),
        **kw,
    )
    return randomise(built).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize(("heads", "groups"), SHAPES)
@torch.no_grad()
def test_merged_equals_branches_with_random_statistics(kind, bidirectional, combination, heads, groups):
    branches = layer(kind, bidirectional, combination, heads, groups, backend="reference")
    single = copy.deepcopy(branches)
    single.backend = "torch"
    merged = copy.deepcopy(branches).reparameterize()
    for L in (1, 2, 63, 100, L_MAX, 1000):
        u = torch.randn(2, L, 4, dtype=torch.float64)
        expected = branches(u)
        assert expected.shape == (2, L, 4 * heads)
        assert relative(single(u), expected) < 1e-12
        assert relative(merged(u), expected) < 1e-12
        lengths = torch.tensor([L, (L + 1) // 2])
        assert relative(merged(u, lengths=lengths), branches(u, lengths=lengths)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2)])
@torch.no_grad()
def test_merged_equals_branches_in_float32(kind, bidirectional, combination, heads, groups):
    branches = layer(kind, bidirectional, combination, heads, groups, dtype=torch.float32)
    exact = copy.deepcopy(branches).double()
    exact.backend = "reference"
    merged = copy.deepcopy(branches).reparameterize()
    for L in (1, 63, L_MAX, 1000):
        u = torch.randn(2, L, 4)
        for tested in (branches, merged):
            assert relative(tested(u).double(), exact(u.double())) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "groups"), SHAPES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_k_rep_is_the_layer_without_skip(kind, heads, groups, bidirectional):
    tested = layer(kind, bidirectional, heads=heads, groups=groups)
    k, b = tested.k_rep()
    C = 4 * heads // groups
    assert k.shape == ((2, C, L_MAX) if bidirectional else (C, L_MAX))
    assert b.shape == (C,)
    assert tested.groups == groups
    if (heads, groups) == (1, 1):
        u = torch.zeros(1, 2 * L_MAX + 1, 4, dtype=torch.float64)
        u[0, L_MAX] = 1
        y = tested(u)[0].t() - b[:, None]  # the impulse response
        forward = k[0] if bidirectional else k
        y[:, L_MAX] -= tested.D
        assert torch.allclose(y[:, L_MAX:-1], forward, atol=1e-12)
        backward = k[1] if bidirectional else torch.zeros_like(k)
        assert torch.allclose(y[:, :L_MAX].flip(1), backward, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_k_rep_is_differentiable(kind):
    tested = layer(kind, bidirectional=True)
    k, b = tested.k_rep()
    (k.square().sum() + b.square().sum()).backward()
    for name, p in tested.named_parameters():
        if name != "D":
            assert p.grad is not None, name
            assert p.grad.abs().sum() > 0, name


def test_merged_kernel_follows_the_papers_formula_with_eps_and_a_bias():
    tested = layer("dense", eps=0.3)
    (branches,) = tested.branches
    norm = branches.norm
    N = tested.resolutions
    k_rep, bias = torch.zeros(4, L_MAX, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for i, (k, _) in enumerate(branches.kernels()):
        gamma, beta, mean, var = (
            x.view(N, 4)[i] for x in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        )
        scale = branches.alpha[i] * gamma / torch.sqrt(var + 0.3)
        k_rep[:, : k.shape[1]] += scale[:, None] * k
        bias += branches.alpha[i] * beta - scale * mean
    k, b = tested.k_rep()
    assert torch.allclose(k, k_rep, atol=1e-13)
    assert torch.allclose(b, bias, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_merged_state_dict_holds_the_kernel_and_the_bias_only(kind, groups):
    merged = layer(kind, groups=groups).reparameterize()
    taps = kind in ("dilated", "sparse")
    expected = {"weight", "bias"} | ({"lags"} if taps else set()) | ({"D"} if groups > 1 else set())
    assert set(merged.state_dict()) == expected
    assert set(dict(merged.named_parameters())) == expected - {"lags"}
    if taps:
        assert merged.weight.shape == (4 // groups, len(merged.lags))
        assert merged.weight.shape[1] <= 4 * 7
    else:
        assert merged.weight.shape == (4 // groups, L_MAX)


def test_skip_is_folded_into_tap_0():
    tested = layer("fourier")
    k, D = tested.k_rep()[0].detach(), tested.D.detach().clone()
    merged_k, _ = tested.reparameterize().k_rep()
    assert torch.allclose(merged_k[:, 0], k[:, 0] + D)
    assert torch.equal(merged_k[:, 1:], k[:, 1:])


def test_merging_is_idempotent_and_returns_self():
    tested = layer("fourier")
    once = tested.reparameterize()
    state = copy.deepcopy(once.state_dict())
    assert once is tested
    assert once.reparameterize() is tested
    assert all(torch.equal(state[name], x) for name, x in once.state_dict().items())
    assert "merged" in repr(once)


def test_merging_a_layer_in_training_mode_uses_the_running_statistics_and_ends_in_eval_mode():
    trained = layer("fourier").train()
    merged = copy.deepcopy(trained).reparameterize()
    assert not merged.training
    u = torch.randn(2, 50, 4, dtype=torch.float64)
    assert relative(merged(u), trained.eval()(u)) < 1e-12


def test_a_merged_layer_warns_once_and_trains_its_kernel():
    merged = layer("fourier").reparameterize()
    with pytest.warns(UserWarning, match="merged"):
        merged.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged.eval().train()
    assert_trains(merged)


def assert_trains(merged):
    """Check that every parameter has a gradient, and that a step along it takes effect."""
    u = torch.randn(2, 50, 4, dtype=torch.float64)
    before = merged(u)
    before.square().sum().backward()
    with torch.no_grad():
        for p in merged.parameters():
            assert p.grad.abs().sum() > 0
            p -= 1e-3 * p.grad
    assert merged(u).square().sum() < before.square().sum()


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_merging_invalid_statistics_raises_and_leaves_the_layer_unmerged(name, bad):
    tested = layer("fourier")
    getattr(tested.branches[0].norm, name)[3] = bad
    keys = set(tested.state_dict())
    with pytest.raises(ValueError, match=f"the layer cannot be merged: .*{name} holds NaN or infinity"):
        tested.reparameterize()
    assert not tested.merged
    assert set(tested.state_dict()) == keys


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_merged_checkpoint_loads_into_a_layer_built_merged(kind, bidirectional):
    merged = layer(kind, bidirectional).reparameterize()
    other = layer(kind, bidirectional, merged=True, seed=12345)
    assert other.merged
    other.load_state_dict(merged.state_dict())
    u = torch.randn(2, 77, 4, dtype=torch.float64)
    assert torch.equal(other(u), merged(u))


def test_a_layer_with_branches_rejects_a_merged_checkpoint():
    with pytest.raises(RuntimeError, match=r"the checkpoint is merged .* build it with merged=True"):
        layer("fourier").load_state_dict(layer("fourier").reparameterize().state_dict())


def test_a_merged_layer_rejects_a_checkpoint_with_branches():
    with pytest.raises(RuntimeError, match=r"the checkpoint is not merged .* build it with merged=False"):
        layer("fourier", merged=True).load_state_dict(layer("fourier").state_dict())


def test_loading_taps_keeps_the_parameter_and_rejects_lags_out_of_range():
    merged = layer("dilated").reparameterize()
    other = layer("dilated", merged=True)
    weight = other.weight.requires_grad_(False)
    other.load_state_dict(merged.state_dict())
    assert other.weight is weight
    sparse = layer("sparse", bidirectional=True).reparameterize()
    causal = layer("sparse", merged=True)
    before = copy.deepcopy(causal.state_dict())
    with pytest.raises(RuntimeError, match=r"taps outside of this layer's lags 0 .. 199"):
        causal.load_state_dict(sparse.state_dict())
    assert causal.weight.shape == before["weight"].shape


def test_changed_positions_take_effect():
    """DDP and functional_call change a buffer without loading a state dict."""
    a, b = (layer("sparse", seed=seed) for seed in (1, 2))
    u = torch.randn(2, 50, 4, dtype=torch.float64)
    expected = a(u)
    state = dict(a.named_parameters()) | dict(a.named_buffers())
    assert torch.equal(torch.func.functional_call(b, state, (u,)), expected)
    with torch.no_grad():
        for name, tensor in b.state_dict().items():
            tensor.copy_(a.state_dict()[name])
    assert torch.equal(b(u), expected)


def test_a_model_that_cannot_be_merged_stays_unmerged_and_the_error_names_the_layer():
    model = SequenceClassifier(n_classes=3, vocab_size=7, d_model=8, depth=2, l_max=64)
    model.backbone.blocks[1].layer.branches[0].norm.running_var[0] = float("nan")
    with pytest.raises(ValueError, match=r"backbone.blocks.1.layer cannot be merged: .*running_var holds NaN"):
        reparameterize(model)
    assert not model.backbone.blocks[0].layer.merged


def test_checkpoints_have_a_format_version_and_newer_ones_are_rejected():
    tested = layer("fourier")
    buffer = io.BytesIO()
    torch.save(tested.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert state._metadata[""]["version"] == 2
    state._metadata[""]["version"] = 3
    with pytest.raises(RuntimeError, match="format 3, newer than"):
        tested.load_state_dict(state)


@pytest.mark.parametrize("block_norm", ["batch", "layer"])
@torch.no_grad()
def test_a_model_merges_in_place(block_norm):
    model = SequenceClassifier(
        n_classes=3, vocab_size=7, d_model=8, depth=3, l_max=64, block_norm=block_norm, dropout=0.3, dtype=torch.float64
    )
    randomise(model).train()
    tokens, lengths = torch.randint(7, (4, 50)), torch.tensor([50, 3, 20, 49])
    assert reparameterize(model.eval()) is model
    rebuilt = SequenceClassifier.from_config(model.config, dtype=torch.float64)
    assert not any(m.training for m in model.modules())
    assert all(block.layer.merged for block in model.backbone.blocks)
    assert not any(block.layer.merged for block in rebuilt.backbone.blocks)
    assert model(tokens, lengths=lengths).shape == (4, 3)


@torch.no_grad()
def test_merging_does_not_change_a_model_s_output():
    model = randomise(
        SequenceClassifier(n_classes=3, d_input=2, d_model=8, depth=3, l_max=64, kernel_size=2, dtype=torch.float64)
    ).eval()
    x = torch.randn(4, 64, 2, dtype=torch.float64)
    before = model(x)
    assert relative(reparameterize(model)(x), before) < 1e-12


def test_a_block_merges_too():
    block = randomise(MRConvBlock(4, 32, kernel="dilated", kernel_size=2, dtype=torch.float64)).eval()
    u = torch.randn(2, 32, 4, dtype=torch.float64)
    before = block(u)
    assert relative(reparameterize(block)(u), before) < 1e-12


def low_rank_layer(kernel_size=1, **options):
    options = {"l_max": 1000, "dtype": torch.float64} | options
    return randomise(MRConv(4, kernel_size=kernel_size, **options)).eval()


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 5])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize(("heads", "groups"), SHAPES)
@pytest.mark.parametrize("rate", [1.0, 0.6, 1.7])
def test_a_layer_merged_into_modes_equals_its_branches(kernel_size, bidirectional, combination, heads, groups, rate):
    options = {"bidirectional": bidirectional, "heads": heads, "groups": groups, **combination}
    branches = low_rank_layer(kernel_size, backend="reference", **options)
    merged = copy.deepcopy(branches).reparameterize(rate)
    dense = copy.deepcopy(branches).reparameterize(rate, dense=True)
    expanded = copy.deepcopy(merged).reparameterize(dense=True)
    assert merged.low_rank
    assert not dense.low_rank
    assert not expanded.low_rank
    for L in (1, 63, 100, 2001):
        u = torch.randn(2, L, 4, dtype=torch.float64)
        lengths = torch.tensor([L, (L + 1) // 2])
        with torch.no_grad():
            expected, padded = branches(u, rate=rate), branches(u, lengths, rate)
            for tested in (merged, dense, expanded):
                assert relative(tested(u), expected) < 1e-12
                assert relative(tested(u, lengths), padded) < 1e-12
        assert relative(merged(u), expected) < 1e-12  # with gradients, the modes are expanded in every call
    kernel, bias = branches.k_rep(rate)
    assert relative(merged.k_rep()[0], kernel) < 1e-12
    assert relative(merged.k_rep()[1], bias) < 1e-12 if bias.any() else not merged.bias.any()


@pytest.mark.parametrize(("kernel_size", "numbers"), [(1, 2), (2, 4), (4, 6)])
def test_merged_modes_are_few_parameters(kernel_size, numbers):
    merged = low_rank_layer(kernel_size, bidirectional=True, groups=2).reparameterize()
    N = merged.resolutions
    modes = {f"branches.{i}.kernel.modes" for i in range(2)}
    assert set(merged.state_dict()) == set(dict(merged.named_parameters())) == {"bias", "D", *modes}
    assert sum(p.numel() for p in merged.parameters()) == 2 * 2 * N * numbers + 2 + 4
    built = MRConv(4, 1000, kernel_size=kernel_size, bidirectional=True, groups=2, merged=True)
    assert {name: x.shape for name, x in built.state_dict().items()} == {
        name: x.shape for name, x in merged.state_dict().items()
    }


def test_modes_are_kept_up_to_an_eighth_of_the_kernel_s_length():
    N = 9
    assert MRConv(1, 16 * N, merged=True).low_rank  # 2 N numbers
    assert not MRConv(1, 16 * N - 1, merged=True).low_rank
    assert not MRConv(1, 1000, kernel="fourier+sparse", merged=True).low_rank
    assert not MRConv(1, 1000, kernel_size=16, merged=True).low_rank


def test_merged_parameters_of_the_text_model():
    shape = {"d_model": 256, "depth": 6, "l_max": 4096}
    config = {"n_classes": 2, "vocab_size": 134, "prenorm": True, "block_norm": "batch", "device": "meta", **shape}
    trained, merged = (SequenceClassifier(merged=merged, **config) for merged in (False, True))
    dense = reparameterize(SequenceClassifier(**config), dense=True)
    counts = [sum(p.numel() for p in model.parameters()) for model in (trained, merged, dense)]
    assert counts == [929_282, 870_914, 7_120_898]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_dense_checkpoint_of_format_1_loads_into_a_layer_that_would_keep_modes(bidirectional, groups):
    trained = low_rank_layer(2, bidirectional=bidirectional, groups=groups)
    dense = copy.deepcopy(trained).reparameterize(dense=True)
    state = dense.state_dict()
    state._metadata[""]["version"] = 1
    loaded = low_rank_layer(2, bidirectional=bidirectional, groups=groups, merged=True)
    loaded.load_state_dict(state)
    u = torch.randn(2, 77, 4, dtype=torch.float64)
    assert not loaded.low_rank
    assert set(loaded.state_dict()) == set(state)
    assert torch.equal(loaded(u), dense(u))
    with pytest.raises(RuntimeError, match="holds modes and this layer a dense kernel"):
        loaded.load_state_dict(trained.reparameterize().state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        low_rank_layer(2, l_max=900, bidirectional=bidirectional, groups=groups, merged=True).load_state_dict(state)


def test_checkpoints_with_modes_and_with_branches_are_distinguished():
    trained = low_rank_layer()
    with pytest.raises(RuntimeError, match=r"the checkpoint is not merged .* build it with merged=False"):
        low_rank_layer(merged=True).load_state_dict(trained.state_dict())
    state = copy.deepcopy(trained).reparameterize().state_dict()
    with pytest.raises(RuntimeError, match=r"the checkpoint is merged .* build it with merged=True"):
        trained.load_state_dict(state)


@torch.no_grad()
def test_changed_modes_take_effect():
    merged, u = low_rank_layer(2).reparameterize(), torch.randn(2, 50, 4, dtype=torch.float64)
    other = low_rank_layer(2).reparameterize()
    assert torch.equal(merged(u), merged(u))
    for change in (
        lambda: merged.branches[0].kernel.modes.mul_(2),
        lambda: merged.D.zero_(),
        lambda: merged.bias.add_(1),
        lambda: merged.load_state_dict(other.state_dict()),
        lambda: (merged.branches[0].kernel.modes.data.mul_(2), merged.eval()),
    ):
        before = merged(u)
        change()
        assert relative(merged(u), before) > 1e-3
        assert torch.equal(merged(u), copy.deepcopy(merged)(u))
    state = dict(other.named_parameters())
    assert torch.equal(torch.func.functional_call(merged, state, (u,)), other(u))
    assert relative(merged.float()(u.float()), merged.double()(u)) < 1e-6


@torch.no_grad()
def test_the_dense_form_of_merged_taps_is_cached_and_follows_changes(monkeypatch):
    monkeypatch.setattr(select, "cost", lambda u, triton, algorithm, problem: float(algorithm is Algorithm.TAPS))
    merged, u = layer("dilated").reparameterize(), torch.randn(2, 50, 4, dtype=torch.float64)
    other = layer("dilated").reparameterize()
    for change in (
        lambda: merged.weight.mul_(2),
        lambda: merged.bias.add_(1),
        lambda: merged.load_state_dict(other.state_dict()),
        lambda: (merged.weight.data.mul_(2), merged.eval()),
    ):
        before = merged(u)
        assert merged._inference_kernel(u.mT, 1.0) is merged._inference_kernel(u.mT, 1.0)
        change()
        assert relative(merged(u), before) > 1e-3
        assert torch.equal(merged(u), copy.deepcopy(merged)(u))
    assert relative(merged.float()(u.float()), merged.double()(u)) < 1e-6


def test_vmap_over_merged_modes():
    layers = [low_rank_layer(2).reparameterize() for _ in range(2)]
    state, _ = torch.func.stack_module_state(layers)
    u = torch.randn(1, 50, 4, dtype=torch.float64)
    with torch.no_grad():
        kernels = torch.func.vmap(lambda each: torch.func.functional_call(layers[0], each, (u,)))(state)
        assert all(torch.equal(a, b(u)) for a, b in zip(kernels, layers, strict=True))


def test_training_changes_merged_modes():
    assert_trains(low_rank_layer(2, bidirectional=True).reparameterize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel_size", [1, 4])
@torch.no_grad()
def test_half_precision_modes_are_as_accurate_as_a_dense_kernel(dtype, kernel_size):
    exact = low_rank_layer(kernel_size)
    u = torch.randn(2, 300, 4, dtype=torch.float64)
    merged, dense = (copy.deepcopy(exact).reparameterize(dense=dense) for dense in (False, True))
    errors = [relative(each.to(dtype)(u.to(dtype)).double(), exact(u)) for each in (merged, dense)]
    assert errors[0] < 1.5 * errors[1] < 2e-2


@torch.no_grad()
def test_a_compiled_layer_follows_its_modes():
    torch._dynamo.reset()
    merged, u = low_rank_layer(2, dtype=torch.float32).reparameterize(), torch.randn(2, 50, 4)
    compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
    assert relative(compiled(u), merged(u)) < 1e-6
    before = merged(u)
    merged.branches[0].kernel.modes.mul_(2)
    assert relative(before, merged(u)) > 1e-3
    assert relative(compiled(u), merged(u)) < 1e-6


def test_times_of_both_merged_forms_are_those_recorded():
    root = Path(__file__).parent.parent
    page = (root / "docs/quickstart.md").read_text()
    for row in json.loads((root / "benchmarks/results/merged-cpu-float32.json").read_text())["rows"]:
        keys = ("ms", "first_ms", "step_ms", "state_MiB")
        cells = [f"{row['modes'][key]:.3g} / {row['dense'][key]:.3g}" for key in keys]
        assert f"| {row['layer']} | {' | '.join(cells)} |" in page


@torch.no_grad()
@pytest.mark.parametrize("kernel_size", [4, 64], ids=["modes", "dense"])
def test_a_merged_layer_keeps_its_spectrum_until_its_kernel_changes(kernel_size, monkeypatch):
    layer = MRConv(4, 512, kernel_size=kernel_size, bidirectional=True, dtype=torch.float64).reparameterize()
    built, build = [], ops.kernel_spectrum
    monkeypatch.setattr(ops, "kernel_spectrum", lambda *arguments: built.append(1) or build(*arguments))
    u = torch.randn(2, 512, 4, dtype=torch.float64)
    assert layer.explain(u).algorithm is ops.Algorithm.FFT

    def check(u, count):
        y = layer(u)
        values, lags, bias = layer.merged_kernel(include_skip=True)
        expected = ops.conv_reference(u.transpose(1, 2), values, lags, bias).transpose(1, 2)
        torch.testing.assert_close(y, expected)
        assert len(built) == count

    check(u, 1)
    check(u + 1, 1)
    for p in layer.parameters():
        p.mul_(1.5)
    check(u, 2)
    check(u[:, :301], 3)
    check(u[:, :301], 3)
    layer.load_state_dict({name: 2 * x if x.is_floating_point() else x for name, x in layer.state_dict().items()})
    check(u, 4)
    assert layer.float()(u.float()).dtype == torch.float32
    assert len(built) == 5
