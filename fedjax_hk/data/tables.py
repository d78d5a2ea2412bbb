"""Reads a wide table: first column time, one column a client, an empty cell is missing."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk.data.columns import missing_file, select_clients
from fedjax_hk.data.errors import DataError
from fedjax_hk.data.regular import regular_grid
from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded

_DECOMPRESS = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}
# No meter reads more; squares of float32 beyond it would overflow.
_LARGEST = 1e15
_ISO_DATE = r"\d{4}-\d{2}-\d{2}(?:[T ].*)?"


class _Sheet(NamedTuple):
    """A table as text: `header` names, `frame` of cells by column number, `row_t` in the file.

    The header is row 1 of the file, as an editor or a spreadsheet counts.
    """

    header: list[str]
    frame: pd.DataFrame
    row_t: np.ndarray


def read_wide(path: str | Path, *, clients: str = "", unit: str = "") -> Table:
    """Reads a wide CSV table, plain or compressed (.gz, .xz, .bz2), onto a regular grid.

    The first column is the time, ISO 8601 ("2015-01-31", "2015-01-31T13:00"; with a zone
    it becomes UTC); every other column is a client. Empty cells, and the spellings of
    missing that pandas knows (NA, NaN, null, ...), are missing readings. Rows may come
    in any order; times that are absent become missing readings, so that no window
    bridges a gap. The step is the median distance of the rows.

    Args:
      path: the file.
      clients: which columns; see `columns.select_clients`.
      unit: label of the readings, such as "L".

    Returns:
      The table. A client with a negative reading is left out, with row and value.

    Raises:
      DataError: names file, row, column, client and value of what cannot be read.
    """
    path = Path(path)
    content = _read_bytes(path)
    sheet = _parse(path, content)
    client_ids = sheet.header[1:]
    wanted, excluded = select_clients(clients, client_ids, path.name)
    times = _times(path, sheet)
    number_of = {name: i + 1 for i, name in enumerate(client_ids)}
    values_tn = _values(path, sheet, wanted, number_of)
    positive_n, negative = _without_negative(sheet, wanted, values_tn)
    wanted = [c for c, keep in zip(wanted, positive_n, strict=True) if keep]
    if not wanted:
        reasons = "\n".join(f"  {e.client}: {e.reason}" for e in negative[:10])
        raise DataError(f"{path}: no client can be used.\n{reasons}")
    times, values_tn, notes = regular_grid(path, times, sheet.row_t, values_tn[:, positive_n])
    step = (times[1] - times[0]).astype(object)  # a timedelta, which prints in words
    described = (
        f"{path.name}: {len(times)} steps of {step} from {times[0]} to {times[-1]}, "
        f"{len(wanted)} of {len(client_ids)} clients"
    )
    return Table(
        times=times,
        client_ids=tuple(wanted),
        values_tn=values_tn,
        unit=unit,
        source="; ".join((described, *notes)),
        fingerprint=hashlib.sha256(content).hexdigest(),
        excluded=(*excluded, *negative),
    )


def _read_bytes(path: Path) -> bytes:
    """The file's content; refuses what is missing, no file, unreadable or empty."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if ".csv" in p.suffixes)
        hint = f" It holds {', '.join(names[:5])}." if names else ""
        raise DataError(f"{path} is a folder. Name a file in it.{hint}")
    if not path.exists():
        raise DataError(missing_file(path))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if not content:
        raise DataError(f"{path} is empty. A table has a header and one row a time.")
    return content


def _parse(path: Path, content: bytes) -> _Sheet:
    """Splits the text into cells without letting pandas rename or shift columns."""
    try:
        raw = _DECOMPRESS.get(path.suffix.lower(), bytes)(content)
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        message = f"{path} is no whole {path.suffix} file ({error}). Fetch it again."
        raise DataError(message) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}. "
            "Give a CSV file (.csv, .csv.gz, .csv.xz)."
        ) from error
    header = _header(path, text)
    _check_lengths(path, text, len(header))
    try:
        with warnings.catch_warnings():
            # pandas warns where it would drop cells; no reading may vanish unseen.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                io.StringIO(text),
                header=None,
                skiprows=1,
                names=range(len(header)),
                index_col=False,
                dtype={0: str},
                skip_blank_lines=False,
                low_memory=False,
            )
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame(columns=range(len(header)))
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise DataError(f"{path} is no regular table: {error}. Quote cells with commas.") from error
    written_t = ~frame.isna().all(axis=1).to_numpy(bool)
    row_t = np.flatnonzero(written_t) + 2
    if not len(row_t):
        raise DataError(f"{path} has a header but no row of readings below it.")
    return _Sheet(header, frame[written_t], row_t)


