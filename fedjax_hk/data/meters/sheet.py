"""A table of cells from CSV text or Parquet, with the file's row numbers for messages."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters.files import PARQUET, as_text

# No meter reads more; squares of float32 beyond it would overflow.
_LARGEST = 1e15
ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ].*)?"
_SEPARATORS = ",;\t"


class Sheet(NamedTuple):
    """`header` names, `frame` of cells by column number, `row_t` in the file.

    The header of a text is row 1, as an editor or a spreadsheet counts; in Parquet, which
    has no header, the first readings are row 1. `separator` is "" for Parquet.
    """

    path: Path
    separator: str
    header: list[str]
    frame: pd.DataFrame
    row_t: np.ndarray


def parse(path: Path, content: bytes) -> Sheet:
    """Splits a file's content into cells.

    Errors: DataError that names the row of what is no regular table.
    """
    if content.startswith(PARQUET):
        return _parse_parquet(path, content)
    return _parse_text(path, content)


def _parse_parquet(path: Path, content: bytes) -> Sheet:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{path} is Parquet, which needs pyarrow: pip install 'fedjax-hk[parquet]'."
        ) from None
    try:
        frame = pd.read_parquet(io.BytesIO(content), engine="pyarrow")
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is no whole Parquet file ({error}). Fetch it again.") from error
    if not isinstance(frame.index, pd.RangeIndex):
        frame = frame.reset_index()
    header = [str(name).strip() for name in frame.columns]
    if not len(frame):
        raise DataError(f"{path} has columns but no row of readings.")
    _check_header(path, header)
    frame.columns = range(len(header))
    return Sheet(path, "", header, frame, np.arange(1, len(frame) + 1))


def _parse_text(path: Path, content: bytes) -> Sheet:
    """Splits text without letting pandas rename or shift columns."""
    text = as_text(path, content)
    first_line = text.split("\n", 1)[0]
    separator = max(_SEPARATORS, key=first_line.count)  # a tie goes to the comma
    header = _header(path, first_line, separator)
    _check_lengths(path, text, len(header), separator)
    try:
        with warnings.catch_warnings():
            # pandas warns where it would drop cells; no reading may vanish unseen.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                io.StringIO(text),
                sep=separator,
                header=None,
                skiprows=1,
                names=range(len(header)),
                index_col=False,
                dtype={0: str},
                na_values=["Null"],
                skip_blank_lines=False,
                low_memory=False,
            )
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame(columns=range(len(header)))
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise DataError(
            f"{path} is no regular table: {error}. Quote cells that hold {separator!r}."
        ) from error
    written_t = ~frame.isna().all(axis=1).to_numpy(bool)
    row_t = np.flatnonzero(written_t) + 2
    if not len(row_t):
        raise DataError(f"{path} has a header but no row of readings below it.")
    return Sheet(path, separator, header, frame[written_t], row_t)


def _header(path: Path, first_line: str, separator: str) -> list[str]:
    """Column names of row 1, each once."""
    if not first_line.strip():
        raise DataError(f"{path}, row 1: the header is empty. Name the time and the clients there.")
    row = pd.read_csv(
        io.StringIO(first_line), sep=separator, header=None, dtype=str, keep_default_na=False
    )
    header = [cell.strip() for cell in row.iloc[0]]
    if len(header) == 1:
        other = " It seems to use '|'." if "|" in first_line else ""
        raise DataError(
            f"{path}, row 1: only one column, {header[0][:60]!r}. A table has the time and one "
            f"column a client, separated by commas, semicolons or tabs.{other}"
        )
    dates = pd.Series(header).str.fullmatch(ISO_DATE)
    if dates.any():
        raise DataError(
            f"{path}, row 1 has the date {header[dates.argmax()]!r}. Add a header row: time, then "
            "the name of each client; or client, time, value."
        )
    _check_header(path, header)
    return header


def _check_header(path: Path, header: list[str]) -> None:
    first_at: dict[str, int] = {}
    for number, name in enumerate(header[1:], start=2):
        if not name:
            raise DataError(f"{path}, row 1, column {number}: the client has no name. Add one.")
        if name in first_at:
            raise DataError(
                f"{path}, row 1: client {name!r} is in column {first_at[name]} and again in "
                f"column {number}. Keep one of them."
            )
        first_at[name] = number


def _check_lengths(path: Path, text: str, num_columns: int, separator: str) -> None:
    """Refuses a row with fewer or more cells than the header, such as a file cut short.

    pandas fills short rows with missing readings, which would hide a broken download.
    """
    if '"' in text:  # commas inside quotes do not separate; pandas still refuses long rows
        return
    bytes_of = np.frombuffer(text.encode(), np.uint8)
    ends = np.flatnonzero(bytes_of == ord("\n"))
    ends = ends if text.endswith("\n") else np.append(ends, len(bytes_of))
    starts = np.append(0, ends[:-1] + 1)
    parts = np.diff(np.searchsorted(np.flatnonzero(bytes_of == ord(separator)), ends), prepend=0)
    for row in np.flatnonzero(parts != num_columns - 1):
        if bytes_of[starts[row] : ends[row]].tobytes().strip():
            comma = " or a number has a decimal comma" if separator == "," else ""
            raise DataError(
                f"{path}, row {row + 1}: {parts[row] + 1} cells, but the header has "
                f"{num_columns}. The row is cut short{comma}; mend it, or separate cells by "
                "semicolons."
            )


def times_of(sheet: Sheet, column: int) -> np.ndarray:
    """The time of each row, `[T]` datetime64[s]; a time with a zone becomes UTC.

    Errors: DataError that names the row of a time that is none.
    """
    cells = sheet.frame[column]
    if pd.api.types.is_datetime64_any_dtype(cells):
        parsed_t = pd.to_datetime(cells, utc=True).dt.tz_localize(None)
    else:
        # Long tables hold each time once a client, so each is parsed once.
        code_t, unique = pd.factorize(cells)
        text = pd.Series(unique, dtype=object).astype(str).str.strip()
        # The pattern keeps out what would be read as a date but is none, such as 20150101
        # or 2015; day-first dates are refused because 01/03 has two readings.
        iso = text.str.fullmatch(ISO_DATE, na=False).astype(bool)
        parsed = pd.to_datetime(text.where(iso), format="ISO8601", utc=True, errors="coerce")
        parsed = parsed.dt.tz_localize(None).to_numpy().astype("datetime64[s]")
        parsed_t = pd.Series(np.append(parsed, np.datetime64("NaT", "s"))[code_t])
    bad = np.flatnonzero(parsed_t.isna())
    if len(bad):
        found = cells.iloc[bad[0]]
        found = "empty" if pd.isna(found) else f"{str(found)!r}, no ISO 8601 time"
        raise DataError(
            f"{sheet.path}, row {sheet.row_t[bad[0]]}, column {sheet.header[column]!r}: the time "
            f"is {found} ({len(bad)} such rows). Write it like 2015-01-31 or 2015-01-31T13:00."
        )
    return parsed_t.to_numpy().astype("datetime64[s]")


def numbers_of(sheet: Sheet, column: int, client_t, rows: np.ndarray | slice) -> np.ndarray:
    """Readings of some rows of a column, float64.

    Args:
      client_t: the client of each of these rows, or the one of all, for messages.

    Errors: DataError that names the cell of what is no usable number.
    """
    cells = sheet.frame[column].iloc[rows]
    if pd.api.types.is_bool_dtype(cells) or not pd.api.types.is_numeric_dtype(cells):
        text = cells.astype(str).str.strip()
        if sheet.separator != ",":  # there a comma has another meaning
            text = text.str.replace(",", ".", regex=False)
        numbers = pd.to_numeric(text, errors="coerce")
        bad = numbers.isna() & cells.notna() & (text != "")
        _refuse(sheet, column, client_t, rows, cells, bad, "no number")
        cells = numbers
    values = cells.to_numpy(np.float64, na_value=np.nan)
    with np.errstate(invalid="ignore"):
        bad = np.abs(values) > _LARGEST
    _refuse(sheet, column, client_t, rows, cells, bad, f"beyond {_LARGEST:g}")
    return values


def _refuse(sheet: Sheet, column: int, client_t, rows, cells, bad, what: str) -> None:
    bad = np.flatnonzero(bad)
    if not len(bad):
        return
    client = client_t if isinstance(client_t, str) else client_t[bad[0]]
    raise DataError(
        f"{sheet.path}, row {sheet.row_t[rows][bad[0]]}, column {column + 1}, client {client!r}: "
        f"the reading is {str(cells.iloc[bad[0]])!r}, {what} ({len(bad)} such cells in this "
        "column). Correct it, or leave the cell empty if the reading is missing."
    )
