"""S4D: a diagonal state-space model per channel (Gu et al., 2022, "On the Parameterization and Initialization...")."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._utils.checks import check_choice, check_positive_int
from ..streaming.state import MixerState
from .long_convolution import LongConvolution, as_complex, normal, parameter, wide


class S4D(LongConvolution):
    """x' = A x + B u, y = 2 Re(C x) + D u with a diagonal A, run as the convolution k[t] = 2 Re(C Abar^t Bbar).

    zoh:       Abar = exp(dt A),                    Bbar = (Abar - 1) A^-1 B
    bilinear:  Abar = (1 + dt A/2) / (1 - dt A/2),  Bbar = dt B / (1 - dt A/2)

    Args:
        d_model: channels, each with its own dt and C.
        l_max: not used: the kernel is as long as the input.
        d_state: N; the state is N/2 complex numbers, whose conjugates make up the other half.
        init: of A: "legs" (normal part of HiPPO-LegS), "lin" (-1/2 + i pi n) or "inv".
        discretization: "zoh" or "bilinear".
        n_ssm: how many different A and B; channel d has number d // (d_model // n_ssm). None: one per channel.
        dt_min, dt_max: range of the step sizes, drawn log-uniformly.
        bidirectional: a second C, with which the same states run backwards.
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
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: Any = {"device": device, "dtype": dtype}
        super().__init__(d_model, l_max, bidirectional, **factory)
        check_choice("discretization", discretization, ("zoh", "bilinear"))
        n_ssm = d_model if n_ssm is None else n_ssm
        check_positive_int(n_ssm=n_ssm)
        if d_model % n_ssm:
            raise ValueError(f"n_ssm must divide d_model = {d_model}; got {n_ssm}")
        self.d_state, self.discretization, self.n_ssm = d_state, discretization, n_ssm
        A, B = diagonal_init(init, d_state)
        self.log_dt = parameter(log_uniform(dt_min, dt_max, d_model), **factory)
        self.log_decay = parameter((-A.real).log().repeat(n_ssm, 1), **factory)
        self.frequency = parameter(A.imag.repeat(n_ssm, 1), **factory)
        self.B = parameter(B.repeat(n_ssm, 1), **factory)
        C = normal(self.n_directions, d_model, d_state // 2, dtype=torch.complex128)
        self.C = parameter(C, **factory)

    def diagonal(self) -> Tensor:
        """Return the diagonal of A, (d_model, N/2)."""
        return self._per_channel(torch.complex(-wide(self.log_decay).exp(), wide(self.frequency)))

    def dt(self, rate: float) -> Tensor:
        """Return the step size of each channel, (d_model, 1)."""
        return wide(self.log_dt).exp()[:, None] / rate

    def discretized(self, rate: float) -> tuple[Tensor, Tensor]:
        """Return log Abar and Bbar, each (d_model, N/2)."""
        return discretize(self.diagonal(), self._per_channel(as_complex(self.B)), self.dt(rate), self.discretization)

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return the kernel by a Vandermonde product."""
        log_a, B = self.discretized(rate)
        return vandermonde(as_complex(self.C) * B, log_a, length)

    def begin(self, batch: int, rate: float) -> MixerState:
        """Return x = 0, (B, d_model, N/2, 2), as pairs of real numbers."""
        return MixerState(rate, [wide(self.C).new_zeros(batch, *self.C.shape[1:])])

    def constants(self, rate: float) -> tuple[Tensor, ...]:
        """Return Abar and Bbar."""
        log_a, B = self.discretized(rate)
        return log_a.exp(), B

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """x <- Abar x + Bbar u, y = 2 Re(C x) + D u."""
        A, B = constants
        x = A * torch.view_as_complex(memory[0]) + B * u[..., None]
        y = 2 * (as_complex(self.C)[0] * x).sum(-1).real
        return y + self.D * u, [torch.view_as_real(x)]

    def _per_channel(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.d_model // self.n_ssm, 0)

    def extra_repr(self) -> str:
        """Return what `print` shows of the mixer."""
        return f"{super().extra_repr()}, d_state={self.d_state}, discretization={self.discretization!r}"


def hippo_legs(N: int) -> tuple[Tensor, Tensor]:
    """Return HiPPO-LegS: A[n, k] = -sqrt((2n+1)(2k+1)) for n > k, -(n+1) for n = k, else 0; B[n] = sqrt(2n+1)."""
    n = torch.arange(N, dtype=torch.float64, device="cpu")
    B = (2 * n + 1).sqrt()
    return -torch.tril(torch.outer(B, B), -1) - torch.diag(n + 1), B


def legs_normal_part(N: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Diagonalise A + P P^T = V diag(Lambda) V^*, with P[n] = sqrt(n + 1/2), for HiPPO-LegS.

    It is -1/2 plus a skew-symmetric matrix, so Lambda = -1/2 + i omega in conjugate pairs. Returns Lambda, V^* B,
    V^* P, each (N/2,), and V (N, N/2), for omega > 0.
    """
    A, B = hippo_legs(N)
    P = B / math.sqrt(2)
    skew = A + torch.outer(P, P) + torch.eye(N, dtype=A.dtype, device="cpu") / 2
    omega, V = torch.linalg.eigh(-1j * skew)
    omega, V = omega[N // 2 :], V[:, N // 2 :]
    back = V.mH
    return torch.complex(torch.full_like(omega, -0.5), omega), back @ B.to(V.dtype), back @ P.to(V.dtype), V


def diagonal_init(name: str, N: int) -> tuple[Tensor, Tensor]:
    """Return A and B, each (N/2,), by the name of an initialisation."""
    check_choice("init", name, ("legs", "lin", "inv"))
    check_even(N)
    if name == "legs":
        return legs_normal_part(N)[:2]
    n = torch.arange(N // 2, dtype=torch.float64, device="cpu")
    omega = math.pi * n if name == "lin" else N / math.pi * (N / (2 * n + 1) - 1)
    A = torch.complex(torch.full_like(omega, -0.5), omega)
    return A, torch.ones_like(A)


def check_even(d_state: int) -> None:
    """Refuse a state that is not made of conjugate pairs."""
    check_positive_int(d_state=d_state)
    if d_state % 2:
        raise ValueError(f"d_state must be even, as the state is made of conjugate pairs; got {d_state}")


def log_uniform(low: float, high: float, *shape: int) -> Tensor:
    """Draw the logarithms of numbers spread log-uniformly over low .. high."""
    if not 0 < low <= high:
        raise ValueError(f"dt_min and dt_max must be positive and in this order; got {low!r} and {high!r}")
    return torch.empty(*shape, dtype=torch.float64, device="cpu").uniform_(math.log(low), math.log(high))


def discretize(A: Tensor, B: Tensor, dt: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Return log Abar and Bbar of a diagonal A."""
    z = dt * A
    if how == "bilinear":
        return torch.log((1 + z / 2) / (1 - z / 2)), dt * B / (1 - z / 2)
    return z, 2 * torch.exp(z / 2) * torch.sinh(z / 2) / A * B  # e^z - 1, without its cancellation for small z


def vandermonde(weights: Tensor, log_a: Tensor, length: int) -> Tensor:
    """Return 2 Re sum_n weights[..., n] a[n]^t for t < length: (..., N) and (..., N) -> (..., length).

    As t = i s + j, a^t = (a^s)^i a^j makes it a matrix product of two factors with sqrt(length) powers each.
    """
    step = math.isqrt(length - 1) + 1
    power = torch.arange(step, device=log_a.device)
    fine = torch.exp(log_a[..., None] * power)
    coarse = torch.exp(log_a[..., None, :] * (step * power[: -(-length // step), None])) * weights[..., None, :]
    pairs = torch.cat([coarse.real, -coarse.imag], -1) @ torch.cat([fine.real, fine.imag], -2)
    return 2 * pairs.flatten(-2)[..., :length]
