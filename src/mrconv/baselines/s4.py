"""S4: a diagonal plus low-rank state-space model per channel (Gu et al., 2021, "Efficiently Modeling Long...")."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .hippo import legs_normal_part
from .parameters import as_complex, as_parameter
from .s4d import S4D


class S4(S4D):
    """x' = A x + B u, y = 2 Re(C x) + D u with A = diag(Lambda) - P P^*, initialised to HiPPO-LegS; bilinear.

    The kernel k[t] = C Abar^t Bbar, t < l_max, is computed from its generating function at the roots of unity z:

        sum_t k[t] z^t = Ct (I - Abar z)^-1 Bbar,           with Ct = C (I - Abar^l_max), the trained parameter
                       = 2/(1+z) Ct (g - A)^-1 B,           g = (2/dt) (1-z)/(1+z)
                       = <Ct,B> - <Ct,P> <P,B> / (1 + <P,P>)  (Woodbury), <x,y> = sum_n x*_n y_n / (g - Lambda_n)

    up to the factors of 2/(1+z) (section 3.2 and appendix C). Beyond l_max and at other rates, C is recovered from Ct
    and truncated again: exact, but with powers of dense N x N matrices.

    Args:
        l_max: length at which the kernel is cheapest to compute.
        d_state, options: as for `S4D`, without init and discretization.
    """

    kernel_parameters = (*S4D.kernel_parameters, "P")
    fixed = frozenset(("init", "discretization"))

    def __init__(self, d_model: int, l_max: int, *, d_state: int = 64, **options: Any) -> None:
        super().__init__(d_model, l_max, d_state=d_state, init="legs", discretization="bilinear", **options)
        self.P = as_parameter(legs_normal_part(d_state)[2].repeat(self.n_ssm, 1), **self.factory)
        if not self.C.is_meta:
            with torch.no_grad():
                self.C.copy_(torch.view_as_real(self._truncated(as_complex(self.C), l_max, 1.0)))

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Lambda, P and B for each channel, (d_model, N/2)."""
        return self.diagonal(), self._per_channel(as_complex(self.P)), self._per_channel(as_complex(self.B))

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return the kernel by Cauchy products at the roots of unity."""
        C, n = as_complex(self.C), self.l_max
        if rate != 1 or length > n:
            C, n = self._truncated(self.output(), length, rate), length
        A, P, B = self.system()
        left = torch.cat([C, P.conj()[None]])  # (n_directions + 1, d_model, N/2)
        products = torch.stack([left * B, left * P], 1)
        z = torch.exp(-2j * math.pi / n * torch.arange(n // 2 + 1, device=C.device, dtype=torch.float64)).to(C.dtype)
        sums, half = cauchy(products, self.dt(rate) * A, z) * self.dt(rate), (1 + z) / 2
        with_b, with_p = sums[:, 0], sums[:, 1]
        spectrum = with_b[:-1] - half * with_p[:-1] * with_b[-1] / (1 + half * with_p[-1])
        return torch.fft.irfft(spectrum, n)[..., :length]

    def dense(self, rate: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return Abar (d_model, N, N) and Bbar (d_model, N) of the full state: its first half, then the conjugates."""
        A, P, B = map(with_conjugates, self.system())
        A = torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :]
        one, half = torch.eye(A.shape[-1], device=A.device), self.dt(rate)[..., None] / 2
        solved = torch.linalg.solve(one - half * A, torch.cat([one + half * A, 2 * half * B[..., None]], -1))
        return solved[..., :-1], solved[..., -1]

    def output(self) -> Tensor:
        """Return C (n_directions, d_model, N/2), from the parameter Ct."""
        power = torch.linalg.matrix_power(self.dense()[0], self.l_max)
        one = torch.eye(power.shape[-1], device=power.device)
        C = torch.linalg.solve(one - power, with_conjugates(as_complex(self.C))[..., None, :], left=False)
        return C[..., 0, : self.d_state // 2]

    def _truncated(self, C: Tensor, length: int, rate: float) -> Tensor:
        """Return C (I - Abar^length)."""
        power = torch.linalg.matrix_power(self.dense(rate)[0], length)
        return C - (with_conjugates(C)[..., None, :] @ power)[..., 0, : self.d_state // 2]

    def constants(self, rate: float) -> tuple[Tensor, ...]:
        """Return C, the step sizes, Lambda, P and B."""
        return self.output(), self.dt(rate), *self.system()

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """Solve (I - dt A/2) x <- (I + dt A/2) x + dt B u in O(N): A is diagonal plus rank one."""
        C, dt, A, P, B = constants
        x = torch.view_as_complex(memory[0])
        x = x + dt / 2 * (A * x - P * inner(P, x)) + dt * B * u[..., None]
        x, p = x / (1 - dt / 2 * A), P / (1 - dt / 2 * A)
        x = x - p * (dt / 2 * inner(P, x) / (1 + dt / 2 * inner(P, p)))
        y = inner(C[0].conj(), x)[..., 0]
        return y + self.D * u, [torch.view_as_real(x)]


def cauchy(v: Tensor, mu: Tensor, z: Tensor) -> Tensor:
    """Return 2/(1+z) sum_n (v_n / (g - mu_n) + its conjugate), g = 2 (1-z)/(1+z): (..., D, N/2) -> (..., D, F).

    With h = (1+z)/2 a pair is (2 Re(v) (1-z) - 2 Re(v mu^*) h) over a quadratic with real coefficients. This has no
    singularity at z = -1, and all sums share one table of quotients, (D, N/2, F).
    """
    a, h = 1 - z, (1 + z) / 2
    table = 1 / (a * a - 2 * mu.real[..., None] * (a * h) + mu.abs().square()[..., None] * (h * h))
    weights = 2 * torch.stack([v.real, (v * mu.conj()).real]).movedim(-2, 0)  # (D, 2, ..., N/2)
    sums = (weights.flatten(1, -2).to(table.dtype) @ table).unflatten(1, weights.shape[1:-1])
    return (sums[:, 0] * a - sums[:, 1] * h).movedim(0, -2)


def with_conjugates(x: Tensor) -> Tensor:
    """Return the full vector of conjugate pairs from its first half."""
    return torch.cat([x, x.conj()], -1)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Return x^* y of the full vectors, from their first halves: (..., N/2) -> (..., 1), real."""
    return 2 * (x.conj() * y).sum(-1, keepdim=True).real
