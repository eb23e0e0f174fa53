"""Files that are replaced atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it when the block ends, and is removed if the block fails."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def link(source: Path, target: Path) -> None:
    """Replace `target` with a hard link to `source`, or with a copy where the file system has no links."""
    with atomic_write(target) as draft:
        draft.unlink(missing_ok=True)
        try:
            os.link(source, draft)
        except OSError:
            draft.write_bytes(source.read_bytes())
