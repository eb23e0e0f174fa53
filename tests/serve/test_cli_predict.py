"""mrconv predict on the command line."""

import csv
import io
import json
import sys

import numpy as np
import pytest

from mrconv import inference
from mrconv.cli import main

from .models import save
from .test_predict import png, wav


def predicted(capsys, *arguments):
    assert main(["predict", *map(str, arguments), "--device", "cpu"]) == 0
    return capsys.readouterr()


def probabilities(folder, raw):
    (prediction,) = inference.load(folder).predict([raw])
    return prediction.probabilities


def test_a_text(tmp_path, capsys):
    folder = save("text", tmp_path / "model")
    expected = probabilities(folder, "what a film")
    lines = predicted(capsys, folder, "--text", "what a film").out.splitlines()
    label = max(expected, key=expected.get)
    assert lines[0] == f"{label}  {100 * expected[label]:5.1f} %"
    assert len(lines) == 2
    assert len(predicted(capsys, folder, "--text", "what a film", "--top", 1).out.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("audio", "yes.wav", wav(np.sin(np.arange(900) / 9))),
        ("image", "night.png", png(np.zeros((20, 30, 3), np.uint8))),
        ("values", "values.JSON", json.dumps({"values": [[1, 2], [3, 4]]}).encode()),
        ("text", "review.txt", b"not good"),
        ("pair", "both.json", b'{"text": "one", "text2": "other"}'),
    ],
)
def test_files_of_every_kind(tmp_path, capsys, name, file, content):
    folder, path = save(name, tmp_path / "model"), tmp_path / file
    path.write_bytes(content)
    printed = json.loads(predicted(capsys, folder, path, "--json").out)
    raw = json.loads(content) if file.lower().endswith("json") else content
    assert printed["probabilities"] == pytest.approx(probabilities(folder, raw), rel=1e-5)
    assert printed["label"] == max(printed["probabilities"], key=printed["probabilities"].get)
    assert printed["input"] == str(path)


def test_several_inputs_and_standard_input(tmp_path, capsys, monkeypatch):
    folder = save("listops", tmp_path / "model")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[MAX 1 2 ]")))
    lines = predicted(capsys, folder, "-", "--text", "[MIN 1 2 ]", "--top", 2).out.splitlines()
    assert lines[::3] == ["--text: [MIN 1 2 ]", "-"]
    assert len(lines) == 6


def test_numbers_on_standard_input(tmp_path, capsys, monkeypatch):
    content = b'{"values": [[1, 2], [3, 4]]}'
    folder = save("values", tmp_path / "model")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    printed = json.loads(predicted(capsys, folder, "-", "--json").out)["probabilities"]
    assert printed == pytest.approx(probabilities(folder, json.loads(content)), rel=1e-5)


def test_a_note_goes_to_standard_error(tmp_path, capsys):
    printed = predicted(capsys, save("text", tmp_path / "model"), "--text", "ab " * 100)
    assert printed.err == "note: only the first 199 of 300 symbols were used\n"


def test_notes_on_several_inputs_are_counted_and_limited(tmp_path, capsys):
    texts = [f"{'ab ' * 100}{'c' * i}" for i in range(8)] + ["Ü", "Ü"]
    printed = predicted(capsys, save("text", tmp_path / "model"), *(w for text in texts for w in ("--text", text)))
    lines = printed.err.splitlines()
    assert lines[0] == "note: 1 symbol is unknown to the model (2 inputs)"
    assert lines[1] == "note: only the first 199 of 300 symbols were used (--text 1)"
    assert lines[5:] == ["note: 4 more notes: --json and --out list them"]


def test_unknown_symbols_are_noted(tmp_path, capsys):
    printed = predicted(capsys, save("text", tmp_path / "model"), "--text", "Ü日本")
    assert printed.err == "note: 3 symbols are unknown to the model\n"


