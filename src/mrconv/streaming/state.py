"""Streaming states: dataclasses of real tensors whose first dimension is the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F


class State:
    """A dataclass of tensors (batch first), numbers, and nested states or lists of them.

    Streaming updates a state in place. Use `copy()` to keep an earlier one.
    """

    nested: ClassVar[Mapping[str, tuple[type[State], ...]]] = {}
    """The possible classes of each field that holds states."""

    def copy(self) -> Self:
        """Return an independent copy."""
        return self.map_tensors(torch.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the state on another device; accepts the arguments of `Tensor.to` except a dtype."""

        def moved(x: Tensor) -> Tensor:
            y = x.to(*args, **kwargs)
            if y.dtype != x.dtype:
                raise ValueError(f"to() cannot change the dtype of a state; got {y.dtype} for a tensor of {x.dtype}")
            return y

        return self.map_tensors(moved)

    def reorder(self, index: Tensor | Sequence[int]) -> Self:
        """Return the state of the sequences at these batch indices, which may repeat, as in beam search."""
        return self.map_tensors(lambda x: x.index_select(0, _batch_index(index, x)))

    def reset(self, index: Tensor | Sequence[int] | int) -> Self:
        """Set some sequences back to the initial state, in place.

        Args:
            index: batch indices, or a boolean mask (batch,).
        """
        for x in self.tensors():
            x[_batch_index(index, x)] = 0
        return self

    def tensors(self) -> list[Tensor]:
        """Return every tensor, those of nested states included."""
        return list(_tensors(self))

    def check_batch(self, u: Tensor) -> None:
        """Reject an input of another batch size or device."""
        x = next(_tensors(self))
        if x.shape[0] != u.shape[0] or x.device != u.device:
            raise ValueError(
                f"the state holds {x.shape[0]} sequences on {x.device}; got an input of {u.shape[0]} on {u.device}"
            )

    def with_input_dtype(self, dtype: torch.dtype) -> Self:
        """Return the state with its inputs in another dtype; only the state of `MRConv` has inputs."""
        raise ValueError(f"dtype={dtype}: a {type(self).__name__} has the dtypes that its mixer computes in")

    @property
    def nbytes(self) -> int:
        """Memory of the tensors in bytes."""
        return sum(x.nbytes for x in self.tensors())

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as nested dictionaries, which `torch.load(weights_only=True)` accepts."""
        return {field.name: _as_dict(getattr(self, field.name)) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_state_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a state from the result of `state_dict`."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if set(values) != names:
            raise ValueError(f"a {cls.__name__} has {', '.join(sorted(names))}; got {', '.join(sorted(values))}")
        return cls(**{name: cls._restored(name, value) for name, value in values.items()})

    @classmethod
    def _restored(cls, name: str, value: Any) -> Any:
        if name not in cls.nested or value is None:
            return value
        if isinstance(value, list):
            return [cls._restored(name, each) for each in value]
        for kind in cls.nested[name]:
            if {field.name for field in dataclasses.fields(kind)} == set(value):  # type: ignore[arg-type]
                return kind.from_state_dict(value)
        raise ValueError(f"unknown fields in {name} of a {cls.__name__}: {', '.join(sorted(value))}")

    def map_tensors(self, f: Callable[[Tensor], Tensor]) -> Self:
        """Return a state with f applied to every tensor."""
        with torch.inference_mode(False):  # inference tensors could not be updated outside of inference mode
            fields = dataclasses.fields(self)  # type: ignore[arg-type]
            return type(self)(**{field.name: _apply(f, getattr(self, field.name)) for field in fields})


def _apply(f: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, list):
        return [_apply(f, each) for each in value]
    return value.map_tensors(f) if isinstance(value, State) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, State):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            yield from _tensors(getattr(value, field.name))


def _batch_index(index: Tensor | Sequence[int] | int, x: Tensor) -> Tensor:
    """Return batch indices or a mask as a tensor on x's device; an empty list would give a tensor of floats."""
    tensor = torch.as_tensor(index, device=x.device)
    return tensor if tensor.numel() else tensor.long()


def _as_dict(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_dict(each) for each in value]
    return value.state_dict() if isinstance(value, State) else value


