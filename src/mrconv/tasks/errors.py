"""Errors in data."""


class DataError(Exception):
    """An error in data that a user can fix; the message names the file, the line or example, and what is expected."""


class MissingData(DataError):
    """A task's files are missing; the message names them, the expected layout and where to get them."""
