"""Custom data: every kind of file, with and without given splits, and errors."""

import io
import json
import lzma
import sys
import wave

import numpy as np
import pytest

from mrconv.tasks import DataError, MissingData, task
from mrconv.tasks.packing import random_split
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.tasks.preview import summary

from .data_files import write_files, write_zip

RNG = np.random.default_rng(0)


def custom(tmp_path, path, **options):
    return task("folder", tmp_path / "data", path=str(path), **options)


def normalised(data, split):
    """Return all examples of a split as a model sees them."""
    return np.asarray(data.splits[split].x) * data.scale + data.shift


def wav(samples, rate=16000, channels=1):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.asarray(samples, "<i2").tobytes())
    return file.getvalue()


def ogg(samples, rate=16000):
    file = io.BytesIO()
    pytest.importorskip("soundfile").write(file, samples, rate, format="OGG")
    return file.getvalue()


def png(pixels, mode=None):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.asarray(pixels, np.uint16 if mode == "I;16" else np.uint8)).save(file, "PNG")
    return file.getvalue()


def zipped(files):
    return write_zip(io.BytesIO(), files).getvalue()


def words(counts, length=8):
    return {f"{word}/{i}.wav": wav(np.arange(length) + 10 * i) for word, n in counts.items() for i in range(n)}


