"""What torch asks of every op of normalised branches, and all answer alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .fft_conv.op import compute_dtype, twins, wanted

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def register_branch_sum(
    op: CustomOpDef, backward: CustomOpDef, extra: Callable[..., tuple[int, ...]] | None = None
) -> None:
    """Register shapes and gradients of op(u, kernels, weight, skip, bias, lengths, ...) -> y, mean, var, count.

    It may return one tensor more, whose shape `extra` tells from kernels, weight and what follows lengths. `backward`
    takes y's gradient, the six tensors, all results but y and the other arguments, and returns the gradients of the
    first five tensors.
    """

    @op.register_fake
    def _(u, kernels, weight, *rest):  # type: ignore[no-untyped-def]
        shapes = [weight.shape, weight.shape, (), *([extra(kernels, weight, *rest[3:])] if extra else [])]
        return torch.empty_like(u), *(u.new_empty(shape, dtype=compute_dtype(u, kernels)) for shape in shapes)

    @backward.register_fake
    def _(grad, u, kernels, weight, *rest):  # type: ignore[no-untyped-def]
        return torch.empty_like(u), *twins(kernels, weight), *(weight.new_empty(weight.shape[1]) for _ in range(2))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rest = inputs[6:]
        ctx.save_for_backward(*inputs[:6], *output[1:])

    def pull(ctx: Any, grad: Any, *_: Any) -> Any:
        *grads, dskip, dbias = backward(grad, *ctx.saved_tensors, *ctx.rest)
        return *grads, *wanted(ctx, 3, dskip, dbias), *([None] * (1 + len(ctx.rest)))

    op.register_autograd(pull, setup_context=setup)
