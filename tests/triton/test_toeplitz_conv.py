"""Convolution by Toeplitz products == the float64 FFT convolution, to the accuracy of the precision."""

import pytest
import torch
from torch.nn import functional as F

from mrconv.ops import fft_conv_reference, toeplitz_conv

from ..conftest import gradients, relative
from .helpers import DEVICE, channels_last, with_nan_padding, zero_padding

pytest.importorskip("triton")
from mrconv.ops.toeplitz_conv import op as toeplitz_op
from mrconv.ops.toeplitz_conv import triton_kernels as toeplitz_triton

TOLERANCE = {  # the interpreter truncates
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 5e-3 if DEVICE == "cuda" else 1e-2,
}
SHAPES = [  # B, C, L, K, lead
    (1, 3, 1, 1, 0),
    (3, 5, 2, 7, 4),
    (2, 7, 63, 63, 0),
    (3, 2, 130, 400, 190),
    (2, 3, 300, 17, 16),
    (2, 3, 257, 300, 1),
    (50, 1, 150, 150, 0),
    (70, 1, 150, 299, 149),
    (20, 1, 257, 257, 0),
]


def reference(u, kernel, lead=0, bias=None, gelu=False):
    y = fft_conv_reference(u.double(), kernel.double(), lead)
    y = y if bias is None else y + bias.double()[:, None]
    return F.gelu(y) if gelu else y


