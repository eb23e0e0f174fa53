"""Normalised branches without FFTs: convolutions and correlations as products of matrices on the tensor cores.

What is computed is what `normalised.py` says, in time instead of frequency:

    R[lag]        =  sum of u[t] u[t - lag] over t and the batch
    sum c_b**2    =  <k_b, R * k_b>  -  sum of tail_b**2,      tail_b the outputs past the end
    du            =  g correlated with sum_b s_b k_b,  -  u * sum_b q_b r_b,  +  tail_b correlated with q_b k_b,  -  ...

with r_b the autocorrelation of k_b. Sequences are rows that end together and are filled up with zeros in front, to
whole blocks, so that the last inputs of all are an aligned piece of memory.

In half precision the factors of products are rounded to it, but for the tails that variances lose: there a kernel is
the sum of two such numbers, and what comes out is float32, as the difference may be small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .correlation_triton import BLOCK, correlation
from .normalised import Reach, grouped, lags_seen, side_by_side
from .statistics import running_total
from .toeplitz_triton import conv


def _blocks(n: int) -> int:
    """Return n, or the next multiple of BLOCK."""
    return n + -n % BLOCK


def _rows(x: Tensor) -> Tensor:
    """Return x (B, C, L) contiguous in time, with zeros in front, (B, C, whole blocks)."""
    B, C, L = x.shape
    rows, front = x.new_empty(C, B, _blocks(L)).transpose(0, 1), -L % BLOCK
    rows[..., :front] = 0
    rows[..., front:] = x
    return rows


def _even(half: Tensor) -> Tensor:
    """Return a kernel (C, 2 l - 1) that is the same to both sides, given at lags 0 .. l - 1."""
    return torch.cat([half[:, 1:].flip(1), half], 1)


class _Direction:
    """The input in one direction's own time, and that direction's kernels (nb, C, l), delayed by one if reversed."""

    def __init__(self, rows: Tensor, L: int, reverse: bool, kernels: Sequence[Tensor], branches: slice) -> None:
        self.rows, self.branches, self.delay = rows, branches, int(reverse)
        self.sizes = [k.shape[1] for k in kernels]
        self.lengths = [min(self.delay + size, L) for size in self.sizes]
        C, longest = rows.shape[1], _blocks(max(self.lengths))
        self.kernels = rows.new_zeros(len(kernels), C, longest, dtype=torch.float32)
        for row, k, length in zip(self.kernels, kernels, self.lengths, strict=True):
            row[:, self.delay : length] = k[:, : length - self.delay]
        total = running_total(rows.sum(0, dtype=torch.float64))
        self.running = total.flip(1)[:, :longest].float()  # S[L-1], S[L-2], ..., (C, l)
        self.groups = grouped(self.sizes, L)

    def own(self, group: slice) -> Tensor:
        """Return a group's kernels, no longer than they are."""
        return self.kernels[group, :, : _blocks(max(self.lengths[group]))]

    def around(self, group: slice, R: Tensor) -> Tensor:
        """Return R * k_b for a group's kernels, where they are."""
        k = self.own(group)
        n = min(k.shape[-1], R.shape[1])
        return conv(k, _even(R[:, :n]), n - 1)

    def last(self, group: slice) -> tuple[Tensor, Tensor]:
        """Return the last inputs that a group's outputs past the end need, and its kernels, (g C, n + 1).

        The inputs are once for every member, (B, g C, n): x[s + n - j] is what lag j of output s past the end meets.
        """
        n, g = _blocks(max(self.lengths[group]) - 1), group.stop - group.start
        x = self.rows[..., self.rows.shape[-1] - n :]
        if g > 1:
            x = x.transpose(0, 1).repeat(g, 1, 1).transpose(0, 1)
        return x, F.pad(self.kernels[group], (0, n + 1 - self.kernels.shape[-1])).flatten(0, 1)

    def side_by_side(self, rows: Tensor) -> Tensor:
        """Return a tensor like the kernels as they came."""
        found = [row[:, self.delay : length] for row, length in zip(rows, self.lengths, strict=True)]
        return side_by_side(found, self.sizes)

    def totals(self, scale: Tensor) -> Iterator[Tensor]:
        """Yield the scaled kernels, added up."""
        yield (scale * self.kernels).sum(0)


