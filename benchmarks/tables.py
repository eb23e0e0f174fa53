"""Write the tables of performance.md, baselines.md and results.md in docs from the records in benchmarks/results.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table NAME -->` and `<!-- end -->`. With --check nothing is written, and the exit status is
1 if a table differs from its record.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mrconv.training.paper_numbers import OTHERS
from mrconv.training.report import mean_and_deviation
from mrconv.training.scores import SCORES

ROOT = Path(__file__).parents[1]
MIXERS = ("mrconv", "s4", "s4d", "s5", "longconv", "sgconv", "mega", "mamba", "attention")
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("performance", "baselines", "results", "recipe")]
TIMINGS = ("compile_graph_ms", "graph_ms", "ms")
DENSE = "merged, dense"
STACKS = ("ListOps", "Text", "Image", "Pathfinder", "Path-X")
MRCONV = {
    "ours": "**MRConv**, as trained",
    "merged": "**MRConv**, merged",
    "large": "MRConv, Large, as trained",
    "large merged": "MRConv, Large, merged",
}
PAPER = {
    "ours": "0.4 / 0.6", "merged": "1.5 / 1.3", "large": "0.2 / 0.3", "large merged": "0.9 / 0.7",
    "mega": "0.1 / 0.5", "mega-chunk": "0.3 / 0.7", "s4": "1 / 1",
}  # fmt: skip
"""Speed relative to S4 in inference on Text and Image that the paper reports."""
Record = Mapping[str, Any]
Column = Callable[[str, list[Record]], str]


def read(name: str) -> Record:
    """Return a record of benchmarks/results."""
    record: Record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return record


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 1) -> str:
    """Return a value, or a dash if there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def source(name: str) -> str:
    """Return the line that names a record, and the revision and machine it holds for."""
    record = read(name)
    revision = str(record.get("revision") or "unknown")[:7]
    machine = f"{record['hardware']}, torch {str(record['torch']).split('+')[0]}"
    return f"Revision {revision}, {machine} ([record](../benchmarks/results/{name}.json))."


def times(result: Mapping[str, float | None]) -> list[str]:
    """Return a candidate's times compiled and as a graph, as a graph, and eager."""
    return [number(result.get(timing)) for timing in TIMINGS]


def least(*results: Mapping[str, Any] | None, timings: Sequence[str] = (*TIMINGS, "compile_ms")) -> float | None:
    """Return the smallest of the candidates' times, None if there is none."""
    found = [result.get(timing) for result in results if result for timing in timings]
    return min((ms for ms in found if ms is not None), default=None)


def fastest(*results: Mapping[str, Any] | None, timings: Sequence[str] = (*TIMINGS, "compile_ms")) -> str:
    """Return the smallest of the candidates' times, as a cell."""
    return number(least(*results, timings=timings))


def training_stacks(name: str) -> str:
    """Return the training steps of stacks that differ in their mixer."""
    header = [
        "stack", "ours, compiled, graph", "graph", "eager", "none", "longconv", "dense", "dense, eager", "branches",
        "GiB", "branches, GiB",
    ]  # fmt: skip
    rows = []
    for row in read(name)["rows"]:
        step = row["training"]
        others = [fastest(step.get(mixer)) for mixer in ("none", "longconv", "dense")]
        memory = [step.get(mixer, {}).get("MiB") for mixer in ("ours", "branches")]
        rows.append([
            row["shape"]["name"], *times(step["ours"]), *others, number(step["dense"]["ms"]),
            fastest(step.get("branches")), *(number(None if mib is None else mib / 1024) for mib in memory),
        ])  # fmt: skip
    return markdown(header, rows) + "\n\n" + source(name)


def merged_stacks(name: str) -> str:
    """Return the inference of merged stacks, and of those that keep modes as dense kernels too, beside others."""
    header = ["stack", "ours, compiled, graph", "graph", "eager", "dense kernels, compiled, graph", "graph", "eager"]
    header += ["none", "longconv", "dense"]
    rows = [
        [row["shape"]["name"], *times(row["inference"]["merged"]), *times(row["inference"].get(DENSE, {}))]
        + [fastest(row["inference"].get(mixer)) for mixer in ("none", "longconv", "dense")]
        for row in read(name)["rows"]
    ]
    return markdown(header, rows) + "\n\n" + source(name)


