"""Accuracy on ListOps by the outermost operator, from the predictions of `mrconv evaluate`.

    mrconv evaluate RUN task.test_size=20000
    python benchmarks/listops_operators.py RUN/evaluate-task.test_size20000 ... [--out FILE.json]

The expressions are generated again with the evaluation's settings.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mrconv._utils.revision import revision
from mrconv.bench import records
from mrconv.tasks import task

OPERATORS = ("[MAX", "[MIN", "[MED", "[SM")


def measure(folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """Return the accuracy on the test split, and on the expressions of each operator."""
    evaluation = json.loads((folder / "metrics.json").read_text())
    changes = evaluation["changes"].items()
    options = {key.removeprefix("task."): value for key, value in changes if key.startswith("task.")}
    data = task("listops", data_dir, **options).prepare()
    split, names = data.splits["test"], np.array(data.vocabulary)
    assert split.offsets is not None
    first = names[split.x[split.offsets[:-1]]]
    with (folder / "predictions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test"]
    targets, predictions = (np.array([int(row[key]) for row in rows]) for key in ("target", "prediction"))
    if not np.array_equal(targets, split.y):
        raise ValueError(f"{folder}/predictions.csv is not of these expressions: the targets differ")
    right = predictions == targets
    parts = {operator: right[first == operator] for operator in OPERATORS}
    return {
        "run": folder.parent.name,
        "examples": len(right),
        "accuracy": float(right.mean()),
        "operators": {name: {"examples": len(part), "accuracy": float(part.mean())} for name, part in parts.items()},
    }


def main() -> int:
    """Measure all evaluations, print a table and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("evaluations", type=Path, nargs="+", help="folders that `mrconv evaluate` wrote")
    parser.add_argument("--data-dir", type=Path, help="folder of the data; default: $MRCONV_DATA, else ./data")
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    given = parser.parse_args()
    rows = [measure(folder, given.data_dir) for folder in given.evaluations]
    print(f"{'run':40} {'all':>6} " + " ".join(f"{name:>6}" for name in OPERATORS))
    for row in rows:
        scores = [row["accuracy"], *(row["operators"][name]["accuracy"] for name in OPERATORS)]
        print(f"{row['run']:40} " + " ".join(f"{100 * score:6.2f}" for score in scores))
    record = {"benchmark": "listops_operators", "command": shlex.join(["python", *sys.argv]), "revision": revision()}
    records.write(given.out, {**record, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
