"""`mrconv report`: one page that needs no other file and runs no script."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from mrconv.cli import main

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<script>document.title = 'attacked'</script>"


@pytest.fixture
def run(tmp_path):
    """Return a copy of a recorded run with weights, and hostile predictions."""
    folder = shutil.copytree(RECORDS / "text-base-seed0", tmp_path / "run")
    (folder / "predictions.csv").write_text(f'name,label,prediction\n"{HOSTILE}",positive,negative\n')
    test = {"examples": 25000, "f1": 0.875, "f1_per_class": {"negative": 0.85, HOSTILE: 0.9}, "confusion_matrix": [[1]]}
    (folder / "metrics.json").write_text(json.dumps({"splits": {"test": test}}))
    return folder


def test_the_page_holds_everything_and_loads_nothing(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    titles = ["Scores", "Learning curves", "Weights of the resolutions", "Merged kernels", "Predictions", "Settings"]
    assert re.findall("<h2>(.*?)</h2>", page) == [*titles, "Environment"]
    for text in (
        "88.56%",
        "0.875",
        "f1 per class",
        "929,282 parameters",
        "weight_decay",
        "NVIDIA H200",
        "&lt;script&gt;",
    ):
        assert text in page, text
    assert HOSTILE not in page
    assert set(re.findall(r"(?:src=|href=|url\().{5}", page)) == {'src="data'}
    assert "script" not in re.sub("&lt;.*?&gt;", "", page)


def test_a_run_without_weights_has_its_curves_and_scores(tmp_path):
    out = tmp_path / "deep" / "image.html"
    assert main(["report", str(RECORDS / "image-base-epochs30-seed0"), "--out", str(out)]) == 0
    page = out.read_text()
    assert "89.39%" in page
    assert page.count("<img") == 1


def test_a_run_that_is_not_recorded_yet_has_a_page(run):
    (run / "result.json").unlink()
    assert main(["report", str(run)]) == 0
    assert "not recorded yet" in (run / "report.html").read_text()


def test_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    for folder, message in (
        (tmp_path / "none", "it has no config.yaml"),
        (tmp_path / "run", "no epoch is complete yet"),
    ):
        if folder.exists():
            shutil.copy(RECORDS / "text-base-seed0" / "config.yaml", folder)
        with pytest.raises(SystemExit):
            main(["report", str(folder)])
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (folder / "report.html").exists()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install one, or name it in $CHROMIUM")
def test_a_browser_shows_the_page(run):
    from playwright.sync_api import sync_playwright

    assert main(["report", str(run)]) == 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, problems = browser.new_page(viewport={"width": 390, "height": 800}), []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.goto((run / "report.html").as_uri())
        assert page.title() == "text-base"
        assert all(page.evaluate("[...document.images].map(image => image.naturalWidth > 0)"))
        assert page.evaluate("document.images.length") == 3
        assert page.evaluate("document.documentElement.scrollWidth") <= 390  # wide tables scroll by themselves
        assert problems == []
        browser.close()
