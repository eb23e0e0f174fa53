"""Shared helpers: seeds, random statistics, gradients by name."""

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomise(module):
    """Give every BatchNorm random statistics and parameters: fresh ones let a wrong merge pass."""
    with torch.no_grad():
        for m in module.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.running_mean.normal_()
                m.running_var.uniform_(0.2, 3.0)
                m.weight.normal_()
                m.bias.normal_()
    return module


def relative(a, b):
    """Norm of the difference over the norm of b."""
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def gradients(f, *inputs):
    """Return f's output and its gradients, pulled back from fixed random numbers."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = f(*inputs)
    return y.detach(), torch.autograd.grad(y, inputs, pull(y), materialize_grads=True)


def pull(y):
    """Return the same random gradient for an output, whatever its dtype."""
    return torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(y)


def training_step(layer, u, **kwargs):
    """Return output, input gradient and every parameter's gradient of one training-mode pass."""
    layer.train()
    layer.zero_grad()
    x = u.detach().clone().requires_grad_()
    y = layer(x, **kwargs)
    y.backward(pull(y))
    return y.detach(), x.grad, {name: p.grad.clone() for name, p in layer.named_parameters()}