class TestArrays:
    def test_integers_are_tokens_shifted_by_the_padding(self, tmp_path):
        x = RNG.integers(0, 5, (20, 7))
        x[0, 0] = 4
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 3)
        data = custom(tmp_path, tmp_path / "a.npz").prepare()
        assert (data.encoder, data.length) == ("tokens", 7)
        assert data.vocabulary == ("<pad>", "0", "1", "2", "3", "4")
        assert data.classes == ("0", "1", "2")
        parts = dict(zip(("train", "val", "test"), random_split(20, (0, 0.1, 0.1), 42), strict=True))
        for name, part in parts.items():
            split = data.splits[name]
            np.testing.assert_array_equal(np.asarray(split.x).reshape(-1, 7), x[part] + 1)
            np.testing.assert_array_equal(split.y, part % 3)
        assert [len(split) for split in data.splits.values()] == [16, 2, 2]

    @pytest.mark.parametrize("shape", [(30, 6), (30, 6, 1), (30, 6, 3)])
    def test_floats_are_values_normalised_by_channel_over_the_training_data(self, tmp_path, shape):
        x = RNG.normal(5, 3, shape)
        np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(30) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
        data = custom(tmp_path, tmp_path / "a.npz").prepare()
        channels = shape[2] if len(shape) == 3 else 1
        assert (data.encoder, data.length, data.channels, list(data.splits)) == (
            "values",
            6,
            channels,
            ["train", "test"],
        )
        assert data.splits["train"].x.shape == (30, 6, channels)
        assert data.splits["train"].x.dtype == np.float32
        np.testing.assert_allclose(normalised(data, "train").mean((0, 1)), 0, atol=1e-5)
        np.testing.assert_allclose(normalised(data, "train").std((0, 1)), 1, atol=1e-5)
        np.testing.assert_array_equal(data.splits["test"].x[..., 0], x.reshape(30, 6, channels)[:4, :, 0].astype("f4"))

    def test_small_integers_with_channels_keep_their_dtype(self, tmp_path):
        x = RNG.integers(0, 255, (10, 4, 2)).astype(np.uint8)
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(10) % 2)
        assert custom(tmp_path, tmp_path / "a.npz").prepare().splits["train"].x.dtype == np.uint8

    def test_constant_channel_becomes_zero(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.full((10, 4), 7.0), y=np.arange(10) % 2)
        assert (normalised(custom(tmp_path, tmp_path / "a.npz").prepare(), "train") == 0).all()

    def test_length_is_that_of_the_model_or_cuts(self, tmp_path):
        x = RNG.normal(size=(10, 4))
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(10) % 2)
        longer = custom(tmp_path, tmp_path / "a.npz", length=6).prepare()
        assert (longer.length, longer.splits["train"].x.shape) == (6, (8, 4, 1))
        assert custom(tmp_path, tmp_path / "a.npz", length=3, cut=True).prepare().splits["train"].x.shape == (8, 3, 1)
        with pytest.raises(DataError, match=r"a\.npz, x, example \d+: length 4; expected at most length=3, or cut"):
            custom(tmp_path, tmp_path / "a.npz", length=3).prepare()

    def test_class_names_are_sorted_and_integers_by_value(self, tmp_path):
        x = RNG.normal(size=(12, 4))
        np.savez(tmp_path / "a.npz", x=x, y=[2, 10, 1] * 4)
        np.savez(tmp_path / "b.npz", x=x, y=["no", "yes", "maybe"] * 4)
        assert custom(tmp_path, tmp_path / "a.npz").prepare().classes == ("1", "2", "10")
        assert custom(tmp_path, tmp_path / "b.npz").prepare().classes == ("maybe", "no", "yes")

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
            (
                {"x": np.ones((3, 2)), "y": [0, 1]},
                r"y is int64 of shape \(2,\) for 3 examples of length 2; expected .*\(n,\)",
            ),
            (
                {"x": np.ones((3, 2)), "y": [0, 0.5, 1]},
                "y is float64 of shape .* expected integers or names .* target=values",
            ),
            ({"x": np.array([[{}]]), "y": [0]}, r"a\.npz, x is not an array of numbers or strings .*object"),
            ({"x": np.ones((20, 2)), "y": np.zeros(20, int)}, "expected at least two classes; all examples are 0"),
            ({"x": np.ones((5, 2)), "y": [0, 1, 0, 1, 0]}, "has 5 examples: too few for val with val_fraction=0.1"),
            (
                {"x": -np.ones((20, 2), int), "y": np.arange(20)},
                "integers from -1 to -1; tokens must lie in 0 .. 32766",
            ),
            ({"x": np.full((20, 2), 40000), "y": np.arange(20)}, "40000; tokens must lie in"),
            ({"x": np.full((20, 2), 1e300), "y": np.arange(20)}, r"x, example \d+: not all values are finite"),
        ],
    )
    def test_invalid_files_raise(self, tmp_path, arrays, message):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(DataError, match=message):
            custom(tmp_path, tmp_path / "a.npz").prepare()

    def test_error_numbers_examples_as_in_the_file(self, tmp_path):
        x = np.ones((20, 2))
        x[13, 1] = np.nan
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 2)
        with pytest.raises(DataError, match=r"a\.npz, x, example 14: not all values are finite"):
            custom(tmp_path, tmp_path / "a.npz").prepare()

    def test_splits_with_other_channels_or_unknown_classes_raise(self, tmp_path):
        train = {"x_train": np.ones((3, 2, 2)), "y_train": [0, 1, 0]}
        np.savez(tmp_path / "a.npz", **train, x_test=np.ones((3, 2, 1)), y_test=[0, 1, 0])
        np.savez(tmp_path / "b.npz", **train, x_test=np.ones((3, 2, 2)), y_test=[0, 1, 2])
        with pytest.raises(DataError, match="x_test has 1 channels; expected 2"):
            custom(tmp_path, tmp_path / "a.npz").prepare()
        with pytest.raises(DataError, match="x_test, example 3: class 2 is not in the training data"):
            custom(tmp_path, tmp_path / "b.npz").prepare()

    def test_truncated_file_raises(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.ones((20, 2)), y=np.arange(20))
        (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-100])
        with pytest.raises(DataError, match=r"a\.npz is not a file of arrays"):
            custom(tmp_path, tmp_path / "a.npz").prepare()


