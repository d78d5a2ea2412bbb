"""The tables of a folder: CSV files that grow by whole rows and read back bit-equal.

A last row torn by a kill is removed by `Tables.truncate_after` before rows are added again.
"""

from __future__ import annotations

import csv
import io
import numbers
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedjax_hk.store.files import RunFolderError, replace

_INTEGER = re.compile(r"-?\d+")
# What repr(float) writes, and nothing more: float() would also take "1_000" or " 5".
_FLOAT = re.compile(r"-?(\d+(\.\d+)?(e[+-]?\d+)?|inf)|nan")


class Tables:
    """Tables of a folder by name; one process may write.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._columns: dict[str, list[str]] = {}

    def append_rows(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows to `<table>.csv`; on the disk when it returns.

        The first row ever written sets the columns. None is an empty cell, floats are
        written so that they read back bit-equal.

        Raises:
          RunFolderError: a row has other columns than the table, or the file ends in a
            torn row (call `truncate_after` first).
        """
        if not rows:
            return
        file_path = self._file(table)
        columns = self._columns.get(table) or _read_header(file_path)
        new = not columns
        columns = columns or list(rows[0])
        _check_columns(file_path, columns, rows)
        text = _csv_text(columns, rows, header=new)
        with open(file_path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self._columns[table] = columns

    def write_table(self, table: str, frame: pd.DataFrame) -> None:
        """Replaces `<table>.csv` by the frame (without its index), all or nothing.

        What is missing is an empty cell, but NaN where the column is of floats.
        """
        columns = [str(column) for column in frame.columns]
        cells = [_objects(frame.iloc[:, i]) for i in range(len(columns))]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*cells, strict=True))
        replace(self._file(table), _csv_text(columns, rows, header=True).encode())
        self._columns[table] = columns

    def read_table(self, table: str, text: Sequence[str] = ()) -> pd.DataFrame:
        """`<table>.csv` as a frame, values as they were written; a torn last row is left out.

        A column is bool, integer or float if all its cells are; an empty cell is NaN
        among numbers and None elsewhere.

        Args:
          table: its name.
          text: columns to leave as text whatever they look like, such as client names.

        Raises:
          RunFolderError: no such table.
        """
        if not self._file(table).is_file():
            raise RunFolderError(f"{self.path} holds no table {table}.csv")
        content = self._file(table).read_bytes()
        if not content.endswith(b"\n"):  # torn by a kill, or being written right now
            content = b"".join(_split_records(content)[0])
        if not content:
            raise RunFolderError(f"{self._file(table)} is empty")
        cells = pd.read_csv(io.BytesIO(content), dtype=str, na_filter=False)
        return pd.DataFrame(
            {name: _typed(cells[name].tolist(), name in text) for name in cells.columns},
            columns=list(cells.columns),
        )

    def truncate_after(self, table: str, column: str, value: float) -> int:
        """Drops the rows whose `column` exceeds `value`, and a last row torn by a kill.

        The rows that stay are left byte for byte; a table that has not even a whole
        header is removed. A table that is not there is left so.

        Returns:
          Rows dropped, the torn one counted.

        Raises:
          RunFolderError: no such column, or a cell of it is not a number (row named).
        """
        file_path = self._file(table)
        if not file_path.is_file():
            return 0
        records, torn = _split_records(file_path.read_bytes())
        if not records:
            file_path.unlink()
            return int(torn)
        columns = _parse_record(records[0])
        if column not in columns:
            raise RunFolderError(
                f"{file_path} has no column {column!r}; it has {', '.join(columns)}"
            )
        kept = [records[0]]
        for row, record in enumerate(records[1:], start=1):
            cells = _parse_record(record)
            at = cells[columns.index(column)] if len(cells) == len(columns) else ""
            if not _FLOAT.fullmatch(at):
                raise RunFolderError(
                    f"{file_path} row {row}: expected {len(columns)} cells with a number in "
                    f"{column!r}, got {record.decode(errors='replace').rstrip()!r}"
                )
            if float(at) <= value:
                kept.append(record)
        dropped = len(records) - len(kept) + torn
        if dropped:
            replace(file_path, b"".join(kept))
        return dropped

    def _file(self, table: str) -> pathlib.Path:
        return self.path / f"{table}.csv"


def _cell(value: Any) -> str:
    """One CSV cell. csv.writer is not used: it rounds NumPy floats and, before Python 3.13,
    leaves a bare carriage return unquoted."""
    if value is None or value is pd.NaT or value is pd.NA:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()  # 0-d arrays and NumPy scalars, exactly
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))
    text = str(value)
    if any(character in text for character in ',"\r\n'):
        text = '"' + text.replace('"', '""') + '"'
    return text


def _csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], header: bool) -> str:
    lines = [",".join(map(_cell, columns))] if header else []
    lines += [",".join(_cell(row[column]) for column in columns) for row in rows]
    return "".join(line + "\n" for line in lines)


def _objects(column: pd.Series) -> pd.Series:
    values = column.astype(object)
    return values if column.dtype.kind == "f" else values.where(column.notna(), None)


def _typed(cells: list[str], text: bool) -> Any:
    """Cells of one column as numbers or truth values if all (but empty ones) are."""
    present = [cell for cell in cells if cell]
    missing = len(present) < len(cells)
    if present and not text:
        if all(cell in ("True", "False") for cell in present):
            values = [None if not cell else cell == "True" for cell in cells]
            return pd.Series(values, dtype=object if missing else bool)
        if not missing and all(map(_INTEGER.fullmatch, present)):
            return [int(cell) for cell in cells]
        if all(map(_FLOAT.fullmatch, present)):
            return np.array([float(cell or "nan") for cell in cells])
    return pd.Series([cell or None for cell in cells], dtype=object)


def _check_columns(
    file_path: pathlib.Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    for row in rows:
        if set(row) != set(columns):
            missing = [column for column in columns if column not in row]
            extra = [column for column in row if column not in columns]
            raise RunFolderError(
                f"{file_path}: expected columns {', '.join(columns)}; "
                f"got none for {missing}, and unknown {extra}"
            )


def _read_header(file_path: pathlib.Path) -> list[str]:
    """The columns of a table, none if there is no table yet."""
    if not file_path.is_file() or not file_path.stat().st_size:
        return []
    records, torn = _split_records(file_path.read_bytes())
    if torn:
        raise RunFolderError(f"{file_path} ends in a torn row; call truncate_after first")
    return _parse_record(records[0])


def _split_records(content: bytes) -> tuple[list[bytes], bool]:
    """The whole rows of a CSV file, each with its line end; and whether a torn one follows.

    A line end inside quotes belongs to the row: it ends where the quotes are even.
    """
    records, open_record = [], b""
    for line in _lines(content):
        open_record += line
        if line.endswith(b"\n") and open_record.count(b'"') % 2 == 0:
            records.append(open_record)
            open_record = b""
    return records, bool(open_record)


def _lines(content: bytes) -> Iterator[bytes]:
    return iter(io.BytesIO(content))  # split at \n only; bytes.splitlines splits at \r too


def _parse_record(record: bytes) -> list[str]:
    return next(csv.reader(io.StringIO(record.decode(), newline="")))
