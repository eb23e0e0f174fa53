"""Expressions of Long Range Arena's ListOps (Tay et al., 2021), reproducible to the byte.

A node is an operator with probability 1/4 and a digit otherwise, always a digit at `max_depth`; an operator has 2 to
`max_args` arguments. Expressions whose length lies strictly between `min_length` and `max_length` are kept. Draw i is
a function of (seed, i) alone, so the data do not depend on how the draws are shared out.
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
from pathlib import Path

import numpy as np
from numba import njit
from numpy.typing import NDArray

from mrconv._utils.checks import check_positive_int

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, CLOSE = range(10, 15)
_FUNCTIONS: dict[int, Callable[[list[int]], int]] = {
    MIN: min,
    MAX: max,
    MED: lambda arguments: int(statistics.median(arguments)),
    SM: lambda arguments: sum(arguments) % 10,
}

PATIENCE = 2_000_000  # draws without anything new after which there is taken to be nothing left
_BLOCK_DRAWS, _BLOCK_BYTES = 8192, 1 << 24

Symbols = NDArray[np.uint8]
_Block = tuple[Symbols, NDArray[np.int64], Symbols, NDArray[np.int64]]


@dataclass(frozen=True)
class Expressions:
    """Expressions one after the other: number i is symbols[offsets[i] : offsets[i + 1]], its value targets[i]."""

    symbols: Symbols  # codes of SYMBOLS
    offsets: NDArray[np.int64]  # (n + 1,)
    targets: Symbols  # (n,)
    draws: int  # how many expressions were drawn for these

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Symbols:
        i = range(len(self))[i]
        return self.symbols[self.offsets[i] : self.offsets[i + 1]]


@njit(cache=True, nogil=True)
def _mix(x: np.uint64) -> np.uint64:
    """Return SplitMix64's output for a state."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _below(n: int, bits: np.uint64) -> int:
    """Return an integer uniform over 0 .. n - 1 from the low 32 bits."""
    return int(np.int64(((bits & np.uint64(0xFFFFFFFF)) * np.uint64(n)) >> np.uint64(32)))


@njit(cache=True, nogil=True)
def _draw(state: np.uint64, max_depth: int, max_args: int, out: Symbols, missing: NDArray[np.int64]) -> int:
    """Write one random expression and return its length, or 0 as soon as it cannot fit into out.

    missing[d] counts the nodes still to draw at depth d.
    """
    depth, missing[1] = 1, 1
    written, length = 0, 1  # length: of the whole expression if all that is missing were digits
    while depth > 0:
        if missing[depth] == 0:
            depth -= 1
            if depth > 0:
                out[written] = CLOSE
                written += 1
            continue
        missing[depth] -= 1
        state += np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(state)
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


@njit(cache=True, nogil=True)
def _ranked(counts: NDArray[np.int64], rank: int) -> int:
    """Return the argument of that rank, the smallest having rank 0; counts[v] arguments are v."""
    value = 0
    while rank >= counts[value]:
        rank -= counts[value]
        value += 1
    return value


