"""mrconv.inference: raw inputs of every kind become labels with probabilities."""

import doctest
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import mrconv
from mrconv import inference
from mrconv.tasks import DataError

from .serve.models import load, save
from .serve.test_predict import png, wav

SAMPLES = np.arange(-400, 400, dtype=np.int16)
PIXELS = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)


def test_the_example_of_the_module_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(inference)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize(
    ("kind", "file", "content", "others"),
    [
        ("text", "a.txt", b"a fine film", ["a fine film", list("a fine film"), {"text": "a fine film"}]),
        ("listops", "a.txt", b"[MAX 2 9 ]", ["[MAX 2 9 ]", ["[MAX", 2, 9, "]"], {"tokens": ["[MAX", "2", 9, "]"]}]),
        ("audio", "a.wav", wav(SAMPLES), [SAMPLES, torch.from_numpy(SAMPLES), {"values": SAMPLES.tolist()}]),
        ("image", "a.png", png(PIXELS), [PIXELS.reshape(64, 3)]),
    ],
)
def test_paths_bytes_and_arrays_give_the_same_prediction(kind, file, content, others, tmp_path):
    predictor, path = load(kind, tmp_path / "model"), tmp_path / file
    path.write_bytes(content)
    if kind in ("audio", "image"):
        others = [*others, str(path)]
    first, *rest = predictor.predict([path, content, *others])
    assert first.label == max(first.probabilities, key=first.probabilities.get)
    assert tuple(first.probabilities) == predictor.classes
    assert sum(first.probabilities.values()) == pytest.approx(1, abs=1e-5)
    for prediction in rest:
        assert prediction.probabilities == pytest.approx(first.probabilities, abs=1e-6)


def test_pairs_are_tuples_mappings_or_json_files(tmp_path):
    predictor, path = load("pair", tmp_path / "model"), tmp_path / "pair.json"
    fields = {"text": "one", "text2": "other"}
    path.write_text(json.dumps(fields))
    first, *rest = predictor.predict([("one", "other"), fields, path], batch_size=2)
    assert all(prediction.probabilities == pytest.approx(first.probabilities) for prediction in rest)
    with pytest.raises(DataError, match="the model takes pairs: give a tuple of two inputs"):
        predictor.predict(["one"])


def test_the_index_of_an_invalid_input_is_named(tmp_path):
    predictor = load("values", tmp_path)
    good, huge = np.ones((50, 2)), np.full((50, 2), 1e20) * [1, -1]
    with pytest.raises(DataError, match="input 1: values must be numbers of shape"):
        predictor.predict([good, np.ones((50, 3))])
    with pytest.raises(DataError, match="input 1: the model's output for this input is not finite"):
        predictor.predict([good, huge])
    with pytest.raises(DataError, match="the model takes numbers: give an array, or JSON"):
        predictor.predict([b"1 2 3"])


@pytest.mark.parametrize("single", ["text", b"text", ("t", "e", "x", "t"), {"text": "text"}, np.array(["text"])])
def test_one_input_gives_one_prediction_and_several_a_list(single, tmp_path):
    predictor = load("text", tmp_path)
    (expected,) = predictor.predict(["text"])
    if isinstance(single, tuple | np.ndarray):  # of several texts
        assert len(predictor.predict(single)) == len(single)
    else:
        assert predictor.predict(single) == expected
    assert [p.label for p in predictor.predict(iter(["text", "text"]))] == [expected.label] * 2
    assert predictor.predict([]) == []


@pytest.mark.parametrize(
    ("kind", "one"),
    [
        ("values", np.random.default_rng(0).normal(size=(50, 2))),
        ("audio", SAMPLES),
        ("audio", SAMPLES[:, None]),
        ("audio", SAMPLES.tolist()),
        ("image", PIXELS),
        ("mrconvnext", PIXELS),
        ("image", PIXELS.reshape(64, 3)),
        ("listops", torch.tensor([1, 2, 3])),
    ],
)
def test_an_array_with_one_more_dimension_is_several_inputs(kind, one, tmp_path):
    predictor = load(kind, tmp_path)
    expected = predictor.predict(one)
    several = np.stack([np.asarray(one)] * 3)
    for each in (several, torch.from_numpy(several), list(several)):
        assert [p.label for p in predictor.predict(each)] == 3 * [expected.label]
    probabilities = predictor.predict_proba(several)
    assert probabilities.shape == (3, len(predictor.classes))
    assert np.allclose(probabilities, list(expected.probabilities.values()), atol=1e-6)
    assert np.allclose(predictor.predict_proba(one), probabilities[0])
    assert predictor.predict_proba([]).shape == (0, len(predictor.classes))


TABLES = {
    "a.csv": "text,label\none,positive\ntwo,\n",
    "b.csv": "id,text\n1,one\n2,two\n",
    "a.tsv": "text\nthree\none\n",
    "a.jsonl": '{"text": "one", "label": "negative"}\n{"text": "two"}\n',
}


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_read_with_and_without_labels(table, tmp_path):
    predictor, path = load("text", tmp_path / "model"), tmp_path / table
    path.write_text(TABLES[table])
    inputs = list(predictor.read(path))
    assert [each.name for each in inputs] == [f"{path}, example 1", f"{path}, example 2"]
    labels = {"a.csv": ["positive", None], "a.jsonl": ["negative", None]}
    assert [each.label for each in inputs] == labels.get(table, [None, None])
    texts = ["three", "one"] if table == "a.tsv" else ["one", "two"]
    assert predictor.predict(path) == predictor.predict(texts)


