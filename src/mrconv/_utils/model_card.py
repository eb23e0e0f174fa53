"""The model card: the README.md that `save_pretrained` writes beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

METRICS = {"accuracy": ".2%", "bits": ".3f", "mae": ".4g"}  # with their format
MARK = "<!-- Written by mrconv, and again whenever the model is saved here; remove this line to keep your own text. -->"


def model_card(
    config: Mapping[str, Any], parameters: int, results: Mapping[str, Any], *, license: str = "apache-2.0"
) -> str:
    """Return the text of README.md: metadata for the hub, how to load the model, its scores and every option.

    `results` may contain the run's `name` and `task`, scores by split (`accuracy`, `bits` or `mae`) and other entries.
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
        entry = {"task": {"type": "other"}, "dataset": {"name": task, "type": task}, "metrics": metrics}
        header["model-index"] = [{"name": name, "results": [entry]}]
    metadata = "\n".join(f"{key}: {json.dumps(value)}" for key, value in header.items())  # JSON is YAML
    form = "merged into one kernel per layer" if config["merged"] else "with separate branches"
    trained = f" Trained on {task}." if task else ""
    lines = [f"| {split} {metric} | {x:{METRICS[metric]}} |" for split, x in scores.items()]
    lines += [f"| {key} | {value} |" for key, value in results.items() if key not in ("name", "task", metric)]
    table = "\n".join(["## Results", "", "| | |", "|---|---|", *lines, "", ""]) if lines else ""
    plugins = "".join(f"import {module}  # a plug-in\n" for module in config.get("plugins", ()))
    return f"""---
{metadata}
---

{MARK}

# {name}

A {config["architecture"]} of reparameterized multi-resolution convolutions, {form}: {parameters:,} parameters.{trained}

```python
{plugins}from mrconv import {config["architecture"]}

model = {config["architecture"]}.from_pretrained("...")  # this repository or folder
```

{table}## Config

```json
{json.dumps(dict(config), indent=2)}
```

Licence: {license}. Weights are safetensors and options are JSON; loading them executes no code.
"""
