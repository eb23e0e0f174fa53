"""Mamba: a state-space model that chooses by its input what to keep (Gu and Dao, 2023)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils.checks import check_positive_int
from ..streaming.state import MixerState
from .long_convolution import wide
from .transformer import ProjectedMixer


class Mamba(ProjectedMixer):
    """y = W_o (scan(x) silu(z)), with x = silu(short_conv(W_x u)) and z = W_z u, E = expand d_model channels each.

        scan:  h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,    y_t = <C_t, h_t> + D x_t

    with N = d_state numbers in h per channel, A < 0, and dt_t = softplus(W_dt x_t + b), B_t and C_t linear in x_t
    (section 3.2, algorithm 2; section 3.4). Causal.

    Args:
        l_max: not used; inputs may have any length.
        d_state: N.
        d_conv: taps of the short convolution.
        expand: how many times d_model channels there are inside.
        dt_rank: rank of W_dt; None: d_model / 16, rounded up.
        dt_min, dt_max: between which the step sizes lie at first.
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
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, l_max, bidirectional)
        dt_rank = -(-d_model // 16) if dt_rank is None else dt_rank
        check_positive_int(d_state=d_state, d_conv=d_conv, expand=expand, dt_rank=dt_rank)
        if bidirectional:
            raise ValueError("bidirectional=True: a Mamba is causal; leave bidirectional=False")
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min and dt_max must be 0 < dt_min <= dt_max; got {dt_min!r} and {dt_max!r}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = expand * d_model
        self.sizes = [dt_rank, d_state, d_state]
        self.into = nn.Linear(d_model, 2 * inner, bias=False, **factory)  # x, z
        self.conv = nn.Conv1d(inner, inner, d_conv, groups=inner, **factory)
        self.select = nn.Linear(inner, sum(self.sizes), bias=False, **factory)  # dt at low rank, B, C
        self.dt = nn.Linear(dt_rank, inner, **factory)
        self.A_log = nn.Parameter(torch.arange(1, d_state + 1, **factory).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner, **factory))
        self.out = nn.Linear(inner, d_model, bias=False, **factory)
        nn.init.uniform_(self.dt.weight, -(dt_rank**-0.5), dt_rank**-0.5)
        with torch.no_grad():
            dt = self.dt.bias.uniform_(math.log(dt_min), math.log(dt_max)).exp()
            self.dt.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus undone

    def mix_padded(self, u: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Scan; what comes after a position, padding too, has no part in its output."""
        x, z = self.into(u).chunk(2, -1)
        x = F.silu(short_conv(x, self.conv))
        return self.gate(selective_scan(x, *self.selected(x)), z)

    def selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return dt (..., E), A (E, N), B and C (..., N) and D (E,) for x (..., E), in a dtype to compute in."""
        dt, B, C = self.select(x).split(self.sizes, -1)
        return F.softplus(wide(self.dt(dt))), -wide(self.A_log).exp(), wide(B), wide(C), wide(self.D)

    def gate(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the output for the scan's."""
        return self.out(y.to(z.dtype) * F.silu(z))

    def begin(self, batch: int, rate: float) -> MixerState:
        """Return zeros: the inputs of the short convolution, (B, d_conv - 1, E), and h, (B, E, N)."""
        past = self.into.weight.new_zeros(batch, self.conv.kernel_size[0] - 1, self.conv.in_channels)
        return MixerState(rate, [past, wide(self.A_log).new_zeros(batch, *self.A_log.shape)])

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """Advance the convolution and the recurrence by one position."""
        past, h = memory
        x, z = self.into(u).chunk(2, -1)
        window = torch.cat([past, x[:, None]], 1)
        x = F.silu(F.conv1d(window.mT, self.conv.weight, self.conv.bias, groups=window.shape[2])[..., 0])
        y, h = selective_step(x, h, *self.selected(x))
        return self.gate(y, z), [window[:, 1:], h]


def short_conv(x: Tensor, conv: nn.Conv1d, lead: int = 0) -> Tensor:
    """Convolve x (B, L, E) along L, the same size, with `lead` taps ahead of the position."""
    return conv(F.pad(x.mT, (conv.kernel_size[0] - 1 - lead, lead))).mT


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Compute y (B, L, E) of x and dt (B, L, E), A (E, N), B and C (B, L, N), D (E,) by a parallel scan."""
    decay = (dt[..., None] * A).exp()  # (B, L, E, N)
    h = linear_scan(decay, (dt * x)[..., None] * B[:, :, None])
    return (h @ C[..., None])[..., 0] + D * x


def selective_scan_reference(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Compute `selective_scan` one position after the other."""
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


def linear_scan(a: Tensor, b: Tensor) -> Tensor:
    """Return h with h_t = a_t h_{t-1} + b_t along dim 1, h_{-1} = 0: O(L) work in O(log L) steps."""
    return _LinearScan.apply(a, b)


def _scan(a: Tensor, b: Tensor) -> Tensor:
    """Join neighbours into one step each, scan those for every second h, and fill in the rest from these."""
    L = b.shape[1]
    if L == 1:
        return b.clone()
    even, odd, later = slice(0, L - L % 2, 2), slice(1, L, 2), slice(2, L, 2)
    seconds = _scan(a[:, odd] * a[:, even], torch.addcmul(b[:, odd], a[:, odd], b[:, even]))
    h = torch.empty_like(b)
    h[:, 0], h[:, odd] = b[:, 0], seconds
    h[:, later] = torch.addcmul(b[:, later], a[:, later], seconds[:, : (L - 1) // 2])
    return h


class _LinearScan(torch.autograd.Function):
    """Backwards it is a scan from the end, so that nothing but a and h has to be kept."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        h = _scan(a, b)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        following = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
        db = linear_scan(following.flip(1), grads[0].flip(1)).flip(1)
        before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        return db * before, db
