"""DAIAD water meters: one reading of a cumulative register a row, by the local wall clock.

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
from typing import BinaryIO, NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk.data.errors import DataError, first_reasons
from fedjax_hk.data.meters import registers
from fedjax_hk.data.meters.clock import DAY, HOUR, Clock, clock
from fedjax_hk.data.meters.files import File, as_text, unpacked
from fedjax_hk.data.meters.regular import MOSTLY_GAPS
from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded

ZONE = "Europe/Madrid"
UNIT = "L"
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
_YEARS = 1990, 2099  # a meter's clock that was never set says 1970 or 2000
# A register at midnight is trusted if the readings around it are this far apart at most.
_WIDEST = {"hourly": 3 * HOUR // 2, "daily": 6 * HOUR, "weekly": 6 * HOUR}
_MANY_DROPPED = 0.05  # share of a meter's readings; beyond it the user is told


class Readings(NamedTuple):
    """Readings in file order: `[R]` meter number, wall clock seconds, liters, row of the file."""

    meter_r: np.ndarray
    local_r: np.ndarray
    register_r: np.ndarray
    row_r: np.ndarray


class Meters:
    """Raw files of meters, parsed; `client_ids` are their user keys."""

    def __init__(self, files: list[File]):
        self.files = files
        number_of: dict[str, int] = {}
        self._parts = [_parse(file, number_of) for file in files]
        self.client_ids = list(number_of)

    def to_table(self, wanted: list[str], resample: str, zone: str) -> Table:
        """Totals of the wanted meters: per local calendar day or week, or per hour of UTC.

        Errors: DataError if no meter can be used.
        """
        every, local_clock = resample or "daily", clock(zone or ZONE)
        meters, excluded, notes = self._cleaned(wanted, local_clock)
        if not meters:
            raise DataError(f"{self.files[0].path}: no meter can be used.{first_reasons(excluded)}")
        first, last = _span(meters, self.files)
        edge_t, name_t = local_clock.edges(every, int(first), int(last))
        values_tn = np.empty((len(name_t), len(meters)))
        filled_tn = np.empty_like(values_tn)
        for i, (time_r, register_r) in enumerate(meters.values()):
            values_tn[:, i], filled_tn[:, i] = registers.totals(
                time_r, register_r, edge_t, _WIDEST[every]
            )
        known = np.flatnonzero(np.isfinite(values_tn).any(axis=1))
        if len(known) < 2:
            raise DataError(
                f"{self.files[0].path}: no two {every} totals are known between "
                f"{_show(first)} and {_show(last)} UTC. Give longer series or --resample=hourly."
            )
        span = slice(known[0], known[-1] + 1)
        return Table(
            times=name_t[span].astype("datetime64[s]"),
            client_ids=tuple(meters),
            values_tn=values_tn[span],
            unit=UNIT,
            source="; ".join((f"{every} totals of cumulative registers", *notes)),
            fingerprint="",
            excluded=tuple(excluded),
            filled_tn=filled_tn[span],
        )

    def _cleaned(self, wanted: list[str], local_clock: Clock):
        """Each meter's UTC seconds and rising register, who is left out, and notes."""
        rows, file_r = _merged(self._parts)
        utc_r, order, edges = _oldest_first(rows, file_r, local_clock)
        number_of = {name: i for i, name in enumerate(self.client_ids)}
        meters, excluded = {}, []
        repeats, flattened, dropped, many = 0, 0, 0, []
        for name in wanted:
            own = order[edges[number_of[name]] : edges[number_of[name] + 1]]
            register_r, time_r = rows.register_r[own], utc_r[own]
            negative = own[register_r < 0]
            if len(negative):
                excluded.append(Excluded(name, _negative(self.files, rows, file_r, negative)))
                continue
            again = np.zeros(len(own), bool)
            again[1:] = (np.diff(time_r) == 0) & (np.diff(register_r) == 0)
            use = np.isfinite(register_r) & ~again
            register_r, time_r = register_r[use], time_r[use]
            if len(register_r) < 2:
                excluded.append(Excluded(name, f"{len(register_r)} readings; two are needed"))
                continue
            rising_r, keep_r = registers.clean(register_r)
            meters[name] = time_r[keep_r], rising_r[keep_r]
            repeats += int(again.sum())
            flattened += int((rising_r != register_r).sum())
            dropped += int((~keep_r).sum())
            if (~keep_r).mean() > _MANY_DROPPED:
                many.append(f"{name} ({(~keep_r).sum()} of {len(keep_r)})")
        notes = [f"{len(rows.meter_r)} readings"]
        for count, what in (
            (repeats, "exact repeats dropped"),
            (flattened, "readings slightly below the register counted as no use"),
            (dropped, "readings that the register contradicts dropped"),
        ):
            notes += [f"{count} {what}"] if count else []
        if many:
            notes.append(
                f"more than {_MANY_DROPPED:.0%} of the readings dropped: {', '.join(many[:5])}"
            )
        return meters, excluded, notes


def looks_like(lines: list[str]) -> bool:
    """Whether a file's first lines are those of this format."""
    return bool(lines) and (
        lines[0].strip().strip('"') in _HEADERS
        or any(_ROW.fullmatch(line.strip()) for line in lines[:2])
    )


def _parse(file: File, number_of: dict[str, int]) -> Readings:
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


