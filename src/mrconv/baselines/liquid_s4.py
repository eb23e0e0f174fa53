"""Liquid-S4: S4 plus products of neighbouring inputs (Hasani et al., 2022, "Liquid Structural State-Space Models")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils.checks import check_positive_int
from ..ops import compute_dtype
from ..streaming.state import MixerState
from .parameters import as_complex
from .s4 import S4, inner


class LiquidS4(S4):
    """y = k * u + D u + sum_{p=2}^{degree} (C Bbar^p) u[t] u[t-1] ... u[t-p+1], with k as in S4.

    The liquid system x[t] = (Abar + Bbar u[t]) x[t-1] + Bbar u[t], with Bbar acting elementwise on the state, has an
    output term for every product of inputs. The PB mode keeps the products of consecutive inputs, whose coefficients
    are powers of Bbar without Abar (section 3.2). If bidirectional, the second C weights the products u[t+1] u[t+2] ...

    As in the authors' code, the C of the products is S4's trained parameter, Ct = C (I - Abar^l_max) for the C of the
    convolution. Their code also reverses the products in time, which is not causal, and has Bbar sum(Bbar) in place of
    Bbar^2; in both, this class follows the paper.

    Args:
        degree: P, the largest number of inputs in a product.
        n_ssm: number of different A and B; None, as published, for one per channel.
        options: as for `S4`.
    """

    def __init__(self, d_model: int, l_max: int, *, degree: int = 2, n_ssm: int | None = None, **options: Any) -> None:
        super().__init__(d_model, l_max, n_ssm=n_ssm, **options)
        check_positive_int(degree=degree)
        self.degree = degree

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Convolve, and add the products of neighbouring inputs."""
        y = super().mix(x, rate, False)
        u = x.to(compute_dtype(x, self.D))
        gains = self.gains(rate)
        for direction, direction_gains in enumerate(gains.unbind(1)):
            step = -1 if direction else 1
            product = shift(u, -1) if direction else u
            neighbour = product
            for gain in direction_gains:
                neighbour = shift(neighbour, step)
                product = product * neighbour
                y = y + (gain[:, None] * product).to(y.dtype)
        return F.gelu(y) if gelu else y

    def gains(self, rate: float) -> Tensor:
        """Return C Bbar^p for p = 2 .. degree, (degree - 1, n_directions, d_model)."""
        C, B = as_complex(self.C), self.discrete_input(rate)
        powers = [inner(C.conj(), B**p)[..., 0] for p in range(2, self.degree + 1)]
        return torch.stack(powers) if powers else C.real.new_zeros(0, *C.shape[:2])

    def discrete_input(self, rate: float) -> Tensor:
        """Return Bbar = (I - dt A/2)^-1 dt B, (d_model, N/2)."""
        dt, (A, P, B) = self.dt(rate), self.system()
        b, p = dt * B / (1 - dt / 2 * A), P / (1 - dt / 2 * A)
        return b - p * (dt / 2 * inner(P, b) / (1 + dt / 2 * inner(P, p)))

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return S4's state and the last inputs, (B, d_model, degree - 1)."""
        (x,) = super().zero_state(batch, rate).memory
        return MixerState(rate, [x, x.new_zeros(batch, self.d_model, self.degree - 1)])

    def constants(self, rate: float) -> tuple[Tensor, ...]:
        """Return the gains, then the constants of S4."""
        return self.gains(rate)[:, 0].T, *super().constants(rate)

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """Advance S4, and add the products with the previous inputs."""
        (x, past), (gains, *rest) = memory, constants
        y, memory = super().advance(u, [x], rest)
        products = u[..., None] * past.cumprod(-1)  # (B, d_model, degree - 1)
        past = torch.cat([u[..., None].to(past), past], -1)[..., : self.degree - 1]
        return y + (products * gains).sum(-1), [*memory, past]


def shift(x: Tensor, by: int) -> Tensor:
    """Return x[..., t - by], zero beyond the ends."""
    L = x.shape[-1]
    if abs(by) >= L:
        return torch.zeros_like(x)
    return F.pad(x[..., : L - by] if by > 0 else x[..., -by:], (max(by, 0), max(-by, 0)))
