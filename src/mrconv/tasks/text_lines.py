"""Reading of text files line by line, with errors that name the line."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import DataError
from .reading import OPENERS, Expansion, check_size, check_text, describe, max_file_bytes, open_file, reading


@dataclass(frozen=True)
class ArchivedFile:
    """A text file in an archive, in place of a path."""

    archive: Path
    member: str
    content: bytes

    @property
    def name(self) -> str:
        """The name without folders."""
        return PurePosixPath(self.member).name

    @property
    def suffix(self) -> str:
        """The end of the name."""
        return PurePosixPath(self.member).suffix

    def open(self, mode: str) -> io.BytesIO:
        """Return the content as a file."""
        return io.BytesIO(self.content)

    def __str__(self) -> str:
        return f"{self.archive}: {self.member}"


TextFile = Path | ArchivedFile


def read_lines(path: TextFile) -> Iterator[tuple[int, str]]:
    """Yield number, from 1, and text of every line of a UTF-8 file, decompressed if its name ends in .xz."""
    number, most = 0, max_file_bytes()
    with reading(path), path.open("rb") if isinstance(path, ArchivedFile) else open_file(path) as file:
        expansion = Expansion(path) if isinstance(path, Path) and path.suffix in OPENERS else None
        while line := file.readline(most + 1):
            number += 1
            check_size(f"{path}, line {number},", len(line))
            if expansion is not None:
                expansion.add(len(line))
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                where = f"{path}, line {number}"
                raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
            yield number, text.removesuffix("\n").removesuffix("\r")


def read_json_lines(
    path: TextFile, *fields: str, optional: Collection[str] = (), hint: str = ""
) -> Iterator[tuple[int, list[Any]]]:
    """Yield line number and these fields of every object in a file with one JSON object per line.

    A missing field is None if it is among the optional ones, else an error that ends with the hint.
    """
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON: {describe(error)}") from error
        if not isinstance(item, dict):
            raise DataError(f"{path}, line {number}: expected an object with {' and '.join(fields)}; got {line[:60]}")
        if "\\ud" in line.lower():  # an escaped surrogate; two in a row are one character
            check_text(json.dumps(item, ensure_ascii=False), f"{path}, line {number}")
        for field in fields:
            if field not in item and field not in optional:
                raise DataError(f"{path}, line {number}: no field {field!r}; it has {', '.join(item) or 'none'}{hint}")
        yield number, [item.get(field) for field in fields]
