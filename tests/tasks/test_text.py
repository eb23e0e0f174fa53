"""Text: IMDB reviews from a folder, the archive or JSON lines."""

import json
import lzma

import numpy as np
import pytest

from mrconv.tasks import DataError, MissingData, task

from .data_files import check_invalid, truncate, write_files, write_tar

REVIEWS = {
    ("train", "neg"): ["bad, bad", "no"],
    ("train", "pos"): ["good<br />é", "a b"],
    ("test", "neg"): ["zzz bad"],
    ("test", "pos"): ["good good"],
}


def files():
    return {
        f"aclImdb/{split}/{label}/{i}_{9 if label == 'pos' else 2}.txt": text.encode()
        for (split, label), texts in REVIEWS.items()
        for i, text in enumerate(texts)
    } | {"aclImdb/train/unsup/0_0.txt": b"@@@", "aclImdb/README": b"\xff"}


def write_folder(folder):
    write_files(folder, files())


def write_archive(folder):
    return write_tar(folder / "aclImdb_v1.tar.gz", dict(reversed(files().items())))


def reviews(split):
    order = sorted(key for key in REVIEWS if key[0] == split)
    return [{"text": text, "label": int(key[1] == "pos"), "id": "x"} for key in order for text in REVIEWS[key]]


def write_json(folder, suffix=".jsonl", **replaced):
    for split in ("train", "test"):
        text = replaced.get(split, "".join(json.dumps(review) + "\n" for review in reviews(split)))
        content = text if isinstance(text, bytes) else text.encode()
        (folder / f"{split}{suffix}").write_bytes(lzma.compress(content) if suffix.endswith("xz") else content)


def text_of(data, split, i):
    return "".join(data.vocabulary[token] for token in data.splits[split].example(i))


WRITERS = {
    "folder": write_folder,
    "archive": write_archive,
    "jsonl": write_json,
    "jsonl.xz": lambda folder: write_json(folder, ".jsonl.xz"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_layout_gives_the_same_examples(tmp_path, kind):
    WRITERS[kind](tmp_path)
    data = task("text", tmp_path, min_freq=1).prepare()
    assert list(data.splits) == ["train", "test"]
    assert data.classes == ("negative", "positive")
    assert data.splits["train"].y.tolist() == [0, 0, 1, 1]
    assert data.splits["test"].y.tolist() == [0, 1]
    assert text_of(data, "train", 2) == "good<br />é<eos>"
    assert text_of(data, "test", 0) == "<unk><unk><unk> bad<eos>"
    assert data.vocabulary == ("<pad>", "<unk>", "<eos>", *sorted(set("bad, bad no good<br />é a b")))


def test_a_part_of_the_training_reviews_can_be_held_out_for_validation(tmp_path):
    write_json(tmp_path)
    whole, parted = (task("text", tmp_path, min_freq=1, val_fraction=f).prepare() for f in (0.0, 0.25))
    assert {name: len(split) for name, split in parted.splits.items()} == {"train": 3, "val": 1, "test": 2}
    texts = [text_of(parted, name, i) for name in ("train", "val") for i in range(len(parted.splits[name]))]
    assert sorted(texts) == sorted(text_of(whole, "train", i) for i in range(4))
    assert parted.vocabulary == whole.vocabulary
    with pytest.raises(ValueError, match=r"val_fraction must be a number in \[0, 1\); got 1"):
        task("text", tmp_path, val_fraction=1.0).prepare()


def test_folder_precedes_archive_precedes_json(tmp_path):
    write_json(tmp_path)
    assert task("text", tmp_path).sources()[0].name == "train.jsonl"
    write_archive(tmp_path)
    assert task("text", tmp_path).sources()[0].name == "aclImdb_v1.tar.gz"
    write_folder(tmp_path)
    assert [path.parent.name for path in task("text", tmp_path).sources()] == ["train", "train", "test", "test"]


def test_vocabulary_has_the_frequent_characters_of_cut_training_texts(tmp_path):
    write_json(tmp_path)
    data = task("text", tmp_path, min_freq=3, length=4).prepare()
    assert data.vocabulary == ("<pad>", "<unk>", "<eos>", "o")  # in "bad", "no", "goo", "a b"
    assert text_of(data, "train", 2) == "<unk>oo<eos>"
    assert data.splits["train"].lengths.max() == 4 == data.length


def test_missing_or_empty_class_folder_raises(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "aclImdb/test/pos/0_9.txt").unlink()
    with pytest.raises(DataError, match="no pos review of test"):
        task("text", tmp_path).prepare()
    (tmp_path / "aclImdb/test/pos").rmdir()
    with pytest.raises(MissingData, match=r"aclImdb/test/pos does not\. Put aclImdb_v1"):
        task("text", tmp_path).prepare()


def test_review_that_is_not_utf8_raises(tmp_path):
    write_files(tmp_path, files() | {"aclImdb/train/neg/7_1.txt": b"abc\xe9 "})
    with pytest.raises(DataError, match=r"train/neg/7_1\.txt is not UTF-8 .* at byte 3"):
        task("text", tmp_path).prepare()


def test_truncated_archive_raises(tmp_path):
    truncate(write_archive(tmp_path), -60)
    with pytest.raises(DataError, match=r"aclImdb_v1\.tar\.gz.* is damaged or truncated"):
        task("text", tmp_path).prepare()


GOOD = '{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + '{"text": "c", "label": 2}\n', r"test\.jsonl, line 3: label is 2; expected 0 or 1"),
        (GOOD + '{"text": "c", "label": "pos"}\n', "line 3: label is 'pos'; expected 0 or 1"),
        (GOOD + '{"text": 5, "label": 1}\n', "line 3: text is 5; expected a string"),
        (GOOD + '{"text": "c", "lab', r"test\.jsonl, line 3: not JSON"),
        (GOOD + '{"text": "c"}\n', "line 3: no field 'label'; it has text"),
        (GOOD + "[1]\n", "line 3: expected an object with text and label"),
        (GOOD.encode() + b'{"text": "\xff"}\n', r"test\.jsonl, line 3: not UTF-8"),
        ('{"text": "a", "label": 0}\n', "no pos review of test"),
        ("", "no neg review of test"),
    ],
)
def test_invalid_json_line_raises_with_its_number(tmp_path, text, message):
    write_json(tmp_path, test=text)
    check_invalid(message, "text", tmp_path)


def test_truncated_compressed_file_raises(tmp_path):
    write_json(tmp_path, ".jsonl.xz")
    truncate(tmp_path / "train.jsonl.xz", -30)
    with pytest.raises(DataError, match=r"train\.jsonl\.xz is damaged or truncated"):
        task("text", tmp_path).prepare()


def test_missing_files_raise_with_their_address(tmp_path):
    with pytest.raises(MissingData, match=r"none of aclImdb, .*ai\.stanford\.edu"):
        task("text", tmp_path).prepare()


def test_train_without_test_raises(tmp_path):
    write_json(tmp_path)
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(MissingData, match=r"train\.jsonl exists, but .*test\.jsonl does not"):
        task("text", tmp_path).prepare()


def test_sequences_are_bytes_with_one_eos_each(tmp_path):
    write_json(tmp_path)
    for split in task("text", tmp_path).prepare().splits.values():
        assert split.x.dtype == np.uint8
        assert (np.asarray(split.x)[split.offsets[1:] - 1] == 2).all()
        assert (np.asarray(split.x) == 2).sum() == len(split)
