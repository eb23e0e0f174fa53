"""What can be wrong with data."""


class DataError(Exception):
    """Something about the data that its owner can put right: names the file, the row, and what was expected."""


class MissingData(DataError):
    """A task's files are not there: names them, the layout that was looked for, and where to get them."""
