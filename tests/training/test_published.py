"""The records in results/ are complete, and docs/results.md shows them."""

import csv
import json
from pathlib import Path

import pytest
import yaml

from mrconv.hub import MODEL, model_folder
from mrconv.inference import load_model
from mrconv.training import Experiment
from mrconv.training.report import displayed_name, markdown
from mrconv.training.result_files import collect, read
from mrconv.training.rundir import read_run

ROOT = Path(__file__).parents[2]
PUBLISHED = sorted((ROOT / "results").glob("*/result.json"))


def test_the_page_shows_the_records():
    assert PUBLISHED
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    of_the_demo = collect((ROOT / "results").glob("demo*"))
    others = [result for result in collect([ROOT / "results"]) if result not in of_the_demo]
    assert of_the_demo
    assert others
    assert others == collect((ROOT / "results").glob("[!d]*"))
    for pattern, results in (("[^d]*", others), ("demo*", of_the_demo)):
        assert f"`mrconv results results/{pattern}" in page
        assert markdown(results) in page


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_a_published_run_is_complete(path):
    folder, result = path.parent, read(path)
    assert folder.name == f"{displayed_name(result)}-seed{result['seed']}"
    assert yaml.safe_load((folder / "config.yaml").read_text()) == result["config"]
    assert read_run(folder) == Experiment.make(result["config"])
    assert json.loads((folder / "environment.json").read_text()).items() >= result["environment"].items()
    with (folder / "metrics.csv").open() as file:
        epochs = [int(line["epoch"]) for line in csv.DictReader(file)]
    assert epochs == list(range(1, result["epochs_done"] + 1))
    assert result["partial"] or result["epochs_done"] == result["epochs"]
    if (folder / MODEL).exists():
        model = load_model(model_folder(folder, MODEL))
        assert sum(p.numel() for p in model.parameters()) == result["parameters"]
        assert model.results["name"] == result["name"]
