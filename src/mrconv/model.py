"""Sequence models: encoder -> blocks -> head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._utils.checks import check_choice, check_lengths, check_positive_int, readable, valid_mask
from .block import MRConvBlock, block_norm_module
from .config import (
    BackboneConfig,
    ClassifierConfig,
    LabellerConfig,
    LanguageModelConfig,
    PoolingOptions,
    RegressorConfig,
    TwoTowerConfig,
    values_of,
)
from .generation import generate
from .hub import Model
from .ops import compute_dtype
from .streaming.state import BackboneState, PooledState
from .streaming.streaming_module import StreamingModule


class Backbone(StreamingModule, Model):
    """Encoder and blocks without a head: tokens (B, L) or values (B, L, d_input) -> features (B, L, d_model)."""

    config_class = BackboneConfig
    config: BackboneConfig

    def build(self, **factory: Any) -> None:
        """Create encoder, blocks and, with prenorm, the final norm."""
        c = self.config
        check_positive_int(depth=c.depth, d_model=c.d_model)
        self.encoder: nn.Module = nn.Identity()
        if c.vocab_size is not None and c.d_input is not None:
            raise ValueError("vocab_size (tokens) and d_input (real values) are mutually exclusive")
        if c.vocab_size is not None:
            check_positive_int(vocab_size=c.vocab_size)
            self.encoder = nn.Embedding(c.vocab_size, c.d_model, **factory)
        elif c.d_input is not None:
            check_positive_int(d_input=c.d_input)
            self.encoder = nn.Linear(c.d_input, c.d_model, **factory)
        shared = c.layer()
        blocks = []
        for i in range(c.depth):
            seed = None if c.seed is None else c.seed + 2 * i  # two directions each
            blocks.append(
                MRConvBlock(
                    c.d_model,
                    c.l_max,
                    dropout=c.dropout,
                    tie_dropout=c.tie_dropout,
                    block_norm=c.block_norm,
                    prenorm=c.prenorm,
                    mixer=c.mixer,
                    mixer_options=c.mixer_options,
                    **(shared | {"seed": seed}),
                    **factory,
                )
            )
        self.blocks = nn.ModuleList(blocks)
        norm = (c.block_norm, c.d_model, c.sync_stats, c.momentum)
        self.norm = block_norm_module(*norm, **factory) if c.prenorm else None

    def forward(self, x: Tensor, lengths: Tensor | None = None, rate: float | None = None) -> Tensor:
        """Return features (B, L, d_model); `lengths` (B,) hide padding only with mask_padding."""
        self.check(x)
        if lengths is not None:
            lengths = check_lengths(lengths, x.shape[0], x.shape[1])
        masked = lengths if self.config.mask_padding else None
        h = self.encoder(x)
        for block in self.blocks:
            h = block(h, masked, rate)
        if self.norm is None:
            return h
        return self.norm(h, None if masked is None else valid_mask(masked, h))

    def initial_state(self, batch: int, **options: Any) -> BackboneState:
        """Return the initial state of `batch` sequences; the options are those of `MRConv.initial_state`."""
        self.check_streamable()
        return BackboneState([block.initial_state(batch, **options) for block in self.block_list])

    @torch.no_grad()
    def stream(self, x: Tensor, state: BackboneState) -> tuple[Tensor, BackboneState]:
        """Process the next positions of x; return their features (B, T, d_model) and the state, updated in place."""
        self.check_streamable()
        self.check(x)
        h = self.encoder(x)
        for block, block_state in zip(self.block_list, state.blocks, strict=True):
            h, _ = block.stream(h, block_state)
        return h if self.norm is None else self.norm(h), state

    @property
    def block_list(self) -> list[MRConvBlock]:
        """The blocks as a typed list."""
        return list(self.blocks)  # type: ignore[arg-type]

    def check(self, x: Tensor) -> None:
        """Raise ValueError for an input of the wrong shape or dtype, or with tokens outside of the vocabulary.

        Tokens are checked only where reading them needs no synchronisation: on the CPU, outside of compiled code.
        """
        c = self.config
        if c.vocab_size is not None:
            if x.ndim != 2 or x.is_floating_point():
                raise ValueError(f"tokens must be integers of shape (batch, length); got {x.dtype} {tuple(x.shape)}")
            if readable(x) and x.numel():
                low, high = (int(token) for token in x.aminmax())
                if low < 0 or high >= c.vocab_size:
                    wrong = low if low < 0 else high
                    raise ValueError(f"tokens must lie in 0 .. vocab_size - 1 = {c.vocab_size - 1}; got {wrong}")
        elif x.ndim != 3 or x.shape[2] != (c.d_input or c.d_model):
            channels = f"d_input = {c.d_input}" if c.d_input else f"d_model = {c.d_model}"
            raise ValueError(f"input must have shape (batch, length, {channels}); got {tuple(x.shape)}")
        elif not x.is_floating_point():
            raise ValueError(f"input must be real floating point, or the model needs vocab_size; got {x.dtype}")


class _WithBackbone(Model):
    """Base class of models with a backbone and a head."""

    def build(self, **factory: Any) -> None:
        self.backbone = Backbone(**values_of(self.config, BackboneConfig), **factory)


def pool(h: Tensor, lengths: Tensor | Sequence[int] | None, how: str) -> Tensor:
    """Reduce (B, L, D) to (B, D) over the first `lengths` positions."""
    if lengths is None:
        return h.mean(1) if how == "mean" else h[:, -1]
    lengths = check_lengths(lengths, h.shape[0], h.shape[1]).to(h.device)
    if how == "mean":
        total = h.to(compute_dtype(h)).masked_fill(~valid_mask(lengths, h), 0).sum(1)
        return (total / lengths.clamp(min=1)[:, None]).to(h.dtype)
    return h[torch.arange(h.shape[0], device=h.device), (lengths - 1).clamp(min=0)]


class _WithLinearHead(StreamingModule, _WithBackbone):
    """A backbone and a linear head, on the pooled sequence or on every position."""

    config: ClassifierConfig | LabellerConfig | RegressorConfig

    def build(self, **factory: Any) -> None:
        super().build(**factory)
        name = "n_outputs" if isinstance(self.config, RegressorConfig) else "n_classes"
        outputs = getattr(self.config, name)
        check_positive_int(**{name: outputs})
        how = None
        if isinstance(self.config, PoolingOptions):
            how = self.config.pool
            check_choice("pool", how, ("mean", "last"))
        self.pool = None if getattr(self.config, "per_position", False) else how
        self.head = nn.Linear(self.config.d_model, outputs, **factory)

    def forward(self, x: Tensor, lengths: Tensor | None = None, rate: float | None = None) -> Tensor:
        """Return the outputs of the head; positions past `lengths` (B,) are not pooled."""
        h = self.backbone(x, lengths, rate)
        return self.head(h if self.pool is None else pool(h, lengths, self.pool))

    def initial_state(self, batch: int, **options: Any) -> BackboneState | PooledState:
        """Return the initial state of `batch` sequences; the options are those of `MRConv.initial_state`."""
        state = self.backbone.initial_state(batch, **options)
        if self.pool != "mean":
            return state
        with torch.inference_mode(False):
            total = torch.zeros(batch, self.config.d_model, device=state.tensors()[0].device, dtype=torch.float64)
            return PooledState(state, total, torch.zeros_like(total[:, 0]))

    @torch.no_grad()
    def stream(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Process the next positions of x; return the outputs (B, T, ...) and the state, updated in place.

        Where `forward` pools, the output at a position is that of the sequence up to this position.
        """
        if self.pool != "mean":
            h, state = self.backbone.stream(x, state)
            return self.head(h), state
        h, _ = self.backbone.stream(x, state.backbone)
        totals = state.total[:, None] + h.to(state.total).cumsum(1)
        counts = state.count[:, None] + torch.arange(1, h.shape[1] + 1, device=h.device)
        state.total.copy_(totals[:, -1])
        state.count += h.shape[1]
        return self.head((totals / counts[..., None]).to(h.dtype)), state


