"""Training, merging, compilation, determinism and streaming on a GPU."""

import copy
import io
import itertools

import pytest
import torch

from mrconv import LanguageModel, MRConv, MRConvNeXt, SequenceClassifier, reparameterize
from mrconv.bench.launches import launches, layer_step
from mrconv.bench.shapes import LAYERS

from .conftest import randomise, relative, training_step
from .streaming.helpers import CHUNKS, L_MAX, build, streamed

LAUNCHES = {  # at most, of one layer: by algorithm, in a training step and merged, with or without lengths
    "training": {"toeplitz": 40, "taps": 40, "moving_sum": 40, "moving_modes": 40, "spectral": 100},
    "merged": {"moving_sum": 6, "toeplitz": 6, "taps": 6, "fft": 8},
}
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = ["dense", "dilated", "fourier", "sparse", "fourier+sparse"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_gpu_trains_and_merges_like_the_reference_on_the_cpu(kind, masked):
    exact = randomise(
        MRConv(8, 1000, kernel=kind, kernel_size=4, bidirectional=True, backend="reference", dtype=torch.float64)
    )
    layer = copy.deepcopy(exact).cuda()
    layer.backend = "auto"
    u = torch.randn(4, 1000, 8, dtype=torch.float64)
    lengths = torch.tensor([1000, 3, 500, 999]) if masked else None
    y, du, grads = training_step(exact, u, lengths=lengths)
    z, dz, gpu_grads = training_step(layer, u.cuda(), lengths=lengths)
    largest = max(g.norm() for g in grads.values())
    assert relative(z.cpu(), y) < 1e-9
    assert (dz.cpu() - du).norm() < 1e-9 * largest
    for name, g in grads.items():
        assert (gpu_grads[name].cpu() - g).norm() < 1e-9 * largest, name
    merged = layer.eval().float().reparameterize()
    assert relative(merged(u.cuda().float(), lengths=lengths).double().cpu(), exact.eval()(u, lengths=lengths)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("L", [1000, 1021, 2048])
def test_half_precision_and_autocast(dtype, L):
    model = SequenceClassifier(n_classes=3, d_input=2, d_model=16, depth=2, l_max=2048, kernel_size=2).cuda()
    x = torch.randn(4, L, 2, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x).float().square().sum()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    low = reparameterize(copy.deepcopy(model)).to(dtype)
    assert relative(low(x.to(dtype)).float(), model.eval()(x)) < 5e-2


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_by_inductor(kind):
    torch._dynamo.reset()
    layer = randomise(MRConv(8, 256, kernel=kind, kernel_size=4)).cuda()
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    u = torch.randn(4, 256, 8, device="cuda")
    assert relative(compiled(u), layer(u)) < 1e-5
    compiled(u).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel_size", [1, 4])
def test_deterministic_mode_is_honoured(kind, kernel_size, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = SequenceClassifier(
        n_classes=3, d_input=2, d_model=16, depth=2, l_max=256, kernel=kind, kernel_size=kernel_size
    ).cuda()
    x = torch.randn(4, 200, 2, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for lengths in (None, torch.tensor([200, 5, 100, 7])):
            for _ in range(2):
                other = copy.deepcopy(model)
                other(x, lengths=lengths).square().sum().backward()
                results.append([p.grad for p in other.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    for first, again in (results[:2], results[2:]):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_a_merged_vision_model_on_the_gpu_equals_its_branches_on_the_cpu(dtype, limit, compiled):
    options = {"image_size": 96, "depths": (1, 1, 1), "dims": (16, 32, 64), "kernel_sizes": (64, 36, 9), "n_classes": 5}
    exact = randomise(MRConvNeXt(**options, layer_scale=1.0, backend="reference", dtype=torch.float64)).eval()
    x = torch.randn(6, 3, 96, 96, dtype=torch.float64)
    model = reparameterize(copy.deepcopy(exact)).to("cuda", dtype)
    run = torch.compile(model) if compiled else model
    assert relative(run(x.to("cuda", dtype)).double().cpu(), exact(x)) < limit


def test_a_vision_model_trains_under_autocast():
    model = MRConvNeXt(image_size=32, patch_size=2, depths=[1, 1], dims=[16, 32], kernel_sizes=[32, 16], n_classes=3)
    x = torch.randn(4, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model.cuda()(x).float().square().sum()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", [*KINDS, "fourier concat", "heads and groups"])
@torch.no_grad()
def test_steps_and_chunks_equal_the_parallel_output(name, merged, dtype, limit):
    exact = build(name, merged)
    layer, u = copy.deepcopy(exact).to("cuda", dtype), torch.randn(3, 10 * L_MAX, 4, dtype=torch.float64)
    expected, x = exact(u), u.to("cuda", dtype)
    for chunks in ("steps", "31", "mixed"):
        assert relative(streamed(layer, x, CHUNKS[chunks])[0].double().cpu(), expected) < limit
    first, state = layer.prefill(x[:, :100])
    saved = io.BytesIO()
    torch.save(state.state_dict(), saved)
    saved.seek(0)
    state = type(state).from_state_dict(torch.load(saved, weights_only=True))
    state = state.reset(torch.tensor([False, True, False], device="cuda"))
    rest, _ = streamed(layer, x[:, 100:], (1, 29), state)
    assert relative(torch.cat([first, rest], 1)[::2].double().cpu(), expected[::2]) < limit
    assert relative(rest[1].double().cpu(), exact(u[1:2, 100:])[0]) < limit


@torch.no_grad()
def test_a_language_model_generates_the_same_by_steps_as_in_parallel():
    model = randomise(LanguageModel(vocab_size=20, d_model=16, depth=2, l_max=64, kernel_size=4)).cuda().eval()
    prompt = torch.randint(20, (2, 10), device="cuda")
    text = model.generate(prompt, 100, temperature=0)
    assert torch.equal(model(torch.cat([prompt, text], 1))[:, 9:-1].argmax(-1), text)


@pytest.mark.parametrize("name", ["ListOps l0=2", "Text", "Image dilated", "Pathfinder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_launches_few_kernels(name, dtype):
    (shape,) = (shape for shape in LAYERS if shape.name == name)
    for merged, masked in itertools.product((False, True), (False, True)):
        algorithm, step = layer_step(shape, dtype, masked, merged)
        kernels, _ = launches(step)
        limit = LAUNCHES["merged" if merged else "training"][algorithm]
        assert kernels.total() <= limit, (algorithm, merged, masked, kernels)
