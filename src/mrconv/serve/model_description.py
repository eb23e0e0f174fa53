"""The description of a model that `/model` returns."""

from __future__ import annotations

from typing import Any

from mrconv.hub import MERGED, MODEL
from mrconv.inference import Predictor
from mrconv.tasks.vocabulary import SPECIAL


def describe_model(predictor: Predictor) -> dict[str, Any]:
    """Return what a client needs to know about a model, as JSON values."""
    p, folder = predictor.preprocessor, predictor.folder.resolve()
    return {
        "name": folder.parent.name if folder.name in (MERGED, MODEL) else folder.name,
        "model": type(predictor.model).__name__,
        "parameters": sum(p.numel() for p in predictor.model.parameters()),
        "kind": p.kind,
        "length": p.length - len(p.end_tokens),
        "symbols": [symbol for symbol in p.vocabulary if symbol not in SPECIAL],
        "classes": list(p.classes),
        "target": p.target,
        "channels": p.channels,
        "pair": predictor.takes_pairs,
        "sample_rate": p.sample_rate,
        "step": p.step,
        "height": p.height,
        "width": p.width,
        "generates": predictor.generates,
        "streams": predictor.no_stream is None,
        "no_stream": predictor.no_stream,
    }