class SequenceClassifier(_WithLinearHead):
    """(B, L) tokens or (B, L, d_input) values -> logits (B, n_classes)."""

    config_class = ClassifierConfig


class SequenceLabeller(_WithLinearHead):
    """Logits (B, L, n_classes) at every position."""

    config_class = LabellerConfig


class SequenceRegressor(_WithLinearHead):
    """Real values per sequence, (B, n_outputs), or with per_position at every position, (B, L, n_outputs)."""

    config_class = RegressorConfig


class TwoTowerClassifier(_WithBackbone):
    """Two sequences through one backbone -> logits (B, n_classes) from [x1, x2, x1 - x2, x1 * x2]."""

    config_class = TwoTowerConfig
    config: TwoTowerConfig

    def build(self, **factory: Any) -> None:
        """Create the backbone and the two-layer head."""
        super().build(**factory)
        check_positive_int(n_classes=self.config.n_classes)
        check_choice("pool", self.config.pool, ("mean", "last"))
        D = self.config.d_model
        self.hidden = nn.Linear(4 * D, D, **factory)
        self.head = nn.Linear(D, self.config.n_classes, **factory)

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        first_lengths: Tensor | None = None,
        second_lengths: Tensor | None = None,
        rate: float | None = None,
    ) -> Tensor:
        """Return logits for B pairs; the shorter side is zero-padded, and both run as one batch of 2B."""
        self.backbone.check(first)
        self.backbone.check(second)
        if first.shape[0] != second.shape[0]:
            raise ValueError(f"first and second differ in batch size: {first.shape[0]} and {second.shape[0]}")
        both, lengths = _interleaved(first, second, first_lengths, second_lengths)
        h = pool(self.backbone(both, lengths, rate), lengths, self.config.pool)
        a, b = h.unflatten(0, (first.shape[0], 2)).unbind(1)
        return self.head(F.gelu(self.hidden(torch.cat([a, b, a - b, a * b], -1))))


