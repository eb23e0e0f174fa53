"""timm creates, merges, trains and validates our image models, and reads their features."""

import random

import numpy as np
import pytest
import torch

timm = pytest.importorskip("timm", reason="timm needs a separate environment: make test-timm")

from timm.data import Mixup, create_dataset, create_loader, create_transform, resolve_data_config  # noqa: E402
from timm.loss import SoftTargetCrossEntropy  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import create_scheduler_v2  # noqa: E402
from timm.utils import ModelEmaV3, accuracy, reparameterize_model  # noqa: E402

from mrconv import MRConv  # noqa: E402
from mrconv.bench import image_models as bench  # noqa: E402
from mrconv.bench import shapes  # noqa: E402
from mrconv.vision import variants  # noqa: E402

from ..conftest import randomise, relative  # noqa: E402

TINY = {"img_size": 32, "patch_size": 2, "depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16), "kernel_sizes": (16, 8, 4, 2)}
NAMES = [name for name in variants() if name.startswith("mrconvnext")]


def create(name="mrconvnext_tiny_fourier_sparse", **options):
    return timm.create_model(name, **(TINY | options))


def test_every_model_is_listed():
    assert set(timm.list_models("mrconvnext*")) == set(NAMES)


@pytest.mark.parametrize("name", ["mrconvnext_tiny_fourier_sparse", "mrconvnext_base_fourier"])
def test_a_model_is_created_by_name(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10, drop_path_rate=0.2)
    assert model.num_classes == 10
    assert model.config.drop_path == 0.2
    assert model.num_features == model.config.dims[-1]
    assert model.default_cfg["input_size"] == (3, 224, 224)
    assert resolve_data_config(model=model)["crop_pct"] == 0.875


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_merging_by_timm_changes_nothing(name):
    model = randomise(create(name, layer_scale=1.0)).eval()
    x = torch.randn(2, 3, 32, 32)
    merged = reparameterize_model(model)
    assert all(m.merged for m in merged.modules() if isinstance(m, MRConv))
    assert relative(merged(x), model(x)) < 1e-4


def test_features_only():
    model = create(features_only=True, out_indices=(1, 3))
    assert model.feature_info.channels() == [8, 16]
    assert model.feature_info.reduction() == [4, 16]
    shapes = [tuple(y.shape) for y in model(torch.randn(2, 3, 32, 32))]
    assert shapes == [(2, 8, 8, 8), (2, 16, 2, 2)]


def test_a_new_head_and_no_head():
    model = create(num_classes=0)
    x = torch.randn(2, 3, 32, 32)
    assert model(x).shape == (2, 16)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    assert model.get_classifier().out_features == 7
    with pytest.raises(ValueError, match="global_pool must be 'avg' or ''; got 'max'"):
        create(global_pool="max")


def test_no_pooling_returns_the_normalised_feature_map():
    model, x = create(num_classes=0, global_pool="").eval(), torch.randn(2, 3, 32, 32)
    y = model(x)
    assert y.shape == (2, 16, 2, 2)
    assert relative(y, model.forward_intermediates(x, 1, norm=True, intermediates_only=True)[0]) < 1e-6
    model.reset_classifier(5, "avg")
    assert model(x).shape == (2, 5)
    with pytest.raises(ValueError, match="n_classes must be 0; got 5"):
        model.reset_classifier(5, "")


def test_timms_training_and_validation_run(tmp_path):
    """The steps of timm's train.py and validate.py, on images in folders."""
    from PIL import Image

    random.seed(0)
    np.random.seed(0)
    for split in ("train", "validation"):
        for colour in ("red", "blue"):
            (tmp_path / split / colour).mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (36, 40), colour).save(tmp_path / split / colour / f"{i}.png")
    model = create("mrconvnext_tiny_fourier", num_classes=2, drop_path_rate=0.1)
    config = resolve_data_config({"img_size": 32}, model=model)
    shared = {key: config[key] for key in ("mean", "std", "interpolation")}
    loaders = {
        split: create_loader(
            create_dataset("", root=str(tmp_path), split=split, is_training=split == "train"),
            input_size=(3, 32, 32), batch_size=8, is_training=split == "train", use_prefetcher=False,
            num_workers=0, device=torch.device("cpu"), **shared,
            **({"re_prob": 0.25} if split == "train" else {}),
        )
        for split in ("train", "validation")
    }  # fmt: skip
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=10, warmup_epochs=1)
    average = ModelEmaV3(model, decay=0.5)
    mixup, loss = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=2), SoftTargetCrossEntropy()
    for epoch in range(epochs):
        model.train()
        for x, y in loaders["train"]:
            optimizer.zero_grad()
            loss(*(model(each) if i == 0 else each for i, each in enumerate(mixup(x, y)))).backward()
            optimizer.step()
            average.update(model)
        scheduler.step(epoch + 1)
    model.load_state_dict(average.module.state_dict())
    merged = reparameterize_model(model.eval())
    with torch.no_grad():
        right = [accuracy(merged(x), y)[0].item() for x, y in loaders["validation"]]
    assert right == [100.0, 100.0]
    assert create_transform(**(config | {"input_size": (3, 32, 32)}))(Image.new("RGB", (40, 40))).shape == (3, 32, 32)


def test_the_benchmark_finds_timms_models():
    models = bench.models(shapes.VisionShape("T", "tiny"), "inference", bench.Options())
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        for name in ("timm ConvNeXt", "timm Swin"):
            assert models[name](x).shape == (1, 1000)
    counts = [sum(p.numel() for p in models[name].parameters()) for name in ("ConvNeXt", "timm ConvNeXt")]
    assert counts == [28_589_128, 28_589_128]