class TestTables:
    def test_text_column_gives_characters(self, tmp_path):
        lines = "".join(f'{i},"a, ""b"" {i}\nc",{"yes" if i % 2 else "no"}\n' for i in range(20))
        write_files(tmp_path, {"a.csv": "\ufeffid,text,label\n" + lines})
        data = custom(tmp_path, tmp_path / "a.csv").prepare()
        assert (data.encoder, data.classes, data.length) == ("tokens", ("no", "yes"), 12)
        split = data.splits["train"]
        for at, i in enumerate(random_split(20, (0, 0.1, 0.1), 42)[0]):
            assert "".join(data.vocabulary[token] for token in split.example(at)) == f'a, "b" {i}\nc<eos>'
            assert data.classes[split.y[at]] == ("yes" if i % 2 else "no")

    def test_texts_are_cut_to_the_length(self, tmp_path):
        write_files(tmp_path, {"a.tsv": "says\twhat\n" + "x\tabcdef\ny\tghijkl\n" * 10})
        data = custom(tmp_path, tmp_path / "a.tsv", length=4, label_column="says", text_column="what").prepare()
        kept = Preprocessor.from_json(Preprocessor.from_data(data).to_json())
        assert (kept.label_column, kept.text_column) == ("says", "what")
        assert data.vocabulary == ("<pad>", "<unk>", "<eos>", *"abcghi")
        assert (data.splits["train"].lengths == 4).all()

    def test_numbers_in_the_other_columns_are_values(self, tmp_path):
        write_files(tmp_path, {"train.csv": "a,label,b\n1,x,2\n3,y,4e1\n", "test.csv": "a,label,b\n5,y,6\n"})
        data = custom(tmp_path, tmp_path).prepare()
        assert list(data.splits) == ["train", "test"]
        np.testing.assert_array_equal(data.splits["train"].x[..., 0], [[1, 2], [3, 40]])
        np.testing.assert_array_equal(data.splits["test"].x[..., 0], [[5, 6]])
        assert data.splits["test"].y.tolist() == [1]
        assert (data.length, data.channels) == (2, 1)

    @pytest.mark.parametrize("compressed", [False, True])
    def test_json_lines_are_texts(self, tmp_path, compressed):
        lines = "".join(json.dumps({"text": f"t{i}", "label": i % 2}) + "\n" for i in range(20)).encode()
        name = "a.jsonl.xz" if compressed else "a.jsonl"
        write_files(tmp_path, {name: lzma.compress(lines) if compressed else lines})
        data = custom(tmp_path, tmp_path / name, val_fraction=0).prepare()
        assert list(data.splits) == ["train", "test"]
        assert data.classes == ("0", "1")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.csv", "text,class\na,b\n", r"has columns text, class; expected label .*task\.label_column=class"),
            ("a.csv", "", r"a\.csv has columns none"),
            ("a.csv", "text,label\n", r"a\.csv has no example"),
            ("a.csv", "a,b,label\n1,2,x\n1,two,x\n", r"a\.csv, line 3: b is 'two'; expected a number .*text_column=b"),
            ("a.csv", "a,label\n1,x\n2\n", r"a\.csv, line 3: 1 columns; expected 2"),
            ("a.csv", "text,label\na,x\nb, \n", r"a\.csv, line 3: label is ' '; expected a name"),
            ("a.csv", 'text,label\na,x\n"b,y\nc,z\n', r"a\.csv, line 4: unexpected end of data"),
            ("a.csv", b"text,label\na,x\n\xff,y\n", r"a\.csv, line 3: not UTF-8"),
            ("a.jsonl", '{"text": "a"}\n', r"line 1: no field 'label'; .*task\.label_column"),
            ("a.jsonl", '{"text": "a", "label": 1.5}\n', r"a\.jsonl, line 1: label is 1.5"),
            ("a.jsonl", '{"text": 3, "label": 1}\n', r"a\.jsonl, line 1: text is 3"),
            ("a.xlsx", "?", r"unknown kind of file .*a\.xlsx; expected \.npz"),
        ],
    )
    def test_invalid_files_raise(self, tmp_path, name, content, message):
        write_files(tmp_path, {name: content})
        with pytest.raises(DataError, match=message):
            custom(tmp_path, tmp_path / name).prepare()

    def test_splits_of_two_kinds_raise(self, tmp_path):
        write_files(tmp_path, {"train.csv": "text,label\na,x\nb,y\n", "test.csv": "a,label\n5,y\n"})
        with pytest.raises(DataError, match=r"one kind; got text in .*train\.csv and values in .*test\.csv"):
            custom(tmp_path, tmp_path).prepare()


