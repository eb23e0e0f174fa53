"""Properties of all mixers: shapes, causality, lengths, gradients, checkpoints, use in a block."""

import copy
import re

import pytest
import torch
from torch import nn

from mrconv import MRConv, MRConvBlock, SequenceClassifier, param_groups
from mrconv.baselines import Mixer, freeze, mixer_class, mixer_names, register_mixer
from mrconv.baselines.kernel_cache import KernelCache

from ..conftest import relative
from .helpers import assert_gradients_are_right

DOUBLE = {"dtype": torch.float64}
OPTIONS = {
    "ckconv": {"width": 4},
    "hyena": {"width": 4, "bands": 2},
    "liquid-s4": {"d_state": 4, "degree": 3},
    "longconv": {"lam": 0.001},
    "multiresconv": {},
    "s4": {"d_state": 4},
    "s4d": {"d_state": 4},
    "s5": {"d_state": 4},
    "sgconv": {"kernel_size": 4},
}
BIDIRECTIONAL = sorted(set(OPTIONS) - {"multiresconv"})
CONTINUOUS = sorted(set(BIDIRECTIONAL) - {"longconv"})


def build(name, d_model=3, l_max=16, **options):
    return mixer_class(name)(d_model, l_max, **(OPTIONS[name] | DOUBLE | options))


def test_the_registry_lists_all_baselines_and_mrconv():
    assert set(OPTIONS) | {"mrconv"} <= set(mixer_names())
    assert mixer_class("mrconv") is MRConv
    with pytest.raises(ValueError, match="did you mean 's4d'"):
        mixer_class("s4dd")
    with pytest.raises(ValueError, match="taken by"):
        register_mixer("s4")(nn.Identity)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("length", [1, 2, 7, 16, 37])
def test_output_has_the_shape_of_an_input_of_any_length(name, length):
    y = build(name)(torch.randn(2, length, 3, **DOUBLE))
    assert y.shape == (2, length, 3)
    assert y.isfinite().all()


def depends(mixer, length=12, at=5):
    """Return for each output whether it depends on input number `at`."""
    u = torch.randn(1, length, 3, **DOUBLE)
    other = u.clone()
    other[:, at] += 1
    return ((mixer(other) - mixer(u)).abs().amax((0, 2)) > 1e-9).tolist()


@pytest.mark.parametrize("name", OPTIONS)
def test_causal_by_default(name):
    assert depends(build(name))[:5] == [False] * 5
    assert depends(build(name))[5]


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_bidirectional_looks_ahead(name):
    assert all(depends(build(name, bidirectional=True))[3:8])


CASES = [*((name, {}) for name in OPTIONS), *((name, {"bidirectional": True}) for name in BIDIRECTIONAL)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_padded_sequences_give_the_outputs_of_unpadded_ones(name, options):
    mixer = build(name, **options)
    u, lengths = torch.randn(4, 16, 3, **DOUBLE), torch.tensor([16, 5, 1, 0])
    y = mixer(u, lengths=lengths, gelu=True)
    for i, length in enumerate(lengths.tolist()):
        assert not y[i, length:].any()
        if length:
            unpadded = mixer(u[i : i + 1, :length], gelu=True)
            assert relative(y[i : i + 1, :length], unpadded) < 1e-11


@pytest.mark.parametrize("name", OPTIONS)
def test_gelu_is_applied_to_the_output_with_and_without_gradients(name):
    mixer, u = build(name), torch.randn(2, 9, 3, **DOUBLE)
    expected = nn.functional.gelu(mixer(u))
    assert torch.allclose(mixer(u, gelu=True), expected)
    with torch.no_grad():
        assert torch.allclose(mixer(u, gelu=True), expected)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradients_of_the_input_and_every_parameter(name, options):
    mixer = build(name, d_model=2, l_max=5, **options)
    assert_gradients_are_right(mixer, torch.randn(1, 5, 2, **DOUBLE), None, None, True, atol=1e-6)  # with GELU


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_gets_a_gradient(name):
    mixer = build(name)
    mixer(torch.randn(2, 16, 3, **DOUBLE)).square().sum().backward()
    for key, p in mixer.named_parameters():
        assert p.grad.isfinite().all(), key
        assert p.grad.any(), key


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dict_round_trip(name):
    first, second, u = build(name), build(name), torch.randn(2, 16, 3, **DOUBLE)
    assert not torch.allclose(first(u), second(u))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(u), second(u))
    assert torch.equal(copy.deepcopy(first)(u), first(u))


