"""Windows of long sequences: how they are cut, which split they are in, and the mean of their outputs."""

import numpy as np
import pytest

from mrconv.tasks import DataError, ResidentLoader, data_loader, task
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.tasks.preview import summary
from mrconv.tasks.window_loader import IGNORED
from mrconv.tasks.windows import mean_of_windows, window_starts

RNG = np.random.default_rng(0)
LENGTHS = [9, 3, 20, 8, 13, 21, 4, 10, 30, 11] * 2


def prepared(tmp_path, path, **options):
    return task("folder", tmp_path / "data", path=str(path), **options).prepare()


@pytest.fixture
def arrays(tmp_path):
    """Return a file of sequences, numbered by their first channel, and the positions in their second."""
    x = np.zeros((20, 30, 2), np.float32)
    x[..., 0], x[..., 1] = np.arange(20)[:, None], np.arange(30)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 2, lengths=LENGTHS, person=np.arange(20) // 5)
    return tmp_path / "a.npz"


@pytest.mark.parametrize(
    ("length", "starts"), [(1, [0]), (8, [0]), (9, [0, 1]), (12, [0, 4]), (13, [0, 4, 5]), (16, [0, 4, 8])]
)
def test_windows_are_full_and_cover_the_sequence(length, starts):
    assert window_starts(length, 8, 4).tolist() == starts


def test_long_sequences_become_windows_with_their_label_in_one_split(tmp_path, arrays):
    data = prepared(tmp_path, arrays, window=8, hop=4)
    assert (data.length, data.facts["hop"]) == (8, 4)
    found = {}
    for name, split in data.splits.items():
        for i in range(len(split)):
            number, start = (int(z) for z in split.example(i)[0])
            n = min(8, LENGTHS[number])
            assert split.example(i)[:, 1].tolist() == list(range(start, start + n))
            assert (split.y[i], split.names[i].decode()) == (number % 2, f"example {number + 1}")
            assert found.setdefault(number, (name, [], split.origins[i]))[::2] == (name, split.origins[i])
            found[number][1].append(start)
    assert {i: starts for i, (_, starts, _) in found.items()} == {
        i: window_starts(n, 8, 4).tolist() for i, n in enumerate(LENGTHS)
    }
    assert len({(name, origin) for name, _, origin in found.values()}) == 20
    assert len(data.splits["train"].x) < 30 * 20  # windows share the stored positions
    assert "windows of 16 sequences" in summary(data)
    assert Preprocessor.from_data(data.decimated(0.5)).hop == 2
    assert data.decimated(0.5).splits["train"].lengths.max() == data.decimated(0.5).length == 4


def test_a_given_group_decides_about_the_split_of_windows(tmp_path, arrays):
    data = prepared(tmp_path, arrays, window=8, group="person", val_fraction=0.25, test_fraction=0.25)
    people = {
        name: {int(split.example(i)[0, 0]) // 5 for i in range(len(split))} for name, split in data.splits.items()
    }
    assert sorted(map(len, people.values())) == [1, 1, 2]
    assert len(set.union(*people.values())) == 4


@pytest.mark.parametrize(
    "loader", [data_loader, lambda *args, **options: ResidentLoader(*args, device="cpu", **options)]
)
def test_batches_of_windows_are_padded_and_have_lengths(tmp_path, arrays, loader):
    data = prepared(tmp_path, arrays, window=8, hop=4)
    split = data.splits["test"]
    (batch,) = loader(data, "test", 100)
    assert batch.lengths.tolist() == split.lengths.tolist()
    for x, n, i in zip(batch.x, batch.lengths, range(len(split)), strict=True):
        np.testing.assert_allclose(x[:n], split.example(i) * data.scale + data.shift, rtol=1e-5)
    assert loader(data, "test", 100, pad="max").padded_length(3) == 8


def test_arrays_of_one_length_and_labels_of_positions_are_cut(tmp_path):
    x = RNG.normal(size=(10, 20))
    y = np.where(np.arange(20) < 12, x > 0, -1)  # windows of the second half have no label
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data = prepared(tmp_path, tmp_path / "a.npz", window=8, hop=8, target="positions", val_fraction=0)
    split = data.splits["train"]
    assert len(split) == 2 * 9
    for i in range(len(split)):
        scored = split.y[i] != IGNORED
        assert np.array_equal(split.y[i][scored], (split.example(i)[:, 0] > 0)[scored])
        assert scored.sum() == (8, 4)[i % 2]


def test_texts_are_cut_with_their_end_and_images_are_not(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "abcdefghij,x\nklm,y\n" * 10)
    data = prepared(tmp_path, tmp_path / "a.csv", window=4, val_fraction=0)
    split = data.splits["train"]
    texts = {"".join(data.vocabulary[token] for token in split.example(i)) for i in range(len(split))}
    assert texts == {"abcd", "efgh", "hij<eos>", "klm<eos>"}
    p = Preprocessor.from_data(data)
    whole = p.from_text("abcdefghij")
    assert [p.vocabulary[t] for t in whole.x] == [*"abcdefghij", "<eos>"]
    assert whole.notes == ["the mean of 3 windows of 4 positions"]
    assert p.from_text("abc").notes == []

    image = pytest.importorskip("PIL.Image").fromarray(np.zeros((2, 2), np.uint8))
    for name in "ab":
        (tmp_path / "files" / name).mkdir(parents=True)
        image.save(tmp_path / "files" / name / "0.png")
    with pytest.raises(DataError, match="has images: window is for sequences"):
        prepared(tmp_path, tmp_path / "files", window=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hop": 5}, "hop at most as many; got window=0 and hop=5"),
        ({"window": 4, "hop": 5}, "hop at most as many; got window=4 and hop=5"),
        ({"window": -1}, "window must be a number of positions"),
        ({"window": 4.5}, "window must be a number of positions"),
        ({"window": 4, "length": 8}, "window sets the length of the examples: leave out length and cut"),
    ],
)
def test_invalid_windows_raise(tmp_path, arrays, options, message):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, arrays, **options)


def test_the_mean_of_overlapping_windows_of_positions():
    outputs = [np.array([[1.0], [2.0], [3.0]]), np.array([[5.0], [6.0], [7.0]])]
    assert mean_of_windows(outputs, [0, 1])[:, 0].tolist() == [1, 3.5, 4.5, 7]
    assert mean_of_windows(outputs)[:, 0].tolist() == [3, 4, 5]
