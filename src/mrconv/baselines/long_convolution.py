"""What a mixer is, and the registry of those there are."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from numbers import Real
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from .._utils.checks import check_input, check_lengths, check_positive_int, valid_mask
from .._utils.registry import Registry
from ..kernels import resampled
from ..layer import MRConv
from ..streaming.parameter_cache import cached
from ..streaming.state import MixerState
from ..streaming.streaming_module import StreamingModule

M = TypeVar("M", bound=nn.Module)


class Mixer(StreamingModule, nn.Module):
    """A map of sequences (B, L, d_model) -> (B, L, d_model) that can stand where `MRConv` stands in a block.

    A subclass mixes in `mix`. One that streams as MRConv does says what it remembers in `begin`, and takes the next
    positions in `run` or, one by one, in `advance`.
    """

    continuous: ClassVar[bool] = False
    """Whether it can run at another sampling rate than the one of training."""

    kernel_parameters: ClassVar[tuple[str, ...]] = ()
    """Parameters or submodules that the paper trains with a learning rate of their own and no weight decay."""

    fixed: ClassVar[frozenset[str]] = frozenset()
    """Options of the classes above that it sets itself."""

    projects: ClassVar[bool] = False
    """Whether it consists of projections, and so runs under autocast."""

    heads = 1

    def __init__(self, d_model: int, l_max: int, bidirectional: bool = False) -> None:
        super().__init__()
        check_positive_int(d_model=d_model, l_max=l_max)
        self.d_model, self.l_max, self.bidirectional = d_model, l_max, bool(bidirectional)

    @property
    def directions(self) -> int:
        """1, or 2 if bidirectional."""
        return 1 + self.bidirectional

    def forward(
        self, u: Tensor, lengths: Tensor | None = None, rate: float | None = None, gelu: bool = False
    ) -> Tensor:
        """Mix u (B, L, d_model) over its length, in u's dtype, and apply GELU if asked for.

        Positions from `lengths` (B,) on are as if absent: zero in, zero out. `rate` is the sampling rate relative to
        that of training.
        """
        check_input(u, self.d_model)
        rate = self._checked(rate)
        if lengths is None:
            return self._mixed(u, rate, gelu)
        padding = ~valid_mask(check_lengths(lengths, u.shape[0], u.shape[1]), u)
        return self._mixed(u.masked_fill(padding, 0), rate, gelu).masked_fill(padding, 0)

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Mix x (B, d_model, L); called with autocast off."""
        raise NotImplementedError

    def initial_state(
        self,
        batch: int,
        *,
        rate: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> MixerState:
        """Return the state of `batch` sequences before their first input; its dtypes are those it computes in."""
        self.check_streamable()
        check_positive_int(batch=batch)
        if dtype is not None:
            raise ValueError(f"dtype={dtype}: the state of {type(self).__name__} has the dtypes that it computes in")
        rate = self._checked(rate)
        with torch.inference_mode(False), torch.no_grad():
            state = self.begin(batch, rate)
        cached(self, rate, type(self).constants, refresh=True)
        return state if device is None else state.to(device)

    @torch.no_grad()
    def stream(self, u: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        """Take the next positions u (B, T, d_model); return their outputs, as `forward`'s, and the state after them.

        The state is written to and returned; there are no gradients.
        """
        self.check_streamable()
        check_input(u, self.d_model)
        state.check_batch(u)
        with nullcontext() if self.projects else torch.autocast(u.device.type, enabled=False):
            return self.run(u, state).to(u.dtype), state

    def begin(self, batch: int, rate: float) -> MixerState:
        """Return the state before the first input, zero wherever it holds numbers."""
        raise ValueError(f"{type(self).__name__} is no recurrence: it has no state and cannot stream")

    def constants(self, rate: float) -> Any:
        """Return what all steps at a rate share."""

    def run(self, u: Tensor, state: MixerState) -> Tensor:
        """Take u (B, T, d_model) in, one position after the other."""
        constants, memory, outputs = cached(self, state.rate, type(self).constants), state.memory, []
        for x in u.unbind(1):
            y, memory = self.advance(x, memory, constants)
            outputs.append(y)
        state.remember(memory)
        return torch.stack(outputs, 1)

    def advance(self, u: Tensor, memory: list[Tensor], constants: Any) -> tuple[Tensor, list[Tensor]]:
        """Take u (B, d_model) of one position in; return its output and what is remembered from then on."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Keep what inference would make of the parameters anew each time; nothing here."""

    def check_streamable(self) -> None:
        """Raise if an output depends on later inputs."""
        if self.bidirectional:
            raise ValueError("bidirectional=True cannot stream: an output needs the inputs after it")

    def extra_repr(self) -> str:
        """Return what `print` shows of the mixer."""
        return f"{self.d_model}, l_max={self.l_max}, bidirectional={self.bidirectional}"

    def _mixed(self, u: Tensor, rate: float, gelu: bool) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            return self.mix(u.transpose(1, 2), rate, gelu).transpose(1, 2)

    def _checked(self, rate: float | None) -> float:
        rate = 1.0 if rate is None else rate
        if not isinstance(rate, Real) or not 0 < rate < float("inf"):
            raise ValueError(f"rate must be a positive number; got {rate!r}")
        if rate != 1 and not self.continuous:
            raise ValueError(f"rate={rate:g}: {type(self).__name__} runs at rate 1 only")
        return float(rate)


class KeptKernel(nn.Module):
    """A convolution that may keep its kernel for inference.

    It lets go of it in training mode, in a pass with gradients and when weights are loaded: parameters change then.
    """

    kept: Tensor | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("kept", None, persistent=False)
        self.kept_lead = 0

    def keep(self, kernel: Tensor, lead: int) -> None:
        """Keep a kernel (C, K) with `lead` taps ahead of lag 0."""
        self.kept, self.kept_lead = kernel.detach(), lead

    def kernel_for(self, lead: int, behind: int, make: Callable[[], Tensor]) -> Tensor:
        """Return so much of the kernel that is kept, or one that is made."""
        if torch.is_grad_enabled() and self.kept is not None:
            self.kept = None
        kernel, first = self.kept, self.kept_lead - lead
        if kernel is None or first < 0:
            return make()
        taps = kernel[:, first : self.kept_lead + behind]
        return taps if taps.shape[1] == lead + behind else make()

    def train(self, mode: bool = True) -> Self:
        """Set the mode."""
        if mode:
            self.kept = None
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.kept = None
        super()._load_from_state_dict(*args)


class LongConvolution(KeptKernel, Mixer):
    """y = k * u + D u, with the kernels that a subclass makes in `kernel`."""

    reach: ClassVar[str] = "l_max"
    """Up to where the kernel goes: "l_max", or "input" for a kernel that never ends."""

    def __init__(self, d_model: int, l_max: int, bidirectional: bool = False, **factory: Any) -> None:
        super().__init__(d_model, l_max, bidirectional)
        self.D = parameter(normal(d_model), **factory)

    def kernel(self, length: int, rate: float) -> Tensor:
        """Return (directions, d_model, length): taps into the past and, second, from u[t + 1] on into the future."""
        raise NotImplementedError

    def mix(self, x: Tensor, rate: float, gelu: bool) -> Tensor:
        """Convolve with both kernels and the skip D as one."""
        L = x.shape[-1]
        taps = L if self.reach == "input" else min(L, resampled(self.l_max, rate))
        lead = taps if self.bidirectional else 0
        make = functools.partial(self._joined, taps, rate)
        kernel = self.kernel_for(lead, taps, make) if rate == 1 else make()
        inside = gelu and not torch.is_grad_enabled()  # its gradient needs what it was applied to
        y = ops.fft_conv(x, kernel, lead, gelu=inside)
        return F.gelu(y) if gelu and not inside else y

    def freeze(self) -> None:
        """Keep the kernel up to l_max, at rate 1."""
        self.keep(self._joined(self.l_max, 1.0), self.l_max if self.bidirectional else 0)

    def _joined(self, taps: int, rate: float) -> Tensor:
        """Return the kernel of the future, backwards, then that of the past with D at lag 0."""
        kernels = self.kernel(taps, rate)
        joined, lead = kernels[0], 0
        if self.bidirectional:
            joined, lead = torch.cat([kernels[1].flip(-1), joined], -1), taps
        return joined + F.pad(wide(self.D)[:, None], (lead, joined.shape[-1] - lead - 1))


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype to compute in: no less than float32."""
    return x.to(ops.compute_dtype(x))


def as_complex(x: Tensor) -> Tensor:
    """Return a parameter of pairs (..., 2) as complex numbers (...)."""
    return torch.view_as_complex(wide(x))


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw standard normal numbers, the same ones for every dtype and device they go to."""
    return torch.randn(*shape, dtype=dtype, device="cpu")


def parameter(x: Tensor, device: Any = None, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a parameter with these values, in torch's default dtype unless told otherwise.

    Complex numbers become pairs (..., 2), which optimizers and casts treat like any other.
    """
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return nn.Parameter(x.to(device=device, dtype=dtype or torch.get_default_dtype()))


def freeze(model: M) -> M:
    """Let every mixer keep its kernel for inference, up to l_max, and put the model in eval mode; returns the model.

    As `reparameterize` is for MRConv, for passes under `torch.no_grad`. Parameters stay: training and gradients, which
    let go of the kernels, longer inputs and other rates use them. After a change by hand, call it again.
    """
    for module in model.modules():
        if isinstance(module, Mixer):
            module.freeze()
    return model.eval()


MIXERS: Registry[nn.Module] = Registry("mixer")
register_mixer = MIXERS.register
"""Class decorator: make a mixer known by a name; all are called as `cls(d_model, l_max, **options)`."""
mixer_names = MIXERS.names
mixer_class = MIXERS.get


def make_mixer(
    name: str, d_model: int, l_max: int, options: Mapping[str, Any], layer: Mapping[str, Any], **factory: Any
) -> nn.Module:
    """Return a mixer for a block, with its own options.

    Of `layer`, the block's options of `MRConv`, one with an MRConv inside takes all, any other `bidirectional` only.
    """
    cls = mixer_class(name)
    known = option_names(cls)
    if "layer" in known:
        given = dict(layer)
    elif "bidirectional" in known:
        given = {"bidirectional": layer.get("bidirectional", False)}
    elif layer.get("bidirectional", False):
        raise ValueError(f"{name} runs forwards only: bidirectional must be false")
    else:
        given = {}
    own = known - {"layer"}
    if "layer" in known:
        own |= option_names(MRConv)
    for option in options:
        if option not in own:
            near = difflib.get_close_matches(option, own, 1)
            raise ValueError(f"{name} has no option {option!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return cls(d_model, l_max, **(given | dict(options)), **factory)


def option_names(cls: type[nn.Module]) -> set[str]:
    """Return the names of a class's options and, where it passes others on, those of the classes above it.

    "layer" is one if they go on to an MRConv.
    """
    found: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            passed_on = {n for n, each in parameters.items() if each.kind is inspect.Parameter.VAR_KEYWORD}
            found |= set(parameters) - (passed_on - {"layer"})
            if not passed_on:
                break
    return found - {"self", "d_model", "l_max", "device", "dtype"} - getattr(cls, "fixed", set())
