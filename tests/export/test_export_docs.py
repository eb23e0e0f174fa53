"""docs/export.md shows the numbers that benchmarks/export.py recorded."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_times_on_the_page_are_those_recorded():
    page = (ROOT / "docs/export.md").read_text()
    record = json.loads((ROOT / "benchmarks/results/export-cpu-float32.json").read_text())
    formats = ("pytorch", "torch", "onnx", "aoti")
    columns = (*formats, *(f"{name} step" for name in formats))
    for row in record["rows"]:
        assert f"| {row['kernel']}, {row['length']:,} | " + " | ".join(f"{row['ms'][c]:.3g}" for c in columns) in page
    small, large = record["dtypes"]["128"], record["dtypes"]["512"]
    for name in small:
        assert f"| {small[name]['ms']:.0f} | {large[name]['ms']:.0f} | {large[name]['error']:.1e} |" in page