def _blocks(stream: BinaryIO):
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
    fast = block.translate(_SPLIT)
    bytes_of = np.frombuffer(fast, np.uint8)
    ends = np.flatnonzero(bytes_of == ord("\n"))
    parts = np.flatnonzero(bytes_of == ord(";"))
    most = len(_NAMES) - 1
    regular = (
        len(parts) == most * len(ends)
        and (parts[most - 1 :: most] < ends).all()
        and (parts[most::most] > ends[:-1]).all()
    )
    if regular and b'"' not in block:
        kinds = {name: np.int32 for name in _NAMES[1:7]}
        try:
            frame = pd.read_csv(
                io.BytesIO(fast),
                sep=";",
                header=None,
                names=_NAMES,
                usecols=_NAMES[:8],
                dtype={"meter": "category", "register": np.float64, **kinds},
                keep_default_na=False,
                na_values={"register": [""]},
                encoding="utf-8",
            )
        except ValueError:  # a cell that is no number: read row by row, which names it
            frame = None
        if frame is not None and len(frame) == len(ends):
            local_r = _seconds(frame)
            meter = frame["meter"].cat
            register_r = frame["register"].to_numpy()
            named = "" not in meter.categories
            if named and local_r is not None and not np.isinf(register_r).any():
                codes = meter.codes.to_numpy()
                row_r = np.arange(first_row, first_row + len(frame), dtype=np.int32)
                return (codes, list(meter.categories)), local_r, register_r, row_r
    return _row_by_row(file, block, first_row)


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
        parts = [int(found[n]) for n in ("year", "month", "day", "hour", "minute", "second")]
        try:
            local = datetime.datetime(*parts, tzinfo=datetime.UTC).timestamp()
        except ValueError as error:
            raise DataError(
                f"{file.path}, row {row}, column 2, meter {meter}: {found['time']!r} is no time "
                f"({error}). Correct it or take the row out."
            ) from None
        if not _YEARS[0] <= parts[0] <= _YEARS[1]:
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


def _merged(parts: list[Readings]) -> tuple[Readings, np.ndarray]:
    """All files' rows one after another, and `[R]` which file each is from."""
    file_r = np.repeat(np.arange(len(parts), dtype=np.int16), [len(p.meter_r) for p in parts])
    return Readings(*(np.concatenate(column) for column in zip(*parts, strict=True))), file_r


def _oldest_first(rows: Readings, file_r: np.ndarray, local_clock: Clock):
    """UTC of every row; the order by meter and time; and where each meter begins in it.

    A wall clock shows an hour twice when it is set back. File order tells the two apart, in
    whichever direction the meter's rows run: the later one begins where the clock does not
    go on.
    """
    # One run is one meter in one file.
    run_r = rows.meter_r * np.int64(file_r[-1] + 1 if len(file_r) else 1) + file_r
    order = np.argsort(run_r, kind="stable")
    local_r = rows.local_r[order]
    starts = np.flatnonzero(np.diff(run_r[order], prepend=-1))
    rise = np.sign(np.diff(local_r, append=local_r[-1:])).astype(np.int64)
    rise[np.append(starts[1:], len(local_r)) - 1] = 0  # from one meter to the next
    newest_first = np.add.reduceat(rise, starts) < 0
    ends = np.append(starts[1:], len(local_r))
    position = np.arange(len(local_r))
    length = np.diff(np.append(starts, len(local_r)))
    turned = np.repeat(newest_first, length)
    position = np.where(turned, np.repeat(starts + ends - 1, length) - position, position)
    order, local_r = order[position], local_r[position]

    second = np.zeros(len(local_r), bool)
    hour = np.flatnonzero(local_clock.is_repeated(local_r))
    if len(hour):
        # One group is one meter's rows of one such hour.
        groups = [run_r[order[hour]], local_r[hour] // DAY]
        back = pd.Series(local_r[hour]).groupby(groups).diff() <= 0
        second[hour] = back.groupby(groups).cummax().to_numpy()
    utc_r = np.empty_like(local_r)
    utc_r[order] = local_clock.to_utc(local_r, second)
    final = order[np.lexsort((utc_r[order], rows.meter_r[order]))]
    num_meters = int(rows.meter_r.max()) + 1
    edges = np.searchsorted(rows.meter_r[final], np.arange(num_meters + 1))
    return utc_r, final, edges


def _span(meters: dict, files: list[File]) -> tuple[int, int]:
    """First and last reading of all meters.

    Errors: DataError if next to nothing but gaps lies between, which comes of a wrong date.
    """
    first = min(meters, key=lambda name: meters[name][0][0])
    last = max(meters, key=lambda name: meters[name][0][-1])
    start, end = meters[first][0][0], meters[last][0][-1]
    longest = max(np.count_nonzero(np.diff(time_r // DAY)) for time_r, _ in meters.values())
    if (end - start) // DAY > MOSTLY_GAPS * longest + 1000:
        raise DataError(
            f"{files[0].path}: meter {first} begins at {_show(start)} UTC and meter {last} ends at "
            f"{_show(end)}, but no meter has readings on more than {longest + 1} days. Correct "
            "the date, or choose meters by --clients."
        )
    return int(start), int(end)


def _negative(files, rows: Readings, file_r: np.ndarray, negative: np.ndarray) -> str:
    first = negative[np.lexsort((rows.row_r[negative], file_r[negative]))[0]]
    return (
        f"a register does not go below zero: {files[file_r[first]].path.name}, row "
        f"{rows.row_r[first]} has {rows.register_r[first]:g} ({len(negative)} such readings). "
        "Correct it or take the row out"
    )


def _show(seconds: int) -> str:
    return str(np.datetime64(int(seconds), "s"))
