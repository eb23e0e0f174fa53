"""The description of a causal kernel from which streaming selects its algorithms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..branches import Branches
from ..kernels import FourierKernel, FourierSparseKernel
from ..ops import Taps, compute_dtype
from .state_space import SlidingSSM, branch_gains, sliding_ssm


@dataclass(frozen=True)
class StreamedKernel:
    """A causal kernel as taps, as sliding Fourier modes, or as the sum of both, with a bias.

    Attributes:
        bias: (channels,), with channels = heads * d_model / groups.
        taps: values (channels, T) and their lags, a range if the kernel is dense; or None.
        modes: the Fourier part in its sliding form, or None.
    """

    bias: Tensor
    taps: Taps | None = None
    modes: SlidingSSM | None = None


def sliding_kernel(branches: Branches, rate: float) -> StreamedKernel | None:
    """Return the branches with their running statistics in sliding form, or None if their kernels have none.

    Subclasses of the Fourier kernels do not qualify: they may compute other kernels from the same modes.
    """
    kernel = branches.kernel
    if type(kernel) is FourierKernel:
        ssm = sliding_ssm(branches, kernel, rate)
        return StreamedKernel(ssm.bias, modes=ssm)
    if type(kernel) is not FourierSparseKernel:
        return None
    ssm = sliding_ssm(branches, kernel.fourier, rate)
    beta = kernel.beta.detach().double()  # (2, N, C)
    taps = kernel.sparse.taps.detach().double() * (beta[1] * branch_gains(branches, beta)[0])[..., None]
    lags = (torch.tensor(kernel.sparse.positions) + torch.tensor(branches.offsets)[:, None]).flatten()
    inside = (lags < branches.l_max).nonzero()[:, 0]
    values = taps.transpose(0, 1).flatten(1)[:, inside.to(taps.device)].to(compute_dtype(kernel.beta))
    modes = dataclasses.replace(ssm, C=ssm.C * beta[0][:, None])
    return StreamedKernel(ssm.bias, Taps(values, tuple(lags[inside].tolist())), modes)
