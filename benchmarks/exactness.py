"""Measure the errors of merging, of training with one convolution, and of other rates; print Markdown, write JSON.

python benchmarks/exactness.py [benchmarks/results/exactness.json]
"""

from __future__ import annotations

import copy
import json
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from mrconv import MRConv, ops

KINDS = ("dense", "dilated", "fourier", "sparse", "fourier+sparse")
L, D, B = 4096, 16, 4


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of a - b relative to the norm of b."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def randomise(layer: MRConv) -> MRConv:
    """Give the branches random statistics and affine parameters."""
    with torch.no_grad():
        for m in layer.modules():
            if isinstance(m, nn.BatchNorm1d):
                assert m.running_mean is not None
                assert m.running_var is not None
                m.running_mean.normal_()
                m.running_var.uniform_(0.2, 3.0)
                m.weight.normal_()
                m.bias.normal_()
    return layer


def with_backend(layer: MRConv, backend: str, dtype: torch.dtype) -> MRConv:
    """Return a copy with another backend and dtype."""
    other = copy.deepcopy(layer).to(dtype)
    other.backend = backend
    return other


def merge_and_training(kind: str) -> dict[str, float]:
    """Return the errors with respect to N branches in float64, bidirectional, kernel_size 8."""
    torch.manual_seed(0)
    layer = randomise(MRConv(D, L, kernel=kind, kernel_size=8, bidirectional=True, dtype=torch.float64))
    u, grad = torch.randn(B, L, D, dtype=torch.float64), torch.randn(B, L, D, dtype=torch.float64)
    exact = with_backend(layer, "reference", torch.float64)
    exact(u).backward(grad)
    largest = max(p.grad.norm().item() for p in exact.parameters() if p.grad is not None)
    result = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        with torch.no_grad():
            merged = with_backend(layer, "torch", dtype).reparameterize()
            expected = with_backend(layer, "reference", torch.float64).eval()(u)
            result[f"merged {name}"] = relative(merged(u.to(dtype)), expected)
        fast = with_backend(layer, "torch", dtype)
        fast(u.to(dtype)).backward(grad.to(dtype))
        pairs = zip(fast.parameters(), exact.parameters(), strict=True)
        errors = [
            (p.grad.double() - q.grad).norm().item() for p, q in pairs if p.grad is not None and q.grad is not None
        ]
        result[f"gradients {name}"] = max(errors) / largest
    return result


def offset(size: float) -> float:
    """Return the float32 error of the branches' sum in training mode for an input with a mean of `size` deviations."""
    torch.manual_seed(0)
    layer = MRConv(D, L, kernel_size=4)
    u = torch.randn(B, L, D) + size
    with torch.no_grad():
        assert layer.D is not None
        layer.D.zero_()
        return relative(layer(u), with_backend(layer, "reference", torch.float64)(u.double()))


def low_frequencies(seed: int) -> Tensor:
    """Return a random signal below a tenth of the Nyquist frequency."""
    spectrum = torch.zeros(B, D, L // 2 + 1, dtype=torch.complex128)
    top = L // 20
    draw = torch.Generator().manual_seed(seed)
    spectrum[..., 1:top] = torch.randn(B, D, top - 1, dtype=torch.complex128, generator=draw)
    return torch.fft.irfft(spectrum, L).transpose(1, 2).contiguous() * L**0.5


@torch.no_grad()
def half_rate(kernel_size: int, bidirectional: bool) -> dict[str, float]:
    """Return the errors at half the rate with respect to the decimated output, for a new layer and for its branches."""
    torch.manual_seed(0)
    layer = MRConv(D, L, kernel_size=kernel_size, bidirectional=bidirectional, dtype=torch.float64)
    for step in range(50):
        layer(low_frequencies(step))
    layer.eval()
    u = low_frequencies(1000)
    result = {"layer": relative(layer(u[:, ::2], rate=0.5), layer(u)[:, ::2])}
    branches = layer.directions[0]
    for (k, lags), (half, half_lags) in zip(branches.kernels(), branches.kernels(0.5), strict=True):
        if len(lags) in (64, 256, 1024, 4096):
            full = ops.conv(u.transpose(1, 2), k, lags)[..., ::2]
            error = relative(ops.conv(u[:, ::2].transpose(1, 2), half, half_lags), full)
            result[f"branch of {len(lags)}"] = error
    return result


def table(title: str, errors: dict[str, dict[str, float]]) -> str:
    """Return errors as a Markdown table."""
    columns = list(next(iter(errors.values())))
    lines = [f"| {title} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, values in errors.items():
        lines.append(f"| {name} | " + " | ".join(f"{values[c]:.1e}" if c in values else "" for c in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write JSON if a path is given."""
    results = {
        "merge and training": {kind: merge_and_training(kind) for kind in KINDS},
        "offset": {f"{size:g}": {"output, float32": offset(size)} for size in (0, 1, 10, 100)},
        "half rate": {
            f"kernel_size {size}" + (", bidirectional" if both else ""): half_rate(size, both)
            for size in (1, 2, 32, 64)
            for both in (False, True)
        },
    }
    print(table("kernel", results["merge and training"]), "\n")
    print(table("mean of the input, in deviations", results["offset"]), "\n")
    print(table("layer", results["half rate"]))
    if len(sys.argv) > 1:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        record = {"command": "python benchmarks/exactness.py", **versions, "shape": [B, L, D], "results": results}
        Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(sys.argv[1]).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
