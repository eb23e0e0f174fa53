"""Reading of files that may be damaged or hostile: one translation of errors, and limits on what a file expands to."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from .errors import DataError

MIB = 2**20
CHUNK = MIB
MAX_FILE_MIB = 1024
DAMAGED = "is damaged or truncated"
MEMBER_RATIO, RATIO = 20, 200
"""What one file of a zip, and all files of an archive, may have of their compressed size: texts have at most 10."""
OPENERS: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_limit = ContextVar("limit", default=(MAX_FILE_MIB * MIB, "the task's option max_file_mib"))


@contextmanager
def limited(mib: int, option: str = "the task's option max_file_mib") -> Iterator[None]:
    """Set the largest size of a file, decompressed, for everything that the block reads; `option` is for errors."""
    token = _limit.set((mib * MIB, option))
    try:
        yield
    finally:
        _limit.reset(token)


def max_file_bytes() -> int:
    """Return the largest size of a file, decompressed."""
    return _limit.get()[0]


def check_size(where: object, size: int, most: int | None = None) -> None:
    """Raise DataError if a file, or a member of an archive, is larger than allowed."""
    most = max_file_bytes() if most is None else most
    if size > most:
        raise DataError(
            f"{where} has more than {most / MIB:,.0f} MiB when read; if this is intended, raise {_limit.get()[1]}"
        )


class Expansion:
    """Counts what was read of a compressed file; raises DataError before that is more than such a file can need.

    A file may expand to the largest size of a file, or to 200 times its own size.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.total = path, path.stat().st_size, 0

    def add(self, size: int) -> None:
        """Count what is read next."""
        self.total += size
        check_size(f"the content of {self.path}", self.total, max(max_file_bytes(), RATIO * self.size))


@contextmanager
def reading(where: object, problem: str = DAMAGED, advice: str = "download it again") -> Iterator[None]:
    """Raise what a library raises for a damaged file as a DataError that names the file.

    The block contains calls of libraries only: they raise nearly anything.
    """
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{where} needs more memory than there is") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise DataError(f"cannot read {where}: {error.strerror}") from error
        raise DataError(f"{where} {problem} ({describe(error)})" + f": {advice}" * bool(advice)) from error


def describe(error: Exception) -> str:
    """Return an error of a library as one short line in ASCII, as it may quote the file."""
    text = " ".join(str(getattr(error, "error_string", error)).split()).encode("ascii", "backslashreplace").decode()
    return f"{text:.160}" or type(error).__name__


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed if its name ends in .gz, .bz2 or .xz."""
    return OPENERS.get(path.suffix, open)(path, "rb")


def read_file(path: Path) -> bytes:
    """Return the content of a file, decompressed if its name ends in .gz, .bz2 or .xz."""
    content = bytearray()
    with reading(path), open_file(path) as file:
        while chunk := file.read(CHUNK):
            content += chunk
            check_size(path, len(content))
    return bytes(content)


def check_text(text: str, where: object) -> None:
    """Raise DataError if a text cannot be written as UTF-8: it has a lone surrogate, half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        raise DataError(f"{where}: the text has a lone surrogate, {found}, which is half of a character") from None
