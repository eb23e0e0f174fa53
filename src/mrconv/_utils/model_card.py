"""The model card: what a folder that `save_pretrained` wrote says of itself to people and to the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

METRICS = {"accuracy": ".2%", "bits": ".3f"}  # and how they are shown
MARK = "<!-- Written by mrconv, and again whenever the model is saved here; remove this line to keep your own text. -->"


def model_card(
    config: Mapping[str, Any], parameters: int, results: Mapping[str, Any], *, license: str = "apache-2.0"
) -> str:
    """Return README.md: metadata for the hub, how to load the model, what it reached, every option.

    `results` may tell what it was trained on (`name`, `task`), its scores (`accuracy` or `bits` by split), and more.
    """
    name, task = results.get("name", config["architecture"]), results.get("task")
    metric = next((each for each in METRICS if each in results), "accuracy")
    scores = results.get(metric, {})
    header: dict[str, Any] = {
        "library_name": "mrconv",
        "license": license,
        "tags": ["mrconv", "long-convolution", "sequence-model", "model_hub_mixin"],
    }
    if task and scores:
        metrics = [{"type": metric, "name": f"{split} {metric}", "value": x} for split, x in scores.items()]
        found = {"task": {"type": "other"}, "dataset": {"name": task, "type": task}, "metrics": metrics}
        header["model-index"] = [{"name": name, "results": [found]}]
    metadata = "\n".join(f"{key}: {json.dumps(value)}" for key, value in header.items())  # JSON is YAML
    form = "merged into one kernel per layer" if config["merged"] else "with all its branches"
    trained = f" Trained on {task}." if task else ""
    rows = [f"| {split} {metric} | {x:{METRICS[metric]}} |" for split, x in scores.items()]
    rows += [f"| {key} | {value} |" for key, value in results.items() if key not in ("name", "task", metric)]
    table = "\n".join(["## Results", "", "| | |", "|---|---|", *rows, "", ""]) if rows else ""
    return f"""---
{metadata}
---

{MARK}

# {name}

A {config["architecture"]} of reparameterized multi-resolution convolutions, {form}: {parameters:,} parameters.{trained}

```python
from mrconv import {config["architecture"]}

model = {config["architecture"]}.from_pretrained("...")  # this repository or folder
```

{table}## Config

```json
{json.dumps(dict(config), indent=2)}
```

Licence: {license}. Weights are safetensors and options are JSON: loading executes nothing from them.
"""