class TestRecordings:
    @pytest.fixture(autouse=True)
    def _soundfile(self):
        pytest.importorskip("soundfile")

    def test_folders_are_the_classes(self, tmp_path):
        root = write_files(tmp_path / "files", words({"yes": 12, "no": 8}))
        data = custom(tmp_path, root).prepare()
        assert (data.encoder, data.length, data.channels, data.classes) == ("values", 8, 1, ("no", "yes"))
        assert [len(split) for split in data.splits.values()] == [16, 2, 2]
        assert data.splits["train"].x.dtype == np.int16
        assert normalised(data, "train").mean() == pytest.approx(0, abs=1e-6)
        assert normalised(data, "train").std() == pytest.approx(1)

    @pytest.mark.parametrize("form", ["folders", "archives", "archives of folders"])
    def test_splits_may_be_given_as_folders_or_archives(self, tmp_path, form):
        parts = {"train": words({"yes": 3, "no": 2}), "validation": words({"no": 1}), "test": words({"yes": 2})}
        parts["test"] |= {"__MACOSX/yes/._0.wav": b"?", ".DS_Store": b"?", "README": b"?"}
        files = {}
        for part, contents in parts.items():
            if form == "folders":
                files |= {f"{part}/{name}": content for name, content in contents.items()}
            else:
                top = f"{part}/" if form == "archives of folders" else ""
                files[f"{part}.zip"] = zipped({top + name: content for name, content in contents.items()})
        data = custom(tmp_path, write_files(tmp_path / "files", files | {"notes.txt": b""})).prepare()
        assert {name: split.y.tolist() for name, split in data.splits.items()} == {
            "train": [0, 0, 1, 1, 1],
            "val": [0],
            "test": [1, 1],
        }
        np.testing.assert_array_equal(data.splits["test"].x[1, :, 0], np.arange(8) + 10)

    def test_recordings_keep_their_lengths_and_longer_ones_raise_or_are_cut(self, tmp_path):
        root = write_files(tmp_path / "files", words({"yes": 3, "no": 3}) | {"no/long.wav": wav(np.ones(10))})
        options = {"val_fraction": 0, "test_fraction": 0}
        data = custom(tmp_path, root, **options).prepare()
        assert data.length == 10
        split = data.splits["train"]
        assert split.lengths.tolist() == [8, 8, 8, 10, 8, 8, 8]
        assert split.example(3).tolist() == np.ones((10, 1)).tolist()
        samples = np.concatenate([split.example(i) for i in range(7)])  # zeros are no part of the statistics
        assert (samples * data.scale + data.shift).std() == pytest.approx(1)
        with pytest.raises(DataError, match=r"no/long\.wav: length 10; expected at most length=9"):
            custom(tmp_path, root, length=9, **options).prepare()
        cut = custom(tmp_path, root, length=9, cut=True, **options).prepare().splits["train"]
        assert cut.lengths.tolist() == [8, 8, 8, 9, 8, 8, 8]

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"no/bad.wav": b"RIFF"}, r"cannot read .*no/bad\.wav"),
            ({"no/bad.wav": wav(np.ones(4), rate=10)}, r"no/bad\.wav must have 1,000 .* samples a second; got 10"),
            ({"top.wav": wav(np.ones(4))}, r"top\.wav is not in a folder; expected CLASS/top\.wav"),
            ({"empty/notes.txt": b""}, r"empty has no \.wav, .* file; expected some of this class"),
            ({"no/a.png": b""}, r"has audio files, and no/a\.png|has image files, and"),
        ],
    )
    def test_invalid_files_raise(self, tmp_path, files, message):
        if any(name.endswith("png") for name in files):
            files = {"no/a.png": png(np.ones((2, 2)))}
        root = write_files(tmp_path / "files", words({"yes": 10, "no": 10}) | files)
        with pytest.raises(DataError, match=message):
            custom(tmp_path, root).prepare()

    def test_recordings_of_any_rate_and_channels_are_read_as_for_a_prediction(self, tmp_path):
        pytest.importorskip("soxr")
        files = words({"yes": 9, "no": 9}, length=160) | {
            "no/slow.wav": wav(RNG.integers(-999, 999, 80), rate=8000),
            "no/stereo.wav": wav(RNG.integers(-999, 999, 320), channels=2),
            "yes/both.wav": wav(RNG.integers(-999, 999, 160), rate=8000, channels=2),
            "yes/compressed.ogg": ogg(RNG.normal(0, 0.1, 160)),
        }
        root = write_files(tmp_path / "files", files)
        data = custom(tmp_path, root, val_fraction=0, test_fraction=0).prepare()
        assert data.length == 160
        assert data.facts["changes"] == (
            "resampled from 8,000 to 16,000 samples a second (2 of 22 files); 2 channels were averaged (2 of 22 files)"
        )
        assert f"changed: {data.facts['changes']}" in summary(data)
        preprocessor, trained = Preprocessor.from_data(data), normalised(data, "train").astype(np.float32)
        for name, x in zip(sorted(files), trained, strict=True):
            np.testing.assert_allclose(preprocessor.from_audio(files[name]).x, x, atol=1e-6)

    def test_another_sampling_rate(self, tmp_path):
        files = {f"{word}/{i}.wav": wav(np.arange(4), rate=8000) for word in ("a", "b") for i in range(10)}
        root = write_files(tmp_path / "files", files)
        data = custom(tmp_path, root, sample_rate=8000).prepare()
        assert (data.facts["sample_rate"], data.length, "changes" in data.facts) == (8000, 4, False)
        with pytest.raises(ValueError, match="sample_rate must be positive, in samples a second; got 0"):
            custom(tmp_path, root, sample_rate=0).prepare()

    def test_a_cache_with_the_former_name_of_the_sampling_rate_is_read(self, tmp_path):
        folder_task = custom(tmp_path, write_files(tmp_path / "files", words({"yes": 10, "no": 10})))
        metadata = folder_task.prepare().folder / "meta.json"
        metadata.write_text(metadata.read_text().replace("sample_rate", "sampling_rate"))
        assert folder_task.prepare().facts["sample_rate"] == 16000

    def test_truncated_archive_raises(self, tmp_path):
        content = zipped(words({"yes": 10, "no": 10}))
        write_files(tmp_path, {"a.zip": content[:-200]})
        with pytest.raises(DataError, match=r"a\.zip"):
            custom(tmp_path, tmp_path / "a.zip").prepare()

    def test_cache_may_lie_beside_the_class_folders(self, tmp_path):
        root = write_files(tmp_path / "files", words({"yes": 10, "no": 10}))
        folder_task = task("folder", root, path=str(root))
        first = folder_task.prepare().folder
        assert first.parent == root / "cache"
        assert folder_task.prepare().folder == first
        assert len(list((root / "cache").iterdir())) == 1

    def test_moving_a_file_to_another_class_changes_the_cache_folder(self, tmp_path):
        root = write_files(tmp_path / "files", words({"yes": 10, "no": 10}) | {"no/x.wav": wav(np.ones(8))})
        before = custom(tmp_path, root).cache_folder()
        (root / "no/x.wav").rename(root / "yes/x.wav")
        assert custom(tmp_path, root).cache_folder() != before


