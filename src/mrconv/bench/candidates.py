"""The layers that a benchmark compares, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fft import irfft, rfft

from mrconv import MRConv

from .shapes import Shape

Step = Callable[[], Any]
"""One pass of one candidate over a fixed batch."""

TENSORS_PER_BRANCH = 7
"""Tensors of the input's size that one branch keeps in a training step, as measured."""


def layer(shape: Shape, backend: str, device: str) -> MRConv:
    """Return an MRConv layer of this shape."""
    return MRConv(shape.channels, shape.length, **shape.options, backend=backend, device=device)


def branches(shape: Shape, device: str, depth: int = 1) -> nn.Module:
    """Return the paper's layer: N convolutions and N BatchNorms, or the N convolutions of "concat"."""
    needed = depth * branch_bytes(shape)
    if device == "cpu" and needed > 0.9 * available_memory():
        return Unavailable(f"needs about {needed / 2**30:.0f} GiB")
    if shape.kernel == "dilated" and shape.combine == "sum" and not shape.bidirectional:
        return DilatedBranches(shape, device)
    return layer(shape, "reference", device)


def branch_bytes(shape: Shape) -> int:
    """Estimate the memory of one training step of the paper's layer."""
    n_branches = layer(shape, "reference", "meta").resolutions * (1 + shape.bidirectional)
    return TENSORS_PER_BRANCH * n_branches * 4 * shape.batch * shape.length * shape.channels


def available_memory() -> float:
    """Return the available bytes of main memory, infinity where the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf"))


class Unavailable(nn.Module):
    """Candidate that cannot run, with the reason.

    It replaces a mixer that does not support the shape, or one that needs more than the available main memory, for
    which the system would kill the process.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def forward(self, u: Tensor) -> Tensor:
        """Raise the reason as an error."""
        raise RuntimeError(self.reason)


class DilatedBranches(nn.Module):
    """The paper's dilated layer: N depthwise dilated conv1d and N BatchNorms."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self.layer = layer(shape, "torch", device)
        N = self.layer.resolutions
        self.norms = nn.ModuleList(nn.BatchNorm1d(shape.channels, device=device) for _ in range(N))
        self.reach = [(shape.kernel_size - 1) * 2**i for i in range(N)]

    def forward(self, u: Tensor) -> Tensor:
        """Return the weighted sum of the branches and the skip."""
        x = u.transpose(1, 2).contiguous()
        direction = self.layer.directions[0]
        assert self.layer.D is not None
        y = self.layer.D[:, None] * x
        for i, norm in enumerate(self.norms):
            taps = direction.kernel.taps[i].flip(1)[:, None].to(x.dtype)  # type: ignore[index]
            padded = nn.functional.pad(x, (self.reach[i], 0))
            c = norm(nn.functional.conv1d(padded, taps, groups=x.shape[1], dilation=2**i))
            y = y + (c if direction.alpha is None else direction.alpha[i][:, None] * c)
        return y.transpose(1, 2).to(u.dtype)


class DenseConvolution(nn.Module):
    """One FFT convolution with a free kernel of the input's length, or of that length on both sides."""

    def __init__(self, channels: int, length: int, bidirectional: bool, device: str) -> None:
        super().__init__()
        taps = length * (1 + bidirectional)
        self.kernel = nn.Parameter(torch.randn(channels, taps, device=device) / taps**0.5)
        self.lead = length if bidirectional else 0

    def forward(self, u: Tensor) -> Tensor:
        """Convolve in float32: FFTs have no half precision."""
        L, n = u.shape[1], 2 * u.shape[1]
        x = u.transpose(1, 2).float()
        y = irfft(rfft(x, n) * rfft(self.kernel, n), n)
        return y.roll(-self.lead, -1)[..., :L].transpose(1, 2).to(u.dtype)


def steps(
    pass_name: str, modules: Mapping[str, nn.Module], u: Tensor, g: Tensor, autocast: torch.dtype | None = None
) -> dict[str, Step]:
    """Return a step of each module.

    Args:
        pass_name: "training" (forward, and the gradients of the input and of all parameters), "forward" (the first
            half of it, which keeps everything that the backward needs) or "inference" (without gradients).
        modules: candidates by name.
        u: input.
        g: gradient of the output.
        autocast: dtype of torch.autocast in the forward pass; None disables it.
    """
    return {name: _step(pass_name, module, u, g, autocast) for name, module in modules.items()}


def _step(pass_name: str, module: nn.Module, u: Tensor, g: Tensor, autocast: torch.dtype | None) -> Step:
    inputs = [u, *(p for p in module.parameters() if p.requires_grad)]

    def forward() -> Tensor:
        with nullcontext() if autocast is None else torch.autocast(u.device.type, autocast):
            return module(u)

    def training() -> tuple[Tensor | None, ...]:
        y = forward()
        return torch.autograd.grad(y, inputs, g.to(y.dtype), allow_unused=True)

    return {"training": training, "forward": forward, "inference": torch.no_grad()(forward)}[pass_name]
