"""Multi-head self-attention (Vaswani et al., 2017) with rotary positions (Su et al., 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._utils.checks import check_choice, check_positive_int
from ..ops import compute_dtype
from ..streaming.state import KeyValueCache, MixerState
from .projected_mixer import ProjectedMixer


class Attention(ProjectedMixer):
    """y = W_o concat_h softmax(q_h k_h^T / sqrt(E)) v_h, with q, k, v = W u + b and E = d_model / n_heads.

    Args:
        d_model: number of channels.
        l_max: number of learned positions; with rotary positions inputs may have any length.
        n_heads: number of attention heads; must divide d_model.
        positions: "rotary" (rotates q and k by their position), "learned" (adds an embedding to u) or "none". Rotary
            positions count samples at the rate of training, so that another rate keeps distances in time; learned
            positions have one rate only.
        options: bidirectional (attends to all positions instead of the current and earlier ones), device and dtype.
    """

    def __init__(
        self, d_model: int, l_max: int, *, n_heads: int = 4, positions: str = "rotary", **options: Any
    ) -> None:
        super().__init__(d_model, l_max, **options)
        check_positive_int(n_heads=n_heads)
        check_choice("positions", positions, ("rotary", "learned", "none"))
        if d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model = {d_model}; got {n_heads}")
        self.n_heads, self.positions, self.continuous = n_heads, positions, positions != "learned"
        self.qkv = nn.Linear(d_model, 3 * d_model, **self.factory)
        self.out = nn.Linear(d_model, d_model, **self.factory)
        self.embedding: nn.Parameter | None = None
        if positions == "learned":
            self.embedding = nn.Parameter(torch.empty(l_max, d_model, **self.factory))
            nn.init.normal_(self.embedding, std=0.02)

    @property
    def max_positions(self) -> int | None:
        """l_max with learned positions, else None."""
        return None if self.embedding is None else self.l_max

    @property
    def state_grows(self) -> bool:
        """True: every key and value is kept."""
        return True

    def mix_padded(self, u: Tensor, lengths: Tensor | None, rate: float) -> Tensor:
        """Attend; padding needs a mask only if a query can attend to later positions."""
        L = u.shape[1]
        q, k, v = self.project(self.embed_positions(u, slice(L), L), 0, rate)
        mask = None
        if self.bidirectional and lengths is not None:
            mask = key_mask(lengths.to(u.device), L)[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not self.bidirectional)
        return self.out(y.transpose(1, 2).flatten(2))

    def embed_positions(self, u: Tensor, positions: slice | Tensor, end: int) -> Tensor:
        """Add the learned embedding of positions, all below `end`, to u (B, L, d_model), if there is one."""
        if self.embedding is None:
            return u
        if end > self.l_max:
            raise ValueError(
                f"u reaches position {end} and learned positions end at l_max = {self.l_max}: "
                "raise l_max or use positions='rotary'"
            )
        return u + self.embedding[positions]

    def project(self, u: Tensor, start: int, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, n_heads, L, E) of u (B, L, d_model), whose first sample is `start`."""
        q, k, v = self.qkv(u).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.positions == "rotary":
            q, k = rotate(q, start, rate), rotate(k, start, rate)
        return q, k, v

    def zero_state(self, batch: int, rate: float) -> MixerState:
        """Return an empty cache of keys and values, (B, n_heads, 0, E) each."""
        empty = self.out.weight.new_empty(batch, self.n_heads, 0, self.d_model // self.n_heads)
        return MixerState(rate, [], KeyValueCache.empty(empty, empty))

    def stream_chunk(self, u: Tensor, state: MixerState) -> Tensor:
        """Append the keys and values of u to the cache and attend to all of it."""
        assert state.cache is not None
        before, new = state.cache.time, state.cache.next_positions(u.shape[1])
        u = self.embed_positions(u, new - 1, 0 if self.embedding is None else int(new.max()))
        q, k, v = self.project(u, before, state.rate)  # rotary positions enter as distances only
        keys, values, place = state.cache.extend(k, v, new)
        if before == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            visible = (place > 0)[:, None] & (place[:, None] <= new[..., None])  # (B, T, n)
            y = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), visible[:, None])
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, start: int = 0, rate: float = 1.0, base: float = 10_000.0) -> Tensor:
    """Rotate the pairs (x_i, x_{i + E/2}) of position t by t base^(-2i/E), so that q_s . k_t depends on s - t only.

    Sample n has position n / rate, and the first of x (..., L, E) is `start`; if E is odd the last channel is not
    rotated.
    """
    half = x.shape[-1] // 2
    dtype = compute_dtype(x)
    t = torch.arange(start, start + x.shape[-2], device=x.device, dtype=dtype) / rate
    speed = base ** (-torch.arange(half, device=x.device, dtype=dtype) / max(half, 1))
    angle = t[:, None] * speed
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1).to(x.dtype)


def key_mask(lengths: Tensor, size: int, chunk: int | None = None) -> Tensor:
    """Return (B, size), true for keys before `lengths` (B,) and for the first key of each chunk.

    The first key is padding only if its whole chunk is; without it, a softmax over no keys would be NaN.
    """
    t = torch.arange(size, device=lengths.device)
    return (t < lengths[:, None]) | (t % (chunk or size) == 0)
