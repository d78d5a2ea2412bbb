"""Rows of DAIAD water meters: a reading of a cumulative register by the local wall clock.

    user key;datetime;meter reading;diff
    1f8730a9-5d67-4895-9215-6e247087ea00;01/03/2016 00:28:55;68321;10

Columns go by position; `diff` is not used, as it holds garbage where the register does
not. Millions of rows are parsed block by block: characters that part a date become
semicolons, so that a row is nine numbers and a key.
"""

from __future__ import annotations

import datetime
import io
import re
from typing import IO, NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters.clock import DAY, HOUR
from fedjax_hk.data.meters.files import File, as_text, unpacked

_HEADERS = ("user key;datetime;meter reading;diff", "user.key;datetime;meter.reading;diff",
            "V1;V2;V3;V4")  # fmt: skip
_ROW = re.compile(
    r"(?P<meter>[^;]+);(?P<time>(?P<day>\d{1,2})/(?P<month>\d{1,2})/(?P<year>\d{4}) "
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2}):(?P<second>\d{2}));(?P<register>[^;]*);[^;]*"
)
# R wrote round registers as 7e+05.
_NUMBER = re.compile(r"\s*[+-]?\d+(?:[.,]\d*)?(?:[eE][+-]?\d+)?\s*")
_BLOCK = 1 << 25  # bytes; some 500,000 rows
_SPLIT = bytes.maketrans(b"/ :", b";;;")
_NAMES = ("meter", "day", "month", "year", "hour", "minute", "second", "register", "diff")
_FIELDS = ("year", "month", "day", "hour", "minute", "second")  # of a row's time
_YEARS = 1990, 2099  # a meter's clock that was never set says 1970 or 2000


class Readings(NamedTuple):
    """Readings in file order: `[R]` meter number, wall clock seconds, liters, row of the file."""

    meter_r: np.ndarray
    local_r: np.ndarray
    register_r: np.ndarray
    row_r: np.ndarray


def looks_like(lines: list[str]) -> bool:
    """Whether a file's first lines are those of this format."""
    return bool(lines) and (
        lines[0].strip().strip('"') in _HEADERS
        or any(_ROW.fullmatch(line.strip()) for line in lines[:2])
    )


