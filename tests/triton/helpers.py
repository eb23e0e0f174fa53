"""Inputs and comparisons that the tests of Triton kernels share."""

import torch

from mrconv.ops import BranchWeights, Normalization

from ..conftest import gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [1, 2, 63, 130]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def channels_last(u):
    return u.transpose(1, 2).contiguous().transpose(1, 2)


def inputs(L, is_channels_last, masked, B=3, C=5):
    u = double(B, C, L) + 0.3
    if is_channels_last:
        u = channels_last(u)
    lengths = torch.tensor([L, 1, (L + 1) // 2])[:B] if masked else None
    mask = torch.arange(L) < (torch.full((B,), L) if lengths is None else lengths)[:, None]
    return u, lengths, mask[:, None]


def zero_padding(x, lengths):
    """Return x (B, C, L), zero from `lengths` on."""
    return x.masked_fill((torch.arange(x.shape[2]) >= lengths[:, None])[:, None], 0)


def with_nan_padding(u, lengths):
    """Return a copy of u (B, C, L) in the same memory format, NaN from `lengths` on."""
    return u.masked_fill((torch.arange(u.shape[2]) >= lengths[:, None])[:, None], float("nan"))


def masked_sum(f, u, kernels, weight, skip_and_beta, lengths, mask, *selection):
    """Return the output of `branch_sum` or of its reference, zero where masked."""
    mask, lengths = mask.to(u.device), None if lengths is None else lengths.to(u.device)
    skip, beta = skip_and_beta or (None, None)
    normalization = Normalization([BranchWeights(weight, None, beta)], skip, lengths)
    return f(u * mask, kernels, normalization, *selection).y * mask


def assert_same(f, reference, *tensors, tolerance=1e-9):
    """Compare f on the device with the reference on the CPU."""
    y, grads = gradients(f, *(x.to(DEVICE) for x in tensors))
    expected, expected_grads = gradients(reference, *tensors)
    for a, b in zip((y, *grads), (expected, *expected_grads), strict=True):
        assert (a.cpu() - b).norm() <= tolerance * b.norm().clamp(min=1)
