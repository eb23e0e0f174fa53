"""Labels of recordings and images from a table beside them, with the name of a file and its label in each line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ..archives import read_members
from ..errors import DataError
from ..text_lines import ArchivedFile, TextFile
from .file_readers import ARCHIVES, Columns, Examples, read_jsonl, read_table, suffix, visible

LABEL_FILES = ("labels.csv", "labels.tsv", "labels.jsonl")
FILE_COLUMN = "file"
MAX_NAMED = 3  # files that an error names


class LabelTable:
    """Labels by file.

    Args:
        examples: the lines of the table; x are the names of files.
        folder: folder of the table within its archive, which names of files are relative to.
    """

    def __init__(self, examples: Examples, folder: str = "") -> None:
        self.examples, self.folder = examples, folder
        self.lines: dict[str, int] = {}
        self.used: set[int] = set()
        for i, name in enumerate(examples.x):
            name = PurePosixPath(name.strip().replace("\\", "/")).as_posix()
            if name in self.lines:
                first = examples.example_name(self.lines[name])
                raise DataError(f"{examples.describe(i)}: {name} has a label already, in {first}")
            self.lines[name] = i

    def line(self, names: Sequence[str]) -> int | None:
        """Return the line of a file that may have several names."""
        return next((self.lines[name] for name in names if name in self.lines), None)

    def label(self, name: str) -> Any:
        """Return the label of a file or member; None if the table has none."""
        line = self.line([name.removeprefix(self.folder), name])
        return None if line is None else self.examples.labels[line]

    def apply(self, files: Examples, prefixes: Sequence[str] = ("",)) -> Examples:
        """Return files with the labels, and groups, of the table.

        `prefixes` are what the table may have before the names of these files.
        """
        lines, unlabelled = [], []
        for name in files.names:
            ends = {name.removeprefix(self.folder): None, name: None}
            if suffix(Path(files.where)) in ARCHIVES:  # the only folder of an archive may be left out
                ends[name.partition("/")[2]] = None
            line = self.line([prefix + end for prefix in prefixes for end in ends])
            if line is None:
                unlabelled.append(name)
            else:
                lines.append(line)
        if unlabelled:
            total = f"{len(unlabelled):,} of {len(files):,} files in {files.where}"
            raise DataError(f"{self.examples.where} has no line for {total}: {_some(unlabelled)}")
        self.used.update(lines)
        labels = [self.examples.labels[i] for i in lines]
        groups = [self.examples.groups[i] for i in lines] if self.examples.groups else ()
        return replace(files, labels=labels, outputs=self.examples.outputs, groups=groups)

    def check_all_used(self, path: Path | str) -> None:
        """Raise DataError if the table names a file that was not found."""
        missing = [name for name, i in self.lines.items() if i not in self.used]
        if missing:
            raise DataError(f"{self.examples.where} names {len(missing):,} files that {path} lacks: {_some(missing)}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")


def find_table(path: Path) -> TextFile | None:
    """Return the table of labels in a folder, in an archive or in the only folder of an archive."""
    found: list[TextFile]
    if path.is_dir():
        found = [path / name for name in LABEL_FILES if (path / name).is_file()]
    else:
        members = read_members(path, lambda name: PurePosixPath(name).name in LABEL_FILES and visible(name))
        found = [ArchivedFile(path, name, content) for name, content in members if name.count("/") < 2]
    if len(found) > 1:
        raise DataError(f"{found[0]} and {found[1].name} both exist: which one has the labels?")
    return found[0] if found else None


def read_labels(table: TextFile, columns: Columns) -> LabelTable:
    """Read a table with the column or field `file`, and labels as `columns` describes them."""
    columns = replace(columns, text=FILE_COLUMN, text_required=True, content="names of files", group_required=False)
    examples = (read_jsonl if suffix(table) == ".jsonl" else read_table)(table, columns)
    folder = table.member[: -len(table.name)] if isinstance(table, ArchivedFile) else ""
    return LabelTable(examples, folder)
