"""Compile all Triton kernels for a GPU without having one: `python -m tests.compile_triton 90` prints JSON.

The ops run on CPU tensors with kernels that are compiled and never launched; their outputs are undefined.
"""

import copy
import importlib
import itertools
import json
import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from mrconv import MRConv, ops, reparameterize
from mrconv.ops import Normalization, Selection, Taps, _common

KINDS = [("fourier", 1), ("fourier", 2), ("fourier", 8), ("dilated", 4), ("fourier+sparse", 8)]


class Absent:
    """The part of a driver that compilation needs."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def name_of(kernel):
    return f"{kernel.fn.__module__.removeprefix('mrconv.ops.')}.{kernel.fn.__name__}"


def all_kernels():
    """Return the names of all kernels."""
    folder = Path(ops.__file__).parent
    modules = [
        importlib.import_module(".".join(("mrconv.ops", *path.relative_to(folder).with_suffix("").parts)))
        for path in sorted(folder.rglob("*triton*.py"))
    ]
    each = itertools.chain.from_iterable(vars(module).values() for module in modules)
    names = {name_of(kernel) for kernel in each if isinstance(kernel, jit.JITFunction)}
    return {name for name in names if name.endswith("_kernel")}


def main(capability):
    """Print the compiled kernels with the shared memory that each needs at most, and the kernels not compiled."""
    shared = {}
    run = jit.JITFunction.run

    def compiled(self, *args, grid, warmup=False, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        shared[name_of(self)] = max(shared.get(name_of(self), 0), kernel.metadata.shared)
        return kernel

    jit.JITFunction.run = compiled
    driver.set_active(Absent(capability))
    _common.triton_unavailable = lambda x: None
    for (kernel, size), dtype in itertools.product(KINDS, (torch.float32, torch.bfloat16)):
        layer = MRConv(32, 2048, kernel=kernel, kernel_size=size, bidirectional=size == 8, backend="triton")
        u = torch.randn(2, 1100, 32, dtype=dtype, requires_grad=True)
        merged = reparameterize(copy.deepcopy(layer).eval())
        for lengths in (None, torch.tensor([1100, 60])):
            merged(u, lengths, gelu=True)
        layer(u, gelu=True).sum().backward()
        layer(u, torch.tensor([1100, 60])).sum().backward()
    layer = MRConv(32, 512, kernel_size=2, backend="triton")  # in float32 MOVING_MODES costs least up to 1,024 taps
    for lengths in (None, torch.tensor([512, 60])):
        layer(torch.randn(2, 512, 32, requires_grad=True), lengths).sum().backward()
    layer = MRConv(32, 20000, kernel_size=8, bidirectional=True, combine="concat", backend="triton")
    layer(torch.randn(2, 16384, 32, requires_grad=True)).sum().backward()
    layer = MRConv(32, 5000, kernel_size=32, bidirectional=True, backend="triton")  # FFTs in rows, tails by FFT
    layer(torch.randn(2, 5000, 32, requires_grad=True)).sum().backward()
    for dtype in (torch.float32, torch.bfloat16):
        u = torch.randn(2, 32, 1100, dtype=dtype)
        ops.moving_sum_conv(u, torch.randn(4, 32), [1.0] * 4, [1, 8, 300, 1000], None, torch.zeros(32), gelu=True)
    for dtype in (torch.float32, torch.float16):
        ops.toeplitz_conv(torch.randn(2, 32, 100, dtype=dtype), torch.randn(32, 100))
    u = torch.randn(2, 1100, 32).bfloat16().requires_grad_()
    lags = range(16), range(1100), range(-1, -17, -1), range(-1, -1101, -1)
    taps = [Taps(torch.randn(32, len(at)), at) for at in lags]
    for lengths in (None, torch.tensor([1100, 60])):
        normalization = Normalization(torch.ones(4, 32), torch.ones(32), lengths)
        y = ops.branch_sum(u.transpose(1, 2), taps, normalization, Selection(ops.Algorithm.TOEPLITZ, True)).y
        y.sum().backward()
    json.dump({"shared": shared, "missed": sorted(all_kernels() - set(shared))}, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
