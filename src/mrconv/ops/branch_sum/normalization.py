"""The small steps of a branch sum: sums to statistics and scales, and the gradients of the weights; in plain torch.

`normalization_triton.py` computes the same in one launch each. This path also shares the sums among processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._common import constants
from .statistics import BatchStatistics, mean_and_variance, sum_over_processes


class BranchWeights(NamedTuple):
    """Weight and BatchNorm parameters of one direction's branches; missing ones are gamma = 1 and beta = 0.

    alpha is (N, C); gamma and beta have as many elements in the same order.
    """

    alpha: Tensor
    gamma: Tensor | None = None
    beta: Tensor | None = None


class Heights(NamedTuple):
    """Factors h_b that turn moving sums m_b into branches c_b = h_b m_b: factors[b] times values[b, c, 0, ...].

    values is (N, C, ...), such as the modes of constant fourier kernels; elements past the first do not count.
    """

    values: Tensor
    factors: Sequence[float]

    def scaled(self, dtype: torch.dtype) -> Tensor:
        """Return the heights (N, C)."""
        values = self.values.flatten(2)[..., 0] if self.values.ndim > 2 else self.values
        return values.to(dtype) * constants(self.factors, values, dtype)[:, None]


class ForwardFactors(NamedTuple):
    """The statistics, and the factors with which y = sum_b scale_b c_b + shift_b, all (N, C) but for the count.

    With heights, the scale is that of m_b, and `means` (N, C) are those of m_b.
    """

    statistics: BatchStatistics
    scale: Tensor
    shift: Tensor
    means: Tensor | None


class BackwardFactors(NamedTuple):
    """Gradients of the weights and of the skip; s, q, a (N, C) of dc_b = s_b g - a_b - q_b c_b.

    With heights, s, q, a are those of dm_b = s_b g - a_b - q_b m_b, and dheights is the gradient of their values.
    """

    dweights: list[BranchWeights]
    dskip: Tensor
    s: Tensor
    q: Tensor
    a: Tensor
    dheights: Tensor | None


def forward_factors(
    parts: Tensor,
    count: Tensor | int,
    weights: Sequence[BranchWeights],
    heights: Heights | None,
    eps: float,
    sync: bool,
    dtype: torch.dtype,
) -> ForwardFactors:
    """Finalise the forward pass from partial sums of c_b and of c_b^2, parts (P, 2, N, C), over `count` values."""
    sums = _total(parts)
    mean, var, count = mean_and_variance(sums, count, sync)
    weight, bias = _weight_and_bias(weights, sums.dtype)
    h = None if heights is None else heights.scaled(sums.dtype)
    means = mean
    if h is not None:
        mean, var = h * mean, h.square() * var
    scale = weight * torch.rsqrt(var + eps)
    shift = bias - scale * mean
    unit = scale if h is None else h * scale
    unit, shift, mean, var, count = (x.to(dtype).contiguous() for x in (unit, shift, mean, var, count))
    return ForwardFactors(BatchStatistics(mean, var, count), unit, shift, None if h is None else means.to(dtype))


def backward_factors(
    parts: Tensor,
    statistics: BatchStatistics,
    weights: Sequence[BranchWeights],
    skip: Tensor | None,
    heights: Heights | None,
    means: Tensor,
    eps: float,
    sync: bool,
    dtype: torch.dtype,
) -> BackwardFactors:
    """Finalise the backward pass from partial sums, parts (P, N + 2, C): of g c_b for every branch, of g, and of g u.

    That is the backward of y = sum_b alpha_b (gamma_b (c_b - mean_b) / sqrt(var_b + eps) + beta_b) + skip u with g the
    gradient of y. With heights, parts are of g m_b, `means` are those of the forward pass, and since scaling a branch
    changes its output by eps only, so does the height: dh_b = s_b eps / (var_b + eps) sum of g (m_b - mean of m_b).
    """
    total = _total(parts)
    inner, g_sum, g_u = total[:-2], total[-2], total[-1]
    mean, var, count = (x.to(total.dtype) for x in statistics)
    h = None if heights is None else heights.scaled(total.dtype)
    rstd = torch.rsqrt(var + eps)
    dweight = rstd * ((inner if h is None else h * inner) - mean * g_sum)
    everywhere, g_everywhere, count = dweight, g_sum, count.clamp(min=1)
    if sync:
        both = sum_over_processes(torch.cat([dweight, g_sum[None]]))
        everywhere, g_everywhere = both[:-1], both[-1]
    s = _weight_and_bias(weights, total.dtype)[0] * rstd
    q = s * rstd * everywhere / count
    a = s * g_everywhere / count - q * mean
    dheights = None
    if heights is not None and h is not None:
        dh = s * eps * rstd.square() * (inner - means.to(total.dtype) * g_sum)
        s, q, a = h * s, h.square() * q, h * a
        dheights = _gradient_of_values(heights, dh)
    s, q, a = (x.to(dtype).contiguous() for x in (s, q, a))
    dskip = g_u.new_empty(0) if skip is None else g_u.to(skip.dtype, copy=True)
    return BackwardFactors(_weight_gradients(weights, dweight, g_sum), dskip, s, q, a, dheights)


def _total(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0, dtype=torch.float64)


def _weight_and_bias(weights: Sequence[BranchWeights], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return alpha gamma and alpha beta of all directions, (N, C)."""
    both = []
    for alpha, gamma, beta in weights:
        wide = alpha.to(dtype)
        weight = wide if gamma is None else wide * gamma.view_as(alpha).to(dtype)
        both.append((weight, torch.zeros_like(wide) if beta is None else wide * beta.view_as(alpha).to(dtype)))
    weight, bias = (torch.cat(each) for each in zip(*both, strict=True))
    return weight, bias


def _weight_gradients(weights: Sequence[BranchWeights], dweight: Tensor, g_sum: Tensor) -> list[BranchWeights]:
    """Return the gradients of alpha, gamma and beta of each direction, given that of alpha gamma and the sum of g."""
    gradients = []
    sizes = [len(each.alpha) for each in weights]
    for (alpha, gamma, beta), dw in zip(weights, dweight.split(sizes), strict=True):
        dalpha, dgamma, dbeta = dw, None, None
        if gamma is not None:
            dalpha = gamma.view_as(alpha) * dw
            dgamma = (alpha * dw).view_as(gamma).to(gamma.dtype)
        if beta is not None:
            dalpha = dalpha + beta.view_as(alpha) * g_sum
            dbeta = (alpha * g_sum).view_as(beta).to(beta.dtype)
        gradients.append(BranchWeights(dalpha.to(alpha.dtype, copy=True).contiguous(), dgamma, dbeta))
    return gradients


def _gradient_of_values(heights: Heights, dh: Tensor) -> Tensor:
    """Return the gradient of the heights' values, which is zero past the first element."""
    values = heights.values
    out = torch.zeros_like(values, memory_format=torch.contiguous_format)
    out.view(*dh.shape, -1)[..., 0] = dh * constants(heights.factors, dh, dh.dtype)[:, None]
    return out