def test_a_table_without_the_column_of_texts_is_named(tmp_path):
    predictor, path = load("text", tmp_path / "model"), tmp_path / "a.csv"
    path.write_text("review,stars\ngood,5\n")
    with pytest.raises(DataError, match=r"a\.csv has columns review, stars; expected text"):
        predictor.predict(path)
    path.write_text("text\n" + "ok\n" * 40 + '""\n')
    with pytest.raises(DataError, match=r"a\.csv, example 41: expected at least one symbol"):
        predictor.predict(path)


def test_arrays_are_read_with_and_without_labels(tmp_path):
    predictor, path = load("values", tmp_path / "model"), tmp_path / "a.npz"
    x = np.random.default_rng(0).normal(size=(4, 50, 2))
    expected = predictor.predict(x)
    np.savez(path, x=x)
    assert predictor.predict(path) == predictor.predict(str(path)) == expected
    np.savez(path, x_train=x[:3], y_train=np.array(["a", "b", "c"]), x_test=x[3:], y_test=np.array(["a"]))
    assert predictor.predict(path) == expected
    assert [each.label for each in predictor.read(path)] == ["a", "b", "c", "a"]
    numbers = tmp_path / "rows.csv"
    numbers.write_text("t0,t1,label\n1,2,bed\n3,4,cat\n")
    audio = load("audio", tmp_path / "audio")
    assert audio.predict(numbers) == audio.predict([np.array([1, 2]), np.array([3, 4])])


def test_folders_and_archives_are_read(tmp_path):
    predictor, data = load("image", tmp_path / "model"), tmp_path / "data"
    for name in ("test/dark/1.png", "test/light/2.png", "3.png"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(png(PIXELS))
    archive = shutil.make_archive(tmp_path / "data", "zip", data)
    assert [each.label for each in predictor.read(data)] == [None, "dark", "light"]
    assert predictor.predict(data) == predictor.predict(archive) == predictor.predict([PIXELS] * 3)
    text, tables = load("text", tmp_path / "text"), tmp_path / "tables"
    tables.mkdir()
    with pytest.raises(DataError, match=r"tables has no file of the kind that the model takes, text: \.txt, \.npz"):
        text.predict(tables)
    for name in ("train.csv", "test.csv"):
        (tables / name).write_text("text\none\n")
    assert len(text.predict(tables)) == 2
    with pytest.raises(DataError, match=r"data has no file of the kind that the model takes, text"):
        text.predict(data)


def test_a_stream_ends_with_the_prediction_of_the_whole(tmp_path):
    predictor = load("audio", tmp_path / "audio")
    stream = predictor.stream()
    for _ in range(2):
        for chunk in np.array_split(SAMPLES, 3):
            running = stream.feed(chunk)
        whole = predictor.predict(SAMPLES)
        assert running.length == stream.position == 800
        assert stream.end().probabilities == pytest.approx(whole.probabilities, abs=1e-5)
        assert stream.position == 0
    stream = load("text", tmp_path / "text").stream()
    stream.feed("a fi")
    assert stream.feed(list("ne")).length == 6
    with pytest.raises(DataError, match="expected at least one symbol"):
        stream.feed("")
    with pytest.raises(ValueError, match="the model is bidirectional"):
        load("text", tmp_path / "both", bidirectional=True).stream()


def test_load_needs_torch_numpy_and_safetensors_only(tmp_path):
    save("text", tmp_path / "text")
    save("values", tmp_path / "values")
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    code = f"""
import sys
from pathlib import Path
for name in ("huggingface_hub", "rich", "PIL", "soundfile", "soxr", "numba", "pytorch_lightning", "hydra", "yaml"):
    sys.modules[name] = None
import mrconv, numpy
model = mrconv.load({str(tmp_path / "text")!r})
assert len(model.predict(Path({str(tmp_path / "a.csv")!r}))) == 2
assert model.predict("one") == model.predict(["one"])[0]
model.stream().feed("one")
assert mrconv.load({str(tmp_path / "values")!r}).predict_proba(numpy.ones((4, 50, 2))).shape == (4, 3)
assert "torch._dynamo" not in sys.modules  # takes longer than everything else
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_is_loaded_with_its_branches_or_merged(tmp_path):
    folder = save("text", tmp_path)
    with pytest.raises(ValueError, match="is merged: it has no branches"):
        inference.load(folder, merged=False)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nope does not exist"):
        mrconv.load(tmp_path / "nope")
    with pytest.raises(FileNotFoundError, match=r"contains no model \(no config\.json\)"):
        mrconv.load(tmp_path)


def test_a_language_model_predicts_the_next_symbol_and_generates(tmp_path):
    predictor = load("language", tmp_path)
    (prediction,) = predictor.predict(["abc"])
    assert set(prediction.probabilities) == set("abcdefgh \n")
    pieces = []
    symbols = predictor.generate([0, 1, 2], 20, seed=1, callback=pieces.append)
    assert symbols == pieces == predictor.generate([0, 1, 2], 20, seed=1)
    assert predictor.generate([0, 1, 2], 1, temperature=0) == [prediction.label]