def _interleaved(
    first: Tensor, second: Tensor, first_lengths: Tensor | None, second_lengths: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return both sides of every pair in turn, so that a part of the batch has both, and their lengths."""
    same_length = first.shape[1] == second.shape[1]
    if first_lengths is None and second_lengths is None and same_length:
        return torch.stack([first, second], 1).flatten(0, 1), None
    L = first.shape[1] if same_length else max(first.shape[1], second.shape[1])  # torch.export cannot trace max
    sides, lengths = [], []
    for x, given in ((first, first_lengths), (second, second_lengths)):
        full = torch.full((x.shape[0],), x.shape[1], device=x.device)
        lengths.append(full if given is None else check_lengths(given, x.shape[0], x.shape[1]).to(x.device))
        sides.append(F.pad(x, (0, 0) * (x.ndim - 2) + (0, L - x.shape[1])))
    both, ends = (torch.stack(each, 1).flatten(0, 1) for each in (sides, lengths))
    return both, ends


class LanguageModel(StreamingModule, _WithBackbone):
    """Tokens (B, L) -> logits (B, L, vocab_size) of the next token; causal, with a tied embedding."""

    config_class = LanguageModelConfig
    config: LanguageModelConfig

    def build(self, **factory: Any) -> None:
        """Create the backbone."""
        if self.config.vocab_size is None or self.config.d_input is not None:
            raise ValueError("LanguageModel needs vocab_size and does not take d_input")
        if self.config.bidirectional:
            raise ValueError("bidirectional=True would let a LanguageModel see the tokens it predicts")
        super().build(**factory)
        nn.init.normal_(self._embedding, std=self.config.d_model**-0.5)

    @property
    def _embedding(self) -> Tensor:
        return self.backbone.encoder.weight  # type: ignore[return-value]

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, rate: float | None = None) -> Tensor:
        """Return the logits of the token after each position."""
        return F.linear(self.backbone(tokens, lengths, rate), self._embedding)

    def initial_state(self, batch: int, **options: Any) -> BackboneState:
        """Return the initial state of `batch` sequences; the options are those of `MRConv.initial_state`."""
        return self.backbone.initial_state(batch, **options)

    @torch.no_grad()
    def stream(self, x: Tensor, state: BackboneState) -> tuple[Tensor, BackboneState]:
        """Process the next tokens x (B, T); return the logits of their successors and the state, updated in place."""
        h, state = self.backbone.stream(x, state)
        return F.linear(h, self._embedding), state

    def generate(self, prompt: Tensor, new_tokens: int, **options: Any) -> Tensor:
        """Return up to new_tokens tokens that continue each prompt (B, T); options as for `generation.generate`.

        Options: temperature (0: greedy), top_k, top_p, stop (tokens that end a sequence), generator and callback.
        """
        return generate(self, prompt, new_tokens, **options)
