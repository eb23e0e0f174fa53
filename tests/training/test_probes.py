"""The table of probes: ordinary runs and recorded folders; test scores and complete results stay out of it."""

import json
from pathlib import Path

import pytest

from mrconv.cli.parser import CommandError
from mrconv.training import loop, probes
from mrconv.training.result_files import collect

from .miniature import listops
from .test_results import call, record, result

ROOT = Path(__file__).parents[2]
METRICS = (
    "epoch,step,train/accuracy,val/accuracy,val/loss,test/accuracy\n1,10,0.5,0.71,0.60,0.9\n2,20,0.6,0.7,0.55,0.9\n"
)


def write_probe(folder, config="name: image-base\ntask: image\nepochs: 6\n", metrics=METRICS, **environment):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.csv").write_text(metrics)
    if environment:
        (folder / "environment.json").write_text(json.dumps(environment))
    return folder


@pytest.mark.usefixtures("without_figures")
def test_an_ordinary_run_is_a_probe(tmp_path):
    folder = tmp_path / "probes" / "listops-lr0.01-seed0"
    experiment = listops(name="listops-base-lr0.01", lr=0.01, pad=64, stop_after=1, data_dir=str(tmp_path))
    loop.train(experiment, folder, quiet=True)
    (folder / "finding.txt").write_text("It learns.\nMore about it.\n")
    assert probes.find_probes([tmp_path]) == [folder]
    line = probes.line(folder)
    assert {"lr=0.01", "pad=64", "depth=2", "task.length=64"} <= set(line["change"].split(", "))
    assert (line["probe"], line["epochs"], line["finding"]) == (folder.name, "1 of 3", "It learns.")
    assert line["best"] == f"{line['validation']} (1)"
    assert line["time"].startswith("0:00:0")


def test_scores_are_those_of_validation(tmp_path):
    line = probes.line(write_probe(tmp_path / "a", hardware="NVIDIA H200", revision="f729b0a39679", seconds=61))
    scores = {"epochs": "2 of 6", "validation": "70.00", "best": "71.00 (1)", "training": "60.00", "loss": "0.550"}
    facts = {"time": "0:01:01", "hardware": "NVIDIA H200", "revision": "f729b0a"}
    assert line.items() >= (scores | facts).items()


def test_missing_values_are_a_dash(tmp_path):
    line = probes.line(write_probe(tmp_path / "a", metrics="epoch,step,train/accuracy,test/accuracy\n1,9,0.5,0.9\n"))
    assert (line["training"], line["epochs"], line["change"]) == ("50.00", "1 of 6", "–")
    for column in ("validation", "best", "loss", "time", "hardware", "revision", "finding"):
        assert line[column] == "–"


def test_bits_have_their_unit_and_the_lowest_is_the_best(tmp_path):
    metrics = "epoch,train/bits,val/bits,val/loss\n1,2.5,2.2,1.5\n2,2.4,2.3,1.6\n"
    config = "name: shakespeare\ntask: characters\nepochs: 2\n"
    line = probes.line(write_probe(tmp_path / "a", config, metrics))
    assert (line["validation"], line["best"], line["epochs"]) == ("2.300 bits", "2.200 bits (1)", "2")


def test_recorded_changes_hold_even_if_the_preset_changes(tmp_path):
    config = "name: image-base\ntask: image\nepochs: 6\nlr: 0.0045\nkernel_lr: 0.123\nprecision: float32\nout: there\n"
    now = write_probe(tmp_path / "a", config)
    assert probes.line(now)["change"] == "kernel_lr=0.123, precision=float32"
    then = write_probe(tmp_path / "b", config, changes={"epochs": 6, "lr": 0.0045})
    assert probes.line(then)["change"] == "lr=0.0045"


def test_probes_are_not_results_unless_their_folder_is_given(tmp_path):
    record(tmp_path / "results" / "a", result(seed=0))
    record(tmp_path / "results" / "probes" / "b", result(seed=1))
    assert [each["seed"] for each in collect([tmp_path / "results"])] == [0]
    assert [each["seed"] for each in collect([tmp_path / "results" / "probes"])] == [1]


def test_the_command_tabulates_probes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="no such folder: results/probes"):
        call("--probes")
    folder = write_probe(Path("results/probes/image-base-seed0"))
    call("--probes", "--markdown", "docs/table.md")
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("image-base-seed0")
    assert Path("docs/table.md").read_text() == probes.markdown([folder])
    with pytest.raises(CommandError, match="argument --baselines: not with --probes"):
        call("--probes", "--baselines", "table.md")
    Path("empty").mkdir()
    with pytest.raises(CommandError, match=r"no folder with config\.yaml and metrics\.csv under empty"):
        call("--probes", "empty")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"metrics": "epoch\n"}, r"metrics\.csv is not the table of metrics of a run: it has no epochs"),
        ({"metrics": "epoch,train/accuracy\n1,x\n"}, r"metrics\.csv is not the table of metrics of a run: could not"),
        ({"config": "task: image\nkernel_lrr: 1\n"}, r"config\.yaml is not the config of a run: unknown key"),
    ],
)
def test_bad_files_are_named(tmp_path, files, message):
    with pytest.raises(CommandError, match=message):
        call("--probes", write_probe(tmp_path / "a", **files).parent)


def test_the_pages_show_the_recorded_probes():
    recorded = probes.markdown(probes.find_probes([ROOT / "results" / "probes"]))
    assert recorded in (ROOT / "results" / "probes" / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8").splitlines()
    shown = {line for line in page if line.startswith("|") and "-seed" in line}
    assert shown == set(recorded.splitlines()[2:])
