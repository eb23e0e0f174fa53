"""Downloads that resume and verify a checksum; a file gets its name only when it is complete."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from .archives import checksum
from .errors import DataError
from .progress_callback import Progress, no_progress
from .reading import CHUNK


@dataclass(frozen=True)
class Remote:
    """A file at a stable public address, with its publisher's checksum."""

    url: str
    name: str
    checksum: str
    algorithm: str = "md5"


def download(
    remote: Remote, folder: Path, progress: Progress = no_progress, tries: int = 3, timeout: float = 60.0
) -> Path:
    """Return the path of the file in this folder, downloading it if it is missing.

    A partial download is kept in NAME.part and resumed. A file with a wrong checksum is removed.
    """
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    for tries_left in range(tries - 1, -1, -1):
        try:
            _fetch(remote.url, part, progress, timeout)
            break
        except (OSError, EOFError) as error:
            permanent = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if not tries_left or permanent:
                kept = f"; the partial download is kept in {part}" if part.exists() and part.stat().st_size else ""
                raise DataError(f"cannot download {remote.url}: {error}{kept}") from error
            time.sleep(0.5)
    actual = checksum(part, remote.algorithm)
    if actual != remote.checksum:
        part.unlink()
        raise DataError(
            f"{remote.url} has {remote.algorithm} {actual}; expected {remote.checksum}. The download was corrupted or "
            "its publisher changed the file; it was deleted"
        )
    part.rename(target)
    return target


def _fetch(url: str, part: Path, progress: Progress, timeout: float) -> None:
    """Download into `part`, resuming at its end."""
    size = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and size:  # no bytes past this size: the checksum decides whether the file is complete
            return
        raise
    with response:
        resumed = response.status == 206
        size = size if resumed else 0
        length = response.headers.get("Content-Length")
        total = size + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                size += len(chunk)
                progress(size, total)
    if total is not None and size < total:
        raise EOFError(f"the connection ended after {size:,} of {total:,} bytes")
