"""Initial A and B of the state-space models: HiPPO-LegS, its normal part, and simpler diagonals."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._utils.checks import check_choice, check_positive_int

MAX_STATE = 2048
"""Largest size of a state: a matrix of this size is diagonalised."""


def hippo_legs(N: int) -> tuple[Tensor, Tensor]:
    """Return HiPPO-LegS: A[n, k] = -sqrt((2n+1)(2k+1)) for n > k, -(n+1) for n = k, else 0; B[n] = sqrt(2n+1)."""
    n = torch.arange(N, dtype=torch.float64, device="cpu")
    B = (2 * n + 1).sqrt()
    return -torch.tril(torch.outer(B, B), -1) - torch.diag(n + 1), B


def legs_normal_part(N: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Diagonalise A + P P^T = V diag(Lambda) V^*, with P[n] = sqrt(n + 1/2), for HiPPO-LegS.

    The matrix is -1/2 plus a skew-symmetric one, so Lambda = -1/2 + i omega in conjugate pairs. Returns Lambda, V^* B,
    V^* P, each (N/2,), and V (N, N/2), for omega > 0.
    """
    A, B = hippo_legs(N)
    P = B / math.sqrt(2)
    skew = A + torch.outer(P, P) + torch.eye(N, dtype=A.dtype, device="cpu") / 2
    omega, V = torch.linalg.eigh(-1j * skew)
    omega, V = omega[N // 2 :], V[:, N // 2 :]
    adjoint = V.mH
    return torch.complex(torch.full_like(omega, -0.5), omega), adjoint @ B.to(V.dtype), adjoint @ P.to(V.dtype), V


def initial_diagonal(name: str, N: int) -> tuple[Tensor, Tensor]:
    """Return A and B, each (N/2,), for the initialisation "legs", "lin" or "inv".

    With "legs", the imaginary part of B is clipped to -2 .. 2, as in the code of S4's authors.
    """
    check_choice("init", name, ("legs", "lin", "inv"))
    check_even(N)
    if name == "legs":
        A, B, _, _ = legs_normal_part(N)
        return A, torch.complex(B.real, B.imag.clamp(-2, 2))
    n = torch.arange(N // 2, dtype=torch.float64, device="cpu")
    omega = math.pi * n if name == "lin" else N / math.pi * (N / (2 * n + 1) - 1)
    A = torch.complex(torch.full_like(omega, -0.5), omega)
    return A, torch.ones_like(A)


def check_even(d_state: int) -> None:
    """Reject an odd state size, as the state consists of conjugate pairs, and one above MAX_STATE."""
    check_positive_int(d_state=d_state)
    if d_state > MAX_STATE:
        raise ValueError(f"d_state must be at most {MAX_STATE}; got {d_state}")
    if d_state % 2:
        raise ValueError(f"d_state must be even, because the state consists of conjugate pairs; got {d_state}")
