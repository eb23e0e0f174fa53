"""MEGA: a moving average, then gated single-head attention (Ma et al., 2022, "Mega: Moving Average Equipped...")."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from .._utils.checks import check_choice, check_positive_int
from ..streaming.state import KeyValueCache, MixerState
from .kernel_cache import KernelCache
from .parameters import upcast
from .projected_mixer import ProjectedMixer
from .transformer import key_mask


class EMA(KernelCache):
    """Multi-dimensional damped exponential moving average, (B, L, d_model) -> (B, L, d_model) (section 3.1).

        h_t = p beta x_t + (1 - p d) h_{t-1},    y_t = <eta, h_t> / sqrt(d_ema) + omega x_t

    with p = sigmoid(alpha) and d = sigmoid(delta), d_ema numbers per channel. As a convolution, the kernel is
    k[j] = sum_n eta_n p_n beta_n (1 - p_n d_n)^j / sqrt(d_ema). If bidirectional, a second average runs over the
    reversed sequence and its output is added; both include x_t.
    """

    def __init__(self, d_model: int, d_ema: int = 16, bidirectional: bool = False, **factory: Any) -> None:
        super().__init__()
        check_positive_int(d_model=d_model, d_ema=d_ema)
        shape = (1 + bidirectional, d_model, d_ema)
        self.bidirectional, self.d_ema = bidirectional, d_ema
        self.alpha, self.delta, self.beta, self.eta = (nn.Parameter(torch.empty(shape, **factory)) for _ in range(4))
        self.omega = nn.Parameter(torch.empty(d_model, **factory))
        with torch.no_grad():
            self.alpha.normal_(std=0.2)
            self.delta.normal_(std=0.2)
            self.beta.normal_(std=0.02).add_(1 - 2 * (torch.arange(d_ema, device=self.beta.device) % 2))
            self.eta.normal_()
            self.omega.normal_()

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return p beta, 1 - p d and eta / sqrt(d_ema), each (n_directions, d_model, d_ema)."""
        p = upcast(self.alpha).sigmoid()
        return p * self.beta, 1 - p * upcast(self.delta).sigmoid(), upcast(self.eta) / math.sqrt(self.d_ema)

    def kernel(self, length: int) -> Tensor:
        """Return k, (n_directions, d_model, length), in closed form."""
        into, decay, out = self.coefficients()
        powers = decay[..., None] ** torch.arange(length, device=decay.device)
        return ((into * out)[..., None, :] @ powers)[..., 0, :]

    def forward(self, x: Tensor) -> Tensor:
        """Average x by one convolution."""
        L = x.shape[1]
        lead = L - 1 if self.bidirectional else 0
        return ops.fft_conv(x.mT, self.cached_kernel(lead, L, functools.partial(self.joined_kernel, L)), lead).mT

    def joined_kernel(self, length: int) -> Tensor:
        """Return the kernel of both directions, with omega at lag 0."""
        kernels = self.kernel(length)
        k = kernels[0] + F.pad(upcast(self.omega)[:, None], (0, length - 1))
        if self.bidirectional:
            k = F.pad(k, (length - 1, 0)) + F.pad(kernels[1].flip(-1), (0, length - 1))
        return k

    def ema_step(self, x: Tensor, h: Tensor, direction: int = 0) -> tuple[Tensor, Tensor]:
        """Advance the recurrence by x (B, d_model) from h (B, d_model, d_ema); return <eta, h> / sqrt(d_ema) and h.

        omega x is not included: it is added once, for any number of directions.
        """
        into, decay, out = (c[direction] for c in self.coefficients())
        h = into * x[..., None] + decay * h
        return (out * h).sum(-1), h


