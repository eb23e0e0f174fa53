"""Index tables of branches of taps, computed once for each set of lags and length."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..tap_conv.correlation_triton import Correlations, SplitCorrelations


class Segment(NamedTuple):
    """Inputs at a distance of low < distance <= high from an end of the sequence, and the differences needed there.

    The taps of `branch` with |lag| >= high map these inputs to outputs outside of the sequence.
    """

    branch: int
    low: int
    high: int
    after: bool  # at the end of the sequence, not at its start
    deltas: tuple[int, ...]


class Members(NamedTuple):
    """Terms of a table of taps: row r is the sum over k in starts[r] .. starts[r + 1] of a product of values.

    The product is that of the values first[k] and, for pairs, second[k], and of a factor of branch owners[k].
    """

    starts: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The largest number of terms of a row."""
        return max((b - a for a, b in itertools.pairwise(self.starts)), default=0)


class RowTile(NamedTuple):
    """`size` rows of a branch from `row` on, at positions from `begin` on, which count from the end if `after`."""

    branch: int
    row: int
    begin: int
    after: int
    size: int


@dataclass(frozen=True)
class TapLayout:
    """Branches of sizes[n] taps each at `lags`, for inputs of length L; lags outside of -L + 1 .. L - 1 have no effect.

    With `outside`, statistics and gradients are computed from the autocorrelation of the input at `deltas`, the
    differences of a branch's lags, and from what lies outside of the sequence; otherwise, from the branches' outputs.
    The *rows* of a branch are the positions at which its output is computed in the backward pass: those outside, after
    the end or before the start of the sequence, or all L inside.
    """

    lags: tuple[int, ...]
    sizes: tuple[int, ...]
    L: int
    masked: bool = False

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The first tap of each branch, and the number of all taps."""
        return tuple(itertools.accumulate(self.sizes, initial=0))

    @functools.cached_property
    def owners(self) -> tuple[int, ...]:
        """The branch of each tap."""
        return tuple(n for n, size in enumerate(self.sizes) for _ in range(size))

    @functools.cached_property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """The effective taps of each branch, by ascending lag."""
        return tuple(
            tuple(sorted((j for j in range(start, stop) if abs(self.lags[j]) < self.L), key=self.lags.__getitem__))
            for start, stop in itertools.pairwise(self.starts)
        )

    @functools.cached_property
    def union(self) -> tuple[int, ...]:
        """The lags of the merged kernel, ascending, with lag 0 for the skip."""
        return tuple(sorted({0, *(self.lags[j] for branch in self.branches for j in branch)}))

    @functools.cached_property
    def width(self) -> int:
        """The largest number of taps of a branch, rounded up to a power of 2."""
        return 1 << (max(1, 1, *self.sizes) - 1).bit_length()

    @functools.cached_property
    def deltas(self) -> tuple[int, ...]:
        """The differences >= 0 of lags of the same branch, ascending."""
        return tuple(sorted({abs(self.lags[i] - self.lags[j]) for b in self.branches for i in b for j in b}))

    @functools.cached_property
    def outside(self) -> bool:
        """Whether the autocorrelation takes fewer loads than the branches' outputs do.

        Storing and loading an output costs about as much as 4 taps. If sequences are masked, what lies outside of a
        short one nearly cancels the autocorrelation, which costs float32 a digit.
        """
        if self.masked or any(self.lags[b[0]] < 0 < self.lags[b[-1]] for b in self.branches if b):
            return False
        D, M, T, N, L = len(self.deltas), len(self.union), len(self.lags), len(self.sizes), max(1, self.L)
        segments = sum((s.high - s.low) * (1 + len(s.deltas)) for s in self.segments)
        rows = sum(abs(self.lags[j]) for branch in self.branches for j in branch)
        return 3 * D + M + (segments + 3 * rows) / L < 3 * T + 4 * N

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments between the |lags| of each branch, from the end of the sequence inwards."""
        found = []
        for n, branch in enumerate(self.branches):
            reach = sorted({abs(self.lags[j]) for j in branch})
            after = any(self.lags[j] > 0 for j in branch)
            for low, high in itertools.pairwise(sorted({0, *reach})):
                far = [p for p in reach if p >= high]
                deltas = {abs(p - other) for p in far for other in reach}
                found.append(Segment(n, low, high, after, tuple(sorted(delta for delta in deltas if delta < high))))
        return tuple(found)

    @functools.cached_property
    def autocorrelations(self) -> SplitCorrelations:
        """Correlations of the input with itself at `deltas`."""
        return SplitCorrelations([Correlations(self.deltas)])

    @functools.cached_property
    def segment_correlations(self) -> SplitCorrelations:
        """Correlations of the input with itself over each of `segments`; their rows follow `autocorrelations`."""
        return SplitCorrelations(
            [
                Correlations(tuple(-delta for delta in s.deltas[::-1]), -s.high, -s.low)
                if s.after
                else Correlations(s.deltas, s.low, s.high)
                for s in self.segments
            ],
            self.autocorrelations.rows,
        )

    @functools.cached_property
    def cross_correlations(self) -> SplitCorrelations:
        """Correlations of the output's gradient with the input at the lags of `union`."""
        return SplitCorrelations([Correlations(self.union)])

    @functools.cached_property
    def terms(self) -> int:
        """The largest number of correlations that make up a sum inside of the sequence, rounded up to a power of 2."""
        counts = [sum(s.branch == n for s in self.segments) for n in range(len(self.sizes))]
        return 1 << max(0, *counts, 0).bit_length()

    @functools.cached_property
    def pair_rows(self) -> tuple[int, ...]:
        """The rows of the correlations behind the product of each tap's inputs with those of the `width` taps.

        They are (T, width, terms), -1 for none. The first one is added, the others are subtracted.
        """
        table = [[[-1] * self.terms for _ in range(self.width)] for _ in self.lags]
        for n, branch in enumerate(self.branches):
            for i, j in itertools.product(branch, branch):
                delta, reach = abs(self.lags[i] - self.lags[j]), max(abs(self.lags[i]), abs(self.lags[j]))
                rows = [self.autocorrelations.row(0, delta)]
                for k, s in enumerate(self.segments):
                    if s.branch == n and delta < s.high <= reach:
                        rows.append(self.segment_correlations.row(k, -delta if s.after else delta))
                table[i][j - self.starts[n]][: len(rows)] = rows
        return tuple(row for tap in table for pair in tap for row in pair)

    @functools.cached_property
    def mass_rows(self) -> tuple[int, ...]:
        """The rows of the correlations behind the sum of each tap's inputs, (T, terms), as in `pair_rows`."""
        table = [[-1] * self.terms for _ in self.lags]
        for n, branch in enumerate(self.branches):
            for i in branch:
                rows = [self.autocorrelations.sum_row(0)]
                for k, s in enumerate(self.segments):
                    if s.branch == n and s.high <= abs(self.lags[i]):
                        rows.append(self.segment_correlations.sum_row(k))
                table[i][: len(rows)] = rows
        return tuple(row for tap in table for row in tap)

    @functools.cached_property
    def positions(self) -> tuple[int, ...]:
        """The row of `cross_correlations` of each tap's lag; -1 if the tap has no effect."""
        return tuple(self.cross_correlations.row(0, lag) if abs(lag) < self.L else -1 for lag in self.lags)

    @functools.cached_property
    def merged(self) -> Members:
        """Terms of the merged kernel, at the lags of `union`."""
        return self._members(self._taps_at(lag) for lag in self.union)

    @functools.cached_property
    def gradient_lags(self) -> tuple[int, ...]:
        """The lags at which the input's gradient reads the output's gradient, ascending."""
        return tuple(sorted(-lag for lag in self.union)) if self.outside else (0,)

    @functools.cached_property
    def signed_deltas(self) -> tuple[int, ...]:
        """The lags at which the input's gradient reads the input, ascending."""
        return tuple(sorted({*self.deltas, *(-delta for delta in self.deltas)})) if self.outside else ()

    @functools.cached_property
    def branch_taps(self) -> tuple[int, ...]:
        """The effective taps, branch by branch, by ascending lag."""
        return tuple(itertools.chain.from_iterable(self.branches))

    @functools.cached_property
    def row_taps(self) -> tuple[int, ...]:
        """The effective taps by descending lag."""
        return tuple(sorted(self.branch_taps, key=lambda j: -self.lags[j]))

    @functools.cached_property
    def gradient(self) -> Members:
        """Terms of the taps at `gradient_lags` and `signed_deltas`, of a constant, of `row_taps` and `branch_taps`."""
        taps = [self._taps_at(-lag) if self.outside else [] for lag in self.gradient_lags]
        differences: dict[int, list[tuple[int, int]]] = {delta: [] for delta in self.signed_deltas}
        if self.outside:
            for branch in self.branches:
                for i, j in itertools.product(branch, branch):
                    differences[self.lags[j] - self.lags[i]].append((i, j))
        constant = [(j, j) for j in self.branch_taps] if self.outside else []
        single = [[(j, j)] for j in (*self.row_taps, *self.branch_taps)]
        return self._members([*taps, *differences.values(), constant, *single])

    @functools.cached_property
    def row_starts(self) -> tuple[int, ...]:
        """The first row of each branch, and the number of all rows."""
        if self.outside:
            rows = [max((abs(self.lags[j]) for j in branch), default=0) for branch in self.branches]
        else:
            rows = [self.L] * len(self.sizes)
        return tuple(itertools.accumulate(rows, initial=0))

    @functools.cached_property
    def row_bases(self) -> tuple[int, ...]:
        """For each of `row_taps`, where its branch's rows start; then where they end."""
        owners = [self.owners[j] for j in self.row_taps]
        return tuple(self.row_starts[n] for n in owners) + tuple(self.row_starts[n + 1] for n in owners)

    def row_tiles(self, size: int) -> tuple[RowTile, ...]:
        """Return all rows in tiles of at most `size` rows of one branch."""
        tiles = []
        for n, (start, stop) in enumerate(itertools.pairwise(self.row_starts)):
            after = self.outside and any(self.lags[j] > 0 for j in self.branches[n])
            first = start - stop if self.outside and not after else 0  # rows before the sequence end at -1
            for row in range(start, stop, size):
                tiles.append(RowTile(n, row, first + row - start, int(after), min(size, stop - row)))
        return tuple(tiles)

    @functools.cached_property
    def row_correlations(self) -> SplitCorrelations:
        """Correlations of each branch's rows with the input at its lags."""
        return SplitCorrelations(
            [
                Correlations(tuple(self.lags[j] for j in branch), source=row)
                for branch, row in zip(self.branches, self.row_starts, strict=False)
            ]
        )

    @functools.cached_property
    def row_positions(self) -> tuple[int, ...]:
        """The row of `row_correlations` of each tap; -1 if the tap has no effect."""
        rows = self.row_correlations
        return tuple(
            rows.row(n, lag) if abs(lag) < self.L else -1 for n, lag in zip(self.owners, self.lags, strict=True)
        )

    def _taps_at(self, lag: int) -> list[tuple[int, int]]:
        return [(j, j) for j, other in enumerate(self.lags) if other == lag]

    def _members(self, rows: Iterable[Sequence[tuple[int, int]]]) -> Members:
        rows = list(rows)
        terms = [term for row in rows for term in row]
        starts = tuple(itertools.accumulate(map(len, rows), initial=0))
        first, second = (tuple(term[k] for term in terms) for k in range(2))
        return Members(starts, first, second, tuple(self.owners[j] for j in first))


tap_layout: Callable[[tuple[int, ...], tuple[int, ...], int, bool], TapLayout] = functools.lru_cache(maxsize=256)(
    TapLayout
)
"""Return a `TapLayout`, cached."""
