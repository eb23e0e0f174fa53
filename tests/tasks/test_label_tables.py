"""Labels of recordings and images from a table: every target and layout, and errors that name files."""

import io
import json
import wave

import numpy as np
import pytest

from mrconv.tasks import DataError, MissingData, task
from mrconv.tasks.input_files import read_inputs
from mrconv.tasks.preprocessing import Preprocessor

from .data_files import write_files, write_tar, write_zip

pytest.importorskip("soundfile")
LABELS = {
    "class": ("label", "xy"),
    "labels": ("label", ["b;a", ""]),
    "values": ("height,weight", ["1.5,-2", "3,4"]),
}


def wav(number):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(np.full(8, number, "<i2").tobytes())
    return file.getvalue()


def recordings(n=20, prefix=""):
    return {f"{prefix}{i}.wav": wav(i) for i in range(n)}


def table(target="class", n=20, prefix="", separator=","):
    columns, labels = LABELS[target]
    lines = [f"file,{columns}", *(f"{prefix}{i}.wav,{labels[i % 2]}" for i in range(n))]
    return "\n".join(lines).replace(",", separator) + "\n"


def prepared(tmp_path, path, **options):
    return task("folder", tmp_path / "data", path=str(path), **options).prepare()


def labels_by_number(data):
    return {int(s.example(i)[0, 0]): s.y[i].tolist() for s in data.splits.values() for i in range(len(s))}


@pytest.mark.parametrize("target", list(LABELS))
def test_a_table_labels_the_files_of_a_folder(tmp_path, target):
    root = write_files(tmp_path / "files", recordings() | {"labels.csv": table(target)})
    data = prepared(tmp_path, root, target=target, label_column=LABELS[target][0])
    y = {"class": [0, 1], "labels": [[1, 1], [0, 0]], "values": [[1.5, -2], [3, 4]]}[target]
    assert labels_by_number(data) == {i: y[i % 2] for i in range(20)}
    assert data.classes == {"class": ("x", "y"), "labels": ("a", "b"), "values": ("height", "weight")}[target]
    first = next(each for each in read_inputs(root, Preprocessor.from_data(data)) if each.name.endswith("/0.wav"))
    assert first.label == {"class": "x", "labels": "a;b", "values": "1.5, -2"}[target]


@pytest.mark.parametrize(
    "layout", ["folders", "clips", "tsv", "jsonl", "zip", "tar", "beside", "option", "splits", "each"]
)
def test_layouts_of_tables(tmp_path, layout):
    clips, options, lines = recordings(prefix="clips/"), {}, table(prefix="clips/")
    if layout == "folders":  # the table replaces the names of folders
        files = recordings(10, "one/") | {f"two/{i}.wav": wav(i) for i in range(10, 20)}
        names = list(files)
        files["labels.csv"] = "file,label\n" + "".join(f"{name},{'xy'[i % 2]}\n" for i, name in enumerate(names))
    elif layout == "clips":
        files = clips | {"labels.csv": lines.replace("clips/1.", ".\\clips\\1.")}
    elif layout == "tsv":
        files = clips | {"labels.tsv": table(prefix="clips/", separator="\t")}
    elif layout == "jsonl":
        lines = "".join(json.dumps({"file": name, "label": "xy"[i % 2]}) + "\n" for i, name in enumerate(clips))
        files = clips | {"labels.jsonl": lines}
    elif layout in ("zip", "tar"):
        members = {f"top/{name}": each for name, each in clips.items()} | {"top/labels.csv": lines.encode()}
        path = tmp_path / f"files.{layout}"
        files = {}
        write_zip(path, members) if layout == "zip" else write_tar(path, members, "w")
    elif layout == "beside":
        (tmp_path / "files").mkdir()
        write_zip(tmp_path / "files" / "all.zip", {f"top/{name}": each for name, each in clips.items()})
        files = {"labels.csv": lines}
    elif layout == "option":
        files, options = clips, {"labels": str(tmp_path / "mine.csv")}
        (tmp_path / "mine.csv").write_text(lines)
    else:
        numbers = {"train": range(14), "test": range(14, 20)}
        files = {f"{split}/{i}.wav": wav(i) for split, each in numbers.items() for i in each}
        for split, each in numbers.items():
            prefix = "" if layout == "each" else f"{split}/"
            lines = "".join(f"{prefix}{i}.wav,{'xy'[i % 2]}\n" for i in each)
            place = f"{split}/labels.csv" if layout == "each" else "labels.csv"
            files[place] = files.get(place, "file,label\n") + lines
    path = tmp_path / (f"files.{layout}" if layout in ("zip", "tar") else "files")
    data = prepared(tmp_path, write_files(path, files) if files else path, **options)
    assert labels_by_number(data) == {i: i % 2 for i in range(20)}
    assert list(data.splits) == (["train", "test"] if layout in ("splits", "each") else ["train", "val", "test"])


