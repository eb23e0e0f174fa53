"""Labels of custom examples by target: read from cells, JSON values and arrays, and encoded as the array y."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..errors import DataError
from ..window_loader import IGNORED

SEPARATOR = ";"
"""Between the labels of a cell."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


class LabelFormat(ABC):
    """The labels of one target. A missing label, which only predictions allow, is None."""

    metric: ClassVar[str] = "accuracy"
    """Score of the target's models: one of `mrconv.training.scores`."""
    expected: ClassVar[str]
    """The labels of a cell or JSON value, for errors."""
    expected_array: ClassVar[str]
    """The labels of an array, for errors."""

    def columns(self, given: str) -> list[str]:
        """Return the columns of a table that the option label_column names."""
        return [given]

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """Return the label of a cell or JSON value; raise ValueError if it is not one."""

    @abstractmethod
    def from_array(self, y: np.ndarray, x: np.ndarray) -> list[Any]:
        """Return the labels of an array of n examples; raise ValueError for a wrong shape or dtype."""

    def names_of_outputs(self, label: Any, columns: Sequence[str]) -> tuple[str, ...]:
        """Return names of outputs that do not follow from the labels of all examples."""
        return ()

    def classes(self, labels: Sequence[Any]) -> list[str]:
        """Return the sorted names of the classes of some labels; integers are sorted by value."""
        names = {name for label in labels for name in self.names(label)}
        integers = all(name.removeprefix("-").isdecimal() and len(name) < 100 for name in names)
        return sorted(names, key=lambda name: (int(name), name)) if integers else sorted(names)

    def names(self, label: Any) -> Sequence[str]:
        """Return the classes in a label."""
        return [name for name in label if name]

    @abstractmethod
    def encode(self, labels: Sequence[Any], classes: Sequence[str], length: int) -> np.ndarray:
        """Return the labels as an array; `length` is that of the sequences."""

    def text(self, label: Any) -> str:
        """Return a label as text, in the form of a prediction."""
        return " ".join(label)


class ClassLabel(LabelFormat):
    """One class: a name or an integer."""

    expected = "a name or an integer; for numbers, set target=values"
    expected_array = "integers or names of classes (n,); for several labels set target=labels, for numbers "
    expected_array += "target=values, for a class per position target=positions"

    def parse(self, value: Any) -> str:
        """Return the name of the class."""
        return _name(value)

    def from_array(self, y: np.ndarray, x: np.ndarray) -> list[str]:
        """Return integers (n,) or (n, 1), or strings, as names."""
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        if y.ndim != 1:
            raise ValueError
        return _integers_or_names(y).tolist()

    def names(self, label: Any) -> Sequence[str]:
        """Return the class."""
        return [label]

    def encode(self, labels: Sequence[str], classes: Sequence[str], length: int) -> np.ndarray:
        """Return indices of classes (n,)."""
        indices = {name: i for i, name in enumerate(classes)}
        return np.array([indices[label] for label in labels], np.int32)

    def text(self, label: Any) -> str:
        """Return the name of the class."""
        return label


class LabelSet(LabelFormat):
    """Any number of labels: names separated by ";", or a list; in an array, a column of 0 and 1 for each label."""

    expected = 'names separated by ";", or a list of names'
    expected_array = "0 and 1 (n, labels)"

    def parse(self, value: Any) -> tuple[str, ...]:
        """Return the names; none for an empty cell or list."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(SEPARATOR) if name.strip())
        return tuple(map(_name, value)) if isinstance(value, list) else (_name(value),)

    def from_array(self, y: np.ndarray, x: np.ndarray) -> list[tuple[str, ...]]:
        """Return the numbers of the columns that are 1."""
        if y.ndim != 2 or not np.isin(y, (0, 1)).all():
            raise ValueError
        return [tuple(map(str, np.flatnonzero(example))) for example in y]

    def encode(self, labels: Sequence[Any], classes: Sequence[str], length: int) -> np.ndarray:
        """Return 0 and 1 (n, classes) in float32."""
        return np.array([[name in label for name in classes] for label in labels], np.float32)

    def text(self, label: Any) -> str:
        """Return the names, separated by ";"."""
        return SEPARATOR.join(label)


class Values(LabelFormat):
    """One or several numbers: from one or several columns, a list, or an array (n,) or (n, values)."""

    metric = "mae"
    expected = "a finite number, or a list of numbers"
    expected_array = "finite numbers (n,) or (n, values)"

    def columns(self, given: str) -> list[str]:
        """Return one or several names, separated by commas."""
        return [name.strip() for name in given.split(",")]

    def parse(self, value: Any) -> tuple[float, ...]:
        """Return the numbers of a cell, of the cells of several columns, or of a JSON value."""
        given = value if isinstance(value, list) else [value]
        values = tuple(map(float, given))
        if (
            not values
            or not all(abs(each) <= FLOAT32_MAX for each in values)
            or any(isinstance(each, bool) for each in given)
        ):
            raise ValueError
        return values

    def from_array(self, y: np.ndarray, x: np.ndarray) -> list[tuple[float, ...]]:
        """Return the numbers of each example."""
        if y.ndim not in (1, 2) or y.dtype.kind not in "iuf" or 0 in y.shape or not (np.abs(y) <= FLOAT32_MAX).all():
            raise ValueError
        return [tuple(map(float, each)) for each in (y[:, None] if y.ndim == 1 else y)]

    def names_of_outputs(self, label: Any, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the columns, or the numbered names of several values in one."""
        if label is None or len(columns) == len(label):
            return tuple(columns)
        return tuple(f"{columns[0]}_{i}" for i in range(len(label)))

    def names(self, label: Any) -> Sequence[str]:
        """Return nothing: values have no class."""
        return ()

    def encode(self, labels: Sequence[Any], classes: Sequence[str], length: int) -> np.ndarray:
        """Return the values (n, values) in float32."""
        return np.array(labels, np.float32)

    def text(self, label: Any) -> str:
        """Return the numbers, separated by commas."""
        return ", ".join(f"{value:.6g}" for value in label)


