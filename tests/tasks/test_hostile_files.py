"""Files that are damaged or hostile: one line that names the file, without reading more than a task can need."""

import gzip
import io
import json
import lzma
import pickle
import zipfile

import numpy as np
import pytest

from mrconv.tasks import DataError, task
from mrconv.tasks.cifar import PickledArray, parse_batch, parse_class_names, safe_unpickle
from mrconv.tasks.mnist import read_idx
from mrconv.tasks.npy_files import parse_npy
from mrconv.tasks.reading import limited
from mrconv.tasks.text_lines import read_json_lines, read_lines

from .data_files import most_memory, write_deflated, write_files

MIB = 2**20
X, Y = np.ones((20, 4), np.float32), np.arange(20) % 2


def custom(path, **options):
    return task("folder", path.parent / "data", path=str(path), **options)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_header(shape, dtype="<f4"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def test_an_error_is_one_line_that_cannot_control_a_terminal():
    assert str(DataError("a\n\x1b[2J\ud83d é")) == r"a\n\x1b[2J\ud83d é"
    assert len(str(DataError("é" * 5000))) == 1000


class TestArrays:
    @pytest.mark.parametrize("y", [1e30, np.inf, np.nan, -1e30])
    def test_labels_that_are_no_integers_are_rejected(self, tmp_path, y):
        np.savez(tmp_path / "a.npz", x=X, y=np.where(Y == 1, y, 0.0))
        with pytest.raises(DataError, match=r"a\.npz, y is float64 of shape .* expected integers or names"):
            custom(tmp_path / "a.npz").prepare()

    def test_large_integers_keep_their_names(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=X, y=np.where(Y == 1, np.uint64(2**64 - 1), np.uint64(0)))
        assert custom(tmp_path / "a.npz").prepare().classes == ("0", str(2**64 - 1))

    def test_values_beyond_float32_are_rejected(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=X, y=1e300 * Y)
        with pytest.raises(DataError, match=r"a\.npz, y is float64 .* expected finite numbers"):
            custom(tmp_path / "a.npz", target="values").prepare()
        (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "label": 1{"0" * 400}}}\n' * 20)
        with pytest.raises(DataError, match=r"a\.jsonl, line 1: label is 1000.* expected a finite number"):
            custom(tmp_path / "a.jsonl", target="values").prepare()

    def test_arrays_that_are_not_asked_for_are_not_read(self, tmp_path):
        write_deflated(tmp_path / "a.npz", {"x.npy": npy(X), "y.npy": npy(Y), "z.npy": bytes(24 * MIB), "w": b"?"})
        with most_memory(8 * MIB):
            assert len(custom(tmp_path / "a.npz", max_file_mib=1).prepare().splits) == 3

    def test_an_array_that_expands_too_much_is_rejected(self, tmp_path):
        write_deflated(tmp_path / "a.npz", {"x.npy": npy(np.zeros((20, 300_000), np.float32)), "y.npy": npy(Y)})
        with most_memory(8 * MIB), pytest.raises(DataError, match=r"a\.npz, x has more than 1 MiB .* max_file_mib"):
            custom(tmp_path / "a.npz", max_file_mib=1).prepare()
        assert custom(tmp_path / "a.npz", max_file_mib=32).prepare().length == 300_000

    def test_an_array_may_be_as_large_as_its_file(self, tmp_path):
        x = np.random.default_rng(0).normal(size=(20, 20_000))
        np.savez(tmp_path / "a.npz", x=x, y=Y)
        np.savez_compressed(tmp_path / "b.npz", x=x.astype(np.float16), y=Y)
        for name in ("a.npz", "b.npz"):
            assert custom(tmp_path / name, max_file_mib=1).prepare().length == 20_000

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (npy_header((2**40, 2**10)), r"0 bytes; its shape .* needs 4,503,"),
            (npy_header((-1, -4)) + bytes(16), "its shape"),
            (npy_header((2,), "|O"), "its dtype is object"),
            (npy_header((2,), [("a", "<i4")]) + bytes(8), "its dtype is"),
            (npy(X)[:-1], "319 bytes; its shape"),
            (b"\x93NUMPY\x09\x00", ""),
            (b"", "EOF"),
            (npy_header((1,), "<U1") + b"\x3d\xd8\0\0", "code points that are no characters"),
            (npy_header((1,), "<U1") + b"\xff" * 4, "code points that are no characters"),
        ],
        ids=range(9),
    )
    def test_an_invalid_array_is_rejected(self, content, message):
        with most_memory(MIB), pytest.raises(DataError, match=rf"a\.npz, x is not an array .*{message}"):
            parse_npy(content, "a.npz, x")

    def test_a_single_array_is_not_a_file_of_arrays(self, tmp_path):
        (tmp_path / "a.npz").write_bytes(npy(X))
        with pytest.raises(DataError, match=r"a\.npz is not a file of arrays saved by numpy\.savez"):
            custom(tmp_path / "a.npz").prepare()


