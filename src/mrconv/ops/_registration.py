"""Registration of ops with `torch.library`, and a shortcut past the dispatcher for eager code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_PLAIN = (Tensor, nn.Parameter)


class EagerOp:
    """A `torch.library` op that calls its implementation directly where nothing but autograd observes the call.

    The dispatcher and the op's wrappers in Python take 60 us forward and 60 us backward, as long as several launches.
    In compiled code, under modes and function transforms, and for subclasses of Tensor the registered op runs.
    """

    def __init__(
        self, name: str, implementation: Callable[..., Any], schema: str | None = None, mutates_args: Sequence[str] = ()
    ) -> None:
        self.implementation = implementation
        self.function: Any = None
        self.definition: CustomOpDef = torch.library.custom_op(
            f"mrconv::{name}", implementation, mutates_args=mutates_args, schema=schema
        )
        self.mutated = [i for i, argument in enumerate((schema or "").split(", ")) if "!" in argument]

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function that returns tensors of the output's shape; a decorator."""
        return self.definition.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """Register the backward, as `torch.library.register_autograd` does."""
        self.definition.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self.implementation(*arguments)
            setup_context(ctx, arguments, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
        self.function = type("EagerFunction", (torch.autograd.Function,), members)

    def __call__(self, *arguments: Any) -> Any:
        """Run the op; all arguments are positional."""
        if not _only_autograd_observes(arguments):
            return self.definition(*arguments)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return (self.function.apply if self.function else self.definition)(*arguments)
        output = self.implementation(*arguments)
        if self.mutated:
            changed = [arguments[i] for i in self.mutated if arguments[i] is not None]
            torch.autograd.graph.increment_version([x for x in changed if not x.is_inference()])
        return output


def eager_op(
    name: str, schema: str | None = None, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], EagerOp]:
    """Return a decorator that registers a function as op mrconv::name; the schema defaults to its annotations."""
    return lambda implementation: EagerOp(name, implementation, schema, mutates_args)


def _only_autograd_observes(arguments: Sequence[Any]) -> bool:
    """Return whether the arguments are plain tensors, outside of compiled code, modes and function transforms."""
    if torch.compiler.is_compiling():
        return False
    core = torch._C  # noqa: SLF001 (torch has no public functions for these)
    modes = core._len_torch_dispatch_stack() + core._len_torch_function_stack()  # noqa: SLF001
    transformed = core._functorch.peek_interpreter_stack() is not None  # noqa: SLF001
    return not (modes or transformed) and all(type(x) in _PLAIN for x in arguments if isinstance(x, Tensor))
