"""The ListOps generator: reproducibility, statistics of the published data, values of expressions."""

import hashlib

import numpy as np
import pytest

from mrconv.tasks.generators import listops_expressions as listops_generator
from mrconv.tasks.generators.listops_expressions import SYMBOLS, Expressions, evaluate, generate

from .data_files import listops_text, write_listops

COUNT = 5000


@pytest.fixture(scope="module")
def expressions():
    return generate(COUNT, workers=2)


def encode(text):
    return np.array([SYMBOLS.index(word) for word in text.split()], np.uint8)


def parse(symbols, at=0, depth=0):
    """Return value, end, nesting depth and numbers of arguments of the expression that starts at a position."""
    word = SYMBOLS[symbols[at]]
    if word.isdigit():
        return int(word), at + 1, depth, []
    arguments, deepest, lists, at = [], depth + 1, [], at + 1
    while SYMBOLS[symbols[at]] != "]":
        value, at, below, inside = parse(symbols, at, depth + 1)
        arguments.append(value)
        deepest = max(deepest, below)
        lists += inside
    arguments.sort()
    n = len(arguments)
    value = {
        "[MIN": arguments[0],
        "[MAX": arguments[-1],
        "[MED": (arguments[(n - 1) // 2] + arguments[n // 2]) // 2,
        "[SM": sum(arguments) % 10,
    }[word]
    return value, at + 1, deepest, [*lists, n]


def test_same_bytes_for_any_workers_and_block_size(expressions, monkeypatch):
    for block in (8192, 1000):
        monkeypatch.setattr(listops_generator, "_BLOCK_DRAWS", block)
        single = generate(COUNT, workers=1)
        assert single.draws == expressions.draws
        for name in ("symbols", "offsets", "targets"):
            assert getattr(single, name).tobytes() == getattr(expressions, name).tobytes()


def test_fewer_expressions_are_a_prefix_and_depend_on_the_seed(expressions):
    few = generate(50)
    assert len(few) == 50
    assert all(np.array_equal(few[i], expressions[i]) for i in range(50))
    assert few.draws < expressions.draws
    assert not np.array_equal(generate(50, seed=1)[0], few[0])


def test_data_of_a_seed_do_not_change(expressions):
    digest = hashlib.sha256(expressions.symbols.tobytes() + expressions.targets.tobytes()).hexdigest()
    assert (expressions.draws, digest[:16]) == (59861, "18f25b21934ee024")


def test_lengths_strictly_inside_and_no_duplicates(expressions):
    lengths = np.diff(expressions.offsets)
    assert expressions.offsets[0] == 0
    assert expressions.offsets[-1] == len(expressions.symbols)
    assert lengths.min() > 500
    assert lengths.max() < 2000
    assert len({expressions[i].tobytes() for i in range(COUNT)}) == COUNT
    narrow = generate(300, min_length=500, max_length=503)
    assert set(np.diff(narrow.offsets)) == {501, 502}


def test_values_nesting_and_arguments(expressions):
    arguments = []
    for i in range(1000):
        value, end, deepest, inside = parse(expressions[i])
        assert value == expressions.targets[i] == evaluate(expressions[i])
        assert end == len(expressions[i])
        assert deepest == 9
        arguments += inside
    assert all(evaluate(expressions[i]) == expressions.targets[i] for i in range(1000, COUNT))
    shares = np.bincount(arguments) / len(arguments)
    published = [10.96, 11.00, 11.03, 11.11, 11.11, 11.19, 11.17, 11.19, 11.24]
    np.testing.assert_allclose(100 * shares, [0, 0, *published], atol=0.4)  # 146,000 operators: 5 standard errors


def test_statistics_of_the_published_data(expressions):
    lengths = np.diff(expressions.offsets)
    assert COUNT / expressions.draws == pytest.approx(0.0825, abs=0.005)
    assert lengths.mean() == pytest.approx(1035.7, abs=25)
    assert lengths.std() == pytest.approx(394.0, abs=15)
    np.testing.assert_allclose(np.percentile(lengths, [5, 25, 50, 75, 95]), [538, 702, 955, 1311, 1798], rtol=0.035)
    counts = np.bincount(expressions.symbols, minlength=15)
    assert counts[10:14].sum() == counts[14]
    assert counts[14] / COUNT == pytest.approx(146.5, abs=4)
    assert counts[:10].sum() / COUNT == pytest.approx(736.5, abs=20)
    np.testing.assert_allclose(counts[10:14] / counts[14], 0.25, atol=0.003)
    np.testing.assert_allclose(counts[:10] / counts[:10].sum(), 0.10, atol=0.001)
    roots = np.bincount(expressions.symbols[expressions.offsets[:-1]], minlength=14)
    np.testing.assert_allclose(roots[10:14] / COUNT, 0.25, atol=0.03)
    targets = np.bincount(expressions.targets, minlength=10) / COUNT
    published = [17.07, 9.22, 7.55, 8.15, 9.27, 8.51, 7.69, 7.08, 8.70, 16.75]
    np.testing.assert_allclose(100 * targets, published, atol=2.2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 4 2 9 ]", 2),
        ("[MAX 4 2 9 ]", 9),
        ("[SM 7 5 9 ]", 1),
        ("[MED 3 4 ]", 3),
        ("[MED 9 4 1 0 ]", 2),
        ("[MED 9 1 4 ]", 4),
        ("[MIN 4 [SM 7 5 ] 8 ]", 2),
    ],
)
def test_value(text, value):
    symbols = encode(text)
    assert evaluate(symbols) == value
    operators, counts = np.zeros(3, np.uint8), np.zeros((3, 10), np.int64)
    assert listops_generator._evaluate(symbols, operators, counts) == value


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("7", "7"),
        ("[MAX 2 9 ]", "( ( ( [MAX 2 ) 9 ) ] )"),
        ("[MIN 4 [SM 7 5 ] 8 ]", "( ( ( ( [MIN 4 ) ( ( ( [SM 7 ) 5 ) ] ) ) 8 ) ] )"),
    ],
)
def test_text(expression, text):
    assert listops_text(encode(expression)) == text