class TestTexts:
    @pytest.mark.parametrize("field", ["text", "label"])
    @pytest.mark.parametrize("half", [r"\ud83d", r"a\uDE00 b"])
    def test_a_lone_surrogate_is_rejected_with_its_line(self, tmp_path, field, half):
        lines = [
            json.dumps({"text": "\U0001f600", "label": "a"}),
            f'{{"text": "a", "label": "b", "{field}": "{half}"}}',
        ]
        (tmp_path / "a.jsonl").write_text("\n".join(lines * 10))
        with pytest.raises(DataError, match=r"a\.jsonl, line 2: the text has a lone surrogate, '\\u.*half of a char"):
            custom(tmp_path / "a.jsonl").prepare()
        (tmp_path / "a.jsonl").write_text("\n".join([lines[0], lines[0].replace('"a"', '"b"')] * 10))
        assert custom(tmp_path / "a.jsonl").prepare().vocabulary[-1] == "\U0001f600"

    @pytest.mark.parametrize("part", ["[", '{"text": ', "1"])
    def test_json_that_python_cannot_parse_is_rejected(self, tmp_path, part):
        (tmp_path / "a.jsonl").write_text(part * 50_000)
        with pytest.raises(DataError, match=r"a\.jsonl, line 1: not JSON"):
            list(read_json_lines(tmp_path / "a.jsonl", "text"))

    @pytest.mark.parametrize("line", [b" ", b'{"text": "' + b" " * 99 + b'"}\n'], ids=["one line", "many lines"])
    def test_a_compressed_text_that_expands_too_much_is_rejected(self, tmp_path, line):
        (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(line * (24 * MIB // len(line)), preset=0))
        with limited(1), most_memory(8 * MIB), pytest.raises(DataError, match=r"a\.jsonl\.xz.* has more than 1 MiB"):
            all(read_lines(tmp_path / "a.jsonl.xz"))

    def test_one_long_text_does_not_set_the_length_of_all(self, tmp_path):
        (tmp_path / "a.csv").write_text("text,label\n" + "a,1\nb,2\n" * 9 + "a" * (2**20 + 1) + ",1\n")
        with pytest.raises(DataError, match=r"a\.csv, example 19: 1,048,577 characters, .* task\.length=1048577"):
            custom(tmp_path / "a.csv").prepare()
        assert custom(tmp_path / "a.csv", length=9).prepare().length == 9

    def test_labels_of_very_many_digits_are_names(self, tmp_path):
        (tmp_path / "a.csv").write_text("text,label\n" + f"a,1\nb,{'2' * 5000}\n" * 9)
        assert custom(tmp_path / "a.csv").prepare().classes == ("1", "2" * 5000)

    def test_a_line_is_limited(self, tmp_path):
        (tmp_path / "a.csv").write_bytes(b"text,label\n" + b"a" * 2 * MIB + b",1\n")
        with pytest.raises(DataError, match=r"a\.csv, line 2, has more than 1 MiB .* max_file_mib"):
            custom(tmp_path / "a.csv", max_file_mib=1).prepare()


class TestMedia:
    def test_one_long_recording_does_not_pad_all_others(self, tmp_path):
        soundfile = pytest.importorskip("soundfile")
        long = io.BytesIO()
        soundfile.write(long, np.zeros(2**20 + 1, np.int16), 16_000, format="FLAC")
        short = io.BytesIO()
        soundfile.write(short, np.ones(100, np.int16), 16_000, format="WAV")
        files = {f"{word}/{i}.wav": short.getvalue() for word in "ab" for i in range(9)} | {
            "a/long.flac": long.getvalue()
        }
        root = write_files(tmp_path / "files", files)
        with pytest.raises(
            DataError, match=r"a/long\.flac: 1,048,577 samples, which would be .* task\.length=1048577.*task\.cut=true"
        ):
            custom(root).prepare()
        assert custom(root, length=100, cut=True).prepare().length == 100

    def test_a_recording_is_limited_by_what_its_header_declares(self, tmp_path):
        soundfile = pytest.importorskip("soundfile")
        file = io.BytesIO()
        soundfile.write(file, np.zeros(5_000_000, np.int16), 16_000, format="FLAC")
        root = write_files(tmp_path / "files", {"a/1.flac": file.getvalue()})
        with most_memory(8 * MIB), pytest.raises(DataError, match=r"a/1\.flac has more than 16 MiB when read"):
            custom(root, max_file_mib=16).prepare()

    def test_an_image_is_limited_by_its_size(self, tmp_path):
        pillow = pytest.importorskip("PIL.Image")
        file = io.BytesIO()
        pillow.new("L", (3000, 3000)).save(file, "PNG")
        root = write_files(tmp_path / "files", {"a/1.png": file.getvalue()})
        with most_memory(8 * MIB), pytest.raises(DataError, match=r"a/1\.png has more than 16 MiB when read"):
            custom(root, max_file_mib=16).prepare()

    def test_one_image_that_occurs_often_in_a_zip_is_rejected(self, tmp_path):
        pillow = pytest.importorskip("PIL.Image")
        file = io.BytesIO()
        pillow.new("L", (1000, 1000)).save(file, "PNG")
        write_deflated(tmp_path / "a.zip", {f"{i % 2}/{i}.png": file.getvalue() for i in range(20)})
        with most_memory(24 * MIB), pytest.raises(DataError, match=r"the content of .*a\.zip has more than 4 MiB"):
            custom(tmp_path / "a.zip", max_file_mib=4).prepare()


def test_a_compressed_mnist_file_that_expands_too_much_is_rejected(tmp_path):
    (tmp_path / "images.gz").write_bytes(gzip.compress(bytes(24 * MIB), 1))
    with limited(1), most_memory(8 * MIB), pytest.raises(DataError, match=r"images\.gz has more than 1 MiB"):
        read_idx(tmp_path / "images.gz", 3)


class Reduced:
    """An object that is pickled as a call with a state."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


class TestPickles:
    def test_arrays_and_types_are_not_created_from_a_pickle(self):
        fields = {"f": (np.dtype("O"), 0)}  # with the flags of a type without objects: bytes taken for pointers
        evil = Reduced(np.dtype, ("V8", False, True), (3, "|", None, ("f",), fields, 8, 1, 0))
        content = pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [evil]}, protocol=4)
        for value in (*(data := safe_unpickle(content, "a")).values(), *data["labels"]):
            assert type(value) in (PickledArray, list)
        with pytest.raises(DataError, match="a: image 0 has label of type PickledArray; expected 0 to 9"):
            parse_batch(content, "a")

    def test_unpickled_objects_are_not_printed(self):
        for label in (10**5000, [[]], "1" * 10**6, None, True, 10**6):
            content = pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [label]}, protocol=4)
            with pytest.raises(DataError, match=rf"^a: image 0 has label of type {type(label).__name__}; expected"):
                parse_batch(content, "a")

    @pytest.mark.parametrize(
        "state",
        [
            (1, (2**40, 3072), np.dtype("u1"), False, b""),
            (1, (-1, 3072), np.dtype("u1"), False, bytes(3072)),
            (1, (1, 3072), np.dtype("O"), False, bytes(3072)),
            (1, (1, 3072), np.dtype("u1"), False, [1]),
            (1, 3072, np.dtype("u1"), False, bytes(3072)),
            (1, (1, 3072), "u1", False, bytes(3072)),
            (1, (1, 3072), np.dtype("u1"), False, "€" * 3072),
            None,
        ],
        ids=range(8),
    )
    def test_invalid_states_of_arrays_are_rejected(self, state):
        array = Reduced(np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), state)
        with most_memory(MIB), pytest.raises(DataError, match=r"^a"):
            parse_batch(pickle.dumps({"data": array, "labels": [0]}, protocol=4), "a")

    def test_arrays_in_fortran_order_are_read(self):
        array = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
        content = pickle.dumps({"data": np.asfortranarray(array), "labels": [0, 1]}, protocol=4)
        assert (parse_batch(content, "a")[0] == array.reshape(2, 3, 1024)).all()

    def test_keys_and_names_may_be_bytes(self):
        names = [f"{i}\xe9".encode("latin1") for i in range(10)]
        assert parse_class_names(pickle.dumps({b"label_names": names}), "a")[9] == "9é"

    def test_a_large_index_does_not_allocate(self):
        with most_memory(MIB), pytest.raises(DataError, match=r"a is not a pickle.*index of 2147483647"):
            safe_unpickle(b"\x80\x02}r\xff\xff\xff\x7f.", "a")


def test_a_zip_may_be_compressed_by_deflate_only(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", npy(X))
        archive.writestr("y.npy", npy(Y))
    with pytest.raises(DataError, match=r"a\.npz, x is compressed by method 14; expected deflate or none"):
        custom(tmp_path / "a.npz").prepare()


def test_the_limit_must_not_be_negative(tmp_path):
    with pytest.raises(ValueError, match="max_file_mib must be 0, for what folder needs, or more; got -1"):
        custom(tmp_path / "a.npz", max_file_mib=-1).prepare()
