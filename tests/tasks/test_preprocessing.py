"""Preprocessing of raw inputs, and inputs.json, which a run saves beside its models."""

import io
import tracemalloc

import numpy as np
import pytest
import soundfile

from mrconv.tasks import DataError, Prepared, Split, data_loader, task
from mrconv.tasks.preprocessing import INPUTS_FILE, Preprocessor, load_preprocessor
from mrconv.tasks.vocabulary import SPECIAL
from mrconv.training import loop
from mrconv.training.evaluation import merge

from ..training.miniature import listops


def prepared(x, **options):
    return Prepared(
        "custom", "values", ("a", "b"), x.shape[1], {"train": Split("train", x, np.zeros(len(x)))}, **options
    )


def same(a, b):
    return all(np.array_equal(getattr(a, name), value) for name, value in vars(b).items())


@pytest.mark.parametrize(
    "preprocessor",
    [
        Preprocessor("text", 10, ("no", "yes"), ("<pad>", "<unk>", "<eos>", "é", "\n", '"')),
        Preprocessor("audio", 4, ("a",), sample_rate=16000, scale=[[0.1], [1 / 3], [1e-9], [7]], shift=[[0.0]] * 4),
        Preprocessor("image", 6, ("a",), channels=3, height=2, width=3, scale=[1 / 255] * 3, shift=[-0.5] * 3),
    ],
)
def test_json_round_trip(preprocessor):
    assert same(Preprocessor.from_json(preprocessor.to_json()), preprocessor)
    assert preprocessor.scale.dtype == np.float32


def test_values_are_preprocessed_as_by_the_loaders(tmp_path):
    x = np.random.default_rng(0).normal(3, 5, (40, 12, 2)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(40) % 2)
    data = task("folder", tmp_path, path=str(tmp_path / "x.npz")).prepare()
    batch = next(iter(data_loader(data, "val", 4)))
    inputs = [Preprocessor.from_data(data).from_values(data.splits["val"].example(i)) for i in range(4)]
    assert np.array_equal(np.stack([each.x for each in inputs]), batch.x.numpy())


def test_preprocessor_at_another_rate():
    x = np.zeros((2, 9, 1), np.int16)
    scale = np.arange(9, dtype=np.float32)[:, None]
    data = prepared(x, scale=scale, shift=-scale, facts={"sample_rate": 16000})
    decimated, preprocessor = Preprocessor.from_data(data.decimated(1 / 3)), Preprocessor.from_data(data)
    assert (decimated.kind, decimated.length, decimated.step) == ("audio", 3, 3)
    assert decimated.sample_rate == pytest.approx(16000 / 3)
    assert same(preprocessor.at_rate(1 / 3), decimated)
    assert (preprocessor.at_rate(2).length, preprocessor.at_rate(2).step) == (18, 1)
    image_data = prepared(np.zeros((2, 16, 1), np.uint8), facts={"height": 4, "width": 4})
    assert Preprocessor.from_data(image_data).kind == "image"
    assert Preprocessor.from_data(image_data.decimated(0.5)).kind == "values"
    assert Preprocessor.from_data(image_data).at_rate(0.5).kind == "values"


def test_former_name_of_the_sampling_rate_is_read():
    text = '{"kind": "audio", "length": 3, "sampling_rate": 8000}'
    assert Preprocessor.from_json(text).sample_rate == 8000
    assert '"sample_rate": 8000' in Preprocessor.from_json(text).to_json()


def test_recording_is_decimated_as_in_training():
    content, samples = io.BytesIO(), np.arange(9, dtype=np.int16)
    soundfile.write(content, samples, 16000, format="WAV")
    data = prepared(samples[None, :, None], facts={"sample_rate": 16000}).decimated(1 / 2)
    result = Preprocessor.from_data(data).from_audio(content.getvalue())
    assert result.x[:, 0].tolist() == [0, 2, 4, 6, 8]
    assert result.notes == []


