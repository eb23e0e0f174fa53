"""`mrconv data`: its output, and errors in one line."""

import io
import json
import re
import sys
import tarfile

import numpy as np
import pytest

from mrconv.cli import main
from mrconv.tasks import MissingData, Prepared, Split, preview, task, task_names

from .tasks.data_files import write_tar

SMALL = ["train_size=60", "val_size=10", "test_size=10", "min_length=20", "max_length=90"]


def test_list_prints_every_task_with_its_options(tmp_path, capsys):
    assert main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == task_names()
    assert any(line.split()[:2] == ["listops", "generated"] for line in lines)
    assert any(line.split()[:2] == ["text", "missing"] for line in lines)
    assert any("train_size=96000" in line for line in lines)


def test_prepare_prints_counts_and_the_folder(tmp_path, capsys):
    assert main(["data", "prepare", "listops", *SMALL, "--data-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "train           60 examples" in out
    assert "lengths of train" in out
    folder = out.splitlines()[-1].removeprefix("in ")
    assert (tmp_path / "cache") in [p.parent for p in (tmp_path / "cache").iterdir()]
    assert folder.startswith(str(tmp_path / "cache" / "listops-"))
    assert main(["data", "list", "--data-dir", str(tmp_path)]) == 0


def test_show_prints_an_example(tmp_path, capsys):
    command = ["data", "show", "listops", *SMALL, "--data-dir", str(tmp_path), "--split", "val", "--example", "3"]
    assert main(command) == 0
    head, example = capsys.readouterr().out.splitlines()[-2:]
    assert head.startswith("val 3: ")
    assert example.startswith("[M") or example.startswith("[S")


def test_show_draws(tmp_path, capsys):
    out = tmp_path / "deep" / "listops.png"
    assert main(["data", "show", "listops", *SMALL, "--data-dir", str(tmp_path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert out.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "listopz"], "got 'listopz'; did you mean 'listops'?"),
        (["show", "listops", "lengths=3"], "listops has no option 'lengths'; did you mean 'length'? Its options are"),
        (["show", "listops", "length=abc"], "option length takes a number like 2048; got 'abc'"),
        (["show", "pathfinder", "centre=yes"], "option centre takes true or false; got 'yes'"),
        (["show", "listops", "length"], "expected an option as NAME=VALUE; got 'length'"),
        (["show", "listops", "data_dir=x"], "data_dir is not an option of a task; use --data-dir DIR"),
        (["prepare", "text"], "text: none of aclImdb"),
        (["prepare", "retrieval", "--download"], "retrieval has no stable public address to download from"),
        (["show", "listops", *SMALL, "--split", "dev"], "listops has train, val, test; got 'dev'"),
        (["show", "listops", *SMALL, "--example", "10", "--split", "val"], "val has examples 0 .. 9; got 10"),
    ],
)
def test_errors_are_printed_in_one_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", *arguments, "--data-dir", str(tmp_path)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def prepared(x, classes=("a", "b"), encoder="values"):
    split = Split("train", x, np.arange(len(x)) % 2)
    return Prepared("some", encoder, classes, x.shape[1], {"train": split}, (), x.shape[2])


def test_images_are_half_blocks_and_waveforms_are_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    pixels = np.zeros((2, 16, 1), np.uint8)
    pixels[1, 5] = 255
    text = preview.describe_example(prepared(pixels), prepared(pixels).splits["train"], 1)
    assert text.count("▀") == 8
    assert "38;5;232;48;5;255m▀" in text  # dark above, bright below
    waveform = (1000 * np.sin(np.arange(400) / 20)).astype(np.int16)[None, :, None].repeat(2, 0)
    text = preview.describe_example(prepared(waveform), prepared(waveform).splits["train"], 0)
    assert text.splitlines()[0] == "train 0: a"
    assert len(text.splitlines()) == 10
    for i, data in enumerate((prepared(pixels), prepared(waveform))):
        preview.draw_examples(data, tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 1000


@pytest.mark.parametrize("suffix", [".tar.xz", ".tar.bz2"])
def test_packed_data_is_found_on_a_machine_without_the_source_files(tmp_path, capsys, suffix):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    for split in ("train", "test"):
        rows = [{"text": f"review {i} {'good' if i % 2 else 'bad'}", "label": i % 2} for i in range(20)]
        (here / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options, packed = ["min_freq=1", "length=64"], tmp_path / f"text{suffix}"
    assert main(["data", "pack", "text", str(packed), *options, "--data-dir", str(here)]) == 0
    assert capsys.readouterr().out.startswith(f"{packed}: 0.0 MiB")
    with pytest.raises(SystemExit):
        main(["data", "show", "text", *options, "--data-dir", str(there)])
    assert main(["data", "unpack", str(packed), "--data-dir", str(there)]) == 0
    assert main(["data", "unpack", str(packed), "--data-dir", str(there)]) == 0  # again: no harm
    assert main(["data", "show", "text", *options, "--data-dir", str(there)]) == 0
    settings = {"min_freq": 1, "length": 64}
    expected, actual = (task("text", folder, **settings).prepare() for folder in (here, there))
    assert actual.folder != expected.folder
    assert np.array_equal(actual.splits["test"].x, expected.splits["test"].x)
    assert actual.vocabulary == expected.vocabulary
    with pytest.raises(MissingData):  # other options, other data
        task("text", there, length=32).prepare()


def test_packed_data_has_a_name_from_which_it_can_be_unpacked(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["data", "pack", "listops", str(tmp_path / "listops.tar"), *SMALL, "--data-dir", str(tmp_path)])
    assert "the name of packed data must end in .tar.xz or .tar.bz2; got" in capsys.readouterr().err
    assert not (tmp_path / "listops.tar").exists()


def test_damaged_packed_data_leaves_nothing_behind(tmp_path, capsys):
    packed = tmp_path / "listops.tar.xz"
    assert main(["data", "pack", "listops", str(packed), *SMALL, "--data-dir", str(tmp_path / "here")]) == 0
    content = packed.read_bytes()
    packed.write_bytes(content[: len(content) // 2])
    other = tmp_path / "other.tar.xz"
    with tarfile.open(other, "w:xz") as tar:
        tar.add(packed, "../evil.npy")
    errors = {packed: "is damaged", other: "points outside of the archive", tmp_path / "none": "does not exist"}
    for file, message in errors.items():
        with pytest.raises(SystemExit):
            main(["data", "unpack", str(file), "--data-dir", str(tmp_path / "there")])
        assert message in capsys.readouterr().err
    assert not list((tmp_path / "there" / "cache").iterdir())


def test_packed_data_that_expands_too_much_is_rejected(tmp_path, capsys):
    packed = tmp_path / "listops.tar.xz"
    assert main(["data", "pack", "listops", str(packed), *SMALL, "--data-dir", str(tmp_path / "here")]) == 0
    with tarfile.open(packed) as tar:
        task = tar.extractfile("task.json").read()
    write_tar(packed, {"task.json": task, "train.x.npy": bytes(2**21)}, "w:xz")
    arguments = ["data", "unpack", str(packed), "--data-dir", str(tmp_path / "there")]
    for options, message in (
        (["--max-mib", "1"], "more than 1 MiB when read; .*raise --max-mib"),
        ([], "holds no meta"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, *options])
        assert re.search(rf"listops\.tar\.xz.*{message}", capsys.readouterr().err)
    assert not list((tmp_path / "there" / "cache").iterdir())


def test_unpacked_arrays_are_checked(tmp_path, capsys):
    packed = tmp_path / "listops.tar.xz"
    assert main(["data", "pack", "listops", str(packed), *SMALL, "--data-dir", str(tmp_path / "here")]) == 0
    with tarfile.open(packed) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    for name, value, message in (
        ("val.y.npy", 10, "example 0 of val has label 10; expected 0 .. 9"),
        ("test.x.npy", 18, "listops.tar.xz: the tokens of test must lie in 0 .. 17"),
    ):
        np.save(file := io.BytesIO(), np.full_like(np.load(io.BytesIO(files[name])), value))
        write_tar(packed, files | {name: file.getvalue()}, "w:xz")
        with pytest.raises(SystemExit):
            main(["data", "unpack", str(packed), "--data-dir", str(tmp_path / "there")])
        assert message in capsys.readouterr().err
    assert not list((tmp_path / "there" / "cache").iterdir())