def test_the_label_of_an_archive_is_known_to_predictions(tmp_path):
    members = recordings(4, "top/") | {"top/labels.csv": table(n=4).encode()}
    path = write_zip(tmp_path / "a.zip", members)
    p = Preprocessor("audio", 8, ("x", "y"), sample_rate=16000)
    assert [each.label for each in read_inputs(path, p)] == ["x", "y", "x", "y"]


def test_a_column_of_the_table_may_hold_the_groups(tmp_path):
    lines = "".join(f"{i}.wav,{'xy'[i % 2]},s{i // 4}\n" for i in range(20))
    files = recordings() | {"labels.csv": f"file,label,singer\n{lines}"}
    data = prepared(
        tmp_path, write_files(tmp_path / "files", files), group="singer", val_fraction=0.2, test_fraction=0.2
    )
    singers = [{int(s.example(i)[0, 0]) // 4 for i in range(len(s))} for s in data.splits.values()]
    assert sorted(map(len, singers)) == [1, 1, 3]
    assert len(set.union(*singers)) == 5
    data = prepared(tmp_path, tmp_path / "files", group=r"^(\d)", val_fraction=0.2, test_fraction=0.2)
    assert sum(map(len, data.splits.values())) == 20  # no column: the first digit of the name


def test_a_changed_table_is_read_again(tmp_path):
    root = write_files(tmp_path / "files", recordings() | {"labels.csv": table()})
    assert prepared(tmp_path, root).classes == ("x", "y")
    (root / "labels.csv").write_text(table().replace(",y", ",other"))
    assert prepared(tmp_path, root).classes == ("other", "x")
    (root / "20.wav").write_bytes(wav(20))
    with pytest.raises(DataError, match=r"labels\.csv has no line for 1 of 21 files in .*files: 20\.wav$"):
        prepared(tmp_path, root)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (table(n=15), {}, r"labels\.csv has no line for 5 of 20 files in .*files: 15\.wav, 16\.wav, 17\.wav, \.\.\.$"),
        (table(n=22), {}, r"labels\.csv names 2 files that .*files lacks: 20\.wav, 21\.wav$"),
        (table() + "3.wav,x\n", {}, r"labels\.csv, example 21: 3\.wav has a label already, in example 4"),
        ("name,label\n", {}, r"labels\.csv has columns name, label; expected file, the column of names of files"),
        ("file,kind\n", {}, r"has columns file, kind; expected label and others.* task\.label_column=kind"),
        (table().replace(",y", ","), {}, r"labels\.csv, line 3: label is ''; expected a name"),
        (table(), {"target": "values"}, r"labels\.csv, line 2: label is 'x'; expected a finite number"),
        (table(), {"target": "positions"}, "files is for recordings or images; target=positions needs texts, tokens"),
        (None, {"target": "labels"}, r"files has no table of labels \(labels\.csv, .*, which target=labels needs"),
        (None, {}, r"0\.wav is not in a folder; expected CLASS/0\.wav, or a table labels\.csv with the columns"),
    ],
)
def test_wrong_tables_are_named(tmp_path, lines, options, message):
    root = write_files(tmp_path / "files", recordings() | ({} if lines is None else {"labels.csv": lines}))
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, root, **options)


def test_tables_that_do_not_fit_the_data_raise(tmp_path):
    root = write_files(tmp_path / "files", recordings() | {"labels.csv": table(), "labels.tsv": table()})
    with pytest.raises(DataError, match=r"labels\.csv and labels\.tsv both exist: which one has the labels"):
        prepared(tmp_path, root)
    with pytest.raises(MissingData, match=r"labels=gone\.csv does not exist: looked for /"):
        prepared(tmp_path, root, labels="gone.csv")
    (tmp_path / "a.csv").write_text("text,label\na,x\n")
    with pytest.raises(
        DataError, match=r"labels=.*files/labels\.csv is for recordings and images; .*a\.csv has its own"
    ):
        prepared(tmp_path, tmp_path / "a.csv", labels=str(root / "labels.csv"))
    # a table that is the data itself
    texts = write_files(tmp_path / "texts", {"labels.csv": "text,label\n" + "a,x\nb,y\n" * 10})
    assert prepared(tmp_path, texts).encoder == "tokens"


def test_images_have_values_as_sequences_and_labels_in_two_dimensions(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "files").mkdir()
    for i in range(20):
        image.fromarray(np.full((2, 3), i, np.uint8)).save(tmp_path / "files" / f"{i}.png")
    lines = "".join(f"{i}.png,{i / 2},{'a;b' if i % 2 else 'b'}\n" for i in range(20))
    (tmp_path / "files" / "labels.csv").write_text(f"file,label,kinds\n{lines}")
    data = prepared(tmp_path, tmp_path / "files", target="values")
    assert labels_by_number(data) == {i: [i / 2] for i in range(20)}
    data = prepared(tmp_path, tmp_path / "files", target="labels", label_column="kinds", sequence=False)
    assert (data.encoder, data.classes) == ("image", ("a", "b"))
    with pytest.raises(DataError, match="has images: target=values needs sequence=true"):
        prepared(tmp_path, tmp_path / "files", target="values", sequence=False)
