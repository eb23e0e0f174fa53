"""Retrieval: pairs of papers in LRA's files."""

import numpy as np
import pytest

from mrconv.tasks import MissingData, task

from .data_files import check_invalid

LINES = [
    ["1.0", "10", "11", r"b'first\nline'", r"""b"it's Zo\xc3\xab" """.strip()],
    ["0.0", "12", "13", "b'x'", "b'second one'"],
]


def write(folder, lines=LINES, **replaced):
    folder.mkdir(parents=True, exist_ok=True)
    content = "".join("\t".join(line) + "\n" for line in lines).encode()
    for part in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{part}.tsv").write_bytes(replaced.get(part, content))


def texts(data, split, i):
    pair = (data.splits[split].example(i), data.splits[split].second(i))
    return ["".join(data.vocabulary[token] for token in tokens) for tokens in pair]


@pytest.mark.parametrize("place", ["", "retrieval", "tsv_data", "lra_release/tsv_data"])
def test_texts_are_not_decoded_as_in_s4(tmp_path, place):
    write(tmp_path / place)
    data = task("retrieval", tmp_path).prepare()
    assert list(data.splits) == ["train", "val", "test"]
    assert data.pair
    assert (data.encoder, data.length, len(data.classes)) == ("tokens", 4000, 2)
    for split in data.splits:
        assert data.splits[split].y.tolist() == [1, 0]
        assert texts(data, split, 0) == [r"b'first\nline'<eos>", r"""b"it's Zo\xc3\xab"<eos>"""]
        assert texts(data, split, 1) == ["b'x'<eos>", "b'second one'<eos>"]
    assert all(len(symbol) == 1 and " " <= symbol <= "~" for symbol in data.vocabulary[3:])
    assert data.splits["train"].lengths.tolist() == [19, 14]


def test_texts_can_be_decoded(tmp_path):
    write(tmp_path)
    data = task("retrieval", tmp_path, decode=True).prepare()
    assert texts(data, "test", 0) == ["first\nline<eos>", "it's Zoë<eos>"]


def test_unquoted_and_quoted_texts_and_integer_labels_are_read(tmp_path):
    write(tmp_path, lines=[["1", "a", "b", "plain 'text'", '"with ""quotes"""'], ["0", "c", "d", '"', ""]])
    data = task("retrieval", tmp_path, decode=True).prepare()
    assert texts(data, "train", 0) == ["plain 'text'<eos>", 'with "quotes"<eos>']
    assert texts(data, "train", 1) == ['"<eos>', "<eos>"]
    assert data.splits["train"].y.tolist() == [1, 0]


def test_vocabulary_is_that_of_both_cut_training_texts(tmp_path):
    write(tmp_path, lines=[["1", "", "", "abcd", "xyz!"]], test=b"0\t\t\tAbc\tdxy\n")
    data = task("retrieval", tmp_path, length=4).prepare()
    assert data.vocabulary == ("<pad>", "<unk>", "<eos>", *"abcxyz")
    assert texts(data, "test", 0) == ["<unk>bc<eos>", "<unk>xy<eos>"]


def test_text_of_a_million_characters_is_cut(tmp_path):
    write(tmp_path, lines=[["1", "", "", "a" * 1_000_000, "b"]])
    data = task("retrieval", tmp_path).prepare()
    assert np.diff(data.splits["train"].offsets).tolist() == [4000]
    assert np.diff(data.splits["train"].offsets2).tolist() == [2]


def test_many_characters_need_two_bytes(tmp_path):
    letters = "".join(chr(0x4E00 + i) for i in range(300))
    write(tmp_path, lines=[["1", "", "", letters, letters[::-1]]])
    data = task("retrieval", tmp_path).prepare()
    assert data.splits["train"].x.dtype == np.int16
    assert texts(data, "train", 0) == [f"{letters}<eos>", f"{letters[::-1]}<eos>"]


def test_progress_counts_the_training_file_twice(tmp_path):
    write(tmp_path)
    seen = []
    task("retrieval", tmp_path).prepare(lambda done, total: seen.append((done, total)))
    size = (tmp_path / "new_aan_pairs.train.tsv").stat().st_size
    assert [total for _, total in seen] == [4 * size] * 4
    assert 0 < seen[0][0] < seen[-1][0] <= 4 * size


GOOD = b"1\ta\tb\tone\ttwo\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b"1\ta\tb\tone\n", r"eval\.tsv, line 2: 4 columns; expected label, id, id, text, text"),
        (GOOD + b"2.0\ta\tb\tone\ttwo\n", r"eval\.tsv, line 2: label is '2.0'; expected 0, 0.0, 1 or 1.0"),
        (GOOD + b"label\tid1\tid2\ttext1\ttext2\n", "line 2: label is 'label'"),
        (GOOD + b"1\ta\tb\t\xff\ttwo\n", r"eval\.tsv, line 2: not UTF-8"),
        (GOOD + b"1\ta\tb\tb'cut \\x\ttwo\n", r"eval\.tsv, line 2: b'cut .*is not a Python bytes literal of UTF-8"),
        (GOOD + rb"1" + b"\ta\tb\tb'\\xff'\ttwo\n", "line 2: .*is not a Python bytes literal of UTF-8"),
        (b"", "val split has no example"),
    ],
)
def test_invalid_line_raises_with_its_number(tmp_path, content, message):
    write(tmp_path, eval=content)
    check_invalid(message, "retrieval", tmp_path, decode=True)


def test_missing_files_raise(tmp_path):
    write(tmp_path)
    (tmp_path / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(MissingData, match=r"new_aan_pairs\.eval\.tsv.*long-range-arena"):
        task("retrieval", tmp_path).prepare()
