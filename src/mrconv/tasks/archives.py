"""Files of a folder, a tar or a zip archive, read one by one without unpacking to disk."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from .errors import DataError

NameFilter = Callable[[str], bool]
CHUNK = 2**20
OPENERS: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def read_members(path: Path, wanted: NameFilter = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every wanted file; names are relative to the folder or archive, with forward slashes.

    Files of a folder or zip are sorted by name; those of a tar are in the order of the archive, which is read once.
    """
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            name = file.relative_to(path).as_posix()
            if wanted(name):
                yield name, file.read_bytes()
    elif zipfile.is_zipfile(path):
        yield from _read_zip(path, wanted)
    elif path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        yield from _read_tar(path, wanted)
    else:
        raise DataError(f"{path} is neither a folder nor a tar or zip archive")


def _read_tar(path: Path, wanted: NameFilter) -> Iterator[tuple[str, bytes]]:
    # decompressed here: tarfile accepts a stream that ends between two members as a complete archive
    opener = next((OPENERS[suffix] for suffix in OPENERS if path.name.endswith(suffix)), open)
    try:
        with opener(path, "rb") as file:
            with tarfile.open(fileobj=file, mode="r|") as archive:
                for member in archive:
                    name = safe_name(member.name, path)
                    if not member.isfile() or not wanted(name):
                        continue
                    stream = archive.extractfile(member)
                    content = b"" if stream is None else stream.read()
                    if len(content) != member.size:
                        raise DataError(f"{path} is truncated within {name}: download it again")
                    yield name, content
            while file.read(CHUNK):  # read to the end, where the checksum is
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} is damaged or truncated ({error}): download it again") from error


def _read_zip(path: Path, wanted: NameFilter) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            for info in sorted(archive.infolist(), key=lambda info: info.filename):
                name = safe_name(info.filename, path)
                if not info.is_dir() and wanted(name):
                    yield name, archive.read(info)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{path} is damaged or truncated ({error}): download it again") from error


def safe_name(name: str, path: Path) -> str:
    """Return a member's name without a leading ./; raise DataError if it points outside of the archive."""
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
