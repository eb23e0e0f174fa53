"""The figure of recorded results: accuracy against training time."""

import json

import pytest
from matplotlib.figure import Figure

from mrconv.cli import main
from mrconv.training import result_files
from mrconv.training.results_figure import accuracy_curve

from .test_figures import METRICS, is_png


@pytest.fixture
def record(tmp_path):
    """A function that writes the record of a run of three epochs."""

    def write(name, task="listops", seed=0, hardware="a GPU", metrics=METRICS, **changes):
        folder = tmp_path / f"{name}-seed{seed}"
        folder.mkdir()
        scores = {"accuracy": {"test": 0.3}, "merged_accuracy": {"test": 0.3}}
        result = {"name": name, "task": task, "seed": seed, "partial": False, "epochs": 3, "seconds": 360.0}
        result |= {"parameters": 1, "environment": {"hardware": hardware}, "config": {}} | scores | changes
        (folder / "result.json").write_text(json.dumps(result))
        if metrics:
            (folder / "metrics.csv").write_text(metrics)
        return tmp_path

    return write


def panels(monkeypatch, folder):
    """Return the panels of the figure of a folder by their titles."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self))
    assert main(["plot", "accuracy", str(folder)]) == 0
    return {axes.get_title(loc="left"): axes for axes in saved[0].axes if axes.get_visible()}


def test_time_is_divided_evenly_among_epochs(record):
    (result,) = result_files.collect([record("listops-base")])
    assert accuracy_curve(result) == ([2.0, 4.0, 6.0], [20.0, 40.0, 30.0])
    (result,) = result_files.collect([record("half", partial=True, epochs=6, epochs_done=3) / "half-seed0"])
    assert accuracy_curve(result).minutes == [2.0, 4.0, 6.0]


def test_each_task_has_a_panel_with_its_runs_and_the_papers_accuracy(record, monkeypatch):
    for name, task, seed in (
        ("text-base", "text", 0),
        ("listops-base", "listops", 0),
        ("listops-base", "listops", 1),
        ("listops-s4", "listops", 0),
        ("mine", "folder", 0),
    ):
        folder = record(name, task, seed)
    drawn = panels(monkeypatch, folder)
    assert list(drawn) == ["listops", "text", "folder"]  # in the order of the paper, then the others
    _, labels = drawn["listops"].get_legend_handles_labels()
    assert labels == ["listops-base", "listops-s4"]  # the seeds of a run share a line of the legend
    lines = [line for line in drawn["listops"].get_lines() if len(line.get_xdata()) == 3]
    assert [line.get_color() == lines[0].get_color() for line in lines] == [True, True, False]
    assert [text.get_text() for text in drawn["listops"].texts] == ["paper 59.60, 62.40"]
    assert drawn["listops"].get_xlabel() == "minutes of training, a GPU"
    assert not drawn["folder"].texts


def test_runs_on_different_hardware_have_different_labels(record, monkeypatch):
    record("listops-base")
    folder = record("listops-s4", hardware="a CPU")
    axes = panels(monkeypatch, folder)["listops"]
    assert axes.get_legend_handles_labels()[1] == ["listops-base, a GPU", "listops-s4, a CPU"]
    assert axes.get_xlabel() == "minutes of training"


def test_the_figure_is_written_to_a_new_folder(record, tmp_path, capsys):
    out = tmp_path / "new" / "accuracy.png"
    assert main(["plot", "accuracy", str(record("listops-base")), "--out", str(out)]) == 0
    assert is_png(out)
    assert capsys.readouterr().out == f"{out}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": ""}, "none of the runs has recorded test accuracies and a time"),
        ({"metrics": "epoch,test/bits\n1,2.0\n"}, "none of the runs has recorded test accuracies and a time"),
        ({"metrics": "epoch,test/accuracy\n1,x\n"}, "is not a metrics table of a run"),
        ({"seed": "x"}, "'seed' cannot be"),
    ],
)
def test_records_that_cannot_be_plotted_are_reported(record, capsys, changes, message):
    folder = record("listops-base", **changes)
    with pytest.raises(SystemExit, match="2"):
        main(["plot", "accuracy", str(folder), "--out", str(folder / "new" / "x.png")])
    assert message in capsys.readouterr().err
    assert not (folder / "new").exists()
