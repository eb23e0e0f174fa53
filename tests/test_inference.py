"""mrconv.inference: raw inputs of every kind become labels with probabilities."""

import doctest
import json
from pathlib import Path

import numpy as np
import pytest
import torch

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
    with pytest.raises(DataError, match="the model takes numbers: give an array"):
        predictor.predict([b"1 2 3"])


@pytest.mark.parametrize("single", ["text", b"text", Path("a.txt"), {"text": "a"}])
def test_a_single_input_is_rejected(single, tmp_path):
    with pytest.raises(TypeError, match="predict takes a list of inputs"):
        load("text", tmp_path).predict(single)


def test_a_model_is_loaded_with_its_branches_or_merged(tmp_path):
    folder = save("text", tmp_path)
    with pytest.raises(ValueError, match="is merged: it has no branches"):
        inference.load(folder, merged=False)


def test_a_language_model_predicts_the_next_symbol_and_generates(tmp_path):
    predictor = load("language", tmp_path)
    (prediction,) = predictor.predict(["abc"])
    assert set(prediction.probabilities) == set("abcdefgh \n")
    pieces = []
    symbols = predictor.generate([0, 1, 2], 20, seed=1, callback=pieces.append)
    assert symbols == pieces == predictor.generate([0, 1, 2], 20, seed=1)
    assert predictor.generate([0, 1, 2], 1, temperature=0) == [prediction.label]
