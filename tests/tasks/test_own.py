"""One's own data: every kind of file, with and without a split, and what is wrong with it."""

import io
import json
import lzma
import sys
import wave
import zipfile

import numpy as np
import pytest

from mrconv.tasks import DataError, MissingData, task
from mrconv.tasks.packing import random_parts

RNG = np.random.default_rng(0)


def own(tmp_path, path, **options):
    return task("folder", tmp_path / "data", path=str(path), **options)


def seen(data, split):
    """What a model sees of all rows of a split."""
    return np.asarray(data.splits[split].x) * data.scale + data.shift


def wav(samples, rate=16000, channels=1):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.asarray(samples, "<i2").tobytes())
    return file.getvalue()


def png(pixels, mode=None):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.asarray(pixels, np.uint16 if mode == "I;16" else np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def zipped(files):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def words(counts, length=8):
    return {f"{word}/{i}.wav": wav(np.arange(length) + 10 * i) for word, n in counts.items() for i in range(n)}


class TestArrays:
    def test_integers_are_tokens_numbered_from_1_for_0_is_the_padding(self, tmp_path):
        x = RNG.integers(0, 5, (20, 7))
        x[0, 0] = 4
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 3)
        data = own(tmp_path, tmp_path / "a.npz").prepare()
        assert (data.encoder, data.length) == ("tokens", 7)
        assert data.vocabulary == ("<pad>", "0", "1", "2", "3", "4")
        assert data.classes == ("0", "1", "2")
        parts = dict(zip(("train", "val", "test"), random_parts(20, (0, 0.1, 0.1), 42), strict=True))
        for name, part in parts.items():
            split = data.splits[name]
            np.testing.assert_array_equal(np.asarray(split.x).reshape(-1, 7), x[part] + 1)
            np.testing.assert_array_equal(split.y, part % 3)
        assert [len(split) for split in data.splits.values()] == [16, 2, 2]

    @pytest.mark.parametrize("shape", [(30, 6), (30, 6, 1), (30, 6, 3)])
    def test_floats_are_values_normalised_by_channel_over_the_training_rows(self, tmp_path, shape):
        x = RNG.normal(5, 3, shape)
        np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(30) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
        data = own(tmp_path, tmp_path / "a.npz").prepare()
        channels = shape[2] if len(shape) == 3 else 1
        assert (data.encoder, data.length, data.channels, list(data.splits)) == (
            "values",
            6,
            channels,
            ["train", "test"],
        )
        assert data.splits["train"].x.shape == (30, 6, channels)
        assert data.splits["train"].x.dtype == np.float32
        np.testing.assert_allclose(seen(data, "train").mean((0, 1)), 0, atol=1e-5)
        np.testing.assert_allclose(seen(data, "train").std((0, 1)), 1, atol=1e-5)
        np.testing.assert_array_equal(data.splits["test"].x[..., 0], x.reshape(30, 6, channels)[:4, :, 0].astype("f4"))

    def test_small_integers_with_channels_stay_as_they_are(self, tmp_path):
        x = RNG.integers(0, 255, (10, 4, 2)).astype(np.uint8)
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(10) % 2)
        assert own(tmp_path, tmp_path / "a.npz").prepare().splits["train"].x.dtype == np.uint8

    def test_a_constant_channel_becomes_zero(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.full((10, 4), 7.0), y=np.arange(10) % 2)
        assert (seen(own(tmp_path, tmp_path / "a.npz").prepare(), "train") == 0).all()

    def test_length_pads_or_if_asked_cuts(self, tmp_path):
        x = RNG.normal(size=(10, 4))
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(10) % 2)
        longer = own(tmp_path, tmp_path / "a.npz", length=6).prepare()
        assert longer.splits["train"].x.shape == (8, 6, 1)
        assert (np.asarray(longer.splits["train"].x)[:, 4:] == 0).all()
        assert own(tmp_path, tmp_path / "a.npz", length=3, cut=True).prepare().splits["train"].x.shape == (8, 3, 1)
        with pytest.raises(DataError, match=r"a\.npz, x, row \d+: length 4; expected at most length=3, or cut=True"):
            own(tmp_path, tmp_path / "a.npz", length=3).prepare()

    def test_names_of_classes_are_sorted_and_numbers_by_size(self, tmp_path):
        x = RNG.normal(size=(12, 4))
        np.savez(tmp_path / "a.npz", x=x, y=[2, 10, 1] * 4)
        np.savez(tmp_path / "b.npz", x=x, y=["no", "yes", "maybe"] * 4)
        assert own(tmp_path, tmp_path / "a.npz").prepare().classes == ("1", "2", "10")
        assert own(tmp_path, tmp_path / "b.npz").prepare().classes == ("maybe", "no", "yes")

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"a": np.ones(3)}, r"a\.npz has a; expected x and y"),
            (
                {"x_train": np.ones((3, 2)), "y_train": [0, 1, 0], "x_test": np.ones((3, 2))},
                "expected x_test and y_test",
            ),
            (
                {"x_val": np.ones((3, 2)), "y_val": [0, 1, 0], "x_test": np.ones((3, 2)), "y_test": [0, 1, 0]},
                "train too",
            ),
            ({"x": np.ones(3), "y": [0, 1, 0]}, r"x is float64 of shape \(3,\); expected .*\(n, length\)"),
            ({"x": np.ones((3, 2), complex), "y": [0, 1, 0]}, "x is complex128"),
            ({"x": np.ones((3, 2)), "y": [0, 1]}, r"x has 3 rows and y is of shape \(2,\); expected \(3,\)"),
            ({"x": np.ones((3, 2)), "y": [0, 0.5, 1]}, "y is float64; expected whole numbers or names"),
            ({"x": np.array([[{}]]), "y": [0]}, "does not read as arrays"),
            ({"x": np.ones((20, 2)), "y": np.zeros(20, int)}, "expected at least two classes; all rows are 0"),
            ({"x": np.ones((5, 2)), "y": [0, 1, 0, 1, 0]}, "has 5 rows: too few for val with val_fraction=0.1"),
            ({"x": -np.ones((20, 2), int), "y": np.arange(20)}, "integers from -1 to -1; tokens lie within 0 .. 32766"),
            ({"x": np.full((20, 2), 40000), "y": np.arange(20)}, "40000; tokens lie within"),
            ({"x": np.full((20, 2), 1e300), "y": np.arange(20)}, r"x, row \d+: not all values are finite"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, arrays, message):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(DataError, match=message):
            own(tmp_path, tmp_path / "a.npz").prepare()

    def test_the_row_of_a_value_that_is_no_number_is_that_of_the_file(self, tmp_path):
        x = np.ones((20, 2))
        x[13, 1] = np.nan
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 2)
        with pytest.raises(DataError, match=r"a\.npz, x, row 14: not all values are finite"):
            own(tmp_path, tmp_path / "a.npz").prepare()

    def test_splits_with_other_channels_or_unknown_classes_are_refused(self, tmp_path):
        train = {"x_train": np.ones((3, 2, 2)), "y_train": [0, 1, 0]}
        np.savez(tmp_path / "a.npz", **train, x_test=np.ones((3, 2, 1)), y_test=[0, 1, 0])
        np.savez(tmp_path / "b.npz", **train, x_test=np.ones((3, 2, 2)), y_test=[0, 1, 2])
        with pytest.raises(DataError, match="x_test has 1 channels; expected 2"):
            own(tmp_path, tmp_path / "a.npz").prepare()
        with pytest.raises(DataError, match="x_test, row 3: class 2 is not in the training data"):
            own(tmp_path, tmp_path / "b.npz").prepare()

    def test_a_file_that_is_cut_off_is_refused(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.ones((20, 2)), y=np.arange(20))
        (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-100])
        with pytest.raises(DataError, match=r"a\.npz does not read as arrays"):
            own(tmp_path, tmp_path / "a.npz").prepare()


