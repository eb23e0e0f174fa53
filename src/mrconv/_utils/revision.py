"""Which revision of the code runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def revision() -> str | None:
    """Return the git revision of the code that runs, with a + if it was changed since; None if it is not in git.

    Where the code was copied to without its history, MRCONV_REVISION tells it.
    """
    if told := os.environ.get("MRCONV_REVISION"):
        return told
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"],
            cwd=folder, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