@pytest.mark.parametrize("name", OPTIONS)
def test_rate_is_applied_or_rejected(name):
    mixer, u = build(name), torch.randn(2, 9, 3, **DOUBLE)
    assert torch.equal(mixer(u, rate=1), mixer(u))
    if name in CONTINUOUS:
        assert not torch.allclose(mixer(u, rate=0.5), mixer(u))
    else:
        with pytest.raises(ValueError, match="runs at rate 1 only"):
            mixer(u, rate=0.5)
    for wrong in (0, -1, "fast", float("inf")):
        with pytest.raises(ValueError, match="rate must be a positive number"):
            mixer(u, rate=wrong)


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_inputs_are_rejected(name):
    mixer = build(name)
    with pytest.raises(ValueError, match="d_model = 3"):
        mixer(torch.randn(2, 9, 4, **DOUBLE))
    with pytest.raises(ValueError, match="lengths"):
        mixer(torch.randn(2, 9, 3, **DOUBLE), lengths=torch.tensor([3, 10]))
    if not hasattr(type(mixer), "diagonal") and name != "s5":
        with pytest.raises(ValueError, match="no recurrent state"):
            mixer.initial_state(2)


@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_is_computed_in_single(name):
    mixer, u = build(name, dtype=torch.float32), torch.randn(2, 16, 3)
    exact = mixer(u)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mixer(u), exact)
    half = mixer(u.bfloat16())
    assert half.dtype == torch.bfloat16
    assert relative(half.float(), exact) < 2e-2
    assert relative(build_like(mixer, name).to(torch.bfloat16)(u.bfloat16()).float(), exact) < 0.2


def build_like(mixer, name):
    twin = build(name, dtype=torch.float32)
    twin.load_state_dict(mixer.state_dict())
    return twin


@pytest.mark.parametrize("name", OPTIONS)
def test_single_precision_is_near_double(name):
    mixer, u = build(name, d_model=8, l_max=256), torch.randn(2, 256, 8, **DOUBLE)
    assert relative(copy.deepcopy(mixer).float()(u.float()).double(), mixer(u)) < 1e-4


@pytest.mark.parametrize("name", OPTIONS)
def test_builds_on_meta_with_the_same_parameters(name):
    real = {key: p.shape for key, p in build(name).named_parameters()}
    meta = build(name, device="meta")
    assert {key: p.shape for key, p in meta.named_parameters()} == real
    assert all(p.is_meta for p in meta.parameters())


@pytest.mark.parametrize("name", OPTIONS)
def test_kernel_parameters_are_parameters_or_submodules(name):
    mixer = build(name)
    assert isinstance(mixer, Mixer)
    names = {key for key, _ in mixer.named_parameters(recurse=False)} | {key for key, _ in mixer.named_children()}
    assert set(mixer.kernel_parameters) <= names
    grouped = [p for group in param_groups(mixer, 0.01, 0.05) for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in mixer.parameters()}
    assert len(grouped) == len(list(mixer.parameters()))


