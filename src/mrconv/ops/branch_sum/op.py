"""The weighted sum of batch-normalised branches.

y = sum_b alpha_b (gamma_b (c_b - mean_b) / sqrt(var_b + eps) + beta_b) + skip u, where c_b = k_b * u is the output of
branch b. Every algorithm is a class (`Computation`) that computes the sums behind the statistics, the output given the
statistics, and the gradients. `_register` turns such a class into a `torch.library` op, which takes flat arguments;
`normalization.py` computes the statistics and the weights' gradients from the sums, and shares them among processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._common import Taps, compute_dtype, contiguous, empty_contiguous, reject_forward_mode, use_triton
from .._registration import EagerOp
from ..kernel_taps import densify
from ..select import Algorithm, BranchShape, Selection, select_branch_sum
from . import normalization as finalising
from .normalization import BranchWeights, Heights
from .spectral import SpectralBranches
from .statistics import BatchStatistics, valid_count
from .taps import tap_branches


@dataclass(frozen=True)
class Normalization:
    """Weights and normalization of N branches of C channels.

    `weights` are alpha, gamma and beta of one or two directions, whose branches follow one another; a tensor is alpha
    of one direction. skip (C,) multiplies the input. Positions from `lengths` (B,) on do not count. With `sync` the
    statistics are those of all processes.
    """

    weights: Sequence[BranchWeights] | Tensor
    skip: Tensor | None = None
    lengths: Tensor | None = None
    eps: float = 1e-5
    sync: bool = False

    @property
    def directions(self) -> list[BranchWeights]:
        """The weights of each direction."""
        return [BranchWeights(self.weights)] if isinstance(self.weights, Tensor) else list(self.weights)


class ConstantKernels(NamedTuple):
    """Causal constant kernels: kernel b is factors[b] times the first of values[b, c, ...] at lags below widths[b]."""

    values: Tensor
    factors: Sequence[float]
    widths: Sequence[int]


class ModeKernels(NamedTuple):
    """Causal kernels of M Fourier modes each.

    Kernel b at lag tau < widths[b] is p_0 + sum_m p_m cos(w_m tau) + r_m sin(w_m tau) with w_m = 2 pi m / periods[b].
    Without `factors`, values (N, C, 2 M - 1) are p_0, p_1, r_1, p_2, r_2, ... With `factors`, N * 2 M numbers, p_m and
    r_m are values (N, C, M, 2) times the factors; those of r_0 do not count.
    """

    values: Tensor
    widths: Sequence[int]
    periods: Sequence[int]
    factors: Sequence[float] = ()


class PackedKernels(NamedTuple):
    """Dense kernels in one tensor, values (C, sum of sizes), the first `causal` of them causal.

    Causal kernels start at lag 0; anticausal ones start at lag -1 and run backwards.
    """

    values: Tensor
    sizes: Sequence[int]
    causal: int

    @property
    def lags(self) -> list[range]:
        """The lags of each kernel."""
        return [range(n) if i < self.causal else range(-1, -1 - n, -1) for i, n in enumerate(self.sizes)]


Kernels = Sequence[Taps] | PackedKernels | ModeKernels | ConstantKernels


class BranchSum(NamedTuple):
    """The output y (B, C, L) and the statistics, without gradients: mean and biased var (N, C) over `num_values`."""

    y: Tensor
    mean: Tensor
    var: Tensor
    num_values: Tensor


def branch_sum(
    u: Tensor,
    kernels: Kernels,
    normalization: Normalization,
    selection: Selection | None = None,
    backend: str = "auto",
) -> BranchSum:
    """Return the weighted sum of normalised branches of u (B, C, L) and their batch statistics.

    u is zero from `normalization.lengths` on, where y and the gradient of u are undefined. Dense kernels start at lag 0
    or, descending, at lag -1, anticausal ones last; scattered taps may be at any lags. `selection` defaults to
    the result of `select_branch_sum` for these kernels.
    """
    selection = selection or select_for(u, kernels, backend)
    return BranchSum(*_run(u, kernels, normalization, selection, with_factors=False)[:4])


class BranchFactors(NamedTuple):
    """The factors with which y = sum_b scale_b c_b + bias + skip u: scale (N, C) and bias (C,), with gradients."""

    scale: Tensor
    bias: Tensor


def branch_sum_with_factors(
    u: Tensor, kernels: Kernels, normalization: Normalization, selection: Selection
) -> tuple[BranchSum, BranchFactors]:
    """Return the result of `branch_sum` and the factors that its statistics give the branches.

    Other sequences can be normalised with the factors: their gradients contribute to those of u and the kernels through
    the statistics. MOVING_SUM, whose factors are those of its moving sums, raises TypeError.
    """
    if selection.algorithm is Algorithm.MOVING_SUM:
        raise TypeError("MOVING_SUM has no factors of the branches: use SPECTRAL")
    outputs = _run(u, kernels, normalization, selection, with_factors=True)
    return BranchSum(*outputs[:4]), BranchFactors(*outputs[4:])


def _run(
    u: Tensor, kernels: Kernels, normalization: Normalization, selection: Selection, with_factors: bool
) -> list[Tensor]:
    """Return y, mean, var and count, and the factors, which are empty if not wanted."""
    algorithm, triton = selection.algorithm, selection.triton
    if algorithm not in _OPS:
        raise ValueError(f"branch_sum has no algorithm {algorithm!r}; it has {', '.join(_OPS)}")
    if algorithm is Algorithm.TOEPLITZ and u.dtype != torch.bfloat16:
        raise TypeError(f"branch_sum by TOEPLITZ takes u in bfloat16; got {u.dtype}: use SPECTRAL")
    if triton or algorithm in _TRITON_ONLY:
        use_triton(u, "triton")
    packed, layout = _pack(kernels, algorithm, triton)
    n = normalization
    weights = (*(x for direction in n.directions for x in direction), None, None, None)[:6]
    reject_forward_mode(u, packed, *weights, n.skip)
    skip, lengths = contiguous(n.skip, n.lengths)
    y, mean, var, count, _, *factors = _OPS[algorithm](
        u, packed, *weights, skip, lengths, n.eps, n.sync, with_factors, *layout
    )
    return [y, mean, var, count, *factors]


def select_for(u: Tensor, kernels: Kernels, backend: str) -> Selection:
    """Return how `branch_sum` runs with these kernels."""
    if isinstance(kernels, ModeKernels):
        return Selection(Algorithm.MOVING_MODES, use_triton(u, "triton"))
    if isinstance(kernels, ConstantKernels):
        return Selection(Algorithm.MOVING_SUM, use_triton(u, "triton"))
    if isinstance(kernels, PackedKernels):
        return select_branch_sum(u, [BranchShape(lags, len(lags)) for lags in kernels.lags], backend)
    return select_branch_sum(u, [BranchShape(lags, values.shape[1]) for values, lags in kernels], backend)


def _pack(kernels: Kernels, algorithm: Algorithm, triton: bool) -> tuple[Tensor, tuple[Any, ...]]:
    """Return all kernels as one tensor, and the other arguments of the algorithm's op."""
    if isinstance(kernels, ModeKernels):
        return kernels.values, (list(kernels.widths), list(kernels.periods), list(kernels.factors))
    if isinstance(kernels, ConstantKernels):
        return kernels.values, (list(kernels.factors), list(kernels.widths))
    if isinstance(kernels, PackedKernels):
        return _packed(kernels.values, list(kernels.sizes), kernels.causal, algorithm, triton)
    sizes = [len(kernel.lags) for kernel in kernels]
    if algorithm is Algorithm.TAPS:
        lags = [lag for kernel in kernels for lag in kernel.lags]
        return torch.cat([kernel.values for kernel in kernels], 1), (lags, sizes, triton)
    if algorithm is Algorithm.MOVING_SUM:
        return torch.stack([kernel.values for kernel in kernels]), ([1.0] * len(sizes), sizes)
    causal = next((i for i, kernel in enumerate(kernels) if kernel.lags and kernel.lags[0] < 0), len(kernels))
    dense = [_dense(kernel, anticausal=i >= causal) for i, kernel in enumerate(kernels)]
    return _packed(torch.cat(dense, 1), [kernel.shape[1] for kernel in dense], causal, algorithm, triton)


