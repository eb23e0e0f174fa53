"""The header of a safetensors file, which bounds what a config may ask for before anything is allocated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
}  # fmt: skip
"""The dtypes of saved models, by their names in safetensors files."""
FREE = ("l_max", "image_size", "seed")
"""Integers of a config that are no dimensions of tensors."""
SMALL = 4096
"""Integers up to this are allowed with any weights."""


class Header(NamedTuple):
    """The tensors of a file, on the meta device, and the results in its metadata."""

    tensors: dict[str, Tensor]
    results: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all floating-point tensors; None if they differ."""
        dtypes = {tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point()}
        return dtypes.pop() if len(dtypes) == 1 else None


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file; raise SafetensorError if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {name: _on_meta(name, each.get_dtype(), each.get_shape()) for name, each in slices.items()}
            results = json.loads((file.metadata() or {}).get("results", "{}"))
        if not isinstance(results, dict):
            raise ValueError("its results are no JSON object")
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SafetensorError(f"{path} cannot be read: {error}") from error
    return Header(tensors, results)


def _on_meta(name: str, dtype: str, shape: list[int]) -> Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype}; models have {', '.join(DTYPES)}")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def check_sizes(config: Any, header: Header) -> None:
    """Raise ValueError if a config describes more blocks than there are tensors, or dimensions that no tensor has."""
    numbers = sum(tensor.numel() for tensor in header.tensors.values())
    for name, value in _integers(config):
        if value > max(numbers, SMALL):
            raise ValueError(f"{name} is {value:.6g}, but the weights are {numbers:,} numbers")
    depth, d_model = (getattr(config, name, 0) for name in ("depth", "d_model"))
    if 2 * depth * d_model**2 > numbers:  # the linear layers of blocks
        raise ValueError(f"depth is {depth} and d_model is {d_model}, but the weights are {numbers:,} numbers")
    blocks = sum(value for name, value in _integers(config) if name in ("depth", "depths"))
    if blocks > len(header.tensors):
        raise ValueError(f"the model has {blocks:,} blocks, but the weights are {len(header.tensors):,} tensors")


def _integers(config: Any) -> Iterator[tuple[str, int]]:
    """Yield all dimensions of a config, also those in lists and in the options of a mixer."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in (*values.items(), *(values.get("mixer_options") or {}).items()):
        for each in value if isinstance(value, list | tuple) else [value]:
            if type(each) is int and name not in FREE:
                yield name, each


def check_same_dtypes(model: nn.Module, header: Header) -> None:
    """Raise ValueError if integers are stored where a model has floating-point numbers, or the other way round."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() != header.tensors[name].is_floating_point():
            raise ValueError(f"{name} is {header.tensors[name].dtype} in the weights and {tensor.dtype} in the model")


class WithoutInitialValues(TorchFunctionMode):
    """Context in which tensors on the meta device are not initialised: torch would import its compiler for that."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, unless it initialises a tensor on the meta device."""
        kwargs = kwargs or {}
        if function in (Tensor.normal_, Tensor.uniform_) or getattr(function, "__module__", "") == nn.init.__name__:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **kwargs)