def targets() -> str:
    """Return the times of our stacks before and after the last revision of the kernels, and the targets."""
    others, rows = read("baselines-h200"), []
    for title, step, dtype, eager in (
        ("training, bfloat16", "training", "bfloat16", False),
        ("training, float32", "training", "float32", False),
        ("merged, bfloat16", "inference", "bfloat16", False),
        ("merged, bfloat16, eager", "inference", "bfloat16", True),
    ):
        after = {row["shape"]["name"]: row[step] for row in read(f"model-h200-{dtype}")["rows"]}
        limits = others["targets_ms"][step + ", eager" * eager][dtype]
        cells = []
        for stack in STACKS:
            ours = [after.get(stack, {}).get(key) for key in ("ours", "merged", DENSE)]
            now = fastest(*ours, timings=["ms"]) if eager else fastest(*ours)
            cells.append(f"{others['ms'][step][dtype]['mrconv'][stack][eager]} / {now} / {limits[stack]}")
        rows.append([title, *cells])
    return markdown(["before / after / target", *STACKS], rows)


def others() -> str:
    """Return the times of other mixers, measured separately, each in its fastest way and eager in brackets."""
    record, rows = read("baselines-h200"), []
    for step, dtypes in record["ms"].items():
        for dtype, mixers in dtypes.items():
            for mixer, stacks in mixers.items():
                if mixer not in ("mrconv", "none"):
                    cells = [f"{number(stacks[s][0])} ({number(stacks[s][1])})" for s in STACKS]
                    rows.append([f"{step}, {dtype}: {mixer}", *cells])
    return markdown(["measured separately", *STACKS], rows)


def epochs() -> str:
    """Return the times of an epoch of the experiments."""
    header, rows = ["experiment", "examples", "epoch, s", "epochs", "all epochs, minutes", "revision"], []
    for row in read("epochs-h200")["rows"]:
        total = row["epoch_s"] * row["epochs"] / 60
        each = f"{row['examples']['train']:,} + {row['examples']['val']:,}"
        rows.append([
            row["experiment"], each, number(row["epoch_s"]), str(row["epochs"]), number(total), row["revision"]
        ])  # fmt: skip
    return markdown(header, rows) + "\n\n" + source("epochs-h200")


def speeds(name: str, step: str, paper: bool = False) -> str:
    """Return the speeds of all mixers relative to S4, each in its fastest way and eager in brackets."""
    record = read(name)
    stacks = [row for row in record["rows"] if "s4" in row.get(step, {})]
    mixers = dict.fromkeys(mixer for mixer in MRCONV if any(mixer in row[step] for row in stacks))
    mixers |= dict.fromkeys(sorted(mixer for row in stacks for mixer in row[step] if mixer not in MRCONV))
    rows = []
    for mixer in mixers:
        cells = [f"{ratio(row[step], mixer)} ({ratio(row[step], mixer, ['ms'])})" for row in stacks]
        cells += [PAPER.get(mixer, "-")] * paper
        rows.append([MRCONV.get(mixer, f"`{mixer}`"), *(cell.replace("- (-)", "-") for cell in cells)])
    rates = [[per_second(row, step), per_second(row, step, ["ms"])] for row in stacks]
    rows.append(["`s4`, examples/s", *(f"{fast} ({eager})" for fast, eager in rates), *["-"] * paper])
    header = ["", *(row["shape"]["name"] for row in stacks), *["in the paper, Text / Image"] * paper]
    missing = [entry for entry in record.get("not_measured", []) if entry["pass"] == step and entry["timing"] == "all"]
    return "\n\n".join([markdown(header, rows), *map(not_measured, missing), source(name)])


def not_measured(entry: Mapping[str, Any]) -> str:
    """Return the sentence that names mixers without any measurement, and the reason."""
    mixers = ", ".join(f"`{mixer}`" for mixer in entry["mixers"])
    return textwrap.fill(f"Not measured: {mixers} on {entry['shape']} ({entry['reason']}).", 120)


def ratio(results: Mapping[str, Any], mixer: str, timings: Sequence[str] = (*TIMINGS, "compile_ms")) -> str:
    """Return the speed of a mixer relative to S4, both in the fastest of these timings.

    A mixer of which only the eager time is known has no fastest one.
    """
    ms, s4 = (least(results.get(key), timings=timings) for key in (mixer, "s4"))
    launched = [timing for timing in timings if timing != "ms"]
    if ms is None or s4 is None or (launched and least(results[mixer], timings=launched) is None):
        return "-"
    return f"{s4 / ms:.2g}"


def per_second(row: Record, step: str, timings: Sequence[str] = (*TIMINGS, "compile_ms")) -> str:
    """Return the examples per second of S4 in the fastest of these timings."""
    ms = least(row[step]["s4"], timings=timings)
    return number(None if ms is None else 1e3 * row["shape"]["batch"] / ms, 0)


def label(row: Record) -> str:
    """Return the name and size of a layer."""
    shape = row["shape"]
    return f"{shape['name']} ({shape['batch']}x{shape['length']}x{shape['channels']})"


