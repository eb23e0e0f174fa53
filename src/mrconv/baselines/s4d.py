"""S4D: a diagonal state-space model per channel (Gu et al., 2022, "On the Parameterization and Initialization...")."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._utils.checks import check_choice, check_positive_int
from ..streaming.state import MixerState
from .hippo import initial_diagonal
from .long_convolution import LongConvolution
from .parameters import as_complex, as_parameter, log_uniform, standard_normal, upcast


class S4D(LongConvolution):
    """x' = A x + B u, y = 2 Re(C x) + D u with a diagonal A, computed as the convolution k[t] = 2 Re(C Abar^t Bbar).

    zoh:       Abar = exp(dt A),                    Bbar = (Abar - 1) A^-1 B
    bilinear:  Abar = (1 + dt A/2) / (1 - dt A/2),  Bbar = dt B / (1 - dt A/2)

    Args:
        d_model: channels, each with its own dt and C.
        l_max: not used: the kernel is as long as the input.
        d_state: N; the state is N/2 complex numbers, whose conjugates are the other half.
        init: initial A: "legs" (normal part of HiPPO-LegS), "lin" (-1/2 + i pi n) or "inv".
        discretization: "zoh" or "bilinear".
        n_ssm: number of different A and B; channel d uses number d // (d_model // n_ssm). None for one per channel.
        dt_min, dt_max: range of the initial step sizes, drawn log-uniformly.
        options: bidirectional (a second C, which reads the same states backwards in time), device and dtype.
    """

    continuous = True
    reach = "input"
    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_dt", "log_decay", "frequency", "B")

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        d_state: int = 64,
        init: str = "legs",
        discretization: str = "zoh",
        n_ssm: int | None = 1,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(d_model, l_max, **options)
        check_choice("discretization", discretization, ("zoh", "bilinear"))
        n_ssm = d_model if n_ssm is None else n_ssm
        check_positive_int(n_ssm=n_ssm)
        if d_model % n_ssm:
            raise ValueError(f"n_ssm must divide d_model = {d_model}; got {n_ssm}")
        self.d_state, self.discretization, self.n_ssm = d_state, discretization, n_ssm
        A, B = initial_diagonal(init, d_state)
        self.log_dt = as_parameter(log_uniform(dt_min, dt_max, d_model), **self.factory)
        self.log_decay = as_parameter((-A.real).log().repeat(n_ssm, 1), **self.factory)
        self.frequency = as_parameter(A.imag.repeat(n_ssm, 1), **self.factory)
        self.B = as_parameter(B.repeat(n_ssm, 1), **self.factory)
        C = standard_normal(self.n_directions, d_model, d_state // 2, dtype=torch.complex128)
        self.C = as_parameter(C, **self.factory)

    def diagonal(self) -> Tensor:
        """Return the diagonal of A, (d_model, N/2)."""
        return self._per_channel(torch.complex(-upcast(self.log_decay).exp(), upcast(self.frequency)))

    def dt(self, rate: float) -> Tensor:
        """Return the step size of each channel, (d_model, 1)."""
        return upcast(self.log_dt).exp()[:, None] / rate

    def discretized(self, rate: float) -> tuple[Tensor, Tensor]:
        """Return log Abar and Bbar, each (d_model, N/2)."""
        return discretize(self.diagonal(), self._per_channel(as_complex(self.B)), self.dt(rate), self.discretization)

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return the kernel by a Vandermonde product."""
        log_a, B = self.discretized(rate)
        return vandermonde(as_complex(self.C) * B, log_a, length)

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return x = 0, (B, d_model, N/2, 2), as real pairs."""
        return MixerState(rate, [upcast(self.C).new_zeros(batch, *self.C.shape[1:])])

    def constants(self, rate: float) -> tuple[Tensor, ...]:
        """Return Abar and Bbar."""
        log_a, B = self.discretized(rate)
        return log_a.exp(), B

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """Compute x <- Abar x + Bbar u, y = 2 Re(C x) + D u."""
        A, B = constants
        x = A * torch.view_as_complex(memory[0]) + B * u[..., None]
        y = 2 * (as_complex(self.C)[0] * x).sum(-1).real
        return y + self.D * u, [torch.view_as_real(x)]

    def _per_channel(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.d_model // self.n_ssm, 0)

    def extra_repr(self) -> str:
        """Return the description that `print` shows."""
        return f"{super().extra_repr()}, d_state={self.d_state}, discretization={self.discretization!r}"


def discretize(A: Tensor, B: Tensor, dt: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """Return log Abar and Bbar of a diagonal A, by "zoh" or "bilinear"."""
    z = dt * A
    if method == "bilinear":
        return torch.log((1 + z / 2) / (1 - z / 2)), dt * B / (1 - z / 2)
    return z, 2 * torch.exp(z / 2) * torch.sinh(z / 2) / A * B  # e^z - 1 without its cancellation for small z


def vandermonde(weights: Tensor, log_a: Tensor, length: int) -> Tensor:
    """Return 2 Re sum_n weights[..., n] a[n]^t for t < length: (..., N) and (..., N) -> (..., length).

    With t = i s + j, a^t = (a^s)^i a^j: a matrix product of two factors with sqrt(length) powers each.
    """
    step = math.isqrt(length - 1) + 1
    power = torch.arange(step, device=log_a.device)
    fine = torch.exp(log_a[..., None] * power)
    coarse = torch.exp(log_a[..., None, :] * (step * power[: -(-length // step), None])) * weights[..., None, :]
    pairs = torch.cat([coarse.real, -coarse.imag], -1) @ torch.cat([fine.real, fine.imag], -2)
    return 2 * pairs.flatten(-2)[..., :length]