class Products(Reach):
    """What forward and backward share."""

    def __init__(
        self, u: Tensor, packed: Tensor, sizes: Sequence[int], forwards: int, correlated: Tensor | None = None
    ) -> None:
        super().__init__(u.shape[-1], sizes, forwards)
        self.u, self.rows = u, _rows(u)
        if correlated is None:
            correlated = correlation(self.rows, self.rows, 0, lags_seen(sizes, forwards)).contiguous()
        self.R = correlated
        kernels = packed.float().split(list(sizes), 1)
        both = (False, slice(forwards)), (True, slice(forwards, len(sizes)))
        self.directions = []
        for reverse, branches in both:
            if kernels[branches]:
                rows = _rows(u.flip(-1)) if reverse else self.rows
                self.directions.append(_Direction(rows, self.L, reverse, kernels[branches], branches))

    def moments(self) -> Tensor:
        """Sum and sum of squares of every branch's output, (2, nb, C)."""
        found = []
        for direction in self.directions:
            sums = (direction.kernels * direction.running).sum(-1)
            energy = torch.empty_like(sums)
            for group in direction.groups:
                energy[group] = (direction.own(group) * direction.around(group, self.R)).sum(-1)
                if max(direction.lengths[group]) > 1:
                    tail = _exact(*direction.last(group))
                    energy[group] -= correlation(tail, tail, 0, 1).view_as(energy[group])
            found.append(torch.stack([sums, energy]))
        return torch.cat(found, 1)

    def output(self, scale: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Return y."""
        y = conv(self.rows, self.k_rep(scale, skip), self.ahead, shift)
        return torch.empty_like(self.u).copy_(self._cut(y))

    def seen(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take in y's gradient g; return sum g c_b (nb, C), sum g (C,) and the gradient of the skip (C,)."""
        self.g = _rows(grad)
        dk_rep = correlation(self.g, self.rows, -self.ahead, self.behind)
        self.own = []
        for direction in self.directions:
            here = self.seen_by(direction, dk_rep)
            self.own.append(F.pad(here, (0, direction.kernels.shape[-1] - here.shape[1])))
        inner = [(x * d.kernels).sum(-1) for x, d in zip(self.own, self.directions, strict=True)]
        return torch.cat(inner), self.g.sum((0, 2), dtype=torch.float64).float(), dk_rep[:, self.ahead]

    def pulled(self, s: Tensor, q: Tensor, a: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of u and of the kernels, side by side, for dc_b = s_b g - a_b - q_b c_b."""
        du = self._cut(conv(self.g, self.k_rep(s, skip).flip(1), self.behind - 1, dtype=torch.float32))
        dkernels, even = [], self.R.new_zeros(self.R.shape)
        for x, direction in zip(self.own, self.directions, strict=True):
            k, of = direction.kernels, direction.branches
            s_b, q_b, a_b = (z[of, :, None] for z in (s, q, a))
            dk = s_b * x - a_b * direction.running
            steps = F.pad((a_b * k).sum(0), (0, direction.rows.shape[-1] - k.shape[-1]))
            extra = torch.zeros_like(direction.rows, dtype=torch.float32).sub_(running_total(steps).flip(1))
            for group in direction.groups:
                own, n = direction.own(group), max(direction.lengths[group])
                even[:, :n] += correlation(q_b[group] * own, own, 0, n)
                dk[group, :, : own.shape[-1]] -= q_b[group] * direction.around(group, self.R)
                if n > 1:
                    self._pull_tails(direction, group, q_b[group], extra, dk)
            du += self._cut(extra).flip(-1) if direction.delay else self._cut(extra)
            dkernels.append(direction.side_by_side(dk))
        du -= self._cut(conv(self.rows, _even(even), even.shape[1] - 1, dtype=torch.float32))
        return torch.empty_like(self.u).copy_(du), torch.cat(dkernels, 1)

    def _pull_tails(self, direction: _Direction, group: slice, q: Tensor, extra: Tensor, dk: Tensor) -> None:
        """Add to the gradients of the input and of a group's kernels what outputs past the end did not have."""
        x, k = direction.last(group)
        n = x.shape[-1]
        tail = conv(x, k, n)
        back = conv(tail, (q.flatten(0, 1) * k).flip(1), 0, dtype=torch.float32)
        extra[..., extra.shape[-1] - n :] += back.unflatten(1, (-1, dk.shape[1])).sum(1)
        kept = min(n + 1, dk.shape[-1])
        dk[group, :, 1:kept] += q * correlation(tail, x, 1 - n, 1).unflatten(0, (-1, dk.shape[1]))[..., : kept - 1]

    def _cut(self, rows: Tensor) -> Tensor:
        """Return rows without the zeros in front."""
        return rows[..., rows.shape[-1] - self.L :]


def _exact(x: Tensor, kernels: Tensor) -> Tensor:
    """Return the outputs past the end, (B, g C, n), of what `_Direction.last` gives, in float32."""
    n = x.shape[-1]
    if x.dtype == torch.float32:
        return conv(x, kernels, n)
    high = kernels.to(x.dtype).float()
    return conv(x, high, n, dtype=torch.float32) + conv(x, kernels - high, n, dtype=torch.float32)