class TestTables:
    def test_a_column_of_texts_gives_characters(self, tmp_path):
        rows = "".join(f'{i},"a, ""b"" {i}\nc",{"yes" if i % 2 else "no"}\n' for i in range(20))
        write(tmp_path, {"a.csv": "\ufeffid,text,label\n" + rows})
        data = own(tmp_path, tmp_path / "a.csv").prepare()
        assert (data.encoder, data.classes, data.length) == ("tokens", ("no", "yes"), 12)
        split = data.splits["train"]
        for row, i in enumerate(random_parts(20, (0, 0.1, 0.1), 42)[0]):
            assert "".join(data.vocabulary[code] for code in split.row(row)) == f'a, "b" {i}\nc<eos>'
            assert data.classes[split.y[row]] == ("yes" if i % 2 else "no")

    def test_texts_are_cut_to_a_length(self, tmp_path):
        write(tmp_path, {"a.tsv": "says\twhat\n" + "x\tabcdef\ny\tghijkl\n" * 10})
        data = own(tmp_path, tmp_path / "a.tsv", length=4, label_column="says", text_column="what").prepare()
        assert data.vocabulary == ("<pad>", "<unk>", "<eos>", *"abcghi")
        assert (data.splits["train"].lengths == 4).all()

    def test_numbers_in_all_other_columns_are_values(self, tmp_path):
        write(tmp_path, {"train.csv": "a,label,b\n1,x,2\n3,y,4e1\n", "test.csv": "a,label,b\n5,y,6\n"})
        data = own(tmp_path, tmp_path).prepare()
        assert list(data.splits) == ["train", "test"]
        np.testing.assert_array_equal(data.splits["train"].x[..., 0], [[1, 2], [3, 40]])
        np.testing.assert_array_equal(data.splits["test"].x[..., 0], [[5, 6]])
        assert data.splits["test"].y.tolist() == [1]
        assert (data.length, data.channels) == (2, 1)

    @pytest.mark.parametrize("packed", [False, True])
    def test_json_lines_are_texts(self, tmp_path, packed):
        lines = "".join(json.dumps({"text": f"t{i}", "label": i % 2}) + "\n" for i in range(20)).encode()
        name = "a.jsonl.xz" if packed else "a.jsonl"
        write(tmp_path, {name: lzma.compress(lines) if packed else lines})
        data = own(tmp_path, tmp_path / name, val_fraction=0).prepare()
        assert list(data.splits) == ["train", "test"]
        assert data.classes == ("0", "1")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.csv", "text,class\na,b\n", r"a\.csv has columns text, class; expected label and others"),
            ("a.csv", "", r"a\.csv has columns none"),
            ("a.csv", "text,label\n", r"a\.csv has no row"),
            ("a.csv", "a,b,label\n1,2,x\n1,two,x\n", r"a\.csv, line 3: b is 'two'; without a column of texts"),
            ("a.csv", "a,label\n1,x\n2\n", r"a\.csv, line 3: 1 columns; expected 2"),
            ("a.csv", "text,label\na,x\nb, \n", r"a\.csv, line 3: label is ' '; expected a name"),
            ("a.csv", 'text,label\na,x\n"b,y\nc,z\n', r"a\.csv, line 4: unexpected end of data"),
            ("a.csv", b"text,label\na,x\n\xff,y\n", r"a\.csv, line 3: not UTF-8"),
            ("a.jsonl", '{"text": "a"}\n', r"a\.jsonl, line 1: no field 'label'"),
            ("a.jsonl", '{"text": "a", "label": 1.5}\n', r"a\.jsonl, line 1: label is 1.5"),
            ("a.jsonl", '{"text": 3, "label": 1}\n', r"a\.jsonl, line 1: text is 3"),
            ("a.xlsx", "?", r"a\.xlsx is of no known kind; expected \.npz"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, name, content, message):
        write(tmp_path, {name: content})
        with pytest.raises(DataError, match=message):
            own(tmp_path, tmp_path / name).prepare()

    def test_splits_of_two_kinds_are_refused(self, tmp_path):
        write(tmp_path, {"train.csv": "text,label\na,x\nb,y\n", "test.csv": "a,label\n5,y\n"})
        with pytest.raises(DataError, match=r"one kind; found text in .*train\.csv and values in .*test\.csv"):
            own(tmp_path, tmp_path).prepare()


