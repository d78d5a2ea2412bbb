"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def format_table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """A text table: numbers to the right, the rest to the left, columns two blanks apart.

    Floats have four significant digits (give text for others), None is a dash.

    Raises:
      ValueError: a row is not as long as the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"Expected rows of {len(header)} cells, got {len(row)}: {row}")
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    right = [
        any(column) and all(_is_number(text) or text == "-" for text in column)
        for column in zip(*texts, strict=True)
    ] or [False] * len(header)
    lines = [list(header), ["-" * width for width in widths], *texts]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%").replace(",", ""))
    except ValueError:
        return False
    return True
