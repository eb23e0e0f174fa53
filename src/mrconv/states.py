"""What streaming remembers between two steps: plain dataclasses of real tensors, the batch first in all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


class State:
    """A dataclass of tensors (batch first), numbers, and states or lists of them.

    Streaming writes into the state it is given: keep a `copy()` to go back to.
    """

    parts: ClassVar[Mapping[str, type[State]]] = {}
    """The class of every field that holds states."""

    def copy(self) -> Self:
        """Return a state that goes on by itself."""
        return self._map(torch.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the state on another device; takes what `Tensor.to` takes but a dtype."""
        return self._map(lambda x: x.to(*args, **kwargs))

    def reorder(self, index: Tensor | Sequence[int]) -> Self:
        """Return the state of the sequences at these places of the batch, as beam search wants it; may repeat some."""
        return self._map(lambda x: x.index_select(0, torch.as_tensor(index, device=x.device)))

    def reset(self, where: Tensor | Sequence[int] | int) -> Self:
        """Make some sequences start anew, in place: a mask (batch,) of bools, or places in the batch."""
        for x in self.tensors():
            x[torch.as_tensor(where, device=x.device)] = 0
        return self

    def tensors(self) -> list[Tensor]:
        """Return every tensor."""
        found: list[Tensor] = []

        def see(x: Tensor) -> Tensor:
            found.append(x)
            return x

        self._map(see)
        return found

    @property
    def nbytes(self) -> int:
        """Memory that the tensors take."""
        return sum(x.nbytes for x in self.tensors())

    def state_dict(self) -> dict[str, Any]:
        """Return the same tensors in dictionaries, which `torch.load(weights_only=True)` accepts."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_state_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a state of what `state_dict` gave."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if set(values) != names:
            raise ValueError(f"a {cls.__name__} has {', '.join(sorted(names))}; got {', '.join(sorted(values))}")
        return cls(**{name: cls._typed(name, value) for name, value in values.items()})

    @classmethod
    def _typed(cls, name: str, value: Any) -> Any:
        if name not in cls.parts:
            return value
        make = cls.parts[name].from_state_dict
        return [make(each) for each in value] if isinstance(value, list) else make(value)

    def _map(self, f: Callable[[Tensor], Tensor]) -> Self:
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside of it
            fields = dataclasses.fields(self)  # type: ignore[arg-type]
            return type(self)(**{field.name: _apply(f, getattr(self, field.name)) for field in fields})


def _apply(f: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, list):
        return [_apply(f, each) for each in value]
    return value._map(f) if isinstance(value, State) else value


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.state_dict() if isinstance(value, State) else value


@dataclass
class LayerState(State):
    """What an `MRConv` (or a block) remembers.

    time: steps taken, for all sequences alike. rate: of the input. inputs (batch, R, d_model): the last R of them, that
    of time t at t % R. modes (batch, 2, N, M, d_model, 2), for Fourier kernels: per resolution and mode, the sum over
    the window and, behind it, the next one in the making, as pairs of numbers. future (batch, P, heads * d_model), for
    dense kernels: what is known of the outputs to come, that of time t at t % P.
    """

    time: int
    rate: float
    inputs: Tensor
    modes: Tensor | None = None
    future: Tensor | None = None


@dataclass
class BackboneState(State):
    """The states of all blocks."""

    blocks: list[LayerState]
    parts: ClassVar[Mapping[str, type[State]]] = {"blocks": LayerState}


@dataclass
class PooledState(State):
    """A backbone's state with the sum (batch, d_model) of its features so far and their number (batch,)."""

    backbone: BackboneState
    total: Tensor
    count: Tensor
    parts: ClassVar[Mapping[str, type[State]]] = {"backbone": BackboneState}
