"""timm's `reparameterize_model` merges our models."""

import pytest
import torch

timm = pytest.importorskip("timm", reason="timm needs a separate environment: make test-timm")

from mrconv import MRConv, SequenceClassifier  # noqa: E402

from ..conftest import randomise, relative  # noqa: E402


@pytest.mark.parametrize("inplace", [False, True])
@torch.no_grad()
def test_timms_reparameterize_model_merges_every_layer(inplace):
    model = randomise(SequenceClassifier(n_classes=3, d_input=2, d_model=8, depth=3, l_max=64, kernel_size=2)).eval()
    x = torch.randn(4, 64, 2)
    before = model(x)
    merged = timm.utils.reparameterize_model(model, inplace=inplace)
    assert (merged is model) is inplace
    assert all(m.merged for m in merged.modules() if isinstance(m, MRConv))
    assert relative(merged(x), before) < 1e-5
