"""Kernels computed from the lag by a network: CKConv, CCNN (Romero et al., 2021; Knigge et al., 2023) and Hyena."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .._utils.checks import check_positive, check_positive_int
from .long_convolution import LongConvolution
from .parameters import as_parameter, upcast


class ImplicitConvolution(LongConvolution):
    """y = k * u + D u with k[t] = f(t), where f is a network with the lag as input and can be sampled at any rate."""

    continuous = True

    def network(self, lag: Tensor) -> Tensor:
        """Return f (T, n_directions * d_model) at lags (T,), counted in samples at the training rate."""
        raise NotImplementedError

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return f at the lags of the input, scaled so that its sum does not depend on the rate."""
        lag = torch.arange(length, device=self.D.device, dtype=upcast(self.D).dtype) / rate
        return self.network(lag).T.reshape(self.n_directions, self.d_model, length) / rate


class CKConv(ImplicitConvolution):
    """f(t) = W_3 sin(w0 (W_2 sin(w0 (W_1 tau + b_1)) + b_2)) + b_3, a SIREN of tau = 2 t / l_max - 1.

    With `mask`, as in FlexConv and CCNN, f is multiplied by exp(-(t / l_max)^2 / (2 sigma^2)), a Gaussian of trained
    width.

    Args:
        d_model, l_max: channels and taps.
        width: hidden units of the network.
        depth: linear layers of the network.
        omega: w0, which bounds how fast the kernel changes.
        mask: initial sigma, or None for no mask.
        options: bidirectional, device and dtype.
    """

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        width: int = 32,
        depth: int = 3,
        omega: float = 30.0,
        mask: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, l_max, **options)
        check_positive_int(width=width, depth=depth)
        check_positive(omega=omega, mask=1.0 if mask is None else mask)
        self.omega = omega
        sizes = [1, *[width] * (depth - 1), self.n_directions * d_model]
        self.layers = linear_layers(sizes, **self.factory)
        layer: Any
        for i, layer in enumerate(self.layers):
            bound = 1 / sizes[i] if i == 0 else math.sqrt(6 / width) / omega
            if i == depth - 1:
                bound = math.sqrt(6 / (sizes[i] * l_max))  # a kernel of energy 1, as sines have variance 1/2
                nn.init.zeros_(layer.bias)
            nn.init.uniform_(layer.weight, -bound, bound)
        self.log_sigma = None if mask is None else as_parameter(torch.full((1,), math.log(mask)), **self.factory)

    def network(self, lag: Tensor) -> Tensor:
        """Evaluate the SIREN and the mask."""
        x = (2 * lag / self.l_max - 1)[:, None]
        for layer in self.layers[:-1]:
            x = torch.sin(self.omega * apply_linear(layer, x))
        x = apply_linear(self.layers[-1], x)
        if self.log_sigma is None:
            return x
        return x * torch.exp(-((lag / self.l_max / upcast(self.log_sigma).exp()) ** 2) / 2)[:, None]


class HyenaFilter(ImplicitConvolution):
    """f(t) = window(t) FFN(t): the filter of Hyena (Poli et al., 2023, section 3.3), without its gates.

    The input of the network is tau = t / l_max and cos, -sin of 2 pi f_j tau at `bands` frequencies f_j = 0 ..
    bands - 1. Its activations are sines of a trained frequency. The window exp(-|delta_d| tau) falls to 0.01 after
    0.3 to 1.5 times l_max, spread over the channels.

    Args:
        d_model, l_max: channels and taps.
        width: hidden units of the network.
        depth: linear layers of the network.
        bands: number of input frequencies.
        omega: initial frequency of the sines.
        options: bidirectional, device and dtype.
    """

    kernel_parameters = ("layers", "omega")
    delta: Tensor
    bands: Tensor

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        width: int = 64,
        depth: int = 4,
        bands: int = 16,
        omega: float = 10.0,
        **options: Any,
    ) -> None:
        super().__init__(d_model, l_max, **options)
        check_positive_int(width=width, depth=depth, bands=bands)
        sizes = [1 + 2 * bands, *[width] * (depth - 1), self.n_directions * d_model]
        self.layers = linear_layers(sizes, **self.factory)
        self.layers[-1].register_parameter("bias", None)
        self.omega = as_parameter(torch.full((width,), omega), **self.factory)
        slow, fast = math.log(100) / 1.5, math.log(100) / 0.3
        self.register_buffer("delta", torch.linspace(slow, fast, d_model, **self.factory).repeat(self.n_directions))
        self.register_buffer("bands", torch.linspace(1e-4, bands - 1, bands, **self.factory))

    def network(self, lag: Tensor) -> Tensor:
        """Evaluate the network and the window."""
        tau = (lag / self.l_max)[:, None]
        angle = 2 * math.pi * tau * upcast(self.bands)
        x = torch.cat([tau, angle.cos(), -angle.sin()], -1)
        for layer in self.layers[:-1]:
            x = torch.sin(upcast(self.omega) * apply_linear(layer, x))
        return apply_linear(self.layers[-1], x) * torch.exp(-tau * upcast(self.delta))


def linear_layers(sizes: list[int], **factory: Any) -> nn.ModuleList:
    """Return linear layers from each size to the next."""
    return nn.ModuleList(nn.Linear(a, b, **factory) for a, b in pairwise(sizes))


def apply_linear(layer: Any, x: Tensor) -> Tensor:
    """Apply a linear layer in x's dtype."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return nn.functional.linear(x, layer.weight.to(x.dtype), bias)