def test_scale_per_position_with_one_shift():
    preprocessor = Preprocessor("values", 3, ("a",), scale=[[1], [2], [3]], shift=0.5)
    assert preprocessor.from_values([1, 1, 1]).x[:, 0].tolist() == [1.5, 2.5, 3.5]
    assert preprocessor.normalise(np.ones((2, 1), np.float32), 1)[:, 0].tolist() == [2.5, 3.5]


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_special_and_missing_symbols_raise(kind):
    preprocessor = Preprocessor(kind, 10, ("no", "yes"), (*SPECIAL, "a", "b"))
    assert preprocessor.from_symbols(["a", "b"]).x.tolist() == [3, 4, 2]
    with pytest.raises(DataError, match="expected at least one symbol; got none"):
        preprocessor.from_text("")
    for symbol in SPECIAL:
        with pytest.raises(DataError, match=f"unknown symbol '{symbol}' at position 1; the model knows a b"):
            preprocessor.from_symbols(["a", symbol])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a" * 1000] + ["b"] * 20_000, "'aaa"),
        ([[0.5]] * 20_000 + [["a" * 1000]], "'aaa"),
        ("a" * 1_000_000, "'aaa"),
        ([[[["a" * 1000] + ["b"] * 20_000]]], "lists nested more than two deep"),
    ],
)
def test_strings_raise_before_numpy_allocates_wide_arrays(values, message):
    tracemalloc.start()
    with pytest.raises(DataError, match=f"values must be numbers of shape .length, 1.; got {message}"):
        Preprocessor("values", 10, ("a",)).check_values(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000


def test_run_and_merge_save_the_preprocessor(tmp_path):
    folder = tmp_path / "run"
    loop.train(listops(epochs=1, data_dir=str(tmp_path / "data")), folder, quiet=True)
    merge(folder, out=tmp_path / "out")
    for directory in (folder / "model", folder / "merged", tmp_path / "out"):
        preprocessor = load_preprocessor(directory)
        assert (preprocessor.kind, preprocessor.length) == ("tokens", 64)
        assert (len(preprocessor.vocabulary), len(preprocessor.classes)) == (18, 10)
    (folder / "model" / INPUTS_FILE).unlink()
    assert load_preprocessor(folder / "model") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "inputs.json does not describe a model's inputs"),
        ("[]", "expected an object with kind, length"),
        ('{"kind": "text"}', "expected an object with kind, length"),
        ('{"kind": "text", "length": 3, "colour": 1}', "expected an object with kind, length"),
        ('{"kind": "text", "length": 0}', "length must be an integer of at least 1; got 0"),
        ('{"kind": "text", "length": 3, "classes": 4}', "classes must be distinct strings; got 4"),
        ('{"kind": "text", "length": 3, "classes": "ab"}', "classes must be distinct strings"),
        ('{"kind": "text", "length": 3, "classes": [0, 1]}', "classes must be distinct strings"),
        (
            '{"kind": "text", "length": 3, "vocabulary": ["a", "a"]}',
            "vocabulary must be distinct strings",
        ),
        ('{"kind": "audio", "length": 3}', "audio needs a sample_rate, in samples a second; got None"),
        ('{"kind": "audio", "length": 3, "sample_rate": 0}', "audio needs a sample_rate"),
        ('{"kind": "image", "length": 4}', "height must be an integer of at least 1; got None"),
        ('{"kind": "image", "length": 4, "height": 2, "width": 3}', "length must be height . width = 2 . 3; got 4"),
        ('{"kind": "values", "length": 3, "scale": [1, 2]}', "scale must be a number.*= .3, 1.; got the shape .2,."),
        ('{"kind": "values", "length": 3, "shift": [[1], [2]]}', "shift must be a number.*got the shape .2, 1."),
        ('{"kind": "values", "length": 3, "shift": NaN}', "shift must be finite"),
    ],
)
def test_invalid_file_raises_with_its_path(text, message, tmp_path):
    (tmp_path / INPUTS_FILE).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_preprocessor(tmp_path)