def parse(file: File, number_of: dict[str, int]) -> Readings:
    """All rows of a file; new meters are added to `number_of`."""
    parts, row = [], 1
    with unpacked(file) as stream:
        for block in _blocks(stream):
            if row == 1:
                block = block.removeprefix(b"\xef\xbb\xbf")
            num_rows = block.count(b"\n")
            block, row_first = _without_header(file, block, row) if row == 1 else (block, row)
            if block.strip():
                meters, local_r, register_r, row_r = _read_block(file, block, row_first)
                codes, names = meters
                new = [number_of.setdefault(name, len(number_of)) for name in names]
                meter_r = np.array(new, np.int32)[codes]
                parts.append(Readings(meter_r, local_r, register_r, row_r))
            row += num_rows
    if not parts:
        raise DataError(f"{file.path} has a header but no row of readings below it.")
    return Readings(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _blocks(stream: IO[bytes]):
    """Whole lines of about `_BLOCK` bytes, each with its line end; lines end with LF or CRLF."""
    rest = b""
    while chunk := stream.read(_BLOCK):
        lines, newline, tail = chunk.rpartition(b"\n")
        if newline:
            yield (rest + lines + newline).replace(b"\r", b"")
            rest = tail
        else:
            rest += chunk
    if rest:
        yield rest.replace(b"\r", b"") + b"\n"


def _without_header(file: File, block: bytes, row: int) -> tuple[bytes, int]:
    line, _, below = block.partition(b"\n")
    if _ROW.fullmatch(as_text(file.path, line).strip()):
        return block, row
    return below, row + 1


def _read_block(file: File, block: bytes, first_row: int):
    """Meters (codes and names), wall clock, register and row number of a block of lines."""
    frame = None if b'"' in block else _frame(block.translate(_SPLIT))
    if frame is None:
        return _row_by_row(file, block, first_row)
    meter, register_r, local_r = frame["meter"].cat, frame["register"].to_numpy(), _seconds(frame)
    if "" in meter.categories or local_r is None or np.isinf(register_r).any():
        return _row_by_row(file, block, first_row)
    row_r = np.arange(first_row, first_row + len(frame), dtype=np.int32)
    return (meter.codes.to_numpy(), list(meter.categories)), local_r, register_r, row_r


def _frame(lines: bytes) -> pd.DataFrame | None:
    """Columns of lines of nine cells; None if not every line is one of these."""
    bytes_of = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(bytes_of == ord("\n"))
    parts = np.flatnonzero(bytes_of == ord(";"))
    most = len(_NAMES) - 1
    regular = (
        len(parts) == most * len(ends)
        and (parts[most - 1 :: most] < ends).all()
        and (parts[most::most] > ends[:-1]).all()
    )
    if not regular:
        return None
    try:
        frame = pd.read_csv(
            io.BytesIO(lines),
            sep=";",
            header=None,
            names=_NAMES,
            usecols=_NAMES[:8],
            dtype={
                "meter": "category",
                "register": np.float64,
                **{name: np.int32 for name in _NAMES[1:7]},
            },
            keep_default_na=False,
            na_values={"register": [""]},
            encoding="utf-8",
        )
    except ValueError:  # a cell that is no number: read row by row, which names it
        return None
    return frame if len(frame) == len(ends) else None


def _seconds(frame: pd.DataFrame) -> np.ndarray | None:
    """Wall clock seconds since 1970; None if a date or time does not exist."""
    year, month, day = (frame[name].to_numpy() for name in ("year", "month", "day"))
    hour, minute, second = (frame[name].to_numpy() for name in ("hour", "minute", "second"))
    if not (
        ((year >= _YEARS[0]) & (year <= _YEARS[1]) & (month >= 1) & (month <= 12) & (day >= 1))
        & ((hour >= 0) & (hour < 24) & (minute >= 0) & (minute < 60))
        & ((second >= 0) & (second < 60))
    ).all():
        return None
    months = (year - 1970) * 12 + month - 1
    first_r = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    next_r = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    if (day > next_r - first_r).any():
        return None
    return (first_r + day - 1) * DAY + hour * np.int64(HOUR) + minute * 60 + second


def _row_by_row(file: File, block: bytes, first_row: int):
    """Slow, for blocks with blank lines, quotes, decimal commas and the like.

    Errors: DataError that names the row, column and meter of what cannot be read.
    """
    codes, local_r, register_r, row_r = [], [], [], []
    number_of: dict[str, int] = {}
    for row, line in enumerate(as_text(file.path, block, first_row).split("\n"), start=first_row):
        line = line.replace('"', "").strip()
        if not line:
            continue
        found = _ROW.fullmatch(line)
        if found is None:
            raise DataError(f"{file.path}, row {row}: {_why_no_row(line)}")
        meter = found["meter"]
        year, month, day, hour, minute, second = (int(found[n]) for n in _FIELDS)
        try:
            local = datetime.datetime(
                year, month, day, hour, minute, second, tzinfo=datetime.UTC
            ).timestamp()
        except ValueError as error:
            raise DataError(
                f"{file.path}, row {row}, column 2, meter {meter}: {found['time']!r} is no time "
                f"({error}). Correct it or take the row out."
            ) from None
        if not _YEARS[0] <= year <= _YEARS[1]:
            raise DataError(
                f"{file.path}, row {row}, column 2, meter {meter}: the year of "
                f"{found['time']!r} is not within {_YEARS[0]} to {_YEARS[1]}. Correct the date or "
                "take the row out."
            )
        text = found["register"].strip()
        if text and not _NUMBER.fullmatch(text):
            raise DataError(
                f"{file.path}, row {row}, column 3, meter {meter}: the register is {text!r}, no "
                "number. Correct it, or leave the cell empty if the reading is missing."
            )
        codes.append(number_of.setdefault(meter, len(number_of)))
        local_r.append(int(local))
        register_r.append(float(text.replace(",", ".")) if text else np.nan)
        row_r.append(row)
    columns = (
        np.array(local_r, np.int64),
        np.array(register_r, np.float64),
        np.array(row_r, np.int32),
    )
    return (np.array(codes, np.int64), list(number_of)), *columns


def _why_no_row(line: str) -> str:
    cells = line.split(";")
    if len(cells) != 4:
        return (
            f"{len(cells)} cells, but a row of meter readings has 4: key;datetime;register;diff. "
            "The row is cut short, or the file has another format (see --data_format)."
        )
    if not cells[0]:
        return "column 1: the meter has no name. Add its key or take the row out."
    return (
        f"column 2, meter {cells[0]}: {cells[1]!r} is no time like 31/01/2016 13:05:00. "
        "Correct it or take the row out."
    )
