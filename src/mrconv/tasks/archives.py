"""Files in a folder, a tar or a zip archive, read one after the other without unpacking."""

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

Wanted = Callable[[str], bool]
CHUNK = 2**20
OPENERS: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def members(path: Path, wanted: Wanted = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """Yield name (with forward slashes, relative to the folder or archive) and content of every wanted file.

    In a folder and in a zip in the order of names, in a tar in that of the archive: it is read once from front to back.
    """
    if path.is_dir():
        for each in sorted(p for p in path.rglob("*") if p.is_file()):
            name = each.relative_to(path).as_posix()
            if wanted(name):
                yield name, each.read_bytes()
    elif zipfile.is_zipfile(path):
        yield from _from_zip(path, wanted)
    elif path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
        yield from _from_tar(path, wanted)
    else:
        raise DataError(f"{path} is neither a folder nor a tar or zip archive")


def _from_tar(path: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    # unpacked by us, not by tarfile: tarfile takes a stream that ends between two members for a whole archive
    opener = next((OPENERS[end] for end in OPENERS if path.name.endswith(end)), open)
    try:
        with opener(path, "rb") as file:
            with tarfile.open(fileobj=file, mode="r|") as archive:
                for member in archive:
                    name = checked_name(member.name, path)
                    if not member.isfile() or not wanted(name):
                        continue
                    inner = archive.extractfile(member)
                    content = b"" if inner is None else inner.read()
                    if len(content) != member.size:
                        raise DataError(f"{path} is cut off within {name}: get it again")
                    yield name, content
            while file.read(CHUNK):  # to the end, where the checksum is
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} is damaged or cut off ({error}): get it again") from error


def _from_zip(path: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            for info in sorted(archive.infolist(), key=lambda info: info.filename):
                name = checked_name(info.filename, path)
                if not info.is_dir() and wanted(name):
                    yield name, archive.read(info)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{path} is damaged or cut off ({error}): get it again") from error


def checked_name(name: str, path: Path) -> str:
    """Return a member's name without a leading ./; refuse one that points out of the archive."""
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (parts.parts and parts.parts[0].endswith(":")):
        raise DataError(f"{path} holds {name!r}, which points outside of it: not a file to trust")
    return parts.as_posix()


def digest(source: Path | IO[bytes], algorithm: str = "sha256") -> str:
    """Return a file's checksum, in hexadecimal."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            return digest(file, algorithm)
    found = hashlib.new(algorithm)
    while chunk := source.read(CHUNK):
        found.update(chunk)
    return found.hexdigest()
