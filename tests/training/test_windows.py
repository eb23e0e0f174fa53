"""Runs on long recordings: their windows in training, evaluation, prediction and serving; masked padding of values."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch

import mrconv
from mrconv import SequenceLabeller, inference
from mrconv.cli import main
from mrconv.tasks import preprocessing
from mrconv.tasks.windows import window_starts
from mrconv.training import loop
from mrconv.training.composition import compose
from mrconv.training.datamodule import prepare
from mrconv.training.evaluation import measure_run
from mrconv.training.outputs import mean_outputs

from .miniature import small, train_without_figures

soundfile = pytest.importorskip("soundfile")
RATE, WINDOW, HOP = 8000, 64, 32
RNG = np.random.default_rng(0)


def write_recordings(folder, lengths):
    for i, n in enumerate(lengths):
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        tone = 0.3 * np.sin(np.arange(n) * (0.2, 1.0)[i % 2]) + 0.05 * RNG.normal(size=n)
        soundfile.write(folder / "ab"[i % 2] / f"{i:02}.wav", tone, RATE)
    return folder


def trained(folder, data, *settings):
    settings = ["task=folder", f"data={data}", f"data_dir={folder}", f"task.sample_rate={RATE}", *settings]
    train_without_figures(small(compose(settings), bidirectional=True, lr=0.1), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Return the run on windows, and the folder of recordings."""
    folder = tmp_path_factory.mktemp("windows")
    data = write_recordings(folder / "files", [200, 50, 131, 64, 300, 90] * 5)
    return trained(folder, data, f"task.window={WINDOW}", f"task.hop={HOP}"), data


def test_a_prediction_is_the_mean_over_the_windows(windowed, capsys):
    run, data = windowed
    predictor = mrconv.load(run)
    assert predictor.preprocessor.hop == HOP
    samples = soundfile.read(data / "a/00.wav", dtype="int16")[0]
    starts = window_starts(200, WINDOW, HOP).tolist()
    expected = predictor.predict_proba([samples[i : i + WINDOW] for i in starts]).mean(0)
    assert predictor.predict_proba(samples) == pytest.approx(expected, rel=1e-4)
    assert predictor.predict_proba([samples, samples[:50], samples[:64]])[0] == pytest.approx(expected, rel=1e-4)
    prediction = predictor.predict(data / "a/00.wav", batch_size=2)
    assert list(prediction.probabilities.values()) == pytest.approx(list(expected), rel=1e-4)
    assert (prediction.notes, prediction.length) == (["the mean of 6 windows of 64 positions"], 200)
    main(["predict", str(run), "--json", str(data / "a/00.wav")])
    assert json.loads(capsys.readouterr().out)["notes"] == prediction.notes


def test_evaluation_scores_recordings_as_predictions_do(windowed, tmp_path):
    run, data = windowed
    measured, predictor = measure_run(run), mrconv.load(run)
    assert measured.metrics["test"]["examples"] == 3
    measured.write(tmp_path, {})
    lines = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert len({line["example"] for line in lines}) == 6
    for line in lines:
        expected = predictor.predict_proba(data / line["example"])
        assert [float(line["p(a)"]), float(line["p(b)"])] == pytest.approx(expected.tolist(), rel=1e-3)
    everything = measure_run(run, [f"data={data / '..' / 'files'}"])
    assert everything.metrics["all"]["examples"] == 30
    result = json.loads((run / "result.json").read_text())
    assert result["accuracy"]["test"] == pytest.approx(measured.metrics["test"]["accuracy"])


def test_a_server_averages_the_windows(windowed):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from mrconv.serve.app import Options, create_app

    run, data = windowed
    predictor = mrconv.load(run)
    expected = predictor.predict(data / "a/04.wav")
    with TestClient(create_app(predictor, Options(batch=4))) as client:
        content = (data / "a/04.wav").read_bytes()
        answer = client.post("/predict", content=content, headers={"content-type": "audio/wav"}).json()
    assert answer["notes"] == expected.notes == ["the mean of 9 windows of 64 positions"]
    assert answer["probabilities"] == pytest.approx(expected.probabilities, rel=1e-4)


def test_few_long_inputs_are_read_at_once(windowed):
    run, data = windowed
    predictor, read = mrconv.load(run), []
    inputs = (read.append(each) or each for each in predictor.read(data / "a"))
    next(predictor.predict_each(inputs, batch_size=6))
    assert len(read) == 1  # of six windows


def test_inputs_to_cut_have_a_limit(windowed, monkeypatch):
    monkeypatch.setattr(preprocessing, "MAX_LENGTH", 100)
    run, data = windowed
    notes = mrconv.load(run).predict(data / "a/04.wav").notes
    assert notes == ["only the first 0.01 of 0.04 seconds were used", "the mean of 3 windows of 64 positions"]
    assert "only the first 100 of 300 values were used" in mrconv.load(run).predict(np.ones(300)).notes


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """Return a run on recordings of different lengths, and their folder."""
    folder = tmp_path_factory.mktemp("lengths")
    data = write_recordings(folder / "files", [100, 50, 81, 64, 97, 31] * 5)
    return trained(folder, data), data


