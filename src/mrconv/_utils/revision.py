"""The git revision of the running code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def revision() -> str | None:
    """Return the git revision of the running code, followed by "+" if it has local changes; None outside of git.

    The environment variable MRCONV_REVISION overrides it, for copies of the code without the repository.
    """
    if revision := os.environ.get("MRCONV_REVISION"):
        return revision
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"],
            cwd=folder, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