@njit(cache=True, nogil=True)
def _apply(operator: int, counts: NDArray[np.int64]) -> int:
    """Return the value of an operator on arguments of which counts[v] are v."""
    n = total = 0
    for value in range(10):
        n += counts[value]
        total += value * counts[value]
    if operator == SM:
        return total % 10
    if operator == MED:
        return (_ranked(counts, (n - 1) // 2) + _ranked(counts, n // 2)) // 2
    return _ranked(counts, 0 if operator == MIN else n - 1)


@njit(cache=True, nogil=True)
def _value(symbols: Symbols, operators: Symbols, counts: NDArray[np.int64]) -> int:
    """Return an expression's value; counts[d, v] counts the arguments v of the operator open at depth d."""
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


@njit(cache=True, nogil=True)
def _block(
    seed: np.uint64, first: int, draws: int, max_depth: int, max_args: int, min_length: int, max_length: int
) -> _Block:
    """Return what is kept of the draws from first on: symbols, ends, values, and the number of each draw."""
    symbols = np.empty(draws * (max_length - 1), np.uint8)
    ends, values, numbers = np.empty(draws, np.int64), np.empty(draws, np.uint8), np.empty(draws, np.int64)
    missing, operators = np.zeros(max_depth + 1, np.int64), np.zeros(max_depth + 1, np.uint8)
    counts = np.zeros((max_depth + 1, 10), np.int64)
    key = _mix(seed)
    kept = end = 0
    for number in range(first, first + draws):
        out = symbols[end : end + max_length - 1]
        length = _draw(_mix(key + np.uint64(number)), max_depth, max_args, out, missing)
        if length > min_length:
            end += length
            ends[kept], numbers[kept] = end, number
            values[kept] = _value(out[:length], operators, counts)
            kept += 1
    return symbols[:end].copy(), ends[:kept].copy(), values[:kept].copy(), numbers[:kept].copy()


def _in_order(
    pool: ThreadPoolExecutor, workers: int, seed: int, limits: tuple[int, int, int, int]
) -> Iterator[tuple[int, _Block]]:
    """Yield, without end, how many draws have been made and what the latest block of them kept."""
    draws = max(1, min(_BLOCK_DRAWS, _BLOCK_BYTES // limits[-1]))
    pending: deque[tuple[int, Future[_Block]]] = deque()
    for first in itertools.count(0, draws):
        pending.append((first + draws, pool.submit(_block, np.uint64(seed), first, draws, *limits)))
        if len(pending) > workers:
            drawn, block = pending.popleft()
            yield drawn, block.result()


def _collect(
    blocks: Iterator[tuple[int, _Block]], count: int, progress: Callable[[int], None] | None
) -> tuple[dict[bytes, int], int]:
    """Return different expressions in the order of the draws, with their values, and how many draws they took.

    They are `count`, or fewer if PATIENCE draws in a row brought nothing new.
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
    """Draw expressions until `count` different ones are kept; the same ones for any number of worker threads.

    Lengths are those of `min_length` < length < `max_length`. `progress` is told how many more have been kept.
    """
    workers = (os.cpu_count() or 1) if workers is None else workers
    check_positive_int(count=count, workers=workers, max_depth=max_depth)
    _check_range("seed", seed, 0, 2**64 - 1)
    _check_range("max_args", max_args, 2, 2**31)
    _check_range("min_length", min_length, 0, 2**31)
    _check_range("max_length", max_length, min_length + 2, 2**32)  # so that a length fits strictly between
    limits = min(max_depth, max_length), int(max_args), int(min_length), int(max_length)
    with ThreadPoolExecutor(workers) as pool:
        kept, draws = _collect(_in_order(pool, workers, seed, limits), count, progress)
    if len(kept) < count:
        raise ValueError(
            f"count must be at most what can be found with min_length={min_length}, max_length={max_length}, "
            f"max_depth={max_depth}, max_args={max_args}: {len(kept)} different expressions in {draws:,} draws, then "
            f"no other in {PATIENCE:,}; got {count}"
        )
    offsets = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    targets = np.fromiter(kept.values(), np.uint8, count)
    return Expressions(np.frombuffer(bytearray().join(kept), np.uint8), offsets, targets, draws)


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer in {low} .. {high}; got {value!r}")


def evaluate(symbols: Symbols) -> int:
    """Return the value of one expression, in plain Python: the reference for the compiled code."""
    stack: list[list[int]] = [[]]  # of each open operator: itself and the values of its arguments
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


def as_text(symbols: Symbols) -> str:
    """Return the form of LRA's files: operator, arguments and bracket as nested pairs, ( ( ( [MAX 2 ) 9 ) ] )."""
    words: list[str] = []
    openings: list[list[int]] = []  # of each open operator: its place in words, how many arguments it has
    for symbol in symbols.tolist():
        words.append(SYMBOLS[symbol])
        if MIN <= symbol < CLOSE:
            openings.append([len(words) - 1, 0])
            continue
        if symbol == CLOSE:
            words.append(")")
            place, arguments = openings.pop()
            words[place] = "( " * (arguments + 1) + words[place]
        if openings:
            words.append(")")
            openings[-1][1] += 1
    return " ".join(words)


def write_tsv(path: str | Path, expressions: Expressions, start: int, stop: int) -> None:
    """Write expressions start .. stop - 1 as a file of LRA: tab-separated Source and Target, lines ended by CR LF."""
    _check_range("start", start, 0, len(expressions))
    _check_range("stop", stop, start, len(expressions))
    with open(path, "w", encoding="ascii", newline="\r\n") as file:
        file.write("Source\tTarget\n")
        for i in range(start, stop):
            file.write(f"{as_text(expressions[i])}\t{expressions.targets[i]}\n")
