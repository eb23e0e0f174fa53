"""Expressions of Long Range Arena's ListOps (Tay et al., 2021), reproducible to the byte.

A node is an operator with probability 1/4 and a digit otherwise, always a digit at `max_depth`; an operator has 2 to
`max_args` arguments. Expressions whose length lies strictly between `min_length` and `max_length` are kept. Draw i is
a function of (seed, i) alone, so the data do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from ..._utils.checks import check_positive_int
from .compiled import compiled, mix

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, CLOSE = range(10, 15)
_FUNCTIONS: dict[int, Callable[[list[int]], int]] = {
    MIN: min,
    MAX: max,
    MED: lambda arguments: int(statistics.median(arguments)),
    SM: lambda arguments: sum(arguments) % 10,
}

PATIENCE = 2_000_000  # draws without a new expression after which the generator gives up
_BLOCK_DRAWS, _BLOCK_BYTES = 8192, 1 << 24

Symbols = NDArray[np.uint8]
_Block = tuple[Symbols, NDArray[np.int64], Symbols, NDArray[np.int64]]


@dataclass(frozen=True)
class Expressions:
    """Concatenated expressions: expression i is symbols[offsets[i] : offsets[i + 1]], its value targets[i]."""

    symbols: Symbols  # indices into SYMBOLS
    offsets: NDArray[np.int64]  # (n + 1,)
    targets: Symbols  # (n,)
    draws: int  # number of expressions drawn, kept or not

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Symbols:
        i = range(len(self))[i]
        return self.symbols[self.offsets[i] : self.offsets[i + 1]]


@compiled
def _below(n: int, bits: np.uint64) -> int:
    """Return an integer uniform over 0 .. n - 1 from the low 32 bits."""
    return int(np.int64(((bits & np.uint64(0xFFFFFFFF)) * np.uint64(n)) >> np.uint64(32)))


@compiled
def _draw_expression(state: np.uint64, max_depth: int, max_args: int, out: Symbols, missing: NDArray[np.int64]) -> int:
    """Write one random expression to `out` and return its length, or 0 as soon as it cannot fit.

    missing[d] is the number of nodes still to draw at depth d.
    """
    depth, missing[1] = 1, 1
    written, length = 0, 1  # length that the expression would have if all missing nodes were digits
    while depth > 0:
        if missing[depth] == 0:
            depth -= 1
            if depth > 0:
                out[written] = CLOSE
                written += 1
            continue
        missing[depth] -= 1
        state += np.uint64(0x9E3779B97F4A7C15)
        bits = mix(state)
        if depth < max_depth and bits >> np.uint64(62) == 0:
            arguments = 2 + _below(max_args - 1, bits)
            length += 1 + arguments
            if length > out.size:
                return 0
            out[written] = MIN + ((bits >> np.uint64(60)) & np.uint64(3))
            depth += 1
            missing[depth] = arguments
        else:
            out[written] = _below(10, bits)
        written += 1
    return length


@compiled
def _ranked(counts: NDArray[np.int64], rank: int) -> int:
    """Return the argument of this rank (0: the smallest) among counts[v] arguments of each value v."""
    value = 0
    while rank >= counts[value]:
        rank -= counts[value]
        value += 1
    return value


@compiled
def _apply(operator: int, counts: NDArray[np.int64]) -> int:
    """Return the value of an operator applied to counts[v] arguments of each value v."""
    n = total = 0
    for value in range(10):
        n += counts[value]
        total += value * counts[value]
    if operator == SM:
        return total % 10
    if operator == MED:
        return (_ranked(counts, (n - 1) // 2) + _ranked(counts, n // 2)) // 2
    return _ranked(counts, 0 if operator == MIN else n - 1)


@compiled
def _evaluate(symbols: Symbols, operators: Symbols, counts: NDArray[np.int64]) -> int:
    """Return the value of an expression; counts[d, v] is the number of arguments v of the open operator at depth d."""
    depth, value = 0, 0
    for symbol in symbols:
        if MIN <= symbol < CLOSE:
            depth += 1
            operators[depth] = symbol
            counts[depth] = 0
            continue
        value = symbol
        if symbol == CLOSE:
            value = _apply(operators[depth], counts[depth])
            depth -= 1
        counts[depth, value] += 1
    return value


@compiled
def _draw_block(
    seed: np.uint64, first: int, draws: int, max_depth: int, max_args: int, min_length: int, max_length: int
) -> _Block:
    """Return the kept expressions of some draws: symbols, ends, values, and the number of each draw."""
    symbols = np.empty(draws * (max_length - 1), np.uint8)
    ends, values, numbers = np.empty(draws, np.int64), np.empty(draws, np.uint8), np.empty(draws, np.int64)
    missing, operators = np.zeros(max_depth + 1, np.int64), np.zeros(max_depth + 1, np.uint8)
    counts = np.zeros((max_depth + 1, 10), np.int64)
    key = mix(seed)
    kept = end = 0
    for number in range(first, first + draws):
        out = symbols[end : end + max_length - 1]
        length = _draw_expression(mix(key + np.uint64(number)), max_depth, max_args, out, missing)
        if length > min_length:
            end += length
            ends[kept], numbers[kept] = end, number
            values[kept] = _evaluate(out[:length], operators, counts)
            kept += 1
    return symbols[:end].copy(), ends[:kept].copy(), values[:kept].copy(), numbers[:kept].copy()


def _draw_blocks(
    pool: ThreadPoolExecutor, workers: int, seed: int, limits: tuple[int, int, int, int]
) -> Iterator[tuple[int, _Block]]:
    """Yield endlessly the number of draws made so far and the kept expressions of the latest block."""
    draws = max(1, min(_BLOCK_DRAWS, _BLOCK_BYTES // limits[-1]))
    pending: deque[tuple[int, Future[_Block]]] = deque()
    for first in itertools.count(0, draws):
        pending.append((first + draws, pool.submit(_draw_block, np.uint64(seed), first, draws, *limits)))
        if len(pending) > workers:
            drawn, block = pending.popleft()
            yield drawn, block.result()


def _collect(
    blocks: Iterator[tuple[int, _Block]], count: int, progress: Callable[[int], None] | None
) -> tuple[dict[bytes, int], int]:
    """Return distinct expressions in the order of the draws, with their values, and the number of draws.

    Return `count` expressions, or fewer if PATIENCE consecutive draws gave no new one.
    """
    kept: dict[bytes, int] = {}
    draws = 0
    for drawn, (symbols, ends, values, numbers) in blocks:
        before, start, data = len(kept), 0, symbols.tobytes()
        for end, value, number in zip(ends.tolist(), values.tolist(), numbers.tolist(), strict=True):
            if len(kept) < count and data[start:end] not in kept:
                kept[data[start:end]] = value
                draws = number + 1
            start = end
        if progress is not None and len(kept) > before:
            progress(len(kept) - before)
        if len(kept) == count or drawn - draws > PATIENCE:
            break
    return kept, draws


def generate(
    count: int = 100_000,
    seed: int = 0,
    workers: int | None = None,
    *,
    max_depth: int = 10,
    max_args: int = 10,
    min_length: int = 500,
    max_length: int = 2000,
    progress: Callable[[int], None] | None = None,
) -> Expressions:
    """Draw expressions until `count` distinct ones are kept; they do not depend on the number of worker threads.

    Lengths lie strictly between `min_length` and `max_length`. `progress` is called with the number of expressions kept
    since its last call.
    """
    workers = (os.cpu_count() or 1) if workers is None else workers
    check_positive_int(count=count, workers=workers, max_depth=max_depth)
    _check_range("seed", seed, 0, 2**64 - 1)
    _check_range("max_args", max_args, 2, 2**31)
    _check_range("min_length", min_length, 0, 2**31)
    _check_range("max_length", max_length, min_length + 2, 2**32)  # at least one length lies strictly between
    limits = min(max_depth, max_length), int(max_args), int(min_length), int(max_length)
    with ThreadPoolExecutor(workers) as pool:
        kept, draws = _collect(_draw_blocks(pool, workers, seed, limits), count, progress)
    if len(kept) < count:
        raise ValueError(
            f"count must be at most the number of distinct expressions with min_length={min_length}, "
            f"max_length={max_length}, max_depth={max_depth}, max_args={max_args}: found {len(kept)} in {draws:,} "
            f"draws and no other in {PATIENCE:,} more; got {count}"
        )
    offsets = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    targets = np.fromiter(kept.values(), np.uint8, count)
    return Expressions(np.frombuffer(bytearray().join(kept), np.uint8), offsets, targets, draws)


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer in {low} .. {high}; got {value!r}")


def evaluate(symbols: Symbols) -> int:
    """Return the value of one expression: the Python reference for the compiled evaluation."""
    stack: list[list[int]] = [[]]  # for each open operator: the operator and the values of its arguments
    for symbol in symbols.tolist():
        if MIN <= symbol < CLOSE:
            stack.append([symbol])
            continue
        value = symbol
        if symbol == CLOSE:
            operator, *arguments = stack.pop()
            value = _FUNCTIONS[operator](arguments)
        stack[-1].append(value)
    return stack[0][0]
