"""Mamba: a state-space model whose coefficients depend on the input (Gu and Dao, 2023)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils.checks import check_positive_int
from ..streaming.state import MixerState
from .parameters import check_step_sizes, upcast
from .projected_mixer import ProjectedMixer, short_conv
from .scans import linear_scan


class Mamba(ProjectedMixer):
    """y = W_o (scan(x) silu(z)), with x = silu(short_conv(W_x u)) and z = W_z u, E = expand d_model channels each.

        scan:  h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    y_t = <C_t, h_t> + D x_t

    where h has N = d_state numbers per channel, A < 0, dt_t = softplus(W_dt x_t + b), and B_t and C_t are linear in x_t
    (section 3.2, algorithm 2; section 3.4). Causal.

    Args:
        d_model: number of channels.
        l_max: not used; inputs may have any length.
        d_state: N.
        d_conv: taps of the short convolution.
        expand: E / d_model.
        dt_rank: rank of W_dt; None for d_model / 16, rounded up.
        dt_min, dt_max: range of the initial step sizes, drawn log-uniformly.
        options: device and dtype.
    """

    kernel_parameters = ("A_log",)

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(d_model, l_max, **options)
        dt_rank = -(-d_model // 16) if dt_rank is None else dt_rank
        check_positive_int(d_state=d_state, d_conv=d_conv, expand=expand, dt_rank=dt_rank)
        if self.bidirectional:
            raise ValueError("bidirectional=True: a Mamba is causal; leave bidirectional=False")
        check_step_sizes(dt_min, dt_max)
        inner = expand * d_model
        self.sizes = [dt_rank, d_state, d_state]
        self.into = nn.Linear(d_model, 2 * inner, bias=False, **self.factory)  # x, z
        self.conv = nn.Conv1d(inner, inner, d_conv, groups=inner, **self.factory)
        self.select = nn.Linear(inner, sum(self.sizes), bias=False, **self.factory)  # dt at low rank, B, C
        self.dt = nn.Linear(dt_rank, inner, **self.factory)
        self.A_log = nn.Parameter(torch.arange(1, d_state + 1, **self.factory).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner, **self.factory))
        self.out = nn.Linear(inner, d_model, bias=False, **self.factory)
        nn.init.uniform_(self.dt.weight, -(dt_rank**-0.5), dt_rank**-0.5)
        with torch.no_grad():
            dt = self.dt.bias.uniform_(math.log(dt_min), math.log(dt_max)).exp()
            self.dt.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus

    def mix_padded(self, u: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Scan; an output depends on earlier positions only, so padding needs no mask."""
        x, z = self.into(u).chunk(2, -1)
        x = F.silu(short_conv(x, self.conv))
        return self.gate(selective_scan(x, *self.selected(x)), z)

    def selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return dt (..., E), A (E, N), B and C (..., N) and D (E,) for x (..., E), upcast for the scan."""
        dt, B, C = self.select(x).split(self.sizes, -1)
        return F.softplus(upcast(self.dt(dt))), -upcast(self.A_log).exp(), upcast(B), upcast(C), upcast(self.D)

    def gate(self, y: Tensor, z: Tensor) -> Tensor:
        """Return W_o (y silu(z)) for the output y of the scan."""
        return self.out(y.to(z.dtype) * F.silu(z))

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return zeros for the last inputs of the short convolution, (B, d_conv - 1, E), and for h, (B, E, N)."""
        past = self.into.weight.new_zeros(batch, self.conv.kernel_size[0] - 1, self.conv.in_channels)
        return MixerState(rate, [past, upcast(self.A_log).new_zeros(batch, *self.A_log.shape)])

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """Advance the convolution and the recurrence by one position."""
        past, h = memory
        x, z = self.into(u).chunk(2, -1)
        window = torch.cat([past, x[:, None]], 1)
        x = F.silu(F.conv1d(window.mT, self.conv.weight, self.conv.bias, groups=window.shape[2])[..., 0])
        y, h = selective_step(x, h, *self.selected(x))
        return self.gate(y, z), [window[:, 1:], h]


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Compute y (B, L, E) of x and dt (B, L, E), A (E, N), B and C (B, L, N), D (E,) by a parallel scan."""
    decay = (dt[..., None] * A).exp()  # (B, L, E, N)
    h = linear_scan(decay, (dt * x)[..., None] * B[:, :, None])
    return (h @ C[..., None])[..., 0] + D * x


def selective_scan_reference(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Compute `selective_scan` position by position."""
    h, outputs = A.new_zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        y, h = selective_step(x[:, t], h, dt[:, t], A, B[:, t], C[:, t], D)
        outputs.append(y)
    return torch.stack(outputs, 1)


def selective_step(
    x: Tensor, h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by x (B, E) from h (B, E, N); return y (B, E) and h."""
    h = (dt[..., None] * A).exp() * h + (dt * x)[..., None] * B[:, None]
    return (h @ C[..., None])[..., 0] + D * x, h
