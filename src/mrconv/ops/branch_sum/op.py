"""The weighted sum of batch-normalised branches, y = sum_b w_b (c_b - mean_b) / sqrt(var_b + eps) + skip u + bias.

c_b = k_b * u is the output of branch b. Every algorithm is a class (`Computation`) that computes the sums behind the
statistics, the output given the statistics, and the gradients. `_register` turns such a class into a `torch.library`
op, which takes flat arguments, computes the statistics, shares them among processes and differentiates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._common import Taps, compute_dtype, contiguous, empty_contiguous, reject_forward_mode, use_triton
from ..kernel_taps import densify
from ..select import Algorithm, BranchShape, Selection, select_branch_sum
from .spectral import SpectralBranches
from .statistics import BatchStatistics, centring_shift, mean_and_variance, normalization_backward, valid_count
from .taps import TapBranches

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

SHORT_BRANCH = 128
"""The largest number of taps of a branch that the Toeplitz algorithm treats as short."""


@dataclass(frozen=True)
class Normalization:
    """Weights and normalization of N branches of C channels.

    weight (N, C) multiplies the normalised branches, skip (C,) the input; bias (C,) is added. Positions from `lengths`
    (B,) on do not count. With `sync` the statistics are those of all processes.
    """

    weight: Tensor
    skip: Tensor | None = None
    bias: Tensor | None = None
    lengths: Tensor | None = None
    eps: float = 1e-5
    sync: bool = False


class ModeKernels(NamedTuple):
    """Causal kernels of M Fourier modes each.

    Kernel b at lag tau < widths[b] is p_0 + sum_m p_m cos(w_m tau) + r_m sin(w_m tau) with w_m = 2 pi m / periods[b];
    coefficients (N, C, 2 M - 1) are p_0, p_1, r_1, p_2, r_2, ...
    """

    coefficients: Tensor
    widths: Sequence[int]
    periods: Sequence[int]


class BranchSum(NamedTuple):
    """The output y (B, C, L) and the statistics, without gradients: mean and biased var (N, C) over `num_values`."""

    y: Tensor
    mean: Tensor
    var: Tensor
    num_values: Tensor


def branch_sum(
    u: Tensor,
    kernels: Sequence[Taps] | ModeKernels,
    normalization: Normalization,
    selection: Selection | None = None,
    backend: str = "auto",
) -> BranchSum:
    """Return the weighted sum of normalised branches of u (B, C, L) and their batch statistics.

    u is zero from `normalization.lengths` on, where y and the gradient of u are undefined. Dense kernels start at lag 0
    or, descending, at lag -1, anticausal ones last; scattered taps may be at any lags. `selection` defaults to
    the result of `select_branch_sum` for these kernels.
    """
    if selection is None:
        selection = _select(u, kernels, backend)
    algorithm, triton = selection.algorithm, selection.triton
    if algorithm not in _OPS:
        raise ValueError(f"branch_sum has no algorithm {algorithm!r}; it has {', '.join(_OPS)}")
    if algorithm is Algorithm.TOEPLITZ and u.dtype != torch.bfloat16:
        raise TypeError(f"branch_sum by TOEPLITZ takes u in bfloat16; got {u.dtype}: use SPECTRAL")
    if triton or algorithm in _TRITON_ONLY:
        use_triton(u, "triton")
    packed, layout = _pack(kernels, algorithm, triton)
    n = normalization
    reject_forward_mode(u, packed, n.weight, n.skip, n.bias)
    skip, lengths = contiguous(n.skip, n.lengths)
    y, mean, var, count, _ = _OPS[algorithm](u, packed, n.weight, skip, n.bias, lengths, n.eps, n.sync, *layout)
    return BranchSum(y, mean, var, count)


def _select(u: Tensor, kernels: Sequence[Taps] | ModeKernels, backend: str) -> Selection:
    if isinstance(kernels, ModeKernels):
        return Selection(Algorithm.MOVING_MODES, use_triton(u, "triton"))
    return select_branch_sum(u, [BranchShape(lags, values.shape[1]) for values, lags in kernels], backend)


def _pack(kernels: Sequence[Taps] | ModeKernels, algorithm: Algorithm, triton: bool) -> tuple[Tensor, tuple[Any, ...]]:
    """Return all kernels as one tensor, and the other arguments of the algorithm's op."""
    if isinstance(kernels, ModeKernels):
        return kernels.coefficients, (list(kernels.widths), list(kernels.periods))
    sizes = [len(kernel.lags) for kernel in kernels]
    if algorithm is Algorithm.TAPS:
        lags = [lag for kernel in kernels for lag in kernel.lags]
        return torch.cat([kernel.values for kernel in kernels], 1), (lags, sizes, triton)
    if algorithm is Algorithm.MOVING_SUM:
        return torch.cat([kernel.values for kernel in kernels], 1).t().contiguous(), (sizes,)
    causal = next((i for i, kernel in enumerate(kernels) if kernel.lags and kernel.lags[0] < 0), len(kernels))
    dense = [_dense(kernel, anticausal=i >= causal) for i, kernel in enumerate(kernels)]
    layout = [kernel.shape[1] for kernel in dense], causal
    return torch.cat(dense, 1), (*layout, triton) if algorithm is Algorithm.SPECTRAL else layout


