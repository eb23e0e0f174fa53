"""Shapes of the published data sets, for models that are built without their data."""

from __future__ import annotations

from typing import Any

from mrconv.tasks import Prepared

from .datamodule import make_task
from .experiment import Experiment

SHAPES: dict[str, dict[str, Any]] = {
    "listops": {"encoder": "tokens", "classes": 10, "symbols": 18},
    "text": {"encoder": "tokens", "classes": 2, "symbols": 134},
    "retrieval": {"encoder": "tokens", "classes": 2, "symbols": 98, "pair": True},
    "image": {"encoder": "values", "classes": 10, "channels": 1, "length": 1024},
    "scifar": {"encoder": "values", "classes": 10, "channels": 3, "length": 1024},
    "smnist": {"encoder": "values", "classes": 10, "channels": 1, "length": 784},
    "pathfinder": {"encoder": "values", "classes": 2, "channels": 1},
    "pathx": {"encoder": "values", "classes": 2, "channels": 1},
    "speech": {"encoder": "values", "classes": 35, "channels": 1, "length": 16000},
    "cifar": {"encoder": "image", "classes": 10, "channels": 3, "size": 32},
    "imagenet": {"encoder": "image", "classes": 1000, "channels": 3},
    "characters": {"encoder": "text", "classes": 0, "symbols": 66},
}
"""What the data sets do not leave to options: numbers of classes, symbols and channels, and lengths or sizes."""


def published_data(experiment: Experiment) -> Prepared:
    """Return an experiment's data without examples, in the shape of the published data set.

    Raises:
        ValueError: the task is one of custom data.
    """
    if experiment.task not in SHAPES:
        raise ValueError(f"{experiment.name}: the shape of task {experiment.task} depends on its data")
    shape = SHAPES[experiment.task]
    options = vars(make_task(experiment))
    size: int = options.get("size") or shape.get("size", 0)
    data = Prepared(
        name=experiment.task,
        encoder=shape["encoder"],
        classes=_names(options.get("words") or shape["classes"]),
        length=options.get("length") or shape.get("length") or size**2,
        splits={},
        vocabulary=_names(shape.get("symbols", 0)),
        channels=shape.get("channels", 1),
        pair=shape.get("pair", False),
        facts={"size": size} if size else {},
    )
    return data if experiment.rate == 1 else data.decimated(experiment.rate)


def _names(n: int) -> tuple[str, ...]:
    return tuple(map(str, range(n)))