def test_nothing_is_printed_if_one_input_fails(tmp_path, capsys):
    folder = save("values", tmp_path / "model")
    for name, values in (("good", [1, 2]), ("bad", [1e20, -1e20])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"values": [values] * 50}))
    with pytest.raises(SystemExit):
        main(["predict", str(folder), str(tmp_path / "good.json"), str(tmp_path / "bad.json"), "--device", "cpu"])
    printed = capsys.readouterr()
    assert "bad.json: the model's output for this input is not finite" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no input: give a FILE or --text"),
        (["missing.wav"], "missing.wav does not exist"),
        (["--text", ""], "--text: expected at least one symbol; got none"),
        (["--text", "a\udcff"], "--text: 'a\\udcff' is not UTF-8"),
        (["--text", "a", "--device", "cuda:9"], "argument --device: cannot use 'cuda:9'"),
    ],
)
def test_invalid_inputs_are_reported_in_one_line(tmp_path, capsys, arguments, message):
    folder = save("text", tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(folder), *arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    with pytest.raises(SystemExit):
        main(["predict", str(tmp_path / "nowhere"), "--text", "a"])
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_a_text_for_a_model_of_recordings_is_reported(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["predict", str(save("audio", tmp_path)), "--text", "yes"])
    assert "--text: the model takes audio, not text: give a FILE" in capsys.readouterr().err


def test_files_may_follow_options(tmp_path, capsys):
    folder = save("audio", tmp_path / "model")
    for name in ("a.wav", "b.wav", "c.wav"):
        (tmp_path / name).write_bytes(wav(np.arange(800, dtype=np.int16)))
    paths = [str(tmp_path / name) for name in ("a.wav", "b.wav", "c.wav")]
    lines = predicted(capsys, folder, paths[0], "--json", paths[1], "--top", 2, paths[2]).out.splitlines()
    assert [json.loads(line)["input"] for line in lines] == paths
    with pytest.raises(SystemExit):
        main(["predict", str(folder), "--json", paths[0], "--yaml"])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_several_texts_are_distinguished(tmp_path, capsys):
    folder = save("text", tmp_path / "model")
    texts = ["a fine film", "a long one " * 20]
    options = [word for text in texts for word in ("--text", text)]
    lines = predicted(capsys, folder, *options, "--top", 1).out.splitlines()
    assert lines[0] == "--text 1: a fine film"
    assert lines[2].startswith("--text 2: a long one a long one")
    assert len(lines[2]) < 120
    printed = predicted(capsys, folder, *options, "--json").out.splitlines()
    assert [json.loads(line)["input"] for line in printed] == texts


def test_a_table_is_predicted_into_a_table(tmp_path, capsys):
    folder, table, out = save("text", tmp_path / "model"), tmp_path / "reviews.csv", tmp_path / "predictions.csv"
    texts = ["a fine film", 'so, "dull"', "well", "never"]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text", "label"), *((i, text, "positive") for i, text in enumerate(texts))])
    printed = predicted(capsys, folder, table, "--out", out)
    assert printed.out == f"4 predictions in {out}\n"
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = 0
    for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
        expected = probabilities(folder, text)
        assert row["input"] == f"{table}, example {i + 1}"
        assert row["target"] == "positive"
        assert row["prediction"] == max(expected, key=expected.get)
        assert {name: float(row[f"p({name})"]) for name in expected} == pytest.approx(expected, rel=1e-5)
        right += row["prediction"] == "positive"
    assert f"{right} of 4 known labels predicted, {right / 4:.1%}" in printed.err
    assert list(rows[0])[-1] == "notes"
    with pytest.raises(SystemExit):
        main(["predict", str(folder), str(table), "--out", str(tmp_path / "nowhere" / "p.csv")])
    assert "argument --out" in capsys.readouterr().err


def test_a_folder_of_recordings_is_predicted(tmp_path, capsys):
    folder = save("audio", tmp_path / "model")
    for name in ("cat/1.wav", "cat/2.WAV", "bed/1.wav", "new.flac", "bed/._1.wav", "bed/readme.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        samples = np.arange(600, dtype=np.int16)
        (tmp_path / "data" / name).write_bytes(wav(samples, form="FLAC" if name.endswith("flac") else "WAV"))
    printed = predicted(capsys, folder, tmp_path / "data", "--json")
    answers = [json.loads(line) for line in printed.out.splitlines()]
    names = ["bed/1.wav", "cat/1.wav", "cat/2.WAV", "new.flac"]
    assert [answer["input"] for answer in answers] == [str(tmp_path / "data" / name) for name in names]
    assert [answer.get("target") for answer in answers] == ["bed", "cat", "cat", None]
    assert printed.err.splitlines()[-1] == "note: 600 values were padded with 200 zeros (4 inputs)"
