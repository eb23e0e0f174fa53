"""Every Python block of the README and the docs runs, and the pages agree with the records, the site and each other.

`test_your_data.py` runs the page your-data.md, whose blocks need the commands between them.
"""

import contextlib
import csv
import io
import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

from mrconv import SequenceClassifier, reparameterize
from mrconv.kernels.protocol import KERNELS
from mrconv.mixers import MIXERS
from mrconv.tasks.base import TASKS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "src/mrconv/ops/README.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def _clean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for registry in (KERNELS, MIXERS, TASKS):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "your-data.md"], ids=lambda p: p.name)
def test_python_blocks_of_the_page_run(page):
    namespace = {"__name__": "page"}
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match[1], str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, namespace)


def test_the_pages_have_the_blocks_they_should():
    counts = {page.name: len(BLOCK.findall(page.read_text())) for page in PAGES}
    assert counts["README.md"] >= 4
    assert counts["quickstart.md"] >= 4
    assert counts["tour.md"] >= 8
    assert counts["kernels.md"] >= 2
    assert counts["plugins.md"] >= 2


def test_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda p: p.name)
def test_lines_have_at_most_120_columns(page):
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code ^= line.startswith("```")
        table_or_link = line.startswith("|") or re.search(r"\]\(\S+\)", line)
        assert code or table_or_link or len(line) <= 120, f"{page.name}:{number} has {len(line)} columns"