def _header(path: Path, text: str) -> list[str]:
    """Column names of row 1, each client once."""
    first_line = text.split("\n", 1)[0]
    if not first_line.strip():
        raise DataError(f"{path}, row 1: the header is empty. Name the time and the clients there.")
    row = pd.read_csv(io.StringIO(first_line), header=None, dtype=str, keep_default_na=False)
    header = [cell.strip() for cell in row.iloc[0]]
    if len(header) == 1:
        other = next((f" It seems to use {c!r}." for c in ";\t|" if c in first_line), "")
        raise DataError(
            f"{path}, row 1: only one column, {header[0][:60]!r}. A table has the time and one "
            f"column a client, separated by commas.{other}"
        )
    if pd.Series(header[:1]).str.fullmatch(_ISO_DATE).any():
        raise DataError(
            f"{path}, row 1 begins with the date {header[0]!r}. Add a header row: time, then "
            "the name of each client."
        )
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
    return header


def _check_lengths(path: Path, text: str, num_columns: int) -> None:
    """Refuses a row with fewer or more cells than the header, such as a file cut short.

    pandas fills short rows with missing readings, which would hide a broken download.
    """
    if '"' in text:  # commas inside quotes do not separate; pandas still refuses long rows
        return
    for row, line in enumerate(text.splitlines(), start=1):
        num_cells = line.count(",") + 1
        if num_cells != num_columns and line.strip():
            raise DataError(
                f"{path}, row {row}: {num_cells} cells, but the header has {num_columns}. "
                "The row is cut short or a number has a decimal comma."
            )


def _times(path: Path, sheet: _Sheet) -> np.ndarray:
    """The time of each row, `[T]` datetime64[s], each once."""
    text_t = sheet.frame[0].str.strip()
    # The pattern keeps out what would be read as a date but is none, such as 20150101
    # or 2015; day-first dates are refused because 01/03 has two readings.
    iso_t = text_t.str.fullmatch(_ISO_DATE, na=False).astype(bool)
    parsed_t = pd.to_datetime(text_t.where(iso_t), format="ISO8601", utc=True, errors="coerce")
    bad = np.flatnonzero(parsed_t.isna())
    if len(bad):
        found = sheet.frame[0].iloc[bad[0]]
        found = "empty" if pd.isna(found) else f"{found!r}, no ISO 8601 time"
        raise DataError(
            f"{path}, row {sheet.row_t[bad[0]]}, column {sheet.header[0]!r}: the time is {found} "
            f"({len(bad)} such rows). Write it like 2015-01-31 or 2015-01-31T13:00."
        )
    times = parsed_t.dt.tz_localize(None).to_numpy().astype("datetime64[s]")
    order = np.argsort(times, kind="stable")
    again = np.flatnonzero(times[order][1:] == times[order][:-1])
    if len(again):
        rows = sheet.row_t[order[again[0]]], sheet.row_t[order[again[0] + 1]]
        raise DataError(
            f"{path}, rows {rows[0]} and {rows[1]}: the time {text_t.iloc[order[again[0]]]} is "
            f"there twice ({len(again)} such pairs). Keep one row a time; where clocks are set "
            "back, write times in UTC."
        )
    return times


def _values(path: Path, sheet: _Sheet, wanted: list[str], number_of: dict[str, int]) -> np.ndarray:
    """Readings of the wanted clients, `[T, N]` float64; refuses what is no usable number."""
    values_tn = np.empty((len(sheet.frame), len(wanted)))
    for i, client in enumerate(wanted):
        cells = sheet.frame[number_of[client]]
        if pd.api.types.is_bool_dtype(cells) or not pd.api.types.is_numeric_dtype(cells):
            text = cells.astype(str).str.strip()
            numbers = pd.to_numeric(text, errors="coerce")
            bad = np.flatnonzero(numbers.isna() & cells.notna() & (text != ""))
            if len(bad):
                _refuse_cell(path, sheet, client, number_of[client], bad, cells, "no number")
            cells = numbers
        values_tn[:, i] = cells.to_numpy(np.float64, na_value=np.nan)
        bad = np.flatnonzero(np.abs(values_tn[:, i]) > _LARGEST)
        if len(bad):
            what = f"beyond {_LARGEST:g}"
            _refuse_cell(path, sheet, client, number_of[client], bad, cells, what)
    return values_tn


def _refuse_cell(path, sheet, client: str, number: int, bad, cells, what: str) -> None:
    raise DataError(
        f"{path}, row {sheet.row_t[bad[0]]}, column {number + 1}, client {client!r}: the reading "
        f"is {str(cells.iloc[bad[0]])!r}, {what} ({len(bad)} such cells in this column). Correct "
        "it, or leave the cell empty if the reading is missing."
    )


def _without_negative(sheet: _Sheet, wanted: list[str], values_tn: np.ndarray):
    """Who has no reading below zero, `[N]` bool, and why the others are left out."""
    negative_tn = values_tn < 0
    positive_n = ~negative_tn.any(axis=0)
    excluded = []
    for i in np.flatnonzero(~positive_n):
        first = negative_tn[:, i].argmax()
        excluded.append(
            Excluded(
                wanted[i],
                f"a meter does not run backwards: row {sheet.row_t[first]} has "
                f"{values_tn[first, i]} ({negative_tn[:, i].sum()} negative readings)",
            )
        )
    return positive_n, tuple(excluded)
