"""Durations as text."""


def format_duration(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds, such as "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