def test_site_navigation_names_every_page():
    def pages(node):
        if isinstance(node, str):
            return [node]
        return [page for child in (node.values() if isinstance(node, dict) else node) for page in pages(child)]

    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(set(named)) == len(named)
    assert {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} <= set(named)


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda p: p.name)
def test_links_between_pages_lead_to_a_file(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def rows_of(record):
    """Return the measurements of a recorded benchmark."""
    return json.loads((ROOT / f"benchmarks/results/{record}.json").read_text())["rows"]


def test_errors_on_the_page_are_those_recorded():
    results = json.loads((ROOT / "benchmarks/results/exactness.json").read_text())["results"]
    page = (ROOT / "docs/exactness.md").read_text()
    for rows in results.values():
        for name, row in rows.items():
            line = f"| {name} | " + " | ".join(f"{value:.1e}" for value in row.values()) + " |"
            assert line in page, line


def test_times_on_the_pages_are_those_recorded():
    tables = runpy.run_path(str(ROOT / "benchmarks/tables.py"))
    pages = [path.read_text() for path in tables["PAGES"]]
    assert all(sum(f"<!-- table {name} -->" in page for page in pages) == 1 for name in tables["TABLES"])
    for page in pages:
        assert page.splitlines() == tables["rewritten"](page).splitlines(), "run python benchmarks/tables.py"


def test_speeds_are_relative_to_s4_in_the_fastest_way_and_eager():
    tables = runpy.run_path(str(ROOT / "benchmarks/tables.py"))
    results = {
        "ours": {"ms": 8.0, "graph_ms": None, "compile_graph_ms": 2.0},
        "longconv": {"ms": None, "graph_ms": 5.0},
        "mega": {"ms": None, "error": "out of memory"},
        "s4d": {"ms": 5.0, "graph_ms": None},
        "s4": {"ms": 10.0, "graph_ms": 4.0},
    }
    rows = [{"shape": {"name": "Text", "batch": 2}, "training": results}, {"shape": {"name": "Image"}, "inference": {}}]
    skipped = {"shape": "Text", "pass": "training", "mixers": ["s5"], "timing": "all", "reason": "no time"}
    record = {
        "rows": rows,
        "not_measured": [skipped, skipped | {"timing": "both"}],
        "revision": "0123456789",
        "hardware": "GPU",
        "torch": "2",
    }
    tables["speeds"].__globals__["read"] = lambda name: record
    lines = tables["speeds"]("name", "training").splitlines()
    assert lines[0] == "|  | Text |"
    cells = ["| **MRConv**, as trained | 2 (1.2) |", "| `longconv` | 0.8 (-) |", "| `mega` | - |", "| `s4` | 1 (1) |"]
    cells.append("| `s4d` | - (2) |")  # known eager only
    assert lines[2:8] == [*cells, "| `s4`, examples/s | 500 (200) |"]
    assert lines[9] == "Not measured: `s5` on Text (no time)."
    assert lines[11].startswith("Revision 0123456, GPU, torch 2")


def test_speed_ratios_of_the_readme_are_those_recorded():
    rows = rows_of("model-h200-bfloat16")
    readme = " ".join((ROOT / "README.md").read_text().split())
    for name, other, ours in (("training", "branches", "ours"), ("inference", "dense", "merged")):
        forms = [
            [row[name][form]["graph_ms"] for form in (ours, f"{ours}, dense") if form in row[name]] for row in rows
        ]
        ratios = [
            row[name][other]["graph_ms"] / min(ms) for row, ms in zip(rows, forms, strict=True) if other in row[name]
        ]
        assert f"{min(ratios):.1f} to {max(ratios):.1f} times as fast" in readme


def test_cpu_ratios_of_the_readme_are_those_recorded():
    readme = " ".join((ROOT / "README.md").read_text().split())
    for name, other, ours, digits in (
        ("training", "branches", "ours", 1), ("training", "dense", "ours", 2), ("inference", "dense", "merged", 2)
    ):  # fmt: skip
        ratios = [row[name][other]["ms"] / row[name][ours]["ms"] for row in rows_of("layer-cpu-float32")]
        assert f"at {min(ratios):.{digits}f} to {max(ratios):.{digits}f} times" in readme


def test_accuracies_of_the_readme_are_those_of_the_results_page():
    def rows(page):
        return [line.strip("| ").split(" | ") for line in (ROOT / page).read_text().splitlines() if line[:2] == "| "]

    compared = 0
    records = {row[0]: row for row in rows("docs/results.md")}
    for task, accuracy, paper, baseline, epochs, _ in (row for row in rows("README.md") if len(row) == 6):
        names = [f"{task.lower()}-base", f"{task.lower()}-base-epochs{epochs.split()[0]}"]
        for row in [records[name] for name in names if name in records][:1]:
            assert accuracy == row[3]
            assert paper == row[5]
            assert baseline == "{1} ({0})".format(*row[7].split())
            assert epochs.split()[0].rstrip(",") == row[9]
            compared += 1
    assert compared == 5


@pytest.mark.parametrize(
    ("section", "run"),
    [("Pathfinder", "pathfinder-base-epochs60-seed0"), ("Sequential CIFAR", "scifar-base-epochs60-seed0")],
)
def test_epochs_on_the_results_page_are_those_recorded(section, run):
    text = (ROOT / "docs/results.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    with (ROOT / "results" / run / "metrics.csv").open(newline="") as file:
        epochs = {row["epoch"]: {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 9
    for epoch, *cells in rows[1:]:
        row = epochs[epoch]
        scores = [f"{100 * row[f'{split}/accuracy']:.2f}" for split in ("train", "val", "test")]
        assert cells == [f"{row['lr']:.4f}", *scores, f"{row['train/loss']:.3f}", f"{row['val/loss']:.3f}"]


@pytest.mark.parametrize(
    ("page", "record", "key", "names"),
    [
        ("streaming", "streaming-cpu-float32", "ms", "fourier 1; fourier 32; dilated 8; dense; window; attention"),
        (
            "language",
            "generation-cpu-float32",
            "tokens_per_s",
            "fourier; dilated; merged; attention; merged, recomputed; attention, recomputed",
        ),
    ],
)
def test_speeds_of_steps_and_generation_are_those_recorded(page, record, key, names):
    text = (ROOT / f"docs/{page}.md").read_text()
    for row in rows_of(record):
        assert " | ".join(f"{row[name][key]:.3g}" for name in names.split("; ")) in text


def test_the_noise_of_dropout_on_the_page_is_the_recorded_one():
    page = (ROOT / "docs/recipe.md").read_text()
    ratios = {(row["name"], row["dropout"], row["tied"]): row["ratio"] for row in rows_of("dropout-cpu")}
    for name, dropout in {key[:2] for key in ratios}:
        tied, single = ratios[name, dropout, True], ratios[name, dropout, False]
        assert f"| {name} | {dropout} | {tied:.2g} | {single:.2g} |" in page


def test_the_soak_test_on_the_page_is_the_recorded_one_and_lost_nothing():
    record = json.loads((ROOT / "benchmarks/results/soak-cpu.json").read_text())
    page = (ROOT / "docs/reliability.md").read_text()
    for row in record["rows"]:
        figures = [f"{name} {value}" for name, value in row.items() if name not in ("check", "lost", "wrong")]
        assert row.get("lost", 0) == row.get("wrong", 0) == 0
        assert f"| {row['check']} | {', '.join(figures)} | nothing |" in page
    for name in ("date", "revision", "hardware", "torch", "python"):
        assert record[name][:10] in page


def test_accuracies_on_the_page_are_those_of_the_papers_tables():
    from mrconv.training.report import baseline_table

    page = (ROOT / "docs/baselines.md").read_text().splitlines()
    assert all(line in page for line in baseline_table([]).splitlines())


def test_files_of_the_architecture_page_exist():
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs/architecture.md").read_text()):
        folders = [f"src/mrconv/{folder}" for folder in ("", "ops/branch_sum", "ops/fft_conv", "training", "baselines")]
        assert any((ROOT / folder / name).exists() for folder in folders), name


def files_visited(call):
    """Return the files of mrconv whose functions run during the second of two calls."""
    package, visited = ROOT / "src/mrconv", set()

    def profile(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(package):
            visited.add(path.relative_to(package).as_posix())

    call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return visited


@pytest.mark.parametrize("path", ["training batch", "merged call", "streaming step"])
def test_files_of_a_path_on_the_architecture_page_are_those_that_run(path):
    model = SequenceClassifier(n_classes=2, vocab_size=4, d_model=4, depth=1, l_max=64, kernel_size=2, backend="torch")
    tokens, lengths = torch.randint(4, (2, 64)), torch.tensor([64, 32])
    if path == "training batch":
        visited = files_visited(lambda: model(tokens, lengths=lengths).sum().backward())
    elif path == "merged call":
        reparameterize(model)
        visited = files_visited(torch.no_grad()(lambda: model(tokens, lengths=lengths)))
    else:
        layer = model.eval().backbone.blocks[0].layer
        state = layer.initial_state(batch=1)
        visited = files_visited(lambda: layer.step(torch.randn(1, 4), state))
    section = (ROOT / "docs/architecture.md").read_text().split(f"## One {path}\n")[1].split("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    assert visited == {name for cell in cells for name in re.findall(r"`([\w/]+\.py)`", cell)}
    if path == "training batch":
        assert len([cell for cell in cells if cell.startswith("| `")]) == 13


def test_layers_of_the_architecture_page_are_those_of_the_import_contract():
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    page = (ROOT / "docs/architecture.md").read_text().split("```text\n")[1].split("```")[0]
    assert page.splitlines() == [layer.replace(" | ", ", ") for layer in contract["layers"]]