class TestImages:
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
    def test_images_are_sequences_of_pixels_in_raster_order(self, tmp_path, channels):
        root = write_files(tmp_path / "files", self.files(channels))
        data = custom(tmp_path, root, val_fraction=0, test_fraction=0).prepare()
        assert (data.encoder, data.length, data.channels) == ("values", 6, channels)
        x = np.asarray(data.splits["train"].x)
        assert x.dtype == np.uint8
        for sequence, pixels in zip(x, self.pixels.values(), strict=True):
            np.testing.assert_array_equal(sequence, pixels.reshape(6, channels))
        np.testing.assert_allclose(normalised(data, "train").mean((0, 1)), 0, atol=1e-5)

    def test_images_without_sequence_stay_images(self, tmp_path):
        data = custom(tmp_path, write_files(tmp_path / "files", self.files()), sequence=False).prepare()
        assert data.encoder == "image"
        assert data.splits["train"].x.shape == (8, 2, 3, 3)
        assert normalised(data, "train").shape == (8, 2, 3, 3)

    def test_one_colour_image_makes_all_images_colour_unless_grey(self, tmp_path):
        root = write_files(tmp_path / "files", self.files(mixed=True))
        options = {"val_fraction": 0, "test_fraction": 0}
        colour = custom(tmp_path, root, **options).prepare()
        first = np.asarray(colour.splits["train"].x)[0]
        np.testing.assert_array_equal(first, np.repeat(self.pixels["cat/0.png"].reshape(6, 1), 3, 1))
        assert custom(tmp_path, root, grey=True, **options).prepare().channels == 1

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (lambda: png(np.ones((2, 3)))[:-30], r"cat/9\.png is not a PNG or JPEG file, or is damaged or truncated"),
            (lambda: b"", r"cat/9\.png is not a PNG or JPEG file"),
            (lambda: png(np.ones((2, 3)), "I;16"), r"cat/9\.png has pixels of more than 8 bits"),
        ],
    )
    def test_invalid_image_raises_with_its_path(self, tmp_path, content, message):
        root = write_files(tmp_path / "files", self.files() | {"cat/9.png": content()})
        with pytest.raises(DataError, match=message):
            custom(tmp_path, root).prepare()

    def test_images_of_several_sizes_are_resized_as_for_a_prediction(self, tmp_path):
        files = self.files() | {
            "cat/tall.png": png(RNG.integers(0, 255, (40, 30, 3))),
            "dog/grey.png": png(RNG.integers(0, 255, (5, 4))),
        }
        root = write_files(tmp_path / "files", files)
        data = custom(tmp_path, root, val_fraction=0, test_fraction=0).prepare()
        assert data.image_size == (2, 3)
        assert data.facts["changes"] == (
            "resized from 30 x 40 to 3 x 2 pixels (1 of 12 files); resized from 4 x 5 to 3 x 2 pixels (1 of 12 files)"
        )
        preprocessor, trained = Preprocessor.from_data(data), normalised(data, "train").astype(np.float32)
        for name, x in zip(sorted(files), trained, strict=True):
            np.testing.assert_allclose(preprocessor.from_image(files[name]).x, x, atol=1e-6)

    def test_images_are_resized_to_the_size(self, tmp_path):
        data = custom(tmp_path, write_files(tmp_path / "files", self.files()), size=4).prepare()
        assert (data.image_size, data.length, data.splits["train"].x.shape) == ((4, 4), 16, (8, 16, 3))
        assert data.facts["changes"] == "resized from 3 x 2 to 4 x 4 pixels (10 of 10 files)"

    def test_other_splits_have_the_size_of_train_and_a_length_raises(self, tmp_path):
        files = {f"train/{name}": content for name, content in self.files().items()}
        others = {f"test/cat/{i}.png": png(np.ones((3, 3, 3))) for i in range(20)}
        root = write_files(tmp_path / "files", files | others)
        assert custom(tmp_path, root).prepare().image_size == (2, 3)
        with pytest.raises(DataError, match="leave length at 0, or set size"):
            custom(tmp_path, root, length=5).prepare()

    def test_without_pillow_the_extra_is_named(self, tmp_path, monkeypatch):
        root = write_files(tmp_path / "files", self.files())
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(DataError, match="needs Pillow: install mrconv with its extra 'data'"):
            custom(tmp_path, root).prepare()