def test_padding_of_recordings_is_hidden_in_training_and_prediction(unequal):
    run, data = unequal
    predictor, files = mrconv.load(run), sorted(data.rglob("*.wav"))
    assert predictor.preprocessor.lengths
    assert predictor.model.config.mask_padding
    together = predictor.predict(files)
    for path, prediction in list(zip(files, together, strict=True))[:6]:
        samples = soundfile.read(path, dtype="int16")[0]
        assert (prediction.notes, prediction.length) == ([], len(samples))
        x = torch.from_numpy(predictor.preprocessor.normalise(samples[:, None].astype(np.float32)))
        with torch.inference_mode():
            alone = predictor.model(x[None]).softmax(-1)[0]
        assert list(prediction.probabilities.values()) == pytest.approx(alone.tolist(), rel=1e-3)
    for line in measure_run(run).lines:
        assert float(line["p(a)"]) == pytest.approx(predictor.predict_proba(data / line["example"])[0], rel=1e-3)
    with torch.inference_mode():  # whatever the padding is
        batch = torch.randn(2, 100, 1)
        changed = batch.clone()
        changed[1, 50:] = 7
        lengths = torch.tensor([100, 50])
        torch.testing.assert_close(predictor.model(batch, lengths), predictor.model(changed, lengths))


def test_runs_without_lengths_keep_their_zeros(unequal, tmp_path):
    trained, data = unequal
    run = shutil.copytree(trained, tmp_path / "run")  # as an earlier version recorded it
    experiment = compose(["task=folder", f"data={data}", f"data_dir={trained.parent}", f"task.sample_rate={RATE}"])
    old = prepare(experiment).without_lengths()
    assert old.splits["test"].x.shape == (3, 100, 1)
    for name in ("model", "merged"):
        path = run / name / "inputs.json"
        described = json.loads(path.read_text())
        assert described.pop("lengths")
        path.write_text(json.dumps(described))
    predictor = mrconv.load(run)
    assert predictor.predict(np.ones(31)).notes == ["31 values were padded with 69 zeros"]
    lines = {line["example"]: line for line in measure_run(run).lines}
    with torch.inference_mode():
        x = torch.from_numpy(old.splits["test"].x * predictor.preprocessor.scale + predictor.preprocessor.shift)
        expected = predictor.model(x).softmax(-1)
    for name, p in zip(old.splits["test"].names, expected, strict=True):
        assert float(lines[name.decode()]["p(a)"]) == pytest.approx(float(p[0]), rel=1e-3)
        assert predictor.predict_proba(data / name.decode()) == pytest.approx(p.numpy(), rel=1e-3)


def test_an_old_checkpoint_resumes_without_lengths(unequal):
    run, data = unequal
    experiment = compose(["task=folder", f"data={data}", f"data_dir={run.parent}", f"task.sample_rate={RATE}"])
    prepared = prepare(experiment)
    checkpoint = run / "last.ckpt"
    assert loop.data_of_checkpoint(checkpoint, prepared).splits["train"].offsets is not None
    content = torch.load(checkpoint, weights_only=True)
    del content["mrconv"]["data"]["lengths"]
    torch.save(content, run / "old.ckpt")
    old = loop.data_of_checkpoint(run / "old.ckpt", prepared)
    assert old.splits["train"].x.shape == (24, 100, 1)
    assert (old.splits["train"].x * old.scale + old.shift).std() == pytest.approx(1)  # with the zeros, as then


@pytest.mark.slow
def test_exported_padded_recordings_equal_the_prediction(unequal, tmp_path):
    from mrconv.export import export

    run, data = unequal
    predictor = mrconv.load(run)
    path = export(predictor.model, tmp_path / "model.pt2", "torch", padded=True).path
    files = sorted(data.rglob("*.wav"))[:3]
    xs = [predictor.raw_inputs.preprocess(file)[0].x for file in files]
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(x) for x in xs], batch_first=True)
    outputs = torch.export.load(path).module()(padded, torch.tensor([len(x) for x in xs]))
    expected = [list(p.probabilities.values()) for p in predictor.predict(files)]
    torch.testing.assert_close(outputs.softmax(-1), torch.tensor(expected), rtol=1e-3, atol=1e-5)


def test_positions_in_overlapping_windows_are_averaged(tmp_path):
    model = SequenceLabeller(n_classes=2, d_input=1, d_model=8, depth=1, l_max=8, bidirectional=True)
    described = preprocessing.Preprocessor("values", 8, ("a", "b"), target="positions", lengths=True, hop=4)
    inference.save(model, tmp_path, described)
    predictor, x = mrconv.load(tmp_path), RNG.normal(size=13)
    expected, counts = np.zeros((13, 2)), np.zeros((13, 1))
    for start in (0, 4, 5):
        expected[start : start + 8] += predictor.predict_proba(x[start : start + 8])
        counts[start : start + 8] += 1
    assert predictor.predict_proba(x) == pytest.approx(expected / counts, rel=1e-4)
    assert len(predictor.predict(x).positions) == 13


def test_means_of_outputs_are_means_of_probabilities():
    outputs, members = torch.randn(5, 3), torch.tensor([1, 0, 1, 1, 0])
    activations = {"class": lambda z: z.softmax(-1), "labels": torch.sigmoid, "values": lambda z: z}
    for target, activated in activations.items():
        expected = torch.stack([activated(outputs)[members == i].mean(0) for i in (0, 1)])
        torch.testing.assert_close(activated(mean_outputs(outputs, members, target)), expected)
