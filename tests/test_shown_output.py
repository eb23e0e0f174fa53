"""Commands of other pages than docs/your-data.md print what the page shows."""

from pathlib import Path

import pytest

from .pages import blocks, comparable, run_command

ROOT = Path(__file__).parent.parent


def shown_output(page, prefix):
    """Return the only command of a page that starts with a prefix, and the output that the page shows."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = [each for *_, commands in blocks(text) for each in commands if each[0].startswith(prefix)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("page", "prefix"), [("results", "mrconv predict"), ("vision", "mrconv info mrconvnext_tiny_fourier_sparse")]
)
def test_a_command_prints_what_the_page_shows(page, prefix, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, shown = shown_output(page, prefix)
    assert run_command(command) == shown


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer", "model", "length"])
def test_a_benchmark_prints_the_table_that_the_page_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, shown = shown_output("benchmarks", f"mrconv bench {name}")
    printed = run_command(command.replace("--rounds 3", "--rounds 1")).splitlines()
    start, _, end = shown.partition("...\n")
    kept = [*printed[: start.count("\n")], *printed[len(printed) - end.count("\n") :]]
    assert comparable("\n".join(kept)) == comparable(shown.replace("...\n", ""))
