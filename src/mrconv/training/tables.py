"""Tables as text, aligned for a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

NOTHING = "–"


def aligned_table(columns: Mapping[str, str], lines: Iterable[Mapping[str, str]], left: Collection[str]) -> str:
    """Return a table for a terminal with the headings of `columns`, whose keys in `left` are aligned to the left."""
    cells = [list(columns.values()), *([line[key] for key in columns] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = []
    for line in cells:
        parts = [
            cell.ljust(width) if key in left else cell.rjust(width)
            for key, cell, width in zip(columns, line, widths, strict=True)
        ]
        text.append("  ".join(parts).rstrip())
    return "\n".join(text)


def markdown_table(columns: Mapping[str, str], lines: Iterable[Mapping[str, str]], left: Collection[str]) -> str:
    """Return the same table in Markdown."""
    sides = [":---" if key in left else "---:" for key in columns]
    return markdown_lines([list(columns.values()), sides, *([line[key] for key in columns] for line in lines)])


def markdown_lines(cells: Iterable[Sequence[str]]) -> str:
    """Return lines of cells in Markdown."""
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells) + "\n"