class TestRecordings:
    @pytest.fixture(autouse=True)
    def _soundfile(self):
        pytest.importorskip("soundfile")

    def test_folders_name_the_classes(self, tmp_path):
        root = write(tmp_path / "mine", words({"yes": 12, "no": 8}))
        data = own(tmp_path, root).prepare()
        assert (data.encoder, data.length, data.channels, data.classes) == ("values", 8, 1, ("no", "yes"))
        assert [len(split) for split in data.splits.values()] == [16, 2, 2]
        assert data.splits["train"].x.dtype == np.int16
        assert seen(data, "train").mean() == pytest.approx(0, abs=1e-6)
        assert seen(data, "train").std() == pytest.approx(1)

    @pytest.mark.parametrize("form", ["folders", "archives", "archives of folders"])
    def test_splits_may_be_given_as_folders_or_archives(self, tmp_path, form):
        parts = {"train": words({"yes": 3, "no": 2}), "validation": words({"no": 1}), "test": words({"yes": 2})}
        parts["test"] |= {"__MACOSX/yes/._0.wav": b"?", ".DS_Store": b"?", "README": b"?"}
        files = {}
        for part, inside in parts.items():
            if form == "folders":
                files |= {f"{part}/{name}": content for name, content in inside.items()}
            else:
                top = f"{part}/" if form == "archives of folders" else ""
                files[f"{part}.zip"] = zipped({top + name: content for name, content in inside.items()})
        data = own(tmp_path, write(tmp_path / "mine", files | {"notes.txt": b""})).prepare()
        assert {name: split.y.tolist() for name, split in data.splits.items()} == {
            "train": [0, 0, 1, 1, 1],
            "val": [0],
            "test": [1, 1],
        }
        np.testing.assert_array_equal(data.splits["test"].x[1, :, 0], np.arange(8) + 10)

    def test_shorter_ones_are_padded_and_longer_ones_refused_or_cut(self, tmp_path):
        root = write(tmp_path / "mine", words({"yes": 3, "no": 3}) | {"no/long.wav": wav(np.ones(10))})
        options = {"val_fraction": 0, "test_fraction": 0}
        data = own(tmp_path, root, **options).prepare()
        assert data.length == 10
        assert (np.asarray(data.splits["train"].x)[0, 8:] == 0).all()
        with pytest.raises(DataError, match=r"no/long\.wav: length 10; expected at most length=9"):
            own(tmp_path, root, length=9, **options).prepare()
        assert own(tmp_path, root, length=9, cut=True, **options).prepare().splits["train"].x.shape == (7, 9, 1)

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"no/bad.wav": wav(np.ones(4), rate=8000)}, r"no/bad\.wav has 8,000 samples a second; expected 16,000"),
            ({"no/bad.wav": wav(np.ones(4), channels=2)}, r"no/bad\.wav has 2 channels"),
            ({"no/bad.wav": b"RIFF"}, r"no/bad\.wav is not a WAV"),
            ({"top.wav": wav(np.ones(4))}, r"top\.wav is in no folder; expected CLASS/top\.wav"),
            ({"empty/notes.txt": b""}, r"empty has no \.wav, .* file: expected some of this class"),
            ({"no/a.png": b""}, r"has audio files, and no/a\.png|has image files, and"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, files, message):
        if any(name.endswith("png") for name in files):
            files = {"no/a.png": png(np.ones((2, 2)))}
        root = write(tmp_path / "mine", words({"yes": 10, "no": 10}) | files)
        with pytest.raises(DataError, match=message):
            own(tmp_path, root).prepare()

    def test_another_rate_can_be_asked_for(self, tmp_path):
        files = {f"{word}/{i}.wav": wav(np.arange(4), rate=8000) for word in ("a", "b") for i in range(10)}
        data = own(tmp_path, write(tmp_path / "mine", files), rate=8000).prepare()
        assert data.facts["sampling_rate"] == 8000

    def test_an_archive_that_is_cut_off_is_refused(self, tmp_path):
        content = zipped(words({"yes": 10, "no": 10}))
        write(tmp_path, {"a.zip": content[:-200]})
        with pytest.raises(DataError, match=r"a\.zip"):
            own(tmp_path, tmp_path / "a.zip").prepare()

    def test_the_cache_may_lie_beside_the_classes(self, tmp_path):
        root = write(tmp_path / "mine", words({"yes": 10, "no": 10}))
        mine = task("folder", root, path=str(root))
        first = mine.prepare().folder
        assert first.parent == root / "cache"
        assert mine.prepare().folder == first
        assert len(list((root / "cache").iterdir())) == 1

    def test_moving_a_file_to_another_class_makes_new_data(self, tmp_path):
        root = write(tmp_path / "mine", words({"yes": 10, "no": 10}) | {"no/x.wav": wav(np.ones(8))})
        before = own(tmp_path, root).folder()
        (root / "no/x.wav").rename(root / "yes/x.wav")
        assert own(tmp_path, root).folder() != before