def test_text_without_parentheses_is_the_expression(expressions):
    words = listops_text(expressions[0]).split()
    assert words.count("(") == words.count(")")
    assert encode(" ".join(word for word in words if word not in "()")).tobytes() == expressions[0].tobytes()


def test_tsv_bytes(tmp_path):
    texts = ["3", "[MAX 2 9 ]", "[MED 3 4 ]"]
    symbols = [encode(text) for text in texts]
    offsets = np.cumsum([0, *map(len, symbols)])
    three = Expressions(np.concatenate(symbols), offsets, np.array([3, 9, 3], np.uint8), 3)
    write_listops(tmp_path / "basic_val.tsv", three, 1, 3)
    assert (tmp_path / "basic_val.tsv").read_bytes() == (
        b"Source\tTarget\r\n( ( ( [MAX 2 ) 9 ) ] )\t9\r\n( ( ( [MED 3 ) 4 ) ] )\t3\r\n"
    )


def test_all_small_expressions_are_found_once():
    every = generate(10, max_depth=1, min_length=0, max_length=2)
    assert sorted(every.symbols) == list(range(10))
    assert np.array_equal(every.symbols, every.targets)


def test_progress_adds_up():
    steps = []
    generate(2000, progress=steps.append)
    assert sum(steps) == 2000
    assert len(steps) > 1
    assert min(steps) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, r"count must be an integer of at least 1; got 0"),
        ({"count": 1.5}, r"count must be an integer of at least 1; got 1.5"),
        ({"workers": 0}, r"workers must be an integer of at least 1; got 0"),
        ({"max_depth": 0}, r"max_depth must be an integer of at least 1; got 0"),
        ({"seed": -1}, r"seed must be an integer in 0 .*; got -1"),
        ({"seed": None}, r"seed must be an integer in 0 .*; got None"),
        ({"max_args": 1}, r"max_args must be an integer in 2 .*; got 1"),
        ({"min_length": -1}, r"min_length must be an integer in 0 .*; got -1"),
        ({"min_length": "500"}, r"min_length must be an integer in 0 .*; got '500'"),
        ({"max_length": 501}, r"max_length must be an integer in 502 .*; got 501"),
        ({"min_length": 2000}, r"max_length must be an integer in 2002 .*; got 2000"),
        ({"count": 1, "min_length": 1, "max_length": 4}, r"count must be at most the number of .*: found 0 in"),
        ({"count": 1, "max_depth": 3}, r"count must be at most .*max_depth=3.*; got 1"),
        ({"count": 11, "min_length": 0, "max_length": 3}, r"count must be at most .*: found 10 in .*; got 11"),
    ],
)
def test_invalid_arguments_raise(options, message):
    with pytest.raises(ValueError, match=message):
        generate(**options)
