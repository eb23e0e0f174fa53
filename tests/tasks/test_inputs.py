"""inputs.json: kept by a run beside its models, enough to use them by."""

import io
import tracemalloc

import numpy as np
import pytest
import soundfile

from mrconv.tasks import DataError, Prepared, Split, task
from mrconv.tasks.packing import SPECIAL
from mrconv.tasks.preprocessing import FILE, Inputs
from mrconv.training import loop as run
from mrconv.training import rundir as record
from mrconv.training.evaluation import merge

from ..training.miniature import listops


def prepared(x, **options):
    return Prepared("own", "values", ("a", "b"), x.shape[1], {"train": Split("train", x, np.zeros(len(x)))}, **options)


def same(a, b):
    return all(np.array_equal(getattr(a, name), value) for name, value in vars(b).items())


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs("text", 10, ("no", "yes"), ("<pad>", "<unk>", "<eos>", "é", "\n", '"')),
        Inputs("audio", 4, ("a",), sampling_rate=16000, scale=[[0.1], [1 / 3], [1e-9], [7]], shift=[[0.0]] * 4),
        Inputs("image", 6, ("a",), channels=3, height=2, width=3, scale=[1 / 255] * 3, shift=[-0.5] * 3),
    ],
)
def test_what_is_written_is_read(inputs):
    assert same(Inputs.read(inputs.json()), inputs)
    assert inputs.scale.dtype == np.float32


def test_values_are_seen_as_the_loaders_give_them(tmp_path):
    x = np.random.default_rng(0).normal(3, 5, (40, 12, 2)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(40) % 2)
    data = task("folder", tmp_path, path=str(tmp_path / "x.npz")).prepare()
    from mrconv.tasks import data_loader

    batch = next(iter(data_loader(data, "val", 4)))
    rows = [Inputs.of(data).values(data.splits["val"].row(i)) for i in range(4)]
    assert np.array_equal(np.stack([row.x for row in rows]), batch.x.numpy())


def test_another_rate():
    x = np.zeros((2, 9, 1), np.int16)
    scale = np.arange(9, dtype=np.float32)[:, None]
    data = prepared(x, scale=scale, shift=-scale, facts={"sampling_rate": 16000})
    thin, inputs = Inputs.of(data.decimated(1 / 3)), Inputs.of(data)
    assert (thin.kind, thin.length, thin.sampling_rate, thin.step) == ("audio", 3, pytest.approx(16000 / 3), 3)
    assert same(inputs.decimated(1 / 3), thin)
    assert (inputs.decimated(2).length, inputs.decimated(2).step) == (18, 1)
    picture = prepared(np.zeros((2, 16, 1), np.uint8), facts={"height": 4, "width": 4})
    assert Inputs.of(picture).kind == "image"
    assert Inputs.of(picture.decimated(0.5)).kind == Inputs.of(picture).decimated(0.5).kind == "values"


def test_a_recording_is_decimated_as_in_training():
    content, samples = io.BytesIO(), np.arange(9, dtype=np.int16)
    soundfile.write(content, samples, 16000, format="WAV")
    inputs = Inputs.of(prepared(samples[None, :, None], facts={"sampling_rate": 16000}).decimated(1 / 2))
    row = inputs.audio(content.getvalue())
    assert row.x[:, 0].tolist() == [0, 2, 4, 6, 8]
    assert row.notes == []


@pytest.mark.parametrize("rate", [1, 999, 1_000_001, 2**31 - 1])
def test_a_recording_of_an_absurd_rate_is_refused(rate):
    content = io.BytesIO()
    soundfile.write(content, np.zeros(9, np.int16), rate, format="WAV")
    with pytest.raises(DataError, match=f"from 1,000 to 1,000,000 samples a second; got {rate:,}"):
        Inputs("audio", 8, ("a",), sampling_rate=16000).audio(content.getvalue())
    assert Inputs("audio", 9, ("a",), sampling_rate=rate).audio(content.getvalue()).notes == []  # the model's own


