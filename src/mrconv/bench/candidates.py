"""What a layer is measured against, in plain PyTorch."""

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

Run = Callable[[], Any]

PER_BRANCH = 7
"""How many tensors of the input's size one branch takes in a training step, as measured."""


def layer(shape: Shape, backend: str, device: str) -> MRConv:
    """Return our layer of this shape."""
    return MRConv(shape.channels, shape.length, **shape.options, backend=backend, device=device)


def branches(shape: Shape, device: str, depth: int = 1) -> nn.Module:
    """Return the paper's way: N convolutions and N BatchNorms (N convolutions of the pieces for "concat")."""
    needed = depth * bytes_of_branches(shape)
    if device == "cpu" and needed > 0.9 * cpu_memory():
        return Refused(f"needs about {needed / 2**30:.0f} GiB")
    if shape.kernel == "dilated" and shape.combine == "sum" and not shape.bidirectional:
        return DilatedBranches(shape, device)
    return layer(shape, "reference", device)


def bytes_of_branches(shape: Shape) -> int:
    """Return about how much memory a training step of the paper's way takes, in one layer."""
    many = layer(shape, "reference", "meta").resolutions * (1 + shape.bidirectional)
    return PER_BRANCH * many * 4 * shape.batch * shape.length * shape.channels


def cpu_memory() -> float:
    """Return the bytes that are free for use, infinity where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf"))


class Refused(nn.Module):
    """Fails for a reason: no such shape, or too large for a CPU, whose process would be killed for trying."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def forward(self, u: Tensor) -> Tensor:
        """Fail."""
        raise RuntimeError(self.reason)


class DilatedBranches(nn.Module):
    """N depthwise dilated conv1d and N BatchNorms: the paper's dilated layer."""

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
    """One FFT convolution with a free kernel as long as the input, or as long on both sides."""

    def __init__(self, channels: int, length: int, bidirectional: bool, device: str) -> None:
        super().__init__()
        taps = length * (1 + bidirectional)
        self.kernel = nn.Parameter(torch.randn(channels, taps, device=device) / taps**0.5)
        self.lead = length if bidirectional else 0

    def forward(self, u: Tensor) -> Tensor:
        """Convolve in float32, as FFTs must."""
        L, n = u.shape[1], 2 * u.shape[1]
        x = u.transpose(1, 2).float()
        y = irfft(rfft(x, n) * rfft(self.kernel, n), n)
        return y.roll(-self.lead, -1)[..., :L].transpose(1, 2).to(u.dtype)


def runs(
    name: str, modules: Mapping[str, nn.Module], u: Tensor, g: Tensor, cast: torch.dtype | None = None
) -> dict[str, Run]:
    """Return the pass of this name for each module.

    "training": forward, and the gradients of the input and of all parameters; "forward": the first half of it, with
    all that a backward would need; "inference": without gradients. `cast` runs the forward under torch.autocast.
    """
    return {key: _run(name, module, u, g, cast) for key, module in modules.items()}


def _run(name: str, module: nn.Module, u: Tensor, g: Tensor, cast: torch.dtype | None) -> Run:
    wanted = [u, *(p for p in module.parameters() if p.requires_grad)]

    def forward() -> Tensor:
        with nullcontext() if cast is None else torch.autocast(u.device.type, cast):
            return module(u)

    def training() -> tuple[Tensor | None, ...]:
        y = forward()
        return torch.autograd.grad(y, wanted, g.to(y.dtype), allow_unused=True)

    return {"training": training, "forward": forward, "inference": torch.no_grad()(forward)}[name]
