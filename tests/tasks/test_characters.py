"""Characters: reading of texts, and windows in training and evaluation."""

import lzma

import numpy as np
import pytest
import torch

from mrconv.tasks import DataError, MissingData, ResidentLoader, WindowLoader, data_loader, preview, task
from mrconv.tasks.window_loader import IGNORED

TEXT = "".join(chr(97 + i * i % 23) for i in range(960)) + "äöü" + "b" * 37  # 1,000 characters


@pytest.fixture
def prepared(tmp_path):
    def prepare(text=TEXT, name="text.txt", **options):
        path = tmp_path / name
        path.write_bytes(lzma.compress(text.encode()) if name.endswith(".xz") else text.encode())
        options = {"length": 16, "path": str(path)} | options
        return task("characters", tmp_path / "data", **options).prepare()

    return prepare


def decode(data, tokens):
    return "".join(data.vocabulary[i] if i else "?" for i in tokens)


def test_splits_are_consecutive_parts_of_the_text(prepared):
    data = prepared()
    assert {name: decode(data, split.y) for name, split in data.splits.items()} == {
        "train": TEXT[1:900],
        "val": TEXT[900:950],
        "test": TEXT[950:].replace("ä", "?").replace("ö", "?").replace("ü", "?"),
    }
    assert decode(data, data.splits["train"].x) == TEXT[:899]
    assert decode(data, data.splits["val"].x) == TEXT[899:949]
    assert data.vocabulary == ("<unk>", *sorted(set(TEXT[:900])))
    assert data.metric == "bits"


def test_compressed_files_and_folders_are_read(prepared, tmp_path):
    uncompressed = prepared()
    assert np.array_equal(prepared(name="text.txt.xz").splits["val"].y, uncompressed.splits["val"].y)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.txt").write_text(TEXT[300:])
    (folder / "a.txt").write_text(TEXT[:300])
    (folder / "notes.md").write_text("not part of the text")
    both = task("characters", tmp_path / "data", path=str(folder), length=16).prepare()
    assert np.array_equal(both.splits["train"].x, uncompressed.splits["train"].x)


def test_large_alphabet_and_byte_order_mark(prepared):
    text = "\ufeff" + "".join(chr(0x4E00 + i % 400) for i in range(2000))
    data = prepared(text)
    assert len(data.vocabulary) == 401
    assert decode(data, data.splits["train"].y) == text[2:1801]


def test_empty_split_is_omitted(prepared):
    assert list(prepared(val_fraction=0.1, test_fraction=0.0).splits) == ["train", "val"]


@pytest.mark.parametrize("passes", [1, 3])
def test_training_windows_tile_the_text_from_a_new_offset_in_every_pass(prepared, passes):
    data = prepared(passes=passes)
    split = data.splits["train"]
    loader = WindowLoader(data, "train", 5)
    seen = []
    for _ in range(2):
        starts = loader.starts()
        assert len(starts) == passes * 55
        for one in np.split(starts, passes):
            assert (np.diff(one) == 16).all()
            assert one[0] < 16
            assert one[-1] + 16 <= len(split)
        batches = list(loader)
        assert all(batch.x.shape == batch.y.shape == (5, 16) for batch in batches)
        windows = {tuple(window) for batch in batches for window in batch.x.tolist()}
        assert windows <= {tuple(split.x[i : i + 16].tolist()) for i in starts}
        for batch in batches:
            assert torch.equal(batch.x[:, 1:], batch.y[:, :-1])
        seen.append(starts[0])
    assert seen[0] != seen[1]


@pytest.mark.parametrize("context", [0, 5, 15])
@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_scores_every_character_once_with_its_context(prepared, context, world):
    data = prepared(context=context)
    for name in ("val", "test"):
        split, predicted = data.splits[name], {}
        for rank in range(world):
            loader = WindowLoader(data, name, 3, train=False, rank=rank, world=world)
            for indices, batch in zip(loader.plan.batches(0), loader, strict=True):
                for i, x, y in zip(indices, batch.x, batch.y, strict=True):
                    start = max(0, i * (16 - context) - context)
                    for place in (y != IGNORED).nonzero()[:, 0].tolist():
                        at = start + place
                        assert place >= min(context, at)
                        assert x[: place + 1].tolist() == split.x[start : at + 1].tolist()
                        assert at not in predicted
                        predicted[at] = int(y[place])
        assert [predicted[i] for i in range(len(split))] == split.y.tolist()


def test_loader_resumes_within_an_epoch(prepared):
    data = prepared(passes=2)
    uninterrupted, first = WindowLoader(data, "train", 5, seed=3), WindowLoader(data, "train", 5, seed=3)
    expected = [batch.x for _ in range(2) for batch in uninterrupted]
    resumed = [batch.x for batch in first]
    resumed += [batch.x for _, batch in zip(range(8), first, strict=False)]
    second = WindowLoader(data, "train", 5, seed=3)
    second.load_state_dict(first.state_dict())
    resumed += [batch.x for batch in second]
    assert len(resumed) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))


def test_text_needs_the_window_loader(prepared):
    data = prepared()
    for make in (data_loader, lambda *a: ResidentLoader(*a, device="cpu")):
        with pytest.raises(ValueError, match="use WindowLoader for 'text'"):
            make(data, "train", 5)


def test_preview_of_a_text(prepared, tmp_path):
    data = prepared()
    assert "train          899 characters" in preview.summary(data)
    assert preview.describe_example(data, data.splits["val"], 3) == f"val 3:\n{TEXT[902:918]}"
    preview.draw_examples(data, tmp_path / "text.png")
    assert (tmp_path / "text.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": 0}, ValueError, "need length >= 1"),
        ({"context": 16}, ValueError, "0 <= context < length; got 16, 1 and 16"),
        ({"passes": 0}, ValueError, "passes >= 1"),
        ({"val_fraction": 0.0, "test_fraction": 0.0}, ValueError, "their sum between 0 and 1"),
        ({"length": 451}, DataError, "900 training characters are too few for windows of length 451"),
        ({"path": "nowhere.txt"}, MissingData, "path nowhere.txt does not exist"),
        ({"path": ""}, MissingData, "characters: none of tinyshakespeare/input.txt"),
    ],
)
def test_invalid_options_raise(prepared, options, error, message):
    with pytest.raises(error, match=message):
        prepared(**options)


def test_unreadable_files_raise_with_their_path(tmp_path):
    for name, content, message in (
        ("latin.txt", b"gr\xfc\xdfe", r"latin\.txt is not UTF-8 .* at byte 2"),
        ("cut.txt.xz", lzma.compress(b"abc" * 1000)[:-10], r"cut\.txt\.xz is damaged"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            task("characters", tmp_path / "data", path=str(tmp_path / name)).prepare()
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingData, match=r"empty has no \.txt"):
        task("characters", tmp_path / "data", path=str(tmp_path / "empty")).prepare()
