"""S5: one diagonal state-space model for all channels, by a parallel scan (Smith et al., 2022, "Simplified...")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils.checks import check_choice, check_positive_int
from ..mixers import Mixer
from ..ops import compute_dtype
from ..streaming.state import MixerState
from .hippo import check_even, legs_normal_part
from .parameters import as_complex, as_parameter, log_uniform, standard_normal, upcast
from .s4d import discretize
from .scans import constant_scan


class S5(Mixer):
    """x' = A x + B u, y = 2 Re(C x) + D u with vectors u, y (d_model) and a diagonal A (N/2), discretised per state.

    The states x[t] = Abar x[t-1] + Bbar u[t] are computed by a parallel scan of logarithmic depth.

    Args:
        d_model: channels of the input and the output, mixed by B and C.
        l_max: not used: the recurrence has no end.
        d_state: N; the state is N/2 complex numbers, whose conjugates are the other half.
        blocks: number of HiPPO-LegS blocks in the initial A.
        discretization: "zoh" or "bilinear".
        dt_min, dt_max: range of the initial step sizes, drawn log-uniformly.
        options: bidirectional (adds a second C, which reads the states of a scan from the end; both include u[t]),
            device and dtype.
    """

    continuous = True
    kernel_parameters = ("log_dt", "log_decay", "frequency", "B")

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        d_state: int = 64,
        blocks: int = 1,
        discretization: str = "zoh",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(d_model, l_max, **options)
        check_choice("discretization", discretization, ("zoh", "bilinear"))
        check_positive_int(d_state=d_state, blocks=blocks)
        if d_state % blocks:
            raise ValueError(f"blocks must divide d_state = {d_state}; got {blocks}")
        check_even(d_state // blocks)
        self.d_state, self.discretization = d_state, discretization
        A, _, _, V = legs_normal_part(d_state // blocks)
        A, V = A.repeat(blocks), torch.block_diag(*[V] * blocks)
        B = standard_normal(d_state, d_model) / d_model**0.5
        C = standard_normal(self.n_directions, d_model, d_state) * (2 / d_state) ** 0.5
        self.log_dt = as_parameter(log_uniform(dt_min, dt_max, d_state // 2), **self.factory)
        self.log_decay = as_parameter((-A.real).log(), **self.factory)
        self.frequency = as_parameter(A.imag, **self.factory)
        self.B = as_parameter(V.mH @ B.to(V.dtype), **self.factory)  # (N/2, d_model, 2)
        self.C = as_parameter(C.to(V.dtype) @ V, **self.factory)  # (n_directions, d_model, N/2, 2)
        self.D = as_parameter(standard_normal(d_model), **self.factory)

    def discretized(self, rate: float) -> tuple[Tensor, Tensor]:
        """Return Abar (N/2,) and Bbar (N/2, d_model)."""
        A = torch.complex(-upcast(self.log_decay).exp(), upcast(self.frequency))[:, None]
        dt = upcast(self.log_dt).exp()[:, None] / rate
        log_a, B = discretize(A, as_complex(self.B), dt, self.discretization)
        return log_a[:, 0].exp(), B

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Scan the inputs forwards and, if bidirectional, backwards."""
        A, B = self.discretized(rate)
        u = x.transpose(1, 2).to(compute_dtype(x, self.D))
        drive = torch.complex(u @ B.real.T, u @ B.imag.T)  # (B, L, N/2)
        y = u * self.D + self._read_out(constant_scan(A, drive), 0)
        if self.bidirectional:
            y = y + self._read_out(constant_scan(A, drive.flip(1)).flip(1), 1)
        y = y.transpose(1, 2).to(x.dtype)
        return F.gelu(y) if gelu else y

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return x = 0, (B, N/2, 2), as real pairs."""
        return MixerState(rate, [upcast(self.C).new_zeros(batch, self.d_state // 2, 2)])

    def constants(self, rate: float) -> tuple[Tensor, ...]:
        """Return Abar and Bbar."""
        return self.discretized(rate)

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """Compute x <- Abar x + Bbar u, y = 2 Re(C x) + D u."""
        A, B = constants
        x = A * torch.view_as_complex(memory[0]) + u.to(B.dtype) @ B.T
        return self._read_out(x, 0) + self.D * u, [torch.view_as_real(x)]

    def _read_out(self, states: Tensor, direction: int) -> Tensor:
        """Return 2 Re(C x)."""
        C = as_complex(self.C[direction])
        return 2 * (states.real @ C.real.T - states.imag @ C.imag.T)

    def extra_repr(self) -> str:
        """Return the description that `print` shows."""
        return f"{super().extra_repr()}, d_state={self.d_state}, discretization={self.discretization!r}"