class GatedAttention(nn.Module):
    """The gated attention of MEGA (sections 3.2, 3.3): y (B, L, d_model) from x and its moving average x'.

        z = silu(W_z x'),  q = kappa_q z + mu_q,  k = kappa_k z + mu_k,  v = silu(W_v x)
        o = f(q k^T / tau + b[s - t]) v
        y = phi h + (1 - phi) x,  h = silu(W_h x' + U_h (gamma o)),  gamma = silu(W_gamma x'),  phi = sigmoid(W_phi x')

    Every W has a bias. f is softmax with tau = sqrt(d_attention), or `laplace` with tau the number of visible keys.

    Args:
        d_model: number of channels.
        l_max: number of distances with a separate bias b, in each direction; larger distances share the last one.
        d_attention: channels of queries and keys.
        d_value: channels of values; None for 2 d_model.
        attention: "softmax" or "laplace".
        chunk: length of the chunks within which positions attend to each other; None for the whole sequence.
        bidirectional: attend to all positions instead of the current and earlier ones only.
        factory: device and dtype of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        l_max: int,
        *,
        d_attention: int = 64,
        d_value: int | None = None,
        attention: str = "softmax",
        chunk: int | None = None,
        bidirectional: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        d_value = 2 * d_model if d_value is None else d_value
        check_positive_int(d_attention=d_attention, d_value=d_value, chunk=1 if chunk is None else chunk)
        check_choice("attention", attention, ("softmax", "laplace"))
        self.attention, self.chunk, self.bidirectional = attention, chunk, bidirectional
        self.span = l_max if chunk is None else min(l_max, chunk)
        self.sizes = [d_attention, d_value, d_model, d_model]
        self.value = nn.Linear(d_model, d_value, **factory)
        self.gates = nn.Linear(d_model, sum(self.sizes), **factory)  # z, gamma, phi, h
        self.back = nn.Linear(d_value, d_model, bias=False, **factory)
        self.kappa = nn.Parameter(torch.empty(2, d_attention, **factory))
        self.mu = nn.Parameter(torch.zeros(2, d_attention, **factory))
        self.distance = nn.Parameter(torch.empty(self.ahead + self.span, **factory))
        for weight in (self.value.weight, self.gates.weight, self.back.weight, self.kappa, self.distance):
            nn.init.normal_(weight, std=0.02)
        for linear in (self.value, self.gates):
            nn.init.zeros_(linear.bias)

    @property
    def ahead(self) -> int:
        """Number of distances into the future."""
        return self.span - 1 if self.bidirectional else 0

    def forward(self, x: Tensor, averaged: Tensor, lengths: Tensor | None) -> Tensor:
        """Attend within x; keys from `lengths` (B,) on are masked."""
        return self.gated(x, averaged, lambda q, k, v: self.attend(q, k, v, lengths))

    def gated(self, x: Tensor, averaged: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Return y, with o computed by `attend` from queries, keys and values."""
        z, gamma, phi, h = self.gates(averaged).split(self.sizes, -1)
        q, k = (F.silu(z) * kappa + mu for kappa, mu in zip(self.kappa, self.mu, strict=True))
        o = attend(q, k, F.silu(self.value(x)))
        h = F.silu(h + self.back(F.silu(gamma) * o))
        return x + phi.sigmoid() * (h - x)

    def cache(self, batch: int) -> KeyValueCache:
        """Return an empty cache."""
        d_attention, d_value, *_ = self.sizes
        return KeyValueCache.empty(*(self.kappa.new_empty(batch, 0, size) for size in (d_attention, d_value)))

    def stream(self, x: Tensor, averaged: Tensor, cache: KeyValueCache) -> Tensor:
        """Attend to the positions so far, or to those of the current chunk."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new = cache.next_positions(q.shape[1])
            keys, values, place = cache.extend(k, v, new, self.chunk)
            age = new[..., None] - place[:, None]  # (B, T, n)
            visible = (place > 0)[:, None] & (age >= 0)
            if self.chunk is not None:
                visible &= age <= ((new - 1) % self.chunk)[..., None]
            bias = self.distance[age.clamp(0, self.span - 1)]
            return self.weighted_sum(q, keys.to(q.dtype), values.to(v.dtype), bias, visible)

        return self.gated(x, averaged, attend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        """Return o (B, L, d_value), with the last chunk padded to full length."""
        L = q.shape[1]
        c = min(self.chunk or L, L)
        filling = -L % c
        q, k, v = (F.pad(x, (0, 0, 0, filling)).unflatten(1, (-1, c)) for x in (q, k, v))  # (B, chunks, c, .)
        if not self.bidirectional:  # padding is later than every valid query
            visible = torch.ones(c, c, dtype=torch.bool, device=q.device).tril()
        elif filling or lengths is not None:
            lengths = torch.tensor([L]) if lengths is None else lengths
            visible = key_mask(lengths.to(q.device), L + filling, c).unflatten(1, (-1, 1, c))  # (B, chunks, 1, c)
        else:
            visible = torch.ones(1, c, dtype=torch.bool, device=q.device)
        return self.weighted_sum(q, k, v, self.biases(c), visible).flatten(1, 2)[:, :L]

    def biases(self, n: int) -> Tensor:
        """Return b at t - s, (n, n), for queries t and keys s; by copies, because the backward of indexing is slow."""
        before, after = max(0, n - 1 - self.ahead), max(0, n - self.span)
        b = torch.cat([self.distance[:1].expand(before), self.distance, self.distance[-1:].expand(after)])
        first = before + self.ahead - (n - 1)  # the index of t - s = -(n - 1)
        b = b[first : first + 2 * n - 1].flip(0)
        shifted = F.pad(b, (0, 1)).expand(n, -1).reshape(-1)[: n * (2 * n - 1)]  # each query one further right
        return shifted.view(n, 2 * n - 1)[:, n - 1 :]

    def weighted_sum(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, visible: Tensor) -> Tensor:
        """Return f(q k^T / tau + bias) v over the visible keys."""
        if self.attention == "softmax":
            return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype).masked_fill(~visible, -math.inf))
        scores = q @ k.transpose(-1, -2) / visible.sum(-1, keepdim=True) + bias
        return laplace(scores).masked_fill(~visible, 0).to(v.dtype) @ v


def laplace(scores: Tensor) -> Tensor:
    """Return the normal distribution function of mean sqrt(1/2) and variance 1/(4 pi), close to relu^2."""
    return (1 + torch.erf((scores - math.sqrt(0.5)) * math.sqrt(2 * math.pi))) / 2


class Mega(ProjectedMixer):
    """y = GatedAttention(x, silu(EMA(x))).

    Args:
        d_model: number of channels.
        l_max: number of distances with a separate position bias; inputs may be longer.
        d_ema: numbers per channel in the moving average.
        bidirectional: average in both directions and attend to all positions.
        options: d_attention, d_value, attention and chunk as for `GatedAttention`; device and dtype.
    """

    option_sources = (GatedAttention,)

    def __init__(
        self, d_model: int, l_max: int, *, d_ema: int = 16, bidirectional: bool = False, **options: Any
    ) -> None:
        super().__init__(d_model, l_max, bidirectional, options.get("device"), options.get("dtype"))
        self.ema = EMA(d_model, d_ema, self.bidirectional, **self.factory)
        self.gated = GatedAttention(d_model, l_max, bidirectional=self.bidirectional, **options)

    @property
    def state_grows(self) -> bool:
        """Whether attention keeps all keys and values, because there are no chunks."""
        return self.gated.chunk is None

    def mix_padded(self, u: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Average and attend."""
        return self.gated(u, F.silu(self.ema(u)), lengths)

    def freeze(self) -> None:
        """Cache the kernel of the average up to l_max."""
        self.ema.cache_kernel(self.ema.joined_kernel(self.l_max), self.l_max - 1 if self.bidirectional else 0)

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return h = 0, (B, d_model, d_ema), and an empty cache."""
        h = upcast(self.ema.eta).new_zeros(batch, *self.ema.eta.shape[1:])
        return MixerState(rate, [h], self.gated.cache(batch))

    def stream_chunk(self, u: Tensor, state: MixerState) -> Tensor:
        """Average by the recurrence and attend."""
        assert state.cache is not None
        (h,), outputs = state.memory, []
        for x in u.unbind(1):
            y, h = self.ema.ema_step(x, h)
            outputs.append(y + self.ema.omega * x)
        state.remember([h])
        return self.gated.stream(u, F.silu(torch.stack(outputs, 1)).to(u.dtype), state.cache)


class MegaChunk(Mega):
    """`Mega` with attention within chunks: linear in the length."""

    def __init__(self, d_model: int, l_max: int, *, chunk: int = 128, **options: Any) -> None:
        super().__init__(d_model, l_max, chunk=chunk, **options)
