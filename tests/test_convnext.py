"""MRConvNeXt: the paper's sizes, merged == branches, features, other image sizes, saving, compiling."""

import pytest
import torch

from mrconv import MRConv, MRConvNeXt, reparameterize
from mrconv.vision import flattening
from mrconv.vision.convnext import KERNELS, SIZES, variants

from .conftest import randomise, relative, slow_except

SMALL = {"image_size": 48, "depths": (1, 2, 1), "dims": (6, 8, 10), "kernel_sizes": (16, 9, 4), "n_classes": 5}
NAMES = [name for name in variants() if name.startswith("mrconvnext")]


def build(dtype=torch.float64, **options):
    """Return a small model with random statistics, whose layer scale is large enough to test the blocks."""
    return randomise(MRConvNeXt(**(SMALL | {"layer_scale": 1.0} | options), dtype=dtype)).eval()


def images(*size, dtype=torch.float64):
    H, W = size or (48, 48)
    return torch.randn(2, 3, H, W, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mrconvnext_tiny_fourier", 30_365_224),
        ("mrconvnext_small_fourier", 53_485_864),
        ("mrconvnext_base_fourier", 92_941_032),
        ("mrconvnext_tiny_fourier_sparse", 32_335_144),
        ("mrconvnext_small_fourier_sparse", 57_114_664),
        ("mrconvnext_base_fourier_sparse", 97_779_432),
        ("convnext_tiny", 28_589_128),
        ("convnext_small", 50_223_688),
        ("convnext_base", 88_591_464),
    ],
)
def test_parameter_counts_are_those_published(name, count):
    model = MRConvNeXt.named(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count


def test_resolutions_are_the_papers():
    model = MRConvNeXt.named("mrconvnext_tiny_fourier", device="meta")
    layers = [stage.blocks[0].mixer.layer for stage in model.stages]
    assert [layer.l_max for layer in layers] == [3136, 784, 196, 49]
    assert [layer.resolutions for layer in layers] == [5, 5, 4, 2]
    assert all(layer.bidirectional for layer in layers)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_merged_equals_the_papers_branches_with_random_statistics(name):
    options = variants()[name] | {"image_size": 64, "kernel_sizes": (49, 16, 9, 2), "n_classes": 7, "layer_scale": 1.0}
    options |= {"dims": [dim // 24 for dim in options["dims"]], "depths": [min(2, n) for n in options["depths"]]}
    model = randomise(MRConvNeXt(**options, backend="reference", dtype=torch.float64)).eval()
    x = images(64, 64)
    before = model(x)
    assert relative(reparameterize(model)(x), before) < 1e-12
    assert all(m.merged for m in model.modules() if isinstance(m, MRConv))


@pytest.mark.parametrize(
    "options", [*({"kernel": k} for k in KERNELS), {"mixer": "conv"}, {"mixer": "sgconv"}], ids=str
)
def test_training_gives_every_parameter_a_gradient(options):
    model = MRConvNeXt(**SMALL, **options, layer_scale=1.0).train()
    model(images(dtype=torch.float32)).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().sum() > 0, name


def test_stochastic_depth_rises_and_drops_whole_images():
    model = MRConvNeXt(**SMALL, drop_path=0.6, layer_scale=1.0)
    rates = [block.drop_path.p for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.2, 0.4, 0.6])
    drop = model.stages[2].blocks[0].drop_path.train()
    y = drop(torch.ones(2000, 2, 2, 3))
    assert y.unique().tolist() == pytest.approx([0.0, 2.5])
    assert (y.amax((1, 2, 3)) == y.amin((1, 2, 3))).all()
    assert y.mean().item() == pytest.approx(1, abs=0.1)


@torch.no_grad()
def test_features_are_the_feature_mapsof_all_stages():
    model = build()
    x = images()
    maps = model.features(x)
    assert [tuple(y.shape[1:]) for y in maps] == [(6, 12, 12), (8, 6, 6), (10, 3, 3)]
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16]
    last, some = model.forward_intermediates(x, indices=[0, 2])
    assert torch.equal(some[0], maps[0])
    assert torch.equal(last, maps[2])
    early, some = model.forward_intermediates(x, indices=[-2], stop_early=True)
    assert torch.equal(early, maps[1])
    assert torch.equal(some[0], maps[1])
    assert torch.equal(model.forward_head(model.forward_features(x)), model(x))
    assert model.forward_head(last, pre_logits=True).shape == (2, 10)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    model.reset_classifier(0)
    assert model(x).shape == (2, 10)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("merged", [False, True])
@torch.no_grad()
def test_a_saved_model_comes_back_the_same(tmp_path, kernel, merged):
    model = build(kernel=kernel, seed=None)
    if merged:
        reparameterize(model)
    model.save_pretrained(tmp_path)
    loaded = MRConvNeXt.from_pretrained(tmp_path)
    x = images()
    assert torch.equal(loaded(x), model(x))
    assert loaded.config.merged is merged
    twin = MRConvNeXt(**vars(loaded.config), dtype=torch.float64).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("merged", slow_except([False, True], True))
@torch.no_grad()
def test_compiles_without_a_break(merged):
    model = build(torch.float32, kernel="fourier+sparse")
    if merged:
        reparameterize(model)
    x = images(dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative(compiled(x), model(x)) < 1e-5


@pytest.mark.parametrize("grid", [(3, 4), (5, 7)])
def test_a_kernel_is_an_image_of_shifts(grid):
    H, W = grid
    kernel = torch.randn(2, 2 * H * W)
    image = flattening.lags_to_shifts(kernel, grid)
    assert torch.equal(flattening.shifts_to_lags(image, grid), kernel)
    assert torch.equal(image[:, H + 1, W // 2 - 1], kernel[:, H * W + W - 1])  # a row down, a column to the left


@pytest.mark.parametrize("new", [(6, 9), (8, 5), (4, 6)])
@pytest.mark.parametrize("shift", [(0, 0), (1, -2), (-2, 1)])
def test_at_rate_1_a_tap_keeps_its_shift(new, shift):
    grid = (6, 7)
    kernel = torch.zeros(1, 2 * 42)
    kernel[0, 42 + shift[0] * 7 + shift[1]] = 1
    resampled = flattening.resample_kernel(kernel, grid, new)
    assert resampled.nonzero()[:, 1].tolist() == [new[0] * new[1] + shift[0] * new[1] + shift[1]]


@pytest.mark.parametrize("new", [(16, 16), (12, 12), (7, 11)])
def test_resampling_gives_the_same_function_of_shifts_on_another_grid(new):
    def blob(grid):
        (rows, columns), rate = flattening.shift_ranges(grid), (grid[0] / 8, grid[1] / 8)
        y, x = torch.meshgrid(torch.tensor(rows) / rate[0], torch.tensor(columns) / rate[1], indexing="ij")
        bump = torch.exp(-((y - 1) ** 2) / 8 - (x + 0.5) ** 2 / 4.5)[None].double()
        return flattening.shifts_to_lags(bump, grid) / (rate[0] * rate[1])

    resampled = flattening.resample_kernel(blob((8, 8)), (8, 8), new, (new[0] / 8, new[1] / 8))
    assert relative(resampled, blob(new)) < 0.1
    assert resampled.sum().item() == pytest.approx(blob((8, 8)).sum().item(), rel=0.02)


@torch.no_grad()
def test_images_of_another_size_use_resampled_kernels():
    model = build()
    x = images(64, 80)
    assert relative(model.resized((64, 80))(x), model(x)) < 1e-12
    assert relative(model.resized((64, 80), rate=1)(x), model(x, rate=1)) < 1e-12
    assert relative(model(x, rate=1), model(x)) > 1e-4
    assert relative(model.resized(48)(x[..., :48, :48]), model(x[..., :48, :48])) < 1e-12


@pytest.mark.parametrize("kernel", ["fourier+sparse", "dilated"])
@torch.no_grad()
def test_tap_kernels_run_on_images_of_another_size_at_the_same_scale(kernel, tmp_path):
    model, x = build(kernel=kernel), images(64, 80)
    expected = model(x, rate=1)
    new = model.resized((64, 80), rate=1)
    assert relative(new(x), expected) < 1e-12
    assert relative(reparameterize(model)(x, rate=1), expected) < 1e-12
    new.save_pretrained(tmp_path)
    assert torch.equal(MRConvNeXt.from_pretrained(tmp_path)(x), new(x))


def test_errors_name_the_option_or_input():
    with pytest.raises(ValueError, match=r"unknown model 'mrconvnext_tiny'; the models are mrconvnext_tiny_fourier"):
        MRConvNeXt.named("mrconvnext_tiny")
    with pytest.raises(TypeError, match=r"VisionConfig has no option 'kernel_size'; did you mean 'kernel_sizes'\?"):
        MRConvNeXt(kernel_size=3)
    with pytest.raises(ValueError, match=r"need a value per stage; got \[3, 3, 9, 3\], \[8, 8\]"):
        MRConvNeXt(dims=[8, 8])
    with pytest.raises(ValueError, match=r"images must be at least 16x16 for 3 stages; got \(8, 8\)"):
        MRConvNeXt(**(SMALL | {"image_size": 8}))
    with pytest.raises(ValueError, match=r"drop_path must be a number in \[0, 1\); got 1"):
        MRConvNeXt(**SMALL, drop_path=1.0)
    model = build(kernel="dilated")
    with pytest.raises(ValueError, match=r"rate must be a positive number; got 0"):
        model(images(), rate=0)
    with pytest.raises(ValueError, match=r"images must be real, of shape \(batch, 3, height, width\)"):
        model(torch.zeros(1, 1, 48, 48))
    with pytest.raises(ValueError, match=r"kernel='dilated' has taps at fixed positions and cannot be resampled"):
        model(images(64, 64))
    with pytest.raises(ValueError, match=r"in training mode images must have the model's image_size"):
        model.train()(images(64, 64))
    with pytest.raises(ValueError, match=r"a merged model cannot be resampled"):
        reparameterize(build())(images(64, 64))
    with pytest.raises(ValueError, match=r"images have no sampling rate"):
        reparameterize(build(), rate=0.5)(images())
    with pytest.raises(ValueError, match=r"SGConv runs on feature maps of 12x12 only"):
        build(mixer="sgconv")(images(64, 64))


def test_every_size_has_every_kernel():
    assert len(NAMES) == len(SIZES) * len(KERNELS)