def training_layers(name: str, timing: str, digits: int) -> str:
    """Return the training steps of single layers beside N branches and one dense convolution."""
    header, rows = ["layer (batch x length x channels)", "ours", "branches", "dense"], []
    header += ["x branches", "x dense", "memory / branches", "merged", "dense, forward"]
    for row in read(name)["rows"]:
        step, merged = row["training"], row["inference"]
        ours, branches, dense = (step[key][timing] for key in ("ours", "branches", "dense"))
        share = step["ours"]["MiB"] / step["branches"]["MiB"]
        rows.append([
            label(row), *(number(ms, digits) for ms in (ours, branches, dense)), number(branches / ours),
            number(dense / ours, 2), number(share, 2),
            *(number(merged[key][timing], max(1, digits)) for key in ("merged", "dense")),
        ])  # fmt: skip
    return markdown(header, rows) + "\n\n" + source(name)


def fractions(name: str, key: str, digits: int) -> str:
    """Return the training steps of single layers by the part of the sequences that gives the statistics."""
    record = read(name)
    parts = list(record["rows"][0]["training"])
    rows = [
        [label(row), *(number(row["training"].get(part, {}).get(key), digits) for part in parts)]
        for row in record["rows"]
    ]
    return markdown(["layer (batch x length x channels)", *parts], rows) + "\n\n" + source(name)


def gradients() -> str:
    """Return the training steps of one dense convolution by the way its gradients are computed."""
    name = "toeplitz-gradients-h200"
    rows = []
    for row in read(name)["rows"]:
        shape, training = row["shape"], row["training"]
        taps = shape["length"] * (1 + shape["bidirectional"])
        ms = [number(result["graph_ms"], 2) for result in training.values()]
        rows.append([f"{shape['length']:,}", f"{taps:,}", *ms])
    header = ["positions", "taps", "on the tensor cores", "gradients by FFT", "all by FFT"]
    return markdown(header, rows) + "\n\n" + source(name)


def operators() -> str:
    """Return the accuracy on ListOps by the outermost operator."""
    record = read("listops-operators")
    header, rows = ["run", "all, %"], []
    for row in record["rows"]:
        each = row["operators"]
        header[2:] = [name.removeprefix("[") for name in each]
        rows.append([row["run"], *(number(100 * part["accuracy"], 2) for part in (row, *each.values()))])
    line = f"Revision {record['revision'][:7]} ([record](../benchmarks/results/listops-operators.json))."
    return markdown(header, rows) + "\n\n" + line


def ablation(pattern: str, paper: bool) -> str:
    """Return the ablation on ListOps from the recorded runs of each variant."""
    variants = OTHERS["listops-base"]
    more: dict[str, Column] = {"paper, test, %": lambda variant, _: number(variants[variant], 2)} if paper else {}
    return recorded_runs("variant", {variant: pattern.format(variant) for variant in variants}, more)


def mixers(pattern: str) -> str:
    """Return the runs of MRConv and of baselines in the same recipe; `pattern` has the place of the mixer's name."""
    patterns = {name: pattern.format("" if name == "mrconv" else f"-{name}") for name in MIXERS}
    more = {"minutes": lambda _, results: number(statistics.mean(result["seconds"] for result in results) / 60, 1)}
    return recorded_runs("mixer", patterns, more)


def schedules() -> str:
    """Return the runs of the demo with half a cosine and with a constant learning rate before a cooldown."""
    settings = {
        "epochs=4": "",
        "epochs=4, cooldown_epochs=1": "cooldown_epochs1.0-",
        "epochs=20": "epochs20-",
        "epochs=20, cooldown_epochs=4": "cooldown_epochs4.0-epochs20-",
    }
    patterns = {
        f"{mixer}, {text}": f"demo-{prefix}{name}task.test_size10000-seed*"
        for mixer, prefix in (("mrconv", ""), ("s4", "s4-"))
        for text, name in settings.items()
    }
    return recorded_runs("settings", patterns, {})


def recorded_runs(first: str, patterns: Mapping[str, str], more: Mapping[str, Column]) -> str:
    """Return the scores of recorded runs, a row for each pattern of folders that has any.

    `more` has further columns, which are functions of a row's name and results.
    """
    header = [first, "parameters", "training, %", "validation, %", "test, %", *more]
    rows = []
    for name, pattern in patterns.items():
        folders = sorted((ROOT / "results").glob(pattern))
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        columns = [
            [last_epoch(folder)["train/accuracy"] for folder in folders],
            *([result["accuracy"][split] for result in results] for split in ("val", "test")),
        ]
        if results:
            scores = [mean_and_deviation([100 * score for score in column]) for column in columns]
            others = [column(name, results) for column in more.values()]
            rows.append([f"`{name}`", f"{results[0]['parameters']:,}", *scores, *others])
    return markdown(header, rows)


