"""What streaming remembers between two steps: plain dataclasses of real tensors, the batch first in all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F


class State:
    """A dataclass of tensors (batch first), numbers, and states or lists of them.

    Streaming writes into the state it is given: keep a `copy()` to go back to.
    """

    parts: ClassVar[Mapping[str, tuple[type[State], ...]]] = {}
    """The classes of every field that holds states."""

    def copy(self) -> Self:
        """Return a state that goes on by itself."""
        return self._map(torch.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the state on another device; takes what `Tensor.to` takes but a dtype."""

        def moved(x: Tensor) -> Tensor:
            y = x.to(*args, **kwargs)
            if y.dtype != x.dtype:
                raise ValueError(f"a state keeps its dtypes, {x.dtype} among them; got {y.dtype}")
            return y

        return self._map(moved)

    def reorder(self, index: Tensor | Sequence[int]) -> Self:
        """Return the state of the sequences at these places of the batch, as beam search wants it; may repeat some."""
        return self._map(lambda x: x.index_select(0, _places(index, x)))

    def reset(self, where: Tensor | Sequence[int] | int) -> Self:
        """Make some sequences start anew, in place: a mask (batch,) of bools, or places in the batch."""
        for x in self.tensors():
            x[_places(where, x)] = 0
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
        if name not in cls.parts or value is None:
            return value
        if isinstance(value, list):
            return [cls._typed(name, each) for each in value]
        for kind in cls.parts[name]:
            if {field.name for field in dataclasses.fields(kind)} == set(value):  # type: ignore[arg-type]
                return kind.from_state_dict(value)
        raise ValueError(f"{name} of a {cls.__name__} cannot have {', '.join(sorted(value))}")

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


def _places(where: Tensor | Sequence[int] | int, x: Tensor) -> Tensor:
    """Return places in the batch of x, or a mask, as a tensor; one of an empty list would be of floats."""
    found = torch.as_tensor(where, device=x.device)
    return found if found.numel() else found.long()


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
class Cache(State):
    """Keys and values of attention.

    time: columns in use; there is room for more. keys, values (batch, ..., room, channels). place (batch, room): the
    position of each column in its sequence, counted from 1, or 0 for one that is not there.
    """

    time: int
    keys: Tensor
    values: Tensor
    place: Tensor

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor) -> Cache:
        """Return one without columns, of the form of these keys and values without columns."""
        with torch.inference_mode(False):
            place = torch.zeros(keys.shape[0], 0, dtype=torch.int64, device=keys.device)
            return cls(0, keys.clone(), values.clone(), place)

    def places(self, count: int) -> Tensor:
        """Return the places (batch, count) of the next columns."""
        last = self.place[:, : self.time].amax(1) if self.time else self.place.new_zeros(len(self.place))
        return last[:, None] + torch.arange(1, count + 1, device=last.device)

    def extend(self, k: Tensor, v: Tensor, place: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Add columns k, v (batch, ..., T, channels) at places (batch, T); return all keys, values and places.

        With a limit, columns that lie further back may be forgotten.
        """
        T, room = k.shape[-2], self.place.shape[1]
        with torch.inference_mode(False):
            if limit is not None and self.time > 2 * limit:
                old = slice(self.time - limit, self.time)
                self.keys, self.values = self.keys[..., old, :].clone(), self.values[..., old, :].clone()
                self.place, self.time, room = self.place[:, old].clone(), limit, limit
            if self.time + T > room:
                more = max(room, T)
                self.keys, self.values = (F.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))
                self.place = F.pad(self.place, (0, more))
        here = slice(self.time, self.time + T)
        self.keys[..., here, :], self.values[..., here, :], self.place[:, here] = k, v, place
        self.time = n = self.time + T
        return self.keys[..., :n, :], self.values[..., :n, :], self.place[:, :n]


@dataclass
class MixerState(State):
    """What a mixer other than MRConv remembers.

    rate: of the input. memory: tensors of its own; cache: of its attention; conv: of an MRConv in it.
    """

    rate: float
    memory: list[Tensor]
    cache: Cache | None = None
    conv: LayerState | None = None
    parts: ClassVar[Mapping[str, tuple[type[State], ...]]] = {"cache": (Cache,), "conv": (LayerState,)}

    def remember(self, memory: Sequence[Tensor]) -> None:
        """Write to the memory."""
        for held, new in zip(self.memory, memory, strict=True):
            held.copy_(new)


@dataclass
class BackboneState(State):
    """The states of all blocks."""

    blocks: list[LayerState | MixerState]
    parts: ClassVar[Mapping[str, tuple[type[State], ...]]] = {"blocks": (LayerState, MixerState)}


@dataclass
class PooledState(State):
    """A backbone's state with the sum (batch, d_model) of its features so far and their number (batch,)."""

    backbone: BackboneState
    total: Tensor
    count: Tensor
    parts: ClassVar[Mapping[str, tuple[type[State], ...]]] = {"backbone": (BackboneState,)}
