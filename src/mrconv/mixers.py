"""The `Mixer` protocol and the registry of mixers: layers that mix a sequence over time, in a block."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.types import Device

from ._utils.checks import check_input, check_lengths, check_positive, check_positive_int, valid_mask
from ._utils.registry import Registry
from ._utils.suggest import closest
from .streaming.parameter_cache import cached
from .streaming.state import LayerState, MixerState
from .streaming.streaming_module import StreamingModule

M = TypeVar("M", bound=nn.Module)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Mixer(StreamingModule, nn.Module):
    """A layer that maps sequences (B, L, d_model) to (B, L, heads * d_model), mixing over L.

    A subclass implements `mix`, or `transform` if it needs the lengths. A mixer that can stream also implements
    `zero_state` and either `stream_chunk` or `advance`.
    """

    continuous: bool = False
    """Whether the mixer can run at a sampling rate other than that of training."""

    kernel_parameters: ClassVar[tuple[str, ...]] = ()
    """Parameters or submodules that the paper trains with a separate learning rate and without weight decay."""

    fixed: ClassVar[frozenset[str]] = frozenset()
    """Options of the parent classes that this class sets itself."""

    option_sources: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Classes of submodules whose options the mixer takes as well, and passes on."""

    projects: ClassVar[bool] = False
    """Whether the mixer has linear projections, for which autocast stays enabled."""

    heads = 1

    def __init__(
        self,
        d_model: int,
        l_max: int,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_int(d_model=d_model, l_max=l_max)
        self.d_model, self.l_max, self.bidirectional = d_model, l_max, bool(bidirectional)
        self.factory: dict[str, Any] = {"device": device, "dtype": dtype}  # for new parameters

    @property
    def n_directions(self) -> int:
        """2 if bidirectional, else 1."""
        return 1 + self.bidirectional

    @property
    def max_positions(self) -> int | None:
        """Number of positions that the mixer can stream, or None for any number."""
        return None

    @property
    def state_grows(self) -> bool:
        """Whether the streaming state grows with the number of positions, as a key-value cache does."""
        return False

    def forward(
        self, u: Tensor, lengths: Tensor | None = None, rate: float | None = None, gelu: bool = False
    ) -> Tensor:
        """Mix u (B, L, d_model) over its length, in u's dtype, and apply GELU if `gelu` is set.

        Positions from `lengths` (B,) on are treated as absent: zero in, zero out. `rate` is the sampling rate relative
        to that of training.
        """
        check_input(u, self.d_model)
        rate = self._resolve_rate(rate)
        if lengths is None:
            return self.transform(u, None, rate, gelu)
        lengths = check_lengths(lengths, u.shape[0], u.shape[1])
        padding = ~valid_mask(lengths, u)
        return self.transform(u.masked_fill(padding, 0), lengths, rate, gelu).masked_fill(padding, 0)

    def transform(self, u: Tensor, lengths: Tensor | None, rate: float, gelu: bool) -> Tensor:
        """Mix u (B, L, d_model), which is zero from `lengths` on; the output there is discarded."""
        with torch.autocast(u.device.type, enabled=False):
            return self.mix(u.transpose(1, 2), rate, gelu).transpose(1, 2)

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Mix x (B, d_model, L); called with autocast disabled."""
        raise NotImplementedError

    def initial_state(
        self, batch: int, *, rate: float | None = None, device: Device = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Return the state of `batch` sequences before their first input.

        Args:
            batch: number of sequences.
            rate: sampling rate of the input relative to training; None means the mixer's.
            device: device of the state; None means that of the parameters.
            dtype: dtype of the inputs in the state, for `MRConv` only; None means that of the parameters.
        """
        self.check_streamable()
        check_positive_int(batch=batch)
        rate = self._resolve_rate(rate)
        cached(self, rate, type(self).constants, refresh=True)  # `.data` writes bypass version counters
        with torch.inference_mode(False), torch.no_grad():
            state = self.zero_state(batch, rate)
        if dtype is not None:
            state = state.with_input_dtype(dtype)
        return state if device is None else state.to(device)

    @torch.no_grad()
    def stream(self, u: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Process the next positions u (B, T, d_model); return their outputs, equal to `forward`'s, and the state.

        The state is updated in place and returned. There are no gradients.
        """
        self.check_streamable()
        check_input(u, self.d_model)
        state.check_batch(u)
        with nullcontext() if self.projects else torch.autocast(u.device.type, enabled=False):
            return self.stream_chunk(u, state).to(u.dtype), state

    def zero_state(self, batch: int, rate: float) -> LayerState | MixerState:
        """Return the state before the first input, with zeros in all its tensors."""
        raise ValueError(f"{type(self).__name__} has no recurrent state and cannot stream")

    def constants(self, rate: float) -> Any:
        """Return the values that all steps at a rate share."""

    def stream_chunk(self, u: Tensor, state: Any) -> Tensor:
        """Process u (B, T, d_model) position by position, updating the state."""
        constants, memory, outputs = cached(self, state.rate, type(self).constants), state.memory, []
        for x in u.unbind(1):
            y, memory = self.advance(x, memory, constants)
            outputs.append(y)
        state.remember(memory)
        return torch.stack(outputs, 1)

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """Process one position u (B, d_model); return its output and the new memory."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Cache what inference would otherwise compute from the parameters in every call; no effect by default."""

    def extra_repr(self) -> str:
        """Return the description that `print` shows."""
        return f"{self.d_model}, l_max={self.l_max}, bidirectional={self.bidirectional}"

    def check_streamable(self) -> None:
        """Raise an error if an output depends on later inputs."""
        if self.bidirectional:
            raise ValueError("bidirectional=True cannot stream: an output needs the inputs after it")

    def _resolve_rate(self, rate: float | None) -> float:
        """Return the rate to run at, 1 by default."""
        rate = 1.0 if rate is None else rate
        check_positive(rate=rate)
        if rate != 1 and not self.continuous:
            raise ValueError(f"rate={rate:g}: {type(self).__name__} runs at rate 1 only")
        return float(rate)


def freeze(model: M) -> M:
    """Cache the kernel of every mixer for inference, up to l_max, and put the model in eval mode; returns the model.

    This is the counterpart of `reparameterize` for other mixers. Calls under `torch.no_grad` use the cache. The
    parameters stay: longer inputs and other rates use them, and training, gradients and loading weights discard the
    cache. After changing parameters in place, call `freeze` again.
    """
    for module in model.modules():
        if isinstance(module, Mixer):
            module.freeze()
    return model.eval()


MIXERS: Registry[Mixer] = Registry(
    "mixer",
    # Entry points instead of imports: blocks build any mixer by name, and the mixers are in modules above this one.
    {
        "attention": "mrconv.baselines.transformer:Attention",
        "ckconv": "mrconv.baselines.implicit:CKConv",
        "hyena": "mrconv.baselines.implicit:HyenaFilter",
        "liquid-s4": "mrconv.baselines.liquid_s4:LiquidS4",
        "longconv": "mrconv.baselines.longconv:LongConv",
        "mamba": "mrconv.baselines.mamba:Mamba",
        "mega": "mrconv.baselines.mega:Mega",
        "mega-chunk": "mrconv.baselines.mega:MegaChunk",
        "mrconv": "mrconv.layer:MRConv",
        "mrconv-attention": "mrconv.baselines.mrhyena:MRConvAttention",
        "mrhyena": "mrconv.baselines.mrhyena:MRHyena",
        "multiresconv": "mrconv.baselines.multiresconv:MultiresConv",
        "s4": "mrconv.baselines.s4:S4",
        "s4d": "mrconv.baselines.s4d:S4D",
        "s5": "mrconv.baselines.s5:S5",
        "sgconv": "mrconv.baselines.sgconv:SGConv",
    },
)
register_mixer = MIXERS.register
"""Class decorator: register a mixer under a name; mixers are built as `cls(d_model, l_max, **options)`."""
mixer_names = MIXERS.names
mixer_class = MIXERS.get


def make_mixer(
    name: str, d_model: int, l_max: int, options: Mapping[str, Any] | None, layer: Mapping[str, Any], **factory: Any
) -> Mixer:
    """Build a mixer by name from its `options` and from `layer`, the options of `MRConv` that a block received.

    A mixer with an MRConv inside gets all options of the layer; any other gets `bidirectional` only.
    """
    options, cls = options or {}, mixer_class(name)
    names = option_defaults(cls)
    if name == "mrconv":
        if options:
            raise ValueError(f"mixer_options are for mixers other than mrconv: pass {options} as layer options instead")
        return cls(d_model, l_max, **layer, **factory)
    for option in options:
        if option not in names:
            raise ValueError(f"{name} has no option {option!r}{closest(option, names)}")
    bidirectional = layer.get("bidirectional", False)
    if mixer_class("mrconv") in getattr(cls, "option_sources", ()):
        shared = dict(layer)
    elif "bidirectional" in names:
        shared = {"bidirectional": bidirectional}
    elif bidirectional:
        raise ValueError(f"{name} runs forwards only: bidirectional must be false")
    else:
        shared = {}
    return cls(d_model, l_max, **(shared | dict(options)), **factory)


def option_defaults(cls: type[nn.Module]) -> dict[str, Any]:
    """Return a mixer's options and their defaults, with those that it passes to its parent class or to submodules."""
    defaults: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        here = {name: each.default for name, each in parameters.items() if each.kind not in VARIADIC}
        defaults = here | defaults
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            break
    for source in getattr(cls, "option_sources", ()):
        defaults = option_defaults(source) | defaults
    hidden = {"self", "d_model", "l_max", "device", "dtype", *getattr(cls, "fixed", ())}
    return {name: default for name, default in defaults.items() if name not in hidden}
