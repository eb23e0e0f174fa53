"""Records of finished runs: their evaluation can be repeated, and nothing is half-written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import mrconv
from mrconv.cli import main
from mrconv.training import recorded_run, result_files, rundir

from .miniature import listops, train_without_figures


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "runs" / "tiny-seed0"
    experiment = listops(data_dir=str(folder.parent / "data"), out=str(folder.parent))
    train_without_figures(experiment, folder)
    return folder


def test_a_record_has_no_checkpoints_and_is_evaluated_as_the_run(finished, tmp_path, capsys):
    assert main(["run", "record", str(finished), str(tmp_path)]) == 0
    record = tmp_path / "tiny-seed0"
    assert capsys.readouterr().out.startswith(f"{record}: 0.")
    assert {path.name for path in record.iterdir()} == {
        "config.yaml", "environment.json", "metrics.csv", "result.json", "model",
    }  # fmt: skip
    for name in ("metrics.csv", "model/model.safetensors"):
        assert (record / name).read_bytes() == (finished / name).read_bytes()
    assert main(["evaluate", str(record), f"data_dir={finished.parent / 'data'}"]) == 0
    scores = json.loads((record / "metrics.json").read_text())["splits"]
    expected = json.loads((finished / "result.json").read_text())["merged_accuracy"]
    assert {split: each["accuracy"] for split, each in scores.items()} == pytest.approx(expected)


def test_a_record_has_no_absolute_paths_of_folders(finished, tmp_path):
    shutil.copytree(finished, run := tmp_path / "runs" / "tiny-seed0")
    command = f"mrconv train -m experiment=listops-base seed=0,1 'data_dir={tmp_path}/my data' +out={tmp_path} lr=0.01"
    for name in ("environment.json", "result.json"):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(content | {"command": command, "before": [{"command": command}]}))
    (run / "evaluate-rate0.5").mkdir()
    evaluation = {"settings": [f"data_dir={tmp_path}", "rate=0.5"], "changes": {"rate": 0.5}, "splits": {}}
    (run / "evaluate-rate0.5" / "metrics.json").write_text(json.dumps(evaluation))
    record = recorded_run.record(run, tmp_path / "results")
    for path in record.glob("**/*.*"):
        if path.suffix in (".json", ".yaml", ".csv", ".md"):
            assert str(tmp_path.parent) not in path.read_text()
    left = "mrconv train -m experiment=listops-base seed=0,1 lr=0.01"
    environment = json.loads((record / "environment.json").read_text())
    assert [environment["command"], environment["before"][0]["command"]] == [left, left]
    assert json.loads((record / "evaluate-rate0.5" / "metrics.json").read_text())["settings"] == ["rate=0.5"]
    assert (rundir.read_run(record).data_dir, rundir.read_run(record).out) == (None, "runs")
    assert len(result_files.collect([run, record])) == 1


def test_relative_folders_and_other_values_stay_in_a_record():
    content = {"data_dir": "data", "out": "results/probes", "seconds": 1.5, "command": "mrconv train out=runs data=/a"}
    assert result_files.portable(content) == content
    assert result_files.portable({"command": "it's no command"}) == {"command": "it's no command"}


def test_a_record_of_a_record_leaves_the_first_as_it_is(finished, tmp_path):
    first = recorded_run.record(finished, tmp_path / "first")
    names = sorted(first.iterdir())
    recorded_run.record(first, tmp_path / "second", bfloat16=True)
    assert sorted(first.iterdir()) == names


def test_a_run_in_training_is_rejected(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "LOCK_TIMEOUT", 0)
    with rundir.run_lock(finished), pytest.raises(ValueError, match=f"another process is training in {finished}"):
        recorded_run.record(finished, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_record_has_the_metrics_of_other_evaluations(finished, tmp_path):
    shutil.copytree(finished, run := tmp_path / "runs" / "tiny-seed0")
    for name in ("metrics.json", "predictions.csv"):
        (run / "evaluate-rate0.5").mkdir(exist_ok=True)
        (run / "evaluate-rate0.5" / name).write_text('{"merged": true}')
    record = recorded_run.record(run, tmp_path)
    assert [path.name for path in (record / "evaluate-rate0.5").iterdir()] == ["metrics.json"]
    assert (record / "evaluate-rate0.5" / "metrics.json").read_text() == '{\n "merged": true\n}\n'


def test_matrices_are_rounded_and_the_record_notes_it(finished, tmp_path):
    record = recorded_run.record(finished, tmp_path, bfloat16=True)
    exact, rounded = (load_file(folder / "model" / "model.safetensors") for folder in (finished, record))
    matrices = {name for name in exact if name.endswith((".mix.weight", "encoder.weight", "head.weight"))}
    assert matrices
    assert (record / "model" / "model.safetensors").stat().st_mode == (record / "result.json").stat().st_mode
    for name, tensor in rounded.items():
        assert tensor.dtype == (torch.bfloat16 if name in matrices else exact[name].dtype)
        assert torch.equal(tensor, exact[name].to(tensor.dtype))
    note = {"rounded_matrices": "bfloat16"}
    exact_result = result_files.portable(json.loads((finished / "result.json").read_text()))
    assert json.loads((record / "result.json").read_text()) == exact_result | note
    model = mrconv.SequenceClassifier.from_pretrained(record / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.results == mrconv.SequenceClassifier.from_pretrained(finished / "model").results | note
    assert f"\n\n{recorded_run.NOTE}\n\n## Config" in (record / "model" / "README.md").read_text()
    assert len(result_files.collect([finished, record])) == 1


@pytest.mark.parametrize("missing", ["result.json", "model/model.safetensors"])
def test_an_unfinished_run_is_rejected(finished, tmp_path, missing):
    shutil.copytree(finished, run := tmp_path / "run")
    (run / missing).unlink()
    with pytest.raises(ValueError, match=f"has no {missing}: the run is not finished"):
        recorded_run.record(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_did_some_of_its_epochs_is_rejected(finished, tmp_path):
    shutil.copytree(finished, run := tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"partial": True, "epochs": 9}))
    with pytest.raises(ValueError, match=f"has done {result['epochs_done']} of 9 epochs: it is not finished"):
        recorded_run.record(run, tmp_path / "out")


def test_a_record_is_not_overwritten(finished, tmp_path):
    (tmp_path / "tiny-seed0").mkdir()
    with pytest.raises(ValueError, match="tiny-seed0 exists: remove it"):
        recorded_run.record(finished, tmp_path)
    assert not list((tmp_path / "tiny-seed0").iterdir())


def test_a_failed_record_leaves_nothing(finished, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorded_run, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        recorded_run.record(finished, tmp_path, bfloat16=True)
    assert not list(tmp_path.iterdir())
