"""docs/export.md shows what benchmarks/export.py recorded."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_times_on_the_page_are_those_recorded():
    page = (ROOT / "docs/export.md").read_text()
    found = json.loads((ROOT / "benchmarks/results/export-cpu-float32.json").read_text())
    ways = ("pytorch", "torch", "onnx", "aoti")
    columns = (*ways, *(f"{way} step" for way in ways))
    for row in found["rows"]:
        assert f"| {row['kernel']}, {row['length']:,} | " + " | ".join(f"{row['ms'][c]:.3g}" for c in columns) in page
    small, large = found["dtypes"]["128"], found["dtypes"]["512"]
    for name in small:
        assert f"| {small[name]['ms']:.0f} | {large[name]['ms']:.0f} | {large[name]['error']:.1e} |" in page
