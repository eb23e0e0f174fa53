"""Files of a folder, a tar or a zip archive, read one by one without unpacking to disk."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from .errors import DataError
from .reading import (
    CHUNK,
    DAMAGED,
    MEMBER_RATIO,
    Expansion,
    check_size,
    check_text,
    max_file_bytes,
    open_file,
    read_file,
    reading,
)

NameFilter = Callable[[str], bool]
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # zipfile limits what it decompresses at once for these only
MAX_NAME = 4096  # names of examples are stored with the length of the longest
MAX_READS = 64  # of the headers of one member; a name and attributes of any length need fewer than ten
MAX_HEADERS = 64  # headers for all members of a tar, which are kept in memory


def read_members(path: Path, wanted: NameFilter = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every wanted file; names are relative to the folder or archive, with forward slashes.

    Files of a folder or zip are sorted by name; those of a tar are in the order of the archive, which is read once.
    """
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            name = file.relative_to(path).as_posix()
            if wanted(name):
                check_text(name, f"{path}, name of {name!a}")
                yield name, read_file(file)
    elif zipfile.is_zipfile(path):
        yield from _read_zip(path, wanted)
    elif path.name.endswith(TARS):
        expansion = Expansion(path)
        for name, size, stream in tar_files(path):
            if wanted(name):
                check_size(f"{path}: {name}", size)
                yield name, _read_exactly(stream, size, f"{path}: {name}", expansion)
    else:
        raise DataError(f"{path} is neither a folder nor a tar or zip archive")


def tar_files(path: Path, problem: str = DAMAGED) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, size and decompressed stream, at the first byte of the content, of every file in a tar.

    The end of the archive is checked: tarfile accepts one that ends, or is damaged, between two members.
    """
    with reading(path, problem), open_file(path) as file:
        tar: Any = _TarStream(file)
        with tarfile.open(fileobj=tar, mode="r:") as archive:
            while (member := _next(archive, tar)) is not None:
                name = safe_name(member.name, path)
                if member.issparse():
                    raise DataError(
                        f"{path}: {name} is a sparse file, which can be of any size: pack it as a plain one"
                    )
                if member.size < 0 or len(archive.pax_headers) > MAX_HEADERS:
                    raise tarfile.ReadError(f"invalid header of {name!a}")
                if member.isfile():
                    yield name, member.size, file
        if tar.last != bytes(tarfile.BLOCKSIZE) or file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError("it does not end with the two empty blocks of a tar")
        while file.read(CHUNK):  # to the end, where the checksum is
            pass


class _TarStream:
    """What tarfile reads of a tar: its headers, of at most `allowed` bytes, as tarfile keeps them in memory.

    A member has at most MAX_READS: tarfile calls itself for a header that describes the next one.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.allowed, self.reads, self.last = file, CHUNK, 0, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.allowed:
            raise tarfile.ReadError(f"a header has more than {CHUNK:,} bytes")
        if self.reads == MAX_READS:
            raise tarfile.ReadError("a member has too many headers")
        self.reads += 1
        self.allowed -= size
        self.last = self.file.read(size)
        return self.last


def _next(archive: tarfile.TarFile, stream: _TarStream) -> tarfile.TarInfo | None:
    stream.allowed, stream.reads = CHUNK, 0
    archive.members.clear()  # type: ignore[attr-defined]
    return archive.next()


def _read_exactly(stream: IO[bytes], size: int, where: str, expansion: Expansion) -> bytes:
    expansion.add(size)
    with reading(where):
        content = stream.read(size)
        if len(content) != size:
            raise EOFError(f"{len(content):,} of {size:,} bytes")
    return content


def copy_exactly(stream: IO[bytes], target: IO[bytes], size: int, where: str, problem: str = DAMAGED) -> None:
    """Copy the next `size` bytes; raise DataError if there are fewer."""
    while size:
        with reading(where, problem):
            chunk = stream.read(min(size, CHUNK))
            if not chunk:
                raise EOFError(f"{size:,} bytes are missing")
        target.write(chunk)
        size -= len(chunk)


def _read_zip(path: Path, wanted: NameFilter) -> Iterator[tuple[str, bytes]]:
    expansion = Expansion(path)
    with reading(path), zipfile.ZipFile(path) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            name = safe_name(info.filename, path)
            if not info.is_dir() and wanted(name):
                yield name, read_zip_member(archive, info, f"{path}: {name}", expansion)


def read_zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str, expansion: Expansion) -> bytes:
    """Return the content of one file of a zip archive."""
    if info.compress_type not in METHODS:
        raise DataError(f"{where} is compressed by method {info.compress_type}; expected deflate or none")
    compressed = min(info.compress_size, expansion.size)
    check_size(where, info.file_size, max(max_file_bytes(), MEMBER_RATIO * compressed))
    with reading(where), archive.open(info) as stream:
        return _read_exactly(stream, info.file_size, where, expansion)


def safe_name(name: str, path: Path) -> str:
    """Return a member's name without a leading ./; raise DataError if it points outside of the archive."""
    if len(name) > MAX_NAME:
        raise DataError(
            f"{path}: the name {name[:40]!r}... has {len(name):,} characters; expected at most {MAX_NAME:,}"
        )
    check_text(name, f"{path}, name of {name!a}")
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (parts.parts and parts.parts[0].endswith(":")):
        raise DataError(f"{path} holds {name!r}, which points outside of the archive: do not trust this file")
    return parts.as_posix()


def checksum(source: Path | IO[bytes], algorithm: str = "sha256") -> str:
    """Return the checksum of a file in hexadecimal."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            return checksum(file, algorithm)
    result = hashlib.new(algorithm)
    while chunk := source.read(CHUNK):
        result.update(chunk)
    return result.hexdigest()
