"""Definition of the options of layers, models and experiments.

Each option is a dataclass field with a default and an explanation. The `...Options` classes group options that several
configurations share: `training.Experiment` inherits them, so an option added to `LayerOptions` (and to `MRConv`) is
also a key of `mrconv train`. The `...Config` classes are complete: one per model, written to its `config.json`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ._utils.suggest import closest

C = TypeVar("C", bound="Config")
T = TypeVar("T", bound=type[Any])


def option(
    default: Any = dataclasses.MISSING,
    explanation: str = "",
    *,
    choices: tuple[Any, ...] | None = None,
    at_least: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field with an explanation and, if given, constraints for `check_constraints`.

    A list or dictionary as default is copied for each instance.
    """
    metadata = {"explanation": explanation, "choices": choices, "at_least": at_least, "below": below}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_constraints(options: Any) -> None:
    """Raise ValueError for the first option whose value its field does not allow."""
    for field in dataclasses.fields(options):
        value, rule = getattr(options, field.name), field.metadata
        if rule.get("choices") and value not in rule["choices"]:
            allowed = ", ".join("null" if each is None else str(each) for each in rule["choices"])
            raise ValueError(f"{field.name} must be one of {allowed}; got {value!r}")
        low, high = rule.get("at_least"), rule.get("below")
        if low is None:
            continue
        if high is not None and not low <= value < high:
            raise ValueError(f"{field.name} must be in [{low:g}, {high:g}); got {value}")
        if value < low:
            problem = "not be negative" if low == 0 else f"be at least {low:g}"
            raise ValueError(f"{field.name} must {problem}; got {value}")
        if not math.isfinite(value):
            raise ValueError(f"{field.name} must be a finite number; got {value}")


def values_of(options: Any, kind: type[Any]) -> dict[str, Any]:
    """Return the values of those options that `kind` declares or inherits."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(kind)}


def argument_docs(kind: type[Any]) -> str:
    """Return a paragraph "name: explanation (default: ...)" for each option of a dataclass, the required ones first."""
    paragraphs = []
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.default is not dataclasses.MISSING):
        text = f"{field.name}: {field.metadata['explanation']}"
        if field.default is not dataclasses.MISSING:
            text += f" (default: {field.default!r})"
        paragraphs.append(textwrap.fill(text, 112, subsequent_indent="    "))
    return "\n".join(paragraphs)


def documented(kind: type[Any]) -> Callable[[T], T]:
    """Return a class decorator that adds the options of `kind` to a class docstring, under "Args:"."""

    def decorate(cls: T) -> T:
        doc = inspect.cleandoc(cls.__doc__ or "")
        start = "" if "\nArgs:\n" in doc else "\nArgs:\n"
        cls.__doc__ = f"{doc}\n{start}{textwrap.indent(argument_docs(kind), '    ')}\n"
        return cls

    return decorate


@dataclass(kw_only=True)
class BranchOptions:
    """Options of MRConv's branches, shared by sequence and image models."""

    kernel: str = option("fourier", "parameterisation of the kernels; `mrconv.kernels.kernel_names()` lists them")
    combine: str = option(
        "sum",
        '"sum" adds the branches; "concat" puts the kernels one after another (Path-X)',
        choices=("sum", "concat"),
    )
    decay: Any = option(
        None,
        'with combine="concat": fixed weight decay**(N-1-i) of kernel i instead of a learned alpha; a pair (min, max) '
        "is spread over the channels",
    )
    norm: str | None = option(
        None,
        '"batch" (alpha and BatchNorm per branch), "scale" (alpha only) or "none"; if unset, "batch" for "sum" and '
        '"scale" for "concat"',
        choices=(None, "batch", "scale", "none"),
    )
    backend: str = option(
        "auto",
        '"auto", "triton", "torch", or "reference" (N convolutions and N BatchNorms, as in the paper)',
        choices=("auto", "torch", "triton", "reference"),
    )
    eps: float = option(1e-5, "epsilon of the branches' BatchNorms")
    momentum: float | None = option(0.1, "momentum of every BatchNorm")
    sync_stats: bool = option(False, "compute BatchNorm statistics over all processes of torch.distributed")
    stats_fraction: float = option(1.0, "part of each batch's sequences whose statistics normalise the branches of all")


@dataclass(kw_only=True)
class LayerOptions(BranchOptions):
    """Options of one MRConv layer."""

    kernel_size: int = option(1, "l0, the length of the first kernel", at_least=1)
    bidirectional: bool = option(False, "add kernels that run backwards in time")
    heads: int = option(1, "independent kernels per channel", at_least=1)
    groups: int = option(1, "number of channel groups that share one set of kernels", at_least=1)


