"""Branches whose kernels are constant, as moving sums: differences of one running sum, and no FFT at all.

With S[t] = u[0] + ... + u[t], a branch of height h and length W has the output c[t] = h (S[t] - S[t - W]). One pass
over S gives the statistics of all branches, a second one the output. Going back, sum_t g c_b takes one pass; the
gradient of S another, dS[t] = sum_b e_b[t] - e_b[t + W_b] with e_b = h_b (s_b g - a_b - q_b c_b), and du is its running
sum from the end. S is float64, so that differences of it lose nothing that float32 would show, however long the
sequence.

Kernels of a few modes go the same way (`mode_branch_sum`), with sums of u[s] e^{i w (t-s)} over the window in place of
those of u: one more for every wave e^{i w tau}.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..fft_conv.op import compute_dtype, contiguous, refuse_forward_mode
from ..registration import register_branch_sum
from .statistics import mean_and_variance, normalised_backward, shifted, valid_count


def window_branch_sum(
    u: Tensor,
    heights: Tensor,
    widths: Sequence[int],
    weight: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `spectral_branch_sum` does for kernels of heights (nb, C) over lags 0 .. widths[b] - 1; by Triton."""
    refuse_forward_mode(u, heights, weight, skip, bias)
    skip, lengths = contiguous(skip, lengths)
    y, mean, var, count, _ = _window_sum(u, heights, weight, skip, bias, lengths, list(widths), eps, sync)
    return y, mean, var, count


def _like(x: Tensor, u: Tensor) -> Tensor:
    """Return x in u's dtype and memory format. The kernels want no half precision: Triton lays its tiles out anew."""
    return x if x.dtype == u.dtype else torch.empty_like(u).copy_(x)


@torch.library.custom_op("mrconv::window_branch_sum", mutates_args=())
def _window_sum(
    u: Tensor,
    heights: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    widths: list[int],
    eps: float,
    sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from . import moving_sum_triton as kernels

    S = kernels.running_sum(u)
    dtype = compute_dtype(u, heights)
    heights, weight = heights.to(dtype), weight.to(dtype)
    raw = kernels.window_moments(S, widths, lengths, dtype).to(dtype)  # of heights 1
    sums = torch.stack([raw[0] * heights, raw[1] * heights.square()])
    mean, var, count = mean_and_variance(sums, valid_count(u, lengths), sync)
    scale = weight * torch.rsqrt(var + eps)
    y = kernels.window_sum(S, u.to(dtype), widths, scale * heights, skip, shifted(bias, scale, mean))
    return _like(y, u), mean, var, count, raw


@torch.library.custom_op("mrconv::window_branch_sum_backward", mutates_args=())
def _window_sum_backward(
    grad: Tensor,
    u: Tensor,
    heights: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    raw: Tensor,
    widths: list[int],
    eps: float,
    sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from . import moving_sum_triton as kernels

    S = kernels.running_sum(u)
    dtype = compute_dtype(u, heights)
    g = grad.to(dtype)
    products, g_sum, dskip = kernels.window_products(S, u.to(dtype), g, widths, dtype)  # sum_bt of g m_b, g and g u
    h = heights.to(dtype)
    dweight, s, q, a = normalised_backward(products * h, g_sum, weight.to(dtype), mean, var, count, eps, sync)
    rise = kernels.window_pull(S, g, widths, h, s, q, a, lengths)
    du = kernels.running_sum_back(rise, u, g, skip)
    dheights = s * products - a * raw[0] - q * h * raw[1]
    dweight, dskip, g_sum = (x.to(weight.dtype, copy=True) for x in (dweight, dskip, g_sum))
    return du, dheights.to(heights.dtype), dweight, dskip, g_sum


register_branch_sum(_window_sum, _window_sum_backward, lambda kernels, weight, *rest: (2, *weight.shape))


def mode_branch_sum(
    u: Tensor,
    coefficients: Tensor,
    widths: Sequence[int],
    periods: Sequence[int],
    weight: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `spectral_branch_sum` does for kernels of a few modes over lags 0 .. widths[b] - 1; by Triton.

    Kernel b at lag tau is p_0 + sum_m p_m cos(w_m tau) + r_m sin(w_m tau) with w_m = 2 pi m / periods[b]; coefficients
    (nb, C, 2 modes - 1) are p_0, p_1, r_1, p_2, r_2, ...
    """
    refuse_forward_mode(u, coefficients, weight, skip, bias)
    skip, lengths = contiguous(skip, lengths)
    return _mode_sum(u, coefficients, weight, skip, bias, lengths, list(widths), list(periods), eps, sync)


def _by_rank(coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    return coefficients.to(dtype).transpose(1, 2).contiguous()  # (nb, 2 modes - 1, C)


@torch.library.custom_op("mrconv::mode_branch_sum", mutates_args=())
def _mode_sum(
    u: Tensor,
    coefficients: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    widths: list[int],
    periods: list[int],
    eps: float,
    sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .moving_modes_triton import ModeWindows

    dtype = compute_dtype(u, coefficients)
    windows = ModeWindows(u, widths, periods, coefficients.shape[2] // 2 + 1, dtype)
    factors, carries = _by_rank(coefficients, dtype), windows.carries(u)
    sums = windows.moments(u, carries, factors, lengths).to(dtype)
    mean, var, count = mean_and_variance(sums, valid_count(u, lengths), sync)
    scale = weight.to(dtype) * torch.rsqrt(var + eps)
    y = windows.output(u, carries, scale[:, None] * factors, skip, shifted(bias, scale, mean))
    return y, mean, var, count


@torch.library.custom_op("mrconv::mode_branch_sum_backward", mutates_args=())
def _mode_sum_backward(
    grad: Tensor,
    u: Tensor,
    coefficients: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    widths: list[int],
    periods: list[int],
    eps: float,
    sync: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .moving_modes_triton import ModeWindows

    dtype = compute_dtype(u, coefficients)
    windows = ModeWindows(u, widths, periods, coefficients.shape[2] // 2 + 1, dtype)
    factors, carries = _by_rank(coefficients, dtype), windows.carries(u)
    inner, g_sum, dskip = windows.products(u, grad, carries, factors)
    dweight, s, q, a = normalised_backward(inner, g_sum, weight.to(dtype), mean, var, count, eps, sync)
    du, dfactors = windows.pull(u, grad, carries, factors, torch.stack([s, q, a]), skip, lengths)
    dcoefficients = dfactors.transpose(1, 2).to(coefficients.dtype, memory_format=torch.contiguous_format)
    dweight, dskip, g_sum = (x.to(weight.dtype, copy=True) for x in (dweight, dskip, g_sum))
    return du, dcoefficients, dweight, dskip, g_sum


register_branch_sum(_mode_sum, _mode_sum_backward)
