"""Generation of tokens from a language model, one streaming step per token."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from ._utils.checks import check_positive_int
from .streaming.streaming_module import StreamingModule

Callback = Callable[[Tensor], None]
"""A function called with each new token of all sequences, (B,), as soon as it is sampled."""


def filter_logits(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Return logits (B, V) with unlikely tokens at -inf.

    `top_k` keeps that many tokens; `top_p` then keeps the fewest whose probabilities sum to at least top_p.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p is not None and top_p < 1:
        descending, index = logits.sort(-1, descending=True)
        preceding = descending.softmax(-1).cumsum(-1) - descending.softmax(-1)
        dropped = preceding >= top_p
        dropped[..., 0] = False  # keep the most likely token, however small top_p is
        mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, dropped)
        logits = logits.masked_fill(mask, -torch.inf)
    return logits


def sample_tokens(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample a token (B,) from logits (B, V); temperature 0 selects the most likely."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() - logits.float().amax(-1, keepdim=True)  # no overflow at small temperatures
    limits = torch.finfo(logits.dtype)
    scaled = logits / min(max(temperature, limits.tiny), limits.max)
    probabilities = filter_logits(scaled, top_k, top_p).softmax(-1)
    try:
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    except RuntimeError as error:  # on a GPU, an assertion of the device
        raise ValueError(f"cannot draw a token: {error}") from error


@torch.no_grad()
def generate(
    model: StreamingModule,
    prompt: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
) -> Tensor:
    """Continue each prompt and return the new tokens (B, n), n <= new_tokens.

    Args:
        model: a `LanguageModel`, or another module that streams tokens to logits.
        prompt: tokens (B, T) with T >= 1.
        new_tokens: largest number of tokens to generate.
        temperature: divides the logits; 0 selects the most likely token.
        top_k: sample among the top_k most likely tokens.
        top_p: sample among the fewest tokens whose probabilities sum to at least top_p.
        stop: tokens that end a sequence. An ended sequence repeats its last token; generation stops when all have
            ended.
        generator: random number generator to sample with.
        callback: called with each new token of all sequences.
    """
    check_positive_int(new_tokens=new_tokens)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be tokens (batch, length >= 1); got {tuple(prompt.shape)}")
    if not temperature >= 0:
        raise ValueError(f"temperature must not be negative; got {temperature}")
    if top_k is not None:
        check_positive_int(top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1]; got {top_p}")
    logits, state = model.prefill(prompt)
    logits, tokens = logits[:, -1], [prompt[:, -1]]
    stop_tokens = torch.tensor(sorted(stop), device=prompt.device, dtype=prompt.dtype)
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for i in range(new_tokens):
        sampled = sample_tokens(logits, temperature, top_k, top_p, generator).to(prompt.dtype)
        tokens.append(torch.where(ended, tokens[-1], sampled))
        if callback is not None:
            callback(tokens[-1])
        ended = ended | torch.isin(tokens[-1], stop_tokens)
        if i + 1 == new_tokens or (len(stop_tokens) and bool(ended.all())):
            break
        logits, state = model.step(tokens[-1], state)
    return torch.stack(tokens[1:], 1)
