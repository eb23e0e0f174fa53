"""Benchmark tasks: their files as published, or generated here, as arrays ready to train on."""

from . import characters, cifar, imagenet, listops, mnist, pathfinder, retrieval, speech, text
from . import preview as show
from .base import Prepared, Split, Task, register_task, task, task_class, task_names
from .custom import task as own
from .errors import DataError, MissingData
from .loaders import Batch, BatchLoader, ResidentLoader, data_loader
from .window_loader import WindowLoader

__all__ = [
    "Batch",
    "BatchLoader",
    "DataError",
    "MissingData",
    "Prepared",
    "ResidentLoader",
    "Split",
    "Task",
    "WindowLoader",
    "characters",
    "cifar",
    "data_loader",
    "imagenet",
    "listops",
    "mnist",
    "own",
    "pathfinder",
    "register_task",
    "retrieval",
    "show",
    "speech",
    "task",
    "task_class",
    "task_names",
    "text",
]