def last_epoch(run: Path) -> dict[str, float]:
    """Return the scores of a run's last epoch."""
    with (run / "metrics.csv").open(newline="") as file:
        *_, last = csv.DictReader(file)
    return {name: float(value) for name, value in last.items()}


def launches() -> str:
    """Return the launches of one layer."""
    record = read("launches-h200")
    header, rows = ["layer", "dtype", "lengths", "pass", "algorithm", "launches", "GPU, ms", "eager, ms"], []
    for row in record["rows"]:
        rows.append([
            row["name"], row["precision"], "yes" if row["lengths"] else "no", row["pass"], row["algorithm"],
            str(row["launches"]), number(row["gpu_ms"], 2), number(row["eager_ms"], 2),
        ])  # fmt: skip
    return markdown(header, rows) + "\n\n" + source("launches-h200")


def costs() -> str:
    """Return the costs of dense kernels in bfloat16 that the selection uses."""
    table = json.loads((ROOT / "src/mrconv/ops/costs.json").read_text())["triton"]["half"]
    one, both = table["branch_sum"], table["bidirectional_branch_sum"]
    columns = {
        "toeplitz": one["toeplitz"], "spectral": one["spectral"], "moving_modes, 2": one["moving_modes"]["2"],
        "moving_modes, 3": one["moving_modes"]["3"], "toeplitz, bidirectional": both["toeplitz"],
        "spectral, bidirectional": both["spectral"],
    }  # fmt: skip
    rows = [
        [f"{length:,}", *(number(column[str(length)], 0) for column in columns.values())]
        for length in (256, 1024, 2048, 4096, 16384)
        if all(str(length) in column for column in columns.values())
    ]
    return markdown(["length", *columns], rows)


def kept() -> str:
    """Return a table of the weights in results/: the scores of the run, and those of the weights as they are kept."""
    rows = []
    for path in sorted((ROOT / "results").glob("*/metrics.json")):
        result, measured = (json.loads(each.read_text()) for each in (path.with_name("result.json"), path))
        metric = SCORES[result["metric"]]
        scores = [result[metric.name], {name: each[metric.name] for name, each in measured["splits"].items()}]
        texts = [metric.text(each[name]) if name in each else "-" for name in ("test", "val") for each in scores]
        size = (path.parent / "model/model.safetensors").stat().st_size / 1e6
        rows.append([f"`{path.parent.name}`", *texts, f"{size:.1f}"])
    return markdown(["run", "test", "as kept", "validation", "as kept", "MB"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "targets": targets,
    "training, bfloat16": lambda: training_stacks("model-h200-bfloat16"),
    "training, float32": lambda: training_stacks("model-h200-float32"),
    "merged, bfloat16": lambda: merged_stacks("model-h200-bfloat16"),
    "merged, float32": lambda: merged_stacks("model-h200-float32"),
    "others": others,
    "launches": launches,
    "costs": costs,
    "ablation": lambda: ablation("listops-base-{}-epochs6-task.test_size20000-seed0", paper=True),
    "ablation, demo": lambda: ablation("demo-{}-task.test_size10000-seed*", paper=False),
    "ablation, demo, kernel_lr 0.04": lambda: ablation("demo-{}-kernel_lr0.04-task.test_size10000-seed*", paper=False),
    "mixers, demo": lambda: mixers("demo{}-task.test_size10000-seed*"),
    "mixers, demo, 20 epochs": lambda: mixers("demo{}-epochs20-task.test_size10000-seed*"),
    "schedules, demo": schedules,
    "epochs": epochs,
    "gradients": gradients,
    "operators": operators,
    "kept": kept,
    "fractions, cpu": lambda: fractions("stats-fraction-cpu", "ms", 0),
    "fractions, h200": lambda: fractions("stats-fraction-h200-bfloat16", "graph_ms", 2),
    "layers, cpu": lambda: training_layers("layer-cpu-float32", "ms", 0),
    "speed, training, bfloat16": lambda: speeds("compare-h200-bfloat16", "training"),
    "speed, training, float32": lambda: speeds("compare-h200-float32", "training"),
    "speed, inference, bfloat16": lambda: speeds("compare-h200-bfloat16", "inference"),
    "speed, inference, float32": lambda: speeds("compare-h200-float32", "inference", paper=True),
    "speed, training, lengths": lambda: speeds("compare-h200-lengths-float32", "training"),
    "speed, inference, lengths": lambda: speeds("compare-h200-lengths-float32", "inference"),
}


def rewritten(page: str) -> str:
    """Return the page with the tables of the records."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table (.*?) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def main() -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table differs")
    check = parser.parse_args().check
    before = [page.read_text() for page in PAGES]
    after = [rewritten(page) for page in before]
    if not check:
        for path, page in zip(PAGES, after, strict=True):
            path.write_text(page)
    return int(check and before != after)


if __name__ == "__main__":
    sys.exit(main())