class TestPictures:
    @pytest.fixture(autouse=True)
    def _pillow(self):
        pytest.importorskip("PIL")

    def files(self, channels=3, mixed=False):
        shape = (2, 3, channels) if channels > 1 else (2, 3)
        self.pixels = {f"{name}/{i}.png": RNG.integers(0, 255, shape) for name in ("cat", "dog") for i in range(5)}
        if mixed:
            self.pixels["cat/0.png"] = RNG.integers(0, 255, (2, 3))
        return {name: png(pixels) for name, pixels in self.pixels.items()}

    @pytest.mark.parametrize("channels", [1, 3])
    def test_pictures_are_sequences_of_pixels_row_by_row(self, tmp_path, channels):
        root = write(tmp_path / "mine", self.files(channels))
        data = own(tmp_path, root, val_fraction=0, test_fraction=0).prepare()
        assert (data.encoder, data.length, data.channels) == ("values", 6, channels)
        x = np.asarray(data.splits["train"].x)
        assert x.dtype == np.uint8
        for row, pixels in zip(x, self.pixels.values(), strict=True):
            np.testing.assert_array_equal(row, pixels.reshape(6, channels))
        np.testing.assert_allclose(seen(data, "train").mean((0, 1)), 0, atol=1e-5)

    def test_or_images(self, tmp_path):
        data = own(tmp_path, write(tmp_path / "mine", self.files()), sequence=False).prepare()
        assert data.encoder == "image"
        assert data.splits["train"].x.shape == (8, 2, 3, 3)
        assert seen(data, "train").shape == (8, 2, 3, 3)

    def test_one_colour_picture_makes_all_of_them_colour_unless_grey_is_asked_for(self, tmp_path):
        root = write(tmp_path / "mine", self.files(mixed=True))
        options = {"val_fraction": 0, "test_fraction": 0}
        colour = own(tmp_path, root, **options).prepare()
        first = np.asarray(colour.splits["train"].x)[0]
        np.testing.assert_array_equal(first, np.repeat(self.pixels["cat/0.png"].reshape(6, 1), 3, 1))
        assert own(tmp_path, root, grey=True, **options).prepare().channels == 1

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (lambda: png(np.ones((4, 3))), r"cat/9\.png is 3 x 4 pixels, and cat/0\.png 3 x 2: expected one size"),
            (lambda: png(np.ones((2, 3)))[:-30], r"cat/9\.png is not a PNG or JPEG file, or is damaged or truncated"),
            (lambda: b"", r"cat/9\.png is not a PNG or JPEG file"),
            (lambda: png(np.ones((2, 3)), "I;16"), r"cat/9\.png has pixels of more than 8 bits"),
        ],
    )
    def test_a_bad_picture_is_named(self, tmp_path, content, message):
        root = write(tmp_path / "mine", self.files() | {"cat/9.png": content()})
        with pytest.raises(DataError, match=message):
            own(tmp_path, root).prepare()

    def test_splits_of_another_size_and_a_length_are_refused(self, tmp_path):
        files = {f"train/{name}": content for name, content in self.files().items()}
        root = write(tmp_path / "mine", files | {"test/cat/0.png": png(np.ones((3, 3, 3)))})
        with pytest.raises(DataError, match=r"test: pictures are of another size than in train, 3 x 2 pixels"):
            own(tmp_path, root).prepare()
        with pytest.raises(DataError, match="leave length at 0"):
            own(tmp_path, root, length=5).prepare()

    def test_without_pillow_the_extra_is_named(self, tmp_path, monkeypatch):
        root = write(tmp_path / "mine", self.files())
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(DataError, match=r"pip install 'mrconv\[data\]'"):
            own(tmp_path, root).prepare()