@dataclass(kw_only=True)
class Config:
    """Base class of complete configurations."""

    merged: bool = option(False, "build the layers merged, to load a merged checkpoint")

    @classmethod
    def make(cls: type[C], options: Mapping[str, Any]) -> C:
        """Build from names and values; an unknown name raises TypeError with a suggestion."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                hint = closest(name, names) or f"; options: {', '.join(sorted(names))}"
                raise TypeError(f"{cls.__name__} has no option {name!r}{hint}")
        return cls(**options)


@dataclass(kw_only=True)
class BranchConfig(Config, BranchOptions):
    """Base class of configurations with branches."""

    def __post_init__(self) -> None:
        """Restore the pair `decay`, which JSON stores as a list."""
        if isinstance(self.decay, list):
            self.decay = tuple(self.decay)


@dataclass(kw_only=True)
class LayerConfig(BranchConfig, LayerOptions):
    """All arguments of `MRConv`."""

    d_model: int = option(explanation="number of channels")
    l_max: int = option(explanation="length of the longest kernel; inputs may be shorter or longer")
    rate: float = option(1.0, "sampling rate of the input relative to training; continuous kernels only")
    seed: int | None = option(None, "seed of randomly drawn tap positions (sparse kernels)")

    def layer(self) -> dict[str, Any]:
        """Return the keyword arguments of `MRConv`."""
        values = values_of(self, LayerConfig)
        return {name: value for name, value in values.items() if name not in ("d_model", "l_max")}


@dataclass(kw_only=True)
class MixerOptions:
    """The choice of the layer that mixes positions."""

    mixer: str = option("mrconv", '"mrconv", or a baseline of `mrconv.mixers.mixer_names()` in its place')
    mixer_options: dict[str, Any] | None = option(None, "options of the baseline")


@dataclass(kw_only=True)
class BlockOptions(MixerOptions):
    """Options of the residual block around the layer."""

    dropout: float = option(0.0, "probability of dropping a channel of the block", at_least=0, below=1)
    tie_dropout: bool = option(True, "drop a channel at all positions together; false: at each position by itself")
    block_norm: str = option("batch", 'norm of the block: "batch" or "layer"', choices=("batch", "layer"))
    prenorm: bool = option(False, "apply the norm before the layer instead of after the residual connection")


@dataclass(kw_only=True)
class BackboneOptions(LayerOptions, BlockOptions):
    """Options of a stack of blocks."""

    d_model: int = option(explanation="number of channels", at_least=1)
    depth: int = option(explanation="number of blocks", at_least=1)
    mask_padding: bool = option(
        False, "hide positions past `lengths` from every layer and statistic, not only from the pooling"
    )


@dataclass(kw_only=True)
class BackboneConfig(LayerConfig, BackboneOptions):
    """A stack of blocks. With neither `vocab_size` nor `d_input`, the input already has d_model channels."""

    vocab_size: int | None = option(None, "number of tokens, for token input")
    d_input: int | None = option(None, "number of channels of real-valued input")


@dataclass(kw_only=True)
class PoolingOptions:
    """How a sequence becomes one vector."""

    pool: str = option(
        "mean", 'what the head sees: the "mean" over valid positions, or the "last" one', choices=("mean", "last")
    )


@dataclass(kw_only=True)
class ClassifierConfig(BackboneConfig, PoolingOptions):
    """One class per sequence."""

    n_classes: int = option(explanation="number of classes")


@dataclass(kw_only=True)
class TwoTowerConfig(ClassifierConfig):
    """One class per pair of sequences."""

    n_classes: int = option(2, "number of classes")


@dataclass(kw_only=True)
class LabellerConfig(BackboneConfig):
    """One class per position."""

    n_classes: int = option(explanation="number of classes")


@dataclass(kw_only=True)
class RegressorConfig(BackboneConfig, PoolingOptions):
    """Real values per sequence or per position."""

    n_outputs: int = option(1, "number of values")
    per_position: bool = option(False, "predict at every position instead of once per sequence")


@dataclass(kw_only=True)
class LanguageModelConfig(BackboneConfig):
    """The next token at every position."""

    block_norm: str = option("layer", 'norm of the block: "batch" or "layer"', choices=("batch", "layer"))
    prenorm: bool = option(True, "apply the norm before the layer instead of after the residual connection")


@dataclass(kw_only=True)
class StageOptions:
    """Options of image models with stages, as in ConvNeXt."""

    patch_size: int = option(4, "side of the first patches; each later stage halves the feature map", at_least=1)
    drop_path: float = option(
        0.0, "stochastic depth of the last block, rising linearly from 0 at the first", at_least=0, below=1
    )
    layer_scale: float = option(1e-6, "initial scale of each block's output", at_least=0)


@dataclass(kw_only=True)
class VisionConfig(BranchConfig, MixerOptions, StageOptions):
    """An image model: stages of blocks over feature maps, as in ConvNeXt."""

    mixer: str = option(
        "mrconv", '"mrconv", "conv" (ConvNeXt\'s 7x7 depthwise convolution), or one of `mrconv.mixers.mixer_names()`'
    )
    n_classes: int = option(1000, "number of classes; 0 removes the head")
    in_channels: int = option(3, "channels of the images")
    image_size: int | Sequence[int] = option(224, "height and width (one number for both) that the kernels fit")
    depths: Sequence[int] = option((3, 3, 9, 3), "number of blocks of each stage")
    dims: Sequence[int] = option((96, 192, 384, 768), "number of channels of each stage")
    kernel_sizes: Sequence[int] = option((196, 49, 28, 28), "l0 of each stage")
    dropout: float = option(0.0, "dropout before the head")
    global_pool: str = option("avg", '"avg", or "" to return the normalised feature map (with n_classes=0)')
    seed: int | None = option(None, "seed of randomly drawn tap positions (sparse kernels)")

    def layer(self) -> dict[str, Any]:
        """Return the keyword arguments of `MRConv` that all stages share."""
        return values_of(self, BranchOptions) | {"bidirectional": True, "merged": self.merged}