def assert_close(u, kernel, *args):
    y = toeplitz_conv(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in (u, kernel, *args)))
    assert y.dtype == u.dtype
    assert y.stride() == torch.empty_like(u).stride()
    assert relative(y.double().cpu(), reference(u, kernel, *args)) < TOLERANCE[u.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("order", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize(("B", "C", "L", "K", "lead"), SHAPES)
def test_values(B, C, L, K, lead, order, dtype):
    assert_close(order(torch.randn(B, C, L).to(dtype)), torch.randn(C, K), lead)


@pytest.mark.parametrize(("tile", "copies"), [((64, 64, 32, 4, 2), 4), ((64, 256, 64, 8, 2), 8)])
@pytest.mark.parametrize(("B", "C", "L", "K", "lead"), SHAPES[3::2])
def test_values_with_other_tiles(monkeypatch, tile, copies, B, C, L, K, lead):
    monkeypatch.setattr(toeplitz_triton, "TILE", toeplitz_triton.Tile(*tile))
    monkeypatch.setattr(toeplitz_triton, "COPIES", copies)
    assert_close(channels_last(torch.randn(B, C, L).half()), torch.randn(C, K), lead)


def test_values_of_a_long_sequence():
    L = 2053
    assert_close(channels_last(torch.randn(2, 1, L).half()), torch.randn(1, 2 * L - 1), L - 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("order", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("B", "C", "L", "K", "lead"), SHAPES[1:4])
def test_bias_gelu_and_gradients(B, C, L, K, lead, gelu, order, dtype):
    inputs = order(torch.randn(B, C, L).to(dtype)), torch.randn(C, K), torch.randn(C)
    y, grads = gradients(lambda u, k, b: toeplitz_conv(u, k, lead, b, gelu), *(x.to(DEVICE) for x in inputs))
    exact, exact_grads = gradients(lambda u, k, b: reference(u, k, lead, b, gelu), *(x.double() for x in inputs))
    for got, like, expected in zip((y, *grads), (inputs[0], *inputs), (exact, *exact_grads), strict=True):
        assert got.dtype == like.dtype
        size = expected.norm().clamp(min=(B * L) ** 0.5)  # the terms of the bias' gradient cancel
        assert (got.double().cpu() - expected).norm() < 2 * TOLERANCE[dtype] * size


@pytest.mark.parametrize("shape", [SHAPES[0], *SHAPES[3:8]], ids=str)
def test_bfloat16_gradients(shape):
    B, C, L, K, lead = shape
    u, kernel = channels_last(torch.randn(B, C, L)).bfloat16(), torch.randn(K, C).t()
    grad = torch.randn(B, C, 1).bfloat16().expand(B, C, L)
    here = [x.to(DEVICE).detach().requires_grad_() for x in (u, kernel)]
    got = torch.autograd.grad(toeplitz_conv(*here, lead), here, grad.to(DEVICE))
    exact = [x.double().requires_grad_() for x in (u, kernel)]
    expected = torch.autograd.grad(reference(*exact, lead), exact, grad.double())
    for value, like, reference_value in zip(got, (u, kernel), expected, strict=True):
        assert value.dtype == like.dtype
        assert relative(value.double().cpu(), reference_value) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_bfloat16_gradients_with_kernels_of_any_size(size):
    inputs = torch.randn(2, 3, 80).bfloat16(), size * torch.randn(3, 80)
    _, got = gradients(toeplitz_conv, *(x.to(DEVICE) for x in inputs))
    _, exact = gradients(reference, *(x.double() for x in inputs))
    for value, expected in zip(got, exact, strict=True):
        assert relative(value.double().cpu(), expected) < 2 * TOLERANCE[torch.bfloat16]


def test_gradients_of_kernels_too_long_for_the_tensor_cores(monkeypatch):
    monkeypatch.setattr(toeplitz_op, "LONGEST_BACKWARD", 79)
    monkeypatch.setattr(toeplitz_op, "_toeplitz_conv_backward", None)
    inputs = torch.randn(2, 3, 80).bfloat16(), torch.randn(3, 80)
    _, got = gradients(toeplitz_conv, *(x.to(DEVICE) for x in inputs))
    _, exact = gradients(reference, *(x.double() for x in inputs))
    for value, expected in zip(got, exact, strict=True):
        assert relative(value.double().cpu(), expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("order", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("L", "K", "lead"), [(1, 1, 0), (63, 80, 70), (129, 17, 0), (192, 192, 5)])
def test_lengths(L, K, lead, gelu, order, dtype):
    lengths = torch.tensor([L, 0, (L + 1) // 2], dtype=torch.int32 if gelu else torch.int64)
    u = with_nan_padding(order(torch.randn(3, 5, L).to(dtype)), lengths)
    inputs, given = (u, torch.randn(5, K), torch.randn(5)), lengths.to(DEVICE)
    y, grads = gradients(lambda u, k, b: toeplitz_conv(u, k, lead, b, gelu, given), *(x.to(DEVICE) for x in inputs))
    exact, exact_grads = gradients(
        lambda u, k, b: zero_padding(reference(zero_padding(u, lengths), k, lead, b, gelu), lengths),
        *(x.double() for x in inputs),
    )
    assert torch.equal(zero_padding(y.cpu(), lengths), y.cpu())
    assert torch.equal(zero_padding(grads[0].cpu(), lengths), grads[0].cpu())
    for got, expected in zip((y, *grads), (exact, *exact_grads), strict=True):
        size = expected.norm().clamp(min=L**0.5)
        assert (got.double().cpu() - expected).norm() < 2 * TOLERANCE[dtype] * size


def test_only_what_needs_a_gradient_gets_one():
    u, kernel = torch.randn(2, 3, 9, device=DEVICE).half(), torch.randn(3, 9, device=DEVICE, requires_grad=True)
    toeplitz_conv(u, kernel, 0, None, True).sum().backward()
    assert kernel.grad.isfinite().all()
    assert u.grad is None


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_strided_inputs(dtype):
    u = torch.randn(3, 2 * 70, 2 * 5).to(dtype)[:, ::2, 1::2].transpose(1, 2)
    assert_close(u, torch.randn(70, 5).t()[:, ::2], 3)
    assert_close(torch.randn(1, 5, 70).to(dtype).expand(4, -1, -1), torch.randn(5, 40))
    assert_close(torch.randn(2, 3, 129).to(dtype)[..., 1:], torch.randn(3, 40), 0, torch.randn(1).expand(3))


@pytest.mark.parametrize("B", [1, 3])
def test_time_contiguous_input_is_not_copied(monkeypatch, B):
    monkeypatch.setattr(toeplitz_triton, "time_contiguous_empty", None)
    assert_close(torch.randn(B, 3, 192).half(), torch.randn(3, 100), 20)
    assert_close(torch.randn(3, B, 192).half().transpose(0, 1), torch.randn(3, 100), 20)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_empty_batch(dtype):
    u, kernel = torch.zeros(0, 3, 9, device=DEVICE, dtype=dtype), torch.ones(3, 9, device=DEVICE, requires_grad=True)
    y = toeplitz_conv(u, kernel)
    assert y.shape == (0, 3, 9)
    y.sum().backward()
    assert torch.equal(kernel.grad, torch.zeros_like(kernel))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "kernel_size"), [(1e4, 1e-8), (1e-4, 1e6)])
def test_kernels_beyond_the_range_of_float16(dtype, size, kernel_size):
    u, kernel = (size * torch.randn(2, 3, 80)).to(dtype), kernel_size * torch.randn(3, 80)
    kernel[1] = 0
    assert_close(u, kernel)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_tap_shifts(dtype):
    u, kernel = torch.randn(2, 3, 140, device=DEVICE).to(dtype), torch.zeros(3, 9, device=DEVICE)
    kernel[:, 5] = 0.5
    y = toeplitz_conv(u, kernel, 2)
    exact = dtype != torch.float32 or DEVICE == "cpu"  # a GPU computes a float32 product from three of fewer bits
    assert (y[..., 3:] - 0.5 * u[..., :-3]).abs().max() <= (0 if exact else 1e-6)
    assert (y[..., :3] == 0).all()


def test_op_is_registered_correctly():
    u = channels_last(torch.randn(2, 3, 9)).to(DEVICE, torch.bfloat16).requires_grad_()
    kernel, bias = torch.randn(3, 20, device=DEVICE, requires_grad=True), torch.randn(3, device=DEVICE)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    lengths = torch.tensor([9, 4], device=DEVICE)
    for args in ((u, kernel, bias.requires_grad_(), lengths, 3, True), (u, kernel, None, None, 0, False)):
        torch.library.opcheck(torch.ops.mrconv.toeplitz_conv.default, args, test_utils=checks)
    grad, plain = torch.randn_like(u.detach()), (u.detach(), kernel.detach())
    torch.library.opcheck(torch.ops.mrconv.toeplitz_conv_backward.default, (grad, *plain, 3), test_utils=checks)


def test_errors():
    u, kernel = torch.randn(2, 3, 9, device=DEVICE), torch.randn(3, 9, device=DEVICE)
    with pytest.raises(TypeError, match=r"takes u in float32, bfloat16 or float16; got torch.float64: use fft_conv"):
        toeplitz_conv(u.double(), kernel)
    with pytest.raises(ValueError, match=r"lead must be from 0 to 8, below the kernel's length; got 9"):
        toeplitz_conv(u.half(), kernel, 9)
