"""The state-space forms of Fourier kernels."""

import pytest
import torch

from mrconv import MRConv

from ..conftest import randomise, relative
from .helpers import L_MAX, LAYERS, build, double

NAMES = ["constant", "fourier", "odd fourier", "one resolution", "no norm", "fourier concat", "decay", "lower rate"]


@pytest.mark.parametrize("name", NAMES)
def test_the_sliding_form_has_the_merged_kernel(name):
    layer = build(name)
    ssm, (kernel, bias) = layer.to_ssm(), layer.k_rep()
    assert relative(ssm.kernel(), kernel) < 1e-13
    assert torch.allclose(ssm.bias, bias)


@pytest.mark.parametrize("name", ["few modes", "few modes concat"])
def test_a_layer_merged_into_modes_has_the_same_sliding_form(name):
    layer = build(name)
    ssm = layer.to_ssm()
    merged = layer.reparameterize().to_ssm()
    assert relative(merged.kernel(), ssm.kernel()) < 1e-13
    assert torch.allclose(merged.bias, ssm.bias)


def weighted_kernels(layer):
    scale, _ = layer.branches[0].scale_and_bias()
    kernels = layer.branches[0].kernels(layer.rate)
    return [(values if scale is None else scale[i, :, None] * values, lags) for i, (values, lags) in enumerate(kernels)]


@pytest.mark.parametrize("name", NAMES)
def test_the_matrices_give_each_branch_kernel(name):
    layer = build(name)
    ssm, kernels = layer.to_ssm(), weighted_kernels(layer)
    for i, (values, lags) in enumerate(kernels):
        powers = ssm.A[i] ** torch.arange(len(lags))[:, None]  # A**s
        kernel = (powers * ssm.B[i] @ ssm.C[i]).real.t()
        assert ssm.offsets[i] == lags.start
        assert relative(kernel, values.expand(-1, len(lags))) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_the_recurrence_gives_the_output(name):
    layer, u = build(name), double(1, 3 * L_MAX, 4)
    ssm = layer.to_ssm()
    x, y = torch.zeros(*ssm.A.shape, 4, dtype=torch.complex128), torch.zeros(u.shape[1], 4).double()
    for t in range(u.shape[1]):
        for i, (offset, width) in enumerate(zip(ssm.offsets, ssm.widths, strict=True)):
            new, old = (u[0, s] if s >= 0 else torch.zeros(4).double() for s in (t - offset, t - offset - width))
            x[i] = ssm.A[i, :, None] * x[i] + ssm.B[i, :, None] * new - ssm.E[i, :, None] * old
        y[t] = (ssm.C * x).sum((0, 1)).real + ssm.bias + layer.D * u[0, t]
    assert relative(y[None], layer(u)) < 1e-12


def appendix_errors(states):
    layer = build("fourier")
    ssm, kernels = layer.to_ssm("fourier", states=states), weighted_kernels(layer)
    errors = []
    for i in (1, 2):  # windows that are not cut
        values, lags = kernels[i]
        n = len(lags)
        step = torch.linalg.matrix_exp(ssm.A / n)
        x, taps = ssm.B, []
        for _ in range(2 * n):
            taps.append(ssm.C[i] @ x)
            x = step @ x
        kernel = torch.stack(taps, 1)
        inside = slice(n // 4, n - n // 4)  # the truncated series rings at the ends of the window
        errors.append(relative(kernel[:, inside], values[:, inside]))
        errors.append((kernel[:, n + n // 4 :].norm() / values.norm()).item())  # past the window
    return max(errors)


def test_the_appendix_form_converges_to_the_kernel_and_to_zero_after_it():
    errors = [appendix_errors(states) for states in (9, 33, 129, 513)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


@pytest.mark.parametrize("l_max", [45, 48])  # 48: no kernel of "fourier" is cut
@pytest.mark.parametrize("name", ["constant", "fourier", "odd fourier", "fourier concat", "decay", "lower rate"])
def test_the_appendix_form_converges_to_the_merged_kernel(name, l_max):
    layer = randomise(MRConv(4, l_max, dtype=torch.float64, **LAYERS[name])).eval()
    kernel, bias = layer.k_rep()
    errors = []
    for states in (33, 129, 513):
        ssm = layer.to_ssm("fourier", states=states)
        errors.append(relative(ssm.kernel(), kernel))
        assert torch.equal(ssm.bias, layer.to_ssm().bias)
        assert torch.allclose(ssm.bias, bias)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


def test_the_matrices_equal_those_of_the_appendix():
    ssm = build("fourier").to_ssm("fourier", states=7)
    A, B, root = ssm.A, ssm.B, 2**0.5
    assert A.shape == (7, 7)
    assert torch.allclose(B, torch.tensor([2, 2 * root, 0, 2 * root, 0, 2 * root, 0]).double())
    assert A[0, 0] == -2
    assert torch.allclose(A[0, 1::2], torch.tensor(-2 * root).double())
    assert torch.allclose(A[1::2, 0], torch.tensor(-2 * root).double())
    assert torch.allclose(A[1::2, 1::2], torch.tensor(-4.0).double())
    assert torch.allclose(A.diagonal(-1)[1::2], 2 * torch.pi * torch.arange(1, 4).double())
    assert torch.allclose(A.diagonal(1)[1::2], -2 * torch.pi * torch.arange(1, 4).double())


def test_to_ssm_rejects_other_kernels_and_options():
    for layer in (build("dense"), build("fourier+sparse"), build("fourier", merged=True)):
        with pytest.raises(ValueError, match="to_ssm needs kernel='fourier'"):
            layer.to_ssm()
    with pytest.raises(ValueError, match="form must be one of sliding, fourier"):
        build("fourier").to_ssm("diagonal")
    with pytest.raises(ValueError, match="states must be an odd number of at least 7"):
        build("fourier").to_ssm("fourier", states=6)
    with pytest.raises(ValueError, match="bidirectional"):
        build("fourier", bidirectional=True).to_ssm()
