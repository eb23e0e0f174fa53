"""Text from a language model, token by token, with a state instead of a growing past."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._utils.checks import check_positive_int

if TYPE_CHECKING:
    from .model import LanguageModel

Callback = Callable[[Tensor], None]
"""Called with each new token of all sequences, (B,), as soon as it is drawn."""


def restricted(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Return logits (B, V) with all but the top_k, and then all but the fewest that have probability top_p, at -inf."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        over = before >= top_p
        over[..., 0] = False  # the likeliest stays, however small top_p is
        out = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, over)
        logits = logits.masked_fill(out, -torch.inf)
    return logits


def draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Return a token (B,) for logits (B, V); at temperature 0 the likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() - logits.float().amax(-1, keepdim=True)  # none overflows, however small the temperature is
    limits = torch.finfo(logits.dtype)
    odds = restricted(logits / min(max(temperature, limits.tiny), limits.max), top_k, top_p).softmax(-1)
    return torch.multinomial(odds, 1, generator=generator)[:, 0]


@torch.no_grad()
def generate(
    model: LanguageModel,
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
    """Return what follows the prompts (B, T >= 1): up to new_tokens tokens each, (B, n).

    A sequence that has drawn a token of `stop` repeats it; when all have, it is over.
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
    logits, found = logits[:, -1], []
    ends = torch.tensor(sorted(stop), device=prompt.device, dtype=prompt.dtype)
    token = prompt[:, -1]
    over = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for i in range(new_tokens):
        token = torch.where(over, token, draw(logits, temperature, top_k, top_p, generator).to(prompt.dtype))
        found.append(token)
        if callback is not None:
            callback(token)
        over = over | torch.isin(token, ends)
        if i + 1 == new_tokens or (len(ends) and bool(over.all())):
            break
        logits, state = model.step(token, state)
    return torch.stack(found, 1)
