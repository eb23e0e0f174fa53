"""Errors in data."""

MAX_MESSAGE = 1000


class DataError(Exception):
    """An error in data that a user can fix; the message names the file, the line or example, and what is expected.

    It is one line: characters of a file that are quoted in it cannot control a terminal.
    """

    def __init__(self, message: str = "") -> None:
        escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message[: MAX_MESSAGE + 1])
        super().__init__(escaped if len(escaped) <= MAX_MESSAGE else f"{escaped[: MAX_MESSAGE - 4]} ...")


class MissingData(DataError):
    """A task's files are missing; the message names them, the expected layout and where to get them."""
