"""The layer under torch.compile, autocast, copies, checkpoints, other dtypes and devices."""

import copy
import pickle
import shutil

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mrconv import MRConv, MRConvBlock, SequenceClassifier, reparameterize

from .conftest import random_gradient, randomise, relative, slow_except, training_step

KINDS = ["dense", "dilated", "fourier", "sparse", "fourier+sparse"]


def build(kind="fourier", **options):
    return randomise(MRConv(4, 32, **({"kernel": kind, "kernel_size": 4, "bidirectional": True} | options)))


@pytest.mark.parametrize(
    ("kind", "backend"),
    slow_except(
        [*((kind, "aot_eager") for kind in KINDS), *((kind, "inductor") for kind in ("fourier", "dilated"))],
        ("fourier", "aot_eager"),
    ),
)
def test_compiles_as_one_graph_in_training_eval_and_merged(kind, backend):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()
    eager = build(kind)
    tested = copy.deepcopy(eager)
    compiled = torch.compile(tested, fullgraph=True, backend=backend)
    u, lengths = torch.randn(3, 32, 4), torch.tensor([32, 5, 9])
    for kwargs in ({}, {"lengths": lengths}):
        y, du, grads = training_step(eager, u, **kwargs)
        tested.train()
        tested.zero_grad()
        x = u.clone().requires_grad_()
        z = compiled(x, **kwargs)
        z.backward(random_gradient(z))
        assert relative(z, y) < 1e-5
        assert relative(x.grad, du) < 1e-4
        largest = max(g.norm() for g in grads.values())
        for name, p in tested.named_parameters():
            assert (p.grad - grads[name]).norm() < 1e-4 * largest, name
    for (name, a), b in zip(eager.named_buffers(), tested.buffers(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name
    eager.eval()
    tested.eval()
    merged = torch.compile(copy.deepcopy(eager).reparameterize(), fullgraph=True, backend="aot_eager")
    for kwargs in ({}, {"lengths": lengths}):
        assert relative(compiled(u, **kwargs), eager(u, **kwargs)) < 1e-5
        assert relative(merged(u, **kwargs), eager(u, **kwargs)) < 1e-5


@pytest.mark.slow
def test_a_model_compiles_as_one_graph():
    torch._dynamo.reset()
    model = SequenceClassifier(n_classes=3, vocab_size=5, d_model=8, depth=2, l_max=32, dropout=0.1, mask_padding=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens, lengths = torch.randint(5, (4, 32)), torch.tensor([32, 3, 7, 20])
    compiled(tokens, lengths=lengths).sum().backward()
    model.eval()
    assert relative(compiled(tokens, lengths=lengths), model(tokens, lengths=lengths)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel_size", [1, 4])
def test_autocast_equals_an_input_in_its_dtype(kind, kernel_size):
    layer = build(kind, kernel_size=kernel_size)
    u = torch.randn(3, 32, 4)
    exact = training_step(copy.deepcopy(layer), u)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, du, grads = training_step(copy.deepcopy(layer), u)
        merged = reparameterize(copy.deepcopy(layer))(u)
        padded = layer(u, torch.tensor([32, 5, 0]))
        assert layer(u.double()).dtype == torch.float64
    half, dhalf, half_grads = training_step(copy.deepcopy(layer), u.bfloat16())
    assert y.dtype == half.dtype == merged.dtype == padded.dtype == torch.bfloat16
    assert du.dtype == torch.float32
    for a, b in zip((y, du, *grads.values()), (half, dhalf, *half_grads.values()), strict=True):
        assert relative(a.double(), b.double()) < 2e-2
    assert relative(half.float(), exact) < 2e-2


@pytest.mark.parametrize(("kind", "kernel_size"), [("fourier", 1), ("fourier", 2), ("dilated", 4)])
def test_a_block_compiles_as_one_graph_under_autocast(kind, kernel_size):
    torch._dynamo.reset()
    block, u = MRConvBlock(4, 32, kernel=kind, kernel_size=kernel_size), torch.randn(3, 32, 4)
    eager = copy.deepcopy(block)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.compile(block, fullgraph=True, backend="aot_eager")(u)
        assert relative(y, eager(u)) < 1e-6
    assert y.dtype == torch.float32  # as the residual
    assert relative(y, copy.deepcopy(eager)(u)) > 1e-4
    y.sum().backward()


def test_a_model_trains_under_bf16_autocast():
    model = SequenceClassifier(n_classes=3, d_input=2, d_model=8, depth=2, l_max=50)
    x = torch.randn(4, 50, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_layers_run_train_and_merge(kind, dtype):
    layer = build(kind)
    u = torch.randn(3, 32, 4)
    low = copy.deepcopy(layer).to(dtype)
    y, du, _ = training_step(low, u.to(dtype))
    assert y.dtype == du.dtype == dtype
    assert relative(y.float(), training_step(copy.deepcopy(layer), u)[0]) < 5e-2
    low = copy.deepcopy(layer).to(dtype).eval()
    expected = low(u.to(dtype)).float()
    assert relative(low.reparameterize()(u.to(dtype)).float(), expected) < 5e-2
    assert low.weight.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device(kind):
    u = torch.randn(2, 40, 4, device="meta")
    assert build(kind).to("meta")(u).shape == (2, 40, 4)
    assert build(kind).to("meta").reparameterize()(u).shape == (2, 40, 4)
    with torch.device("meta"):
        layer = MRConv(4, 32, kernel=kind, kernel_size=4, combine="concat", decay=2.0)
    assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
    source = MRConv(4, 32, kernel=kind, kernel_size=4, combine="concat", decay=2.0)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    u = torch.randn(2, 40, 4)
    assert torch.equal(layer(u), source(u))
    again = layer.to("meta").to_empty(device="cpu")
    again.reset_parameters()
    assert all(t.isfinite().all() for t in again.state_dict().values())
    assert again(u).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("merged", [False, True])
def test_copies_pickles_and_state_dicts_keep_the_layer(kind, merged):
    layer = build(kind).eval()
    if merged:
        layer.reparameterize()
    u = torch.randn(2, 40, 4)
    loaded = build(kind, merged=merged).eval()
    loaded.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(u), layer(u))


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_uses_the_parameters_given(kind):
    layer = build(kind).eval()
    u = torch.randn(2, 40, 4)
    other = randomise(build(kind)).eval()
    state = dict(other.named_parameters()) | dict(other.named_buffers())
    assert torch.equal(torch.func.functional_call(layer, state, (u,)), other(u))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    layer = build()
    u = torch.randn(2, 40, 4)
    _, du, grads = training_step(copy.deepcopy(layer), u)
    x = u.clone().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=use_reentrant)
    y.backward(random_gradient(y))
    assert torch.equal(x.grad, du)
    assert all(torch.equal(p.grad, grads[name]) for name, p in layer.named_parameters())


def test_only_the_output_dtype_follows_the_input():
    layer = build().double()
    assert layer(torch.randn(2, 40, 4)).dtype == torch.float32
    assert layer(torch.randn(2, 40, 4).double()).dtype == torch.float64