@dataclass
class LayerState(State):
    """The state of an `MRConv`, or of a block around one.

    Attributes:
        time: number of steps taken, the same for all sequences.
        rate: sampling rate of the input relative to training.
        inputs: the last R inputs, (batch, R, d_model); the input of time t is at t % R.
        modes: for Fourier kernels, (batch, 2, N, M, d_model, 2) as real pairs: per resolution and mode, the sum over
            the current window, and a later sum that replaces it once it covers a full window.
        future: for dense kernels, (batch, P, heads * d_model): the contribution of past inputs to the next P outputs;
            that of time t is at t % P.
    """

    time: int
    rate: float
    inputs: Tensor
    modes: Tensor | None = None
    future: Tensor | None = None

    def with_input_dtype(self, dtype: torch.dtype) -> LayerState:
        """Return the state with its inputs in another dtype."""
        with torch.inference_mode(False):
            return dataclasses.replace(self, inputs=self.inputs.to(dtype))


@dataclass
class KeyValueCache(State):
    """The keys and values of attention, one column per position.

    Attributes:
        time: number of columns in use; the tensors may have room for more.
        keys: (batch, ..., room, channels).
        values: (batch, ..., room, channels).
        place: position of each column in its sequence, (batch, room), counted from 1; 0 marks an absent column.
    """

    time: int
    keys: Tensor
    values: Tensor
    place: Tensor

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor) -> KeyValueCache:
        """Return a cache without columns; `keys` and `values` (batch, ..., 0, channels) give shape and dtype."""
        with torch.inference_mode(False):
            place = torch.zeros(keys.shape[0], 0, dtype=torch.int64, device=keys.device)
            return cls(0, keys.clone(), values.clone(), place)

    def next_positions(self, count: int) -> Tensor:
        """Return the positions (batch, count) of the next columns."""
        last = self.place[:, : self.time].amax(1) if self.time else self.place.new_zeros(len(self.place))
        return last[:, None] + torch.arange(1, count + 1, device=last.device)

    def extend(
        self, k: Tensor, v: Tensor, positions: Tensor, limit: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append columns k, v (batch, ..., T, channels) at `positions` (batch, T); return all keys, values, positions.

        With a limit, columns older than the last `limit` may be dropped.
        """
        T, room = k.shape[-2], self.place.shape[1]
        with torch.inference_mode(False):
            if limit is not None and self.time > 2 * limit:
                recent = slice(self.time - limit, self.time)
                self.keys, self.values = self.keys[..., recent, :].clone(), self.values[..., recent, :].clone()
                self.place, self.time, room = self.place[:, recent].clone(), limit, limit
            if self.time + T > room:
                more = max(room, T)
                self.keys, self.values = (F.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))
                self.place = F.pad(self.place, (0, more))
        new = slice(self.time, self.time + T)
        self.keys[..., new, :], self.values[..., new, :], self.place[:, new] = k, v, positions
        self.time = n = self.time + T
        return self.keys[..., :n, :], self.values[..., :n, :], self.place[:, :n]


@dataclass
class MixerState(State):
    """The state of a mixer other than MRConv.

    Attributes:
        rate: sampling rate of the input relative to training.
        memory: the mixer's recurrent tensors.
        cache: keys and values of its attention, if it has any.
        conv: state of an MRConv inside it, if it has one.
    """

    rate: float
    memory: list[Tensor]
    cache: KeyValueCache | None = None
    conv: LayerState | None = None
    nested: ClassVar[Mapping[str, tuple[type[State], ...]]] = {"cache": (KeyValueCache,), "conv": (LayerState,)}

    def remember(self, memory: Sequence[Tensor]) -> None:
        """Copy new values into the memory."""
        for current, new in zip(self.memory, memory, strict=True):
            current.copy_(new)


@dataclass
class BackboneState(State):
    """The states of all blocks."""

    blocks: list[LayerState | MixerState]
    nested: ClassVar[Mapping[str, tuple[type[State], ...]]] = {"blocks": (LayerState, MixerState)}


@dataclass
class PooledState(State):
    """A backbone's state with the sum (batch, d_model) of its features so far and their number (batch,)."""

    backbone: BackboneState
    total: Tensor
    count: Tensor
    nested: ClassVar[Mapping[str, tuple[type[State], ...]]] = {"backbone": (BackboneState,)}