def test_missing_path_raises(tmp_path):
    with pytest.raises(MissingData, match="set path, or data with `mrconv train`, to a file"):
        task("folder", tmp_path).prepare()
    with pytest.raises(MissingData, match=r"gone does not exist: looked for /"):
        custom(tmp_path, tmp_path / "gone").prepare()


def test_ambiguous_folder_raises(tmp_path):
    table = "text,label\na,x\nb,y\n"
    for files, message in (
        ({"test.csv": table}, r"has test\.csv; expected train too"),
        ({"train.csv": table, "train.jsonl": "", "test.csv": table}, r"train\.csv and train\.jsonl both exist"),
        ({"a.csv": table, "b.csv": table}, r"a\.csv, b\.csv: set path to one of them or name them train, test"),
        ({"notes.txt": ""}, r"has no \.wav, .*and is not a table"),
    ):
        root = write_files(tmp_path / message[:9].strip("\\ "), files)
        with pytest.raises(DataError, match=message):
            custom(tmp_path, root).prepare()


def test_folder_with_a_single_table(tmp_path):
    root = write_files(tmp_path / "files", {"train.csv": "text,label\n" + "a,x\nb,y\n" * 10, "README.md": "?"})
    assert [len(split) for split in custom(tmp_path, root).prepare().splits.values()] == [16, 2, 2]


