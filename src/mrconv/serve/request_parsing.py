"""What comes in, as text, JSON and its fields; what is wrong with it is told by DataError."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mrconv.tasks import DataError


def decoded(content: bytes) -> str:
    """Return UTF-8 as text."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from None


def parsed(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"expected a JSON object; got {text[:60]}")
    return found


def listed(names: Iterable[str]) -> str:
    """Return names as an answer can quote them: a name in JSON may be what UTF-8 has no bytes for."""
    return f"{', '.join(map(ascii, names)) or 'none':.100}"


def checked_text(text: Any) -> str:
    """Refuse anything but a string."""
    if not isinstance(text, str):
        raise DataError(f"text must be a string; got {text!r:.60}")
    return text


def checked_tokens(tokens: Any) -> list[str | int]:
    """Refuse anything but a list of symbols: strings, or numbers that name them."""
    if not isinstance(tokens, list) or any(isinstance(t, bool) or not isinstance(t, str | int) for t in tokens):
        raise DataError(f"tokens must be a list of symbols; got {tokens!r:.60}")
    return tokens