def test_a_scale_for_each_position_goes_with_a_shift_for_all():
    inputs = Inputs("values", 3, ("a",), scale=[[1], [2], [3]], shift=0.5)
    assert inputs.values([1, 1, 1]).x[:, 0].tolist() == [1.5, 2.5, 3.5]
    assert inputs.normalised(np.ones((2, 1), np.float32), 1)[:, 0].tolist() == [2.5, 3.5]


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_inputs_have_symbols_and_only_those_of_their_own(kind):
    inputs = Inputs(kind, 10, ("no", "yes"), (*SPECIAL, "a", "b"))
    assert inputs.tokens(["a", "b"]).x.tolist() == [3, 4, 2]
    with pytest.raises(DataError, match="expected at least one symbol; got none"):
        inputs.tokens(inputs.symbols(""))
    for symbol in SPECIAL:
        with pytest.raises(DataError, match=f"'{symbol}', at position 1, is no symbol of the model; it knows a b"):
            inputs.tokens(["a", symbol])


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["a" * 1000] + ["b"] * 20_000, "something that is no number: 'aaa"),
        ([[0.5]] * 20_000 + [["a" * 1000]], "something that is no number: 'aaa"),
        ("a" * 1_000_000, "something that is no number: 'aaa"),
        ([[[["a" * 1000] + ["b"] * 20_000]]], "lists that are more than two deep"),
    ],
)
def test_strings_are_refused_before_numpy_makes_all_as_wide_as_the_widest(values, why):
    tracemalloc.start()
    with pytest.raises(DataError, match=f"values must be numbers of shape .length, 1.; got {why}"):
        Inputs("values", 10, ("a",)).array(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000


def test_a_run_keeps_them_and_so_does_a_merge(tmp_path):
    folder = tmp_path / "run"
    run.train(listops(epochs=1, data_dir=str(tmp_path / "data")), folder, quiet=True)
    merge(folder, out=tmp_path / "out")
    for place in (folder / "model", folder / "merged", tmp_path / "out"):
        inputs = record.saved_inputs(place)
        assert (inputs.kind, inputs.length, len(inputs.vocabulary), len(inputs.classes)) == ("tokens", 64, 18, 10)
    (folder / "model" / FILE).unlink()
    assert record.saved_inputs(folder / "model") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "inputs.json does not tell what a model takes"),
        ("[]", "expected an object with kind, length"),
        ('{"kind": "text"}', "expected an object with kind, length"),
        ('{"kind": "text", "length": 3, "colour": 1}', "expected an object with kind, length"),
        ('{"kind": "text", "length": 0}', "length must be an integer of at least 1; got 0"),
        ('{"kind": "text", "length": 3, "classes": 4}', "classes must be strings, no two of them the same; got 4"),
        ('{"kind": "text", "length": 3, "classes": "ab"}', "classes must be strings"),
        ('{"kind": "text", "length": 3, "classes": [0, 1]}', "classes must be strings"),
        (
            '{"kind": "text", "length": 3, "vocabulary": ["a", "a"]}',
            "vocabulary must be strings, no two of them the same",
        ),
        ('{"kind": "audio", "length": 3}', "audio needs a sampling_rate, in samples a second; got None"),
        ('{"kind": "audio", "length": 3, "sampling_rate": 0}', "audio needs a sampling_rate"),
        ('{"kind": "image", "length": 4}', "height must be an integer of at least 1; got None"),
        ('{"kind": "image", "length": 4, "height": 2, "width": 3}', "length must be that of 2 x 3 pixels; got 4"),
        ('{"kind": "values", "length": 3, "scale": [1, 2]}', "scale must be a number.*= .3, 1.; got the shape .2,."),
        ('{"kind": "values", "length": 3, "shift": [[1], [2]]}', "shift must be a number.*got the shape .2, 1."),
        ('{"kind": "values", "length": 3, "shift": NaN}', "shift must be finite"),
    ],
)
def test_a_file_that_is_none_is_named(text, why, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=why):
        record.saved_inputs(tmp_path)