def _packed(
    values: Tensor, sizes: list[int], causal: int, algorithm: Algorithm, triton: bool
) -> tuple[Tensor, tuple[Any, ...]]:
    """Return dense kernels and their layout as the algorithm's op takes them."""
    return (values.float(), (sizes, causal)) if algorithm is Algorithm.TOEPLITZ else (values, (sizes, causal, triton))


def _dense(kernel: Taps, anticausal: bool) -> Tensor:
    """Return a causal kernel dense from lag 0 on, or an anticausal one dense from lag -1 on, backwards."""
    values, lags = kernel
    if isinstance(lags, range):
        return values.expand(-1, len(lags))
    positions = tuple(-1 - lag if anticausal else lag for lag in lags)
    return densify(values, positions, 0, 1 + max(positions, default=0))


class Computation(Protocol):
    """One algorithm on one batch: constructed for the forward pass, and again for the backward pass.

    `kernels` holds the kernels of all branches, and `layout` describes them. With `heights`, the class computes moving
    sums m_b: its sums and factors are those of m_b in place of c_b = h_b m_b.
    """

    def __init__(self, u: Tensor, kernels: Tensor, lengths: Tensor | None, *layout: Any) -> None: ...

    @property
    def heights(self) -> Heights | None:
        """The heights h_b, or None if the class computes c_b itself."""

    def moments(self) -> tuple[Tensor, Tensor | None]:
        """Return partial sums of c_b and of c_b^2, (P, 2, N, C), and a tensor to save for `gradients`."""

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return sum_b (scale_b c_b + shift_b) + skip u, like u; scale and shift are (N, C)."""

    def products(self, grad: Tensor) -> Tensor:
        """Return partial sums over batch and time, (P, N + 2, C), of g c_b, of g and of g u for y's gradient g."""

    def gradients(
        self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None, saved: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of u and of the kernels for dc_b = s_b g - a_b - q_b c_b, after `products`.

        s, q and a are (N, C), one after the other in memory. With `heights` there is no gradient of the kernels.
        """


_TENSORS = (
    "Tensor u, Tensor kernels, Tensor alpha, Tensor? gamma, Tensor? beta, "
    "Tensor? alpha2, Tensor? gamma2, Tensor? beta2, Tensor? skip, Tensor? lengths"
)
_INPUTS = 10  # tensors
_STATISTICS = "Tensor mean, Tensor var, Tensor count, Tensor saved"


def _returns(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


def _directions(*weights: Tensor | None) -> list[BranchWeights]:
    """Return alpha, gamma and beta of one or two directions."""
    each = weights[:3], weights[3:]
    return [BranchWeights(alpha, gamma, beta) for alpha, gamma, beta in each if alpha is not None]


def _agreed(parts: Tensor, dtype: torch.dtype, triton: bool, sync: bool) -> tuple[Tensor, torch.dtype]:
    """Return partial sums, and the dtype of the factors that follow from them.

    In torch that is the dtype of the sums, which is float64 where float32 would overflow. Several processes have to
    agree on it and use `dtype`.
    """
    if triton:
        return parts, dtype
    return (parts.to(dtype), dtype) if sync else (parts, parts.dtype)


def _forward(algorithm, triton, u, kernels, *rest):  # type: ignore[no-untyped-def]
    """Compute y, mean, var, count, the tensor that the algorithm saves, and the factors; empty if not wanted."""
    *weights, skip, lengths, eps, sync, wanted = rest[:11]
    computation: Computation = algorithm(u, kernels, lengths, *rest[11:])
    parts, saved = computation.moments()
    arguments = _directions(*weights), computation.heights, eps
    dtype = compute_dtype(u, kernels)
    if triton and not sync:
        from . import normalization_triton

        count = u.shape[0] * u.shape[2] if lengths is None else lengths
        factors = normalization_triton.forward_factors(parts, count, *arguments, dtype)
    else:
        parts, wide = _agreed(parts, dtype, triton, sync)
        factors = finalising.forward_factors(parts, valid_count(u, lengths), *arguments, sync, wide)
    y = computation.output(factors.scale, skip, factors.shift)
    saved = saved if factors.means is None else factors.means
    statistics = (x.to(dtype) for x in factors.statistics)
    others = (saved, factors.scale, factors.shift.sum(0)) if wanted else (saved, None, None)
    return y, *statistics, *(u.new_empty(0, dtype=dtype) if x is None else x.to(dtype) for x in others)


def _backward(algorithm, triton, grad, dscale, dbias, u, kernels, *rest):  # type: ignore[no-untyped-def]
    """Compute the gradients of u, kernels, weights and skip; empty for missing ones.

    The gradients of the factors are sums of g c_b and of g over other sequences: one more partial sum.
    """
    *weights, skip, lengths, mean, var, count, saved, eps, sync, _ = rest[:15]
    computation: Computation = algorithm(u, kernels, lengths, *rest[15:])
    parts = computation.products(grad)
    if dscale is not None:
        others = torch.cat([dscale, dbias[None], torch.zeros_like(dbias)[None]])
        parts = torch.cat([parts, others[None].to(parts.dtype)])
    parts, dtype = _agreed(parts, compute_dtype(u, kernels), triton, sync)
    statistics = BatchStatistics(mean, var, count)
    arguments = parts, statistics, _directions(*weights), skip, computation.heights, saved, eps
    if triton and not sync:
        from . import normalization_triton

        factors = normalization_triton.backward_factors(*arguments, dtype)
    else:
        factors = finalising.backward_factors(*arguments, sync, dtype)
    du, dkernels = computation.gradients(factors.s, factors.q, factors.a, skip, saved)
    dkernels = factors.dheights if dkernels is None else dkernels
    assert dkernels is not None
    dkernels = dkernels.to(kernels.dtype, memory_format=torch.contiguous_format).contiguous()
    dweights = (*(x for direction in factors.dweights for x in direction), None, None, None)[:6]
    return du, dkernels, *(u.new_empty(0) if x is None else x for x in dweights), factors.dskip


def _register(
    name: str,
    layout: str,
    load: Callable[[], Callable[..., Computation]],
    saved_shape: Callable[..., tuple[int, ...]] = lambda u, kernels, N, *layout: (0,),
    triton: Callable[..., bool] = lambda *layout: True,
) -> EagerOp:
    """Register an algorithm as op(tensors, eps, sync, with_factors, *layout), with its backward.

    It returns y, mean, var, count, saved, scale and bias; the last two are empty without `with_factors`.

    `layout` is the schema of the arguments that describe the kernels. `load` returns the class; it imports Triton only
    when the op runs. `saved_shape` is a function of u, the kernels, N and the layout, `triton` of the layout.
    """
    options = f"float eps, bool sync, bool with_factors, {layout}"
    forward = EagerOp(
        f"branch_sum_{name}",
        lambda *arguments: _forward(load(), triton(*arguments[_INPUTS + 3 :]), *arguments),
        schema=f"({_TENSORS}, {options}) -> {_returns(7)}",
    )
    backward = EagerOp(
        f"branch_sum_{name}_backward",
        lambda *arguments: _backward(load(), triton(*arguments[_INPUTS + 10 :]), *arguments),
        schema=f"(Tensor grad, Tensor? dscale, Tensor? dbias, {_TENSORS}, {_STATISTICS}, {options}) -> {_returns(9)}",
    )

    @forward.register_fake
    def _(u, kernels, alpha, gamma, beta, alpha2, gamma2, beta2, skip, lengths, eps, sync, with_factors, *layout):  # type: ignore[no-untyped-def]
        N, C = alpha.shape[0] + (0 if alpha2 is None else alpha2.shape[0]), alpha.shape[1]
        shapes = [(N, C), (N, C), (), saved_shape(u, kernels, N, *layout)]
        shapes += [(N, C), (C,)] if with_factors else [(0,), (0,)]
        return torch.empty_like(u), *(u.new_empty(shape, dtype=compute_dtype(u, kernels)) for shape in shapes)

    @backward.register_fake
    def _(grad, dscale, dbias, u, kernels, *rest):  # type: ignore[no-untyped-def]
        others = (u.new_empty(0) if x is None else empty_contiguous(x)[0] for x in rest[:7])
        return torch.empty_like(u), *empty_contiguous(kernels), *others

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[_INPUTS:]
        ctx.save_for_backward(*inputs[:_INPUTS], *output[1:5])
        ctx.mark_non_differentiable(*(output[1:5] if inputs[_INPUTS + 2] else output[1:]))
        ctx.set_materialize_grads(False)  # else autograd fills the statistics' gradients with zeros

    def vjp(ctx: Any, grad: Any, *others: Any) -> Any:
        saved, (dscale, dbias), grads = ctx.saved_tensors, others[-2:], []
        if dscale is not None or dbias is not None:
            mean = saved[_INPUTS]
            grad = torch.zeros_like(saved[0]) if grad is None else grad
            dscale = torch.zeros_like(mean) if dscale is None else dscale
            dbias = mean.new_zeros(mean.shape[1]) if dbias is None else dbias
        if grad is not None:
            grads = backward(grad, dscale, dbias, *saved, *ctx.options)
        needed = (g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False))
        return *needed, *([None] * (_INPUTS + len(ctx.options) - len(grads)))

    forward.register_autograd(vjp, setup_context=setup)
    return forward


def _spectral(
    u: Tensor, kernels: Tensor, lengths: Tensor | None, sizes: Sequence[int], causal: int, triton: bool
) -> Computation:
    if triton:
        from .spectral_triton import SpectralBranchesTriton

        return SpectralBranchesTriton(u, kernels, lengths, sizes, causal)
    return SpectralBranches(u, kernels, lengths, sizes, causal)


def _spectral_saved(u: Tensor, kernels: Tensor, N: int, *layout: Any) -> tuple[int, ...]:
    """Return the shape of the derivatives of short branches that the Triton version saves."""
    return tuple(kernels.shape) if layout[-1] else (0,)


def _toeplitz() -> type[Computation]:
    from .toeplitz_triton import ToeplitzBranches

    return ToeplitzBranches


def _moving_sum() -> type[Computation]:
    from .moving_sum_triton import MovingSums

    return MovingSums


def _moving_modes() -> type[Computation]:
    from .moving_modes_triton import MovingModes

    return MovingModes


def _toeplitz_saved(u: Tensor, kernels: Tensor, N: int, sizes: Sequence[int], causal: int) -> tuple[int]:
    from .toeplitz_triton import saved_numbers

    return (sum(saved_numbers(u, sizes)),)


def _tap_sums(
    u: Tensor, kernels: Tensor, N: int, lags: Sequence[int], sizes: Sequence[int], triton: bool
) -> tuple[int, ...]:
    """Return the shape of the sums over the inputs of each tap, which Triton kernels save."""
    return (2, len(lags), kernels.shape[0]) if triton else (0,)


def _last(*layout: Any) -> bool:
    return bool(layout[-1])


_OPS = {
    Algorithm.SPECTRAL: _register(
        Algorithm.SPECTRAL, "int[] sizes, int causal, bool triton", lambda: _spectral, _spectral_saved, _last
    ),
    Algorithm.TOEPLITZ: _register(Algorithm.TOEPLITZ, "int[] sizes, int causal", _toeplitz, _toeplitz_saved),
    Algorithm.TAPS: _register(
        Algorithm.TAPS, "int[] lags, int[] sizes, bool triton", lambda: tap_branches, _tap_sums, _last
    ),
    Algorithm.MOVING_SUM: _register(
        Algorithm.MOVING_SUM,
        "float[] factors, int[] widths",
        _moving_sum,
        lambda u, kernels, N, *layout: (N, kernels.shape[1]),
    ),
    Algorithm.MOVING_MODES: _register(
        Algorithm.MOVING_MODES, "int[] widths, int[] periods, float[] factors", _moving_modes
    ),
}
_TRITON_ONLY = (Algorithm.TOEPLITZ, Algorithm.MOVING_SUM, Algorithm.MOVING_MODES)
