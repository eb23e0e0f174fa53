"""Downloads that resume, verify, and leave a file under its name only when it is whole."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .archives import CHUNK, digest
from .errors import DataError

Progress = Callable[[int, int | None], None]
"""Called with bytes so far and, if known, in all."""


@dataclass(frozen=True)
class Remote:
    """A file at a stable public address, with its publisher's checksum."""

    url: str
    name: str
    checksum: str
    algorithm: str = "md5"


def download(
    remote: Remote, folder: Path, progress: Progress | None = None, tries: int = 3, timeout: float = 60.0
) -> Path:
    """Return the file in this folder, fetched if it is not there.

    What was fetched of it before is kept in NAME.part and gone on with. A file with another checksum is removed.
    """
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    for left in range(tries - 1, -1, -1):
        try:
            _fetch(remote.url, part, progress, timeout)
            break
        except (OSError, EOFError) as error:
            answered = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if not left or answered:
                kept = f"; what came so far is kept in {part}" if part.exists() and part.stat().st_size else ""
                raise DataError(f"cannot download {remote.url}: {error}{kept}") from error
            time.sleep(0.5)
    found = digest(part, remote.algorithm)
    if found != remote.checksum:
        part.unlink()
        raise DataError(
            f"{remote.url} has {remote.algorithm} {found} and should have {remote.checksum}: it was damaged on the way "
            "or has been changed by its publisher; nothing was kept"
        )
    part.rename(target)
    return target


def _fetch(url: str, part: Path, progress: Progress | None, timeout: float) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing after what we have: the checksum will tell whether that is all of it
            return
        raise
    with answer:
        resumed = answer.status == 206
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(have, total)
    if total is not None and have < total:
        raise EOFError(f"the connection ended after {have:,} of {total:,} bytes")