def test_arrays_with_lengths_are_read_without_their_padding(tmp_path):
    x = RNG.integers(1, 9, (40, 6))
    lengths, y = np.arange(40) % 6 + 1, np.arange(40) % 2
    np.savez(tmp_path / "tokens.npz", x=np.where(np.arange(6) < lengths[:, None], x, 30000), y=y, lengths=lengths)
    data = custom(tmp_path, tmp_path / "tokens.npz").prepare()
    assert len(data.vocabulary) == 10  # the padding is no token
    train = random_split(40, (0.0, 0.1, 0.1), 42)[0]
    assert data.splits["train"].lengths.tolist() == lengths[train].tolist()
    assert data.splits["train"].example(3).tolist() == (x[train[3], : lengths[train[3]]] + 1).tolist()

    np.savez(tmp_path / "values.npz", x=x.astype(float), y=y, lengths=lengths)
    split = custom(tmp_path, tmp_path / "values.npz").prepare().splits["train"]
    assert all(np.array_equal(split.example(i)[:, 0], x[j, : lengths[j]]) for i, j in enumerate(train))


@pytest.mark.parametrize("dtype", [int, float])
def test_labels_of_positions_after_the_lengths_are_ignored(tmp_path, dtype):
    x, lengths = RNG.integers(1, 9, (40, 6)).astype(dtype), np.arange(40) % 6 + 1
    np.savez(tmp_path / "d.npz", x=x, y=(x > 4).astype(int), lengths=lengths)
    y = custom(tmp_path, tmp_path / "d.npz", target="positions").prepare().splits["train"].y
    train = random_split(40, (0.0, 0.1, 0.1), 42)[0]
    assert np.array_equal(y >= 0, np.arange(6) < lengths[train][:, None])


def test_wrong_lengths_raise(tmp_path):
    for lengths in ([7] * 40, [0] * 40, [6] * 39, [2.5] * 40):
        np.savez(tmp_path / "d.npz", x=np.ones((40, 6)), y=np.arange(40) % 2, lengths=lengths)
        with pytest.raises(DataError, match=r"expected 40 integers in 1 \.\. 6"):
            custom(tmp_path, tmp_path / "d.npz").prepare()
