"""ListOps: LRA's files and generated expressions."""

import numpy as np
import pytest

from mrconv.tasks import MissingData, task
from mrconv.tasks.generators.listops_expressions import SYMBOLS as GENERATED_SYMBOLS
from mrconv.tasks.generators.listops_expressions import generate
from mrconv.tasks.listops import SYMBOLS, VOCABULARY

from .data_files import check_invalid, write_listops

SMALL = {"train_size": 40, "val_size": 6, "test_size": 4, "min_length": 5, "max_length": 60}
NESTED = "( ( ( ( [MIN 4 ) ( ( ( [SM 7 ) 5 ) ] ) ) 8 ) ] )"


def write(folder, header="Source\tTarget", lines=(f"{NESTED}\t2",), **files):
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        text = files.get(split, "\r\n".join([header, *lines]) + "\r\n")
        (folder / f"basic_{split}.tsv").write_bytes(text if isinstance(text, bytes) else text.encode())


def symbols(data, split="train", i=0):
    return [data.vocabulary[token] for token in data.splits[split].example(i)]


def test_vocabulary_has_18_symbols_in_the_order_of_the_generator():
    assert SYMBOLS == GENERATED_SYMBOLS
    assert ("<pad>", "<unk>", "<eos>", *SYMBOLS) == VOCABULARY
    assert len(VOCABULARY) == 18


@pytest.mark.parametrize("place", ["", "listops", "listops-1000", "lra_release/listops-1000"])
def test_files_are_found_in_every_layout_of_the_release(tmp_path, place):
    write(tmp_path / place)
    data = task("listops", tmp_path).prepare()
    assert symbols(data) == ["[MIN", "4", "[SM", "7", "5", "]", "8", "]", "<eos>"]
    assert data.splits["train"].y.tolist() == [2]
    assert (data.encoder, data.length, len(data.classes)) == ("tokens", 2048, 10)
    assert data.facts["source"] == "files"


def test_x_is_the_closing_bracket_of_old_files(tmp_path):
    write(tmp_path, lines=["[MAX 2 9 X\t9"])
    assert symbols(task("listops", tmp_path).prepare()) == ["[MAX", "2", "9", "]", "<eos>"]


def test_columns_are_found_by_name(tmp_path):
    write(tmp_path, header="Target\tid\tSource", lines=[f"2\t17\t{NESTED}"])
    assert task("listops", tmp_path).prepare().splits["val"].y.tolist() == [2]


def test_long_expression_is_cut_and_ends_with_eos(tmp_path):
    write(tmp_path)
    assert symbols(task("listops", tmp_path, length=4).prepare()) == ["[MIN", "4", "[SM", "<eos>"]


def test_files_of_generated_expressions_equal_generated_data(tmp_path):
    limits = {"min_length": 5, "max_length": 60, "max_depth": 10, "max_args": 10}
    expressions = generate(50, 3, 1, **limits)
    for split, start, stop in (("train", 0, 40), ("val", 40, 46), ("test", 46, 50)):
        write_listops(tmp_path / f"basic_{split}.tsv", expressions, start, stop)
    read = task("listops", tmp_path).prepare()
    generated = task("listops", tmp_path, source="generate", seed=3, **SMALL).prepare()
    for split, examples in (("train", 40), ("val", 6), ("test", 4)):
        assert len(read.splits[split]) == examples
        for name in ("x", "y", "offsets"):
            np.testing.assert_array_equal(getattr(read.splits[split], name), getattr(generated.splits[split], name))
    assert read.vocabulary == generated.vocabulary
    assert generated.facts["source"] == "generated"


def test_generated_data_needs_no_source_and_depends_on_the_seed(tmp_path):
    first = task("listops", tmp_path, seed=1, **SMALL)
    assert first.sources() == []
    again, other = task("listops", tmp_path, seed=1, **SMALL), task("listops", tmp_path, seed=2, **SMALL)
    assert first.cache_folder() == again.cache_folder() != other.cache_folder()
    seen = []
    data = first.prepare(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (50, 50)
    assert not np.array_equal(data.splits["train"].x, other.prepare().splits["train"].x)
    for split in data.splits.values():
        ends = split.offsets[1:] - 1
        assert (np.asarray(split.x)[ends] == 2).all()
        assert (np.asarray(split.x) == 2).sum() == len(split)
        assert split.lengths.min() > 6
        assert split.lengths.max() <= 60


def test_missing_files_raise_with_source_files(tmp_path):
    with pytest.raises(MissingData, match=r"basic_train\.tsv.*long-range-arena"):
        task("listops", tmp_path, source="files").prepare()


def test_one_file_without_the_others_raises(tmp_path):
    write(tmp_path)
    (tmp_path / "basic_test.tsv").unlink()
    with pytest.raises(MissingData, match=r"basic_test\.tsv"):
        task("listops", tmp_path, **SMALL).prepare()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Source\tTarget\n[MAX 2 9 ]\t9\n[MAX 2 nine ]\t9\n",
            r"basic_val\.tsv, line 3: unknown symbol 'nine'; expected 0 1",
        ),
        ("Source\tTarget\n[MAX 2 9 ]\t10\n", r"basic_val\.tsv, line 2: Target is '10'; expected 0 to 9"),
        ("Source\tTarget\n[MAX 2 9 [MIN 1\t1\n", r"line 2: 5 symbols, 2 operators, 0 closing brackets: truncated"),
        ("Source\tTarget\n[MAX 2 9\n", r"line 2: 1 columns; expected 2"),
        ("Source\tTarget\n()\t9\n", r"line 2: 0 symbols"),
        ("[MAX 2 9 ]\t9\n", r"line 1: expected columns Source and Target; got '\[MAX 2"),
        (b"Source\tTarget\n[MAX 2 9 ]\t9\n\xff\xfe\n", r"basic_val\.tsv, line 3: not UTF-8"),
        ("Source\tTarget\n", "val split has no example"),
        ("", "val split has no example"),
    ],
)
def test_invalid_line_raises_with_its_number(tmp_path, text, message):
    write(tmp_path, val=text)
    check_invalid(message, "listops", tmp_path)