def _dense(kernel: Taps, anticausal: bool) -> Tensor:
    """Return a causal kernel dense from lag 0 on, or an anticausal one dense from lag -1 on, backwards."""
    values, lags = kernel
    if isinstance(lags, range):
        return values.expand(-1, len(lags))
    positions = tuple(-1 - lag if anticausal else lag for lag in lags)
    return densify(values, positions, 0, 1 + max(positions, default=0))


class Computation(Protocol):
    """One algorithm on one batch: constructed for the forward pass, and again for the backward pass.

    `kernels` holds the kernels of all branches, and `layout` describes them.
    """

    def __init__(self, u: Tensor, kernels: Tensor, lengths: Tensor | None, *layout: Any) -> None: ...

    def moments(self) -> tuple[Tensor, Tensor | None]:
        """Return the sums of c_b and of c_b^2, (2, N, C), and a tensor to save for `gradients`."""

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b scale_b c_b + skip u + shift, like u."""

    def products(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums over batch and time of g c_b, (N, C), of g, (C,), and of g u, (C,), for y's gradient g."""

    def gradients(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the kernels for dc_b = s_b g - a_b - q_b c_b, after `products`."""


_TENSORS = "Tensor u, Tensor kernels, Tensor weight, Tensor? skip, Tensor? bias, Tensor? lengths"
_STATISTICS = "Tensor mean, Tensor var, Tensor count, Tensor saved"
_FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor)"


def _forward(algorithm, u, kernels, weight, skip, bias, lengths, eps, sync, *layout):  # type: ignore[no-untyped-def]
    """Compute y, mean, var, count and the tensor that the algorithm saves."""
    computation: Computation = algorithm(u, kernels, lengths, *layout)
    sums, saved = computation.moments()
    mean, var, count = mean_and_variance(sums, valid_count(u, lengths), sync)
    scale = weight.to(var.dtype) * torch.rsqrt(var + eps)
    y = computation.output(scale, skip, centring_shift(bias, scale, mean))
    saved = u.new_empty(0) if saved is None else saved
    return y, *(x.to(compute_dtype(u, kernels)) for x in (mean, var, count, saved))


def _backward(  # type: ignore[no-untyped-def]
    algorithm, grad, u, kernels, weight, skip, bias, lengths, mean, var, count, saved, eps, sync, *layout
):
    """Compute the gradients of u, kernels, weight, skip and bias."""
    computation: Computation = algorithm(u, kernels, lengths, *layout)
    inner, g_sum, dskip = computation.products(grad)
    statistics = BatchStatistics(mean, var, count)
    dweight, s, q, a = normalization_backward(inner, g_sum, weight.to(var.dtype), statistics, eps, sync)
    du, dkernels = computation.gradients(s, q, a, skip, saved)
    dkernels = dkernels.to(kernels.dtype, memory_format=torch.contiguous_format).contiguous()
    dskip, dbias = (x.to(weight.dtype, copy=True) for x in (dskip, g_sum))
    return du, dkernels, dweight.to(weight.dtype), dskip, dbias


def _register(
    name: str,
    layout: str,
    load: Callable[[], type[Computation]],
    saved_shape: Callable[..., tuple[int, ...]] = lambda kernels, weight, *layout: (0,),
) -> CustomOpDef:
    """Register an algorithm as op(tensors, eps, sync, *layout) -> y, mean, var, count, saved, with its backward.

    `layout` is the schema of the arguments that describe the kernels. `load` returns the class; it imports Triton only
    when the op runs.
    """
    options = f"float eps, bool sync, {layout}"
    forward = torch.library.custom_op(
        f"mrconv::branch_sum_{name}",
        lambda *arguments: _forward(load(), *arguments),
        mutates_args=(),
        schema=f"({_TENSORS}, {options}) -> {_FIVE}",
    )
    backward = torch.library.custom_op(
        f"mrconv::branch_sum_{name}_backward",
        lambda *arguments: _backward(load(), *arguments),
        mutates_args=(),
        schema=f"(Tensor grad, {_TENSORS}, {_STATISTICS}, {options}) -> {_FIVE}",
    )

    @forward.register_fake
    def _(u, kernels, weight, skip, bias, lengths, eps, sync, *layout):  # type: ignore[no-untyped-def]
        shapes = weight.shape, weight.shape, (), saved_shape(kernels, weight, *layout)
        return torch.empty_like(u), *(u.new_empty(shape, dtype=compute_dtype(u, kernels)) for shape in shapes)

    @backward.register_fake
    def _(grad, u, kernels, weight, *rest):  # type: ignore[no-untyped-def]
        vectors = (weight.new_empty(weight.shape[1]) for _ in range(2))
        return torch.empty_like(u), *empty_contiguous(kernels, weight), *vectors

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[6:]
        ctx.save_for_backward(*inputs[:6], *output[1:])

    def vjp(ctx: Any, grad: Any, *_: Any) -> Any:
        *grads, dskip, dbias = backward(grad, *ctx.saved_tensors, *ctx.options)
        optional = (g if ctx.needs_input_grad[3 + i] else None for i, g in enumerate((dskip, dbias)))
        return *grads, *optional, *([None] * (1 + len(ctx.options)))

    forward.register_autograd(vjp, setup_context=setup)
    return forward


def _toeplitz() -> type[Computation]:
    from .toeplitz_triton import ToeplitzBranches

    return ToeplitzBranches


def _moving_sum() -> type[Computation]:
    from .moving_sum_triton import MovingSums

    return MovingSums


def _moving_modes() -> type[Computation]:
    from .moving_modes_triton import MovingModes

    return MovingModes


def _short_taps(kernels: Tensor, weight: Tensor, sizes: Sequence[int], causal: int) -> tuple[int, int, int]:
    """Return the shape of the tensor saved for short branches; it includes branches that are long for short inputs."""
    return 2, kernels.shape[0], sum(size for size in sizes if size <= SHORT_BRANCH)


_OPS = {
    Algorithm.SPECTRAL: _register(Algorithm.SPECTRAL, "int[] sizes, int causal, bool triton", lambda: SpectralBranches),
    Algorithm.TOEPLITZ: _register(Algorithm.TOEPLITZ, "int[] sizes, int causal", _toeplitz, _short_taps),
    Algorithm.TAPS: _register(Algorithm.TAPS, "int[] lags, int[] sizes, bool triton", lambda: TapBranches),
    Algorithm.MOVING_SUM: _register(
        Algorithm.MOVING_SUM, "int[] widths", _moving_sum, lambda kernels, weight, widths: (2, *weight.shape)
    ),
    Algorithm.MOVING_MODES: _register(Algorithm.MOVING_MODES, "int[] widths, int[] periods", _moving_modes),
}
_TRITON_ONLY = (Algorithm.TOEPLITZ, Algorithm.MOVING_SUM, Algorithm.MOVING_MODES)
