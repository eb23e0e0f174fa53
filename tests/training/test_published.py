"""What is published in results/ is whole, and docs/results.md shows it."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from mrconv.hub import MODEL, model_folder, saved_model
from mrconv.training import report as results
from mrconv.training.loop import read_run

ROOT = Path(__file__).parents[2]
PUBLISHED = sorted((ROOT / "results").glob("*/result.json"))


def test_the_page_shows_what_was_recorded():
    assert PUBLISHED
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert results.markdown(results.collect([ROOT / "results"])) in page


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_a_published_run_is_whole(path):
    folder, result = path.parent, results.read(path)
    assert folder.name == f"{result['name']}-seed{result['seed']}"
    assert dataclasses.asdict(read_run(folder)) == result["config"]
    assert json.loads((folder / "environment.json").read_text()).items() >= result["environment"].items()
    with (folder / "metrics.csv").open() as file:
        epochs = [int(row["epoch"]) for row in csv.DictReader(file)]
    assert epochs == list(range(1, result["epochs_done"] + 1))
    assert result["partial"] or result["epochs_done"] == result["epochs"]
    if (folder / MODEL).exists():
        model = saved_model(model_folder(folder, MODEL))
        assert sum(p.numel() for p in model.parameters()) == result["parameters"]
        assert model.results["name"] == result["name"]
