"""The plain torch forms of the ops against the library's reference."""

import pytest
import torch

from mrconv.export import plain_ops
from mrconv.ops import conv_reference

from ..conftest import relative

LAGS = {
    "direct": range(9),
    "direct, bidirectional": range(-4, 5),
    "fft": range(300),
    "fft, bidirectional": range(-300, 300),
    "longer than the input": range(-2000, 3000),
    "one": range(1),
    "few taps nearby": (0, 3, 17),
    "shifts": (-290, -2, 0, 5, 400),
    "ahead only": (-300, -7),
    "far only": (270, 300),
    "many taps": (*range(0, 500, 3), 700),
}


@pytest.mark.parametrize("name", LAGS)
@pytest.mark.parametrize("length", [1, 63, 290])
@pytest.mark.parametrize("matmul_dft", [False, True])
def test_every_form_equals_the_reference(name, length, matmul_dft):
    lags = LAGS[name]
    u = torch.randn(2, 3, length, dtype=torch.float64)
    values, bias = torch.randn(3, len(lags), dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    for given, gelu in ((bias, True), (None, False)):
        y = plain_ops.convolve(u, values, lags, given, gelu, longest=290, matmul_dft=matmul_dft)
        assert relative(y, conv_reference(u, values, lags, given, gelu)) < 1e-12


def test_the_cases_cover_every_form(monkeypatch):
    forms, conv1d, fft_conv = [], torch.nn.functional.conv1d, plain_ops._fft_conv
    monkeypatch.setattr(plain_ops.F, "conv1d", lambda *a, **k: forms.append("direct") or conv1d(*a, **k))
    monkeypatch.setattr(plain_ops, "_fft_conv", lambda *a: forms.append("fft") or fft_conv(*a))
    u = torch.randn(1, 1, 290)
    for lags in LAGS.values():
        before = len(forms)
        plain_ops.convolve(u, torch.randn(1, len(lags)), lags, None, False, 290, False)
        forms += [] if len(forms) > before else ["shifts"]
    assert forms == ["direct"] * 2 + ["fft"] * 3 + ["direct"] * 2 + ["shifts"] * 3 + ["fft"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    u, values = torch.randn(2, 3, 400), torch.randn(3, 300) / 17
    y = plain_ops.convolve(u.to(dtype), values.to(dtype), range(300), None, False, 400, True)
    assert y.dtype == dtype
    expected = conv_reference(u.to(dtype).float(), values.to(dtype).float(), range(300))
    assert torch.equal(y, expected.to(dtype)) or relative(y.float(), expected) < torch.finfo(dtype).eps