@pytest.mark.parametrize("name", OPTIONS)
def test_trains_as_the_layer_of_a_block(name):
    block = MRConvBlock(3, 16)
    block.layer = build(name, dtype=torch.float32)
    u, lengths = torch.randn(2, 16, 3), torch.tensor([16, 9])
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = (block(u, lengths) - u.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert name != "s4" or "d_state=4" in repr(block)


@pytest.mark.parametrize("name", OPTIONS)
def test_compiles_without_graph_breaks(name):
    torch._dynamo.reset()
    mixer, u = build(name), torch.randn(2, 16, 3, **DOUBLE)
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    assert relative(compiled(u, gelu=True), mixer(u, gelu=True)) < 1e-12


CACHING = sorted({*OPTIONS, "mega", "mega-chunk"} - {"s5"})


@pytest.mark.parametrize(
    ("name", "bidirectional"), [(n, b) for n in CACHING for b in (False, True) if not b or n != "multiresconv"]
)
def test_frozen_kernels_equal_computed_ones(name, bidirectional):
    options = {"bidirectional": True} if bidirectional else {}
    mixer = mixer_class(name)(3, 16, **(OPTIONS.get(name, {}) | DOUBLE | options))
    u = torch.randn(2, 23, 3, **DOUBLE)
    expected = {n: mixer.eval()(u[:, :n]).detach() for n in (1, 11, 16, 23)}
    cache = next(module for module in freeze(mixer).modules() if isinstance(module, KernelCache))
    lookup, computed = cache.cached_kernel, []
    cache.cached_kernel = lambda lead, behind, f: lookup(lead, behind, lambda: computed.append(behind) or f())
    with torch.no_grad():
        for n, y in expected.items():
            assert relative(mixer(u[:, :n]), y) < 1e-11
        assert [n for n in computed if n <= 16] == []
        assert "_kernel" not in str(mixer.state_dict().keys())
        mixer.train()(u[:, :11])
        mixer.eval().load_state_dict({key: value * 0.9 for key, value in mixer.state_dict().items()})
        recomputed = mixer(u[:, :11])
        assert computed.count(11) == 2
    assert relative(recomputed, mixer(u[:, :11]).detach()) < 1e-12
    assert relative(recomputed, expected[11]) > 1e-3


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", CACHING)
def test_a_training_step_discards_frozen_kernels(name, mode):
    mixer = freeze(mixer_class(name)(3, 16, **(OPTIONS.get(name, {}) | DOUBLE)))
    u = torch.randn(2, 16, 3, **DOUBLE)
    mixer.train(mode)(u).square().mean().backward()
    with torch.no_grad():
        for x in mixer.parameters():
            x -= 0.5 * x.grad
        after = mixer.eval()(u)
    assert relative(after, mixer(u).detach()) < 1e-12


@pytest.mark.parametrize("name", ["s4", "s5"])
def test_streaming_under_autocast_equals_forward(name):
    mixer, u = mixer_class(name)(8, 16, d_state=8).eval(), torch.randn(2, 9, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = mixer.stream(u, mixer.initial_state(2))
        assert relative(y, mixer(u)) < 1e-5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("s4", {"init": "lin"}, "s4 has no option 'init'"),
        ("liquid-s4", {"discretization": "zoh"}, "liquid-s4 has no option 'discretization'"),
        ("s4d", {"d_model": 3}, "s4d has no option 'd_model'"),
        ("s4d", {"device": "cpu"}, "s4d has no option 'device'"),
        ("mrhyena", {"kernelsize": 3}, "mrhyena has no option 'kernelsize'; did you mean 'kernel_size'?"),
        ("mrconv-attention", {"chunks": 3}, "mrconv-attention has no option 'chunks'; did you mean 'chunk'?"),
        ("mega-chunk", {"options": 1}, "mega-chunk has no option 'options'"),
        ("ckconv", {"omega": 0}, "omega must be a positive number; got 0"),
        ("multiresconv", {"kernel_size": 2.5}, "kernel_size must be an integer of at least 1; got 2.5"),
        ("sgconv", {"init_scale": 1.5}, "init_scale must be an integer of at least 0; got 1.5"),
        ("sgconv", {"decay": 0}, "decay must be a positive number or a pair"),
        ("longconv", {"smooth": 1.5}, "smooth must be an integer of at least 0; got 1.5"),
    ],
)
def test_errors_name_the_option(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MRConvBlock(4, 16, mixer=name, mixer_options=options)


def test_a_pair_of_decays_survives_saving(tmp_path):
    options = {"decay": (1.0, 2.0), "kernel_size": 4}
    model = SequenceClassifier(
        d_model=4, depth=1, l_max=16, n_classes=2, d_input=1, mixer="sgconv", mixer_options=options
    )
    model.save_pretrained(tmp_path)
    again = SequenceClassifier.from_pretrained(tmp_path)
    x = torch.randn(2, 16, 1)
    assert torch.equal(again(x), model.eval()(x))