def test_a_path_is_needed_and_must_be_there(tmp_path):
    with pytest.raises(MissingData, match="path must name a file or folder"):
        task("folder", tmp_path).prepare()
    with pytest.raises(MissingData, match=r"gone is not there: looked for /"):
        own(tmp_path, tmp_path / "gone").prepare()


def test_a_folder_must_say_which_part_is_which(tmp_path):
    table = "text,label\na,x\nb,y\n"
    for files, message in (
        ({"test.csv": table}, r"has test\.csv; expected train too"),
        ({"train.csv": table, "train.jsonl": "", "test.csv": table}, r"train\.csv and train\.jsonl are both there"),
        ({"a.csv": table, "b.csv": table}, r"a\.csv, b\.csv: give one as path or call them train, test"),
        ({"notes.txt": ""}, r"has no \.wav, .*and is no table"),
    ):
        root = write(tmp_path / message[:9].strip("\\ "), files)
        with pytest.raises(DataError, match=message):
            own(tmp_path, root).prepare()


def test_one_table_in_a_folder_is_the_data(tmp_path):
    root = write(tmp_path / "mine", {"train.csv": "text,label\n" + "a,x\nb,y\n" * 10, "README.md": "?"})
    assert [len(split) for split in own(tmp_path, root).prepare().splits.values()] == [16, 2, 2]


@pytest.mark.parametrize(
    "options", [{"length": -1}, {"val_fraction": -0.1}, {"val_fraction": 0.5, "test_fraction": 0.5}]
)
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        own(tmp_path, tmp_path, **options).prepare()