class PositionLabels(LabelFormat):
    """A class per position: a word per position, a character per position, or a list; in an array, (n, length).

    A negative integer in an array, and "" or null in a list, stand for a position without a label.
    """

    expected = "a class per position: words with spaces between them, a string of characters, or a list"
    expected_array = "integers or names of classes (n, length)"

    def parse(self, value: Any) -> tuple[str, ...]:
        """Return the classes of all positions."""
        if isinstance(value, str) and value.strip():
            return tuple(value.split() if " " in value else value.strip())
        if not isinstance(value, list) or not value:
            raise ValueError
        return tuple("" if each in ("", None) else _name(each) for each in value)

    def from_array(self, y: np.ndarray, x: np.ndarray) -> list[tuple[str, ...]]:
        """Return the classes of all positions."""
        if y.shape != x.shape[:2]:
            raise ValueError
        names = _integers_or_names(y)
        return [tuple("" if name.startswith("-") else name for name in each) for each in names.tolist()]

    def encode(self, labels: Sequence[Any], classes: Sequence[str], length: int) -> np.ndarray:
        """Return indices of classes (n, length), IGNORED where there is no label."""
        indices = {name: i for i, name in enumerate(classes)} | {"": IGNORED}
        y = np.full((len(labels), length), IGNORED, np.int32)
        for out, label in zip(y, labels, strict=True):
            out[: len(label)] = [indices[name] for name in label[:length]]
        return y


FORMATS: dict[str, LabelFormat] = {
    "class": ClassLabel(),
    "labels": LabelSet(),
    "values": Values(),
    "positions": PositionLabels(),
}
"""The format of the labels by target."""


def parse_label(target: str, value: Any, where: str, name: str, required: bool = True) -> Any:
    """Return the label of a cell or JSON value; None if it is missing and not required. `name` is the column's."""
    if not required and (value in ("", None) or (isinstance(value, list) and not any(value))):
        return None
    try:
        return FORMATS[target].parse(value)
    except (ValueError, TypeError, OverflowError):
        raise DataError(f"{where}: {name} is {value!r:.60}; expected {FORMATS[target].expected}") from None


def labels_of_array(target: str, y: np.ndarray, x: np.ndarray, where: str) -> list[Any]:
    """Return the labels of an array y of the examples x."""
    try:
        if len(y) != len(x):
            raise ValueError
        return FORMATS[target].from_array(y, x)
    except (ValueError, TypeError):
        expected = FORMATS[target].expected_array
        raise DataError(
            f"{where} is {y.dtype} of shape {y.shape} for {len(x)} examples of length {x.shape[1]}; expected {expected}"
        ) from None


def _name(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError
    return str(value).strip()


def _integers_or_names(y: np.ndarray) -> np.ndarray:
    """Return an array of strings."""
    if y.dtype.kind == "f" and np.array_equal(y, np.round(y)) and np.abs(y).max(initial=0) <= 2**53:  # exact in float64
        y = y.astype(np.int64)
    if y.dtype.kind not in "iubU":
        raise ValueError
    return (y.astype(np.int64) if y.dtype.kind == "b" else y).astype(str)
