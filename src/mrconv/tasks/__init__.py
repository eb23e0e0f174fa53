"""Benchmark tasks: published or generated data, prepared as arrays for training."""

from . import characters, cifar, custom, imagenet, listops, mnist, pathfinder, retrieval, speech, text
from .base import Prepared, Split, Task, register_task, task, task_class, task_names
from .errors import DataError, MissingData
from .loaders import Batch, BatchLoader
from .resident_loader import ResidentLoader
from .window_loader import WindowLoader
from .worker_loader import data_loader

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
    "custom",
    "data_loader",
    "imagenet",
    "listops",
    "mnist",
    "pathfinder",
    "register_task",
    "retrieval",
    "speech",
    "task",
    "task_class",
    "task_names",
    "text",
]
