"""The message about a missing optional dependency."""

from __future__ import annotations


def needs(user: str, package: str | None, extra: str) -> str:
    """Return an error message: a package is missing, which an extra of mrconv installs."""
    return f"{user} needs {package}: install mrconv with its extra {extra!r}"
