"""Long tables: one row a client and time, in any order, with any step."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters.clock import step_in_words, time_in_words
from fedjax_hk.data.meters.regular import MOSTLY_GAPS, OFF_GRID, median_step, slots
from fedjax_hk.data.meters.reshape import resampled
from fedjax_hk.data.meters.sheet import ISO_DATE, Sheet, numbers_of, times_of
from fedjax_hk.data.meters.wide import negative_reading, nobody
from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded

# Column names as the field writes them, in lower case with "_" for blanks and dots.
_CLIENT = re.compile(
    "(client|user|meter|household|house|customer|series|item|unique|sensor|device|lcl|site)"
    "(_?(id|key|name|no|number))?|id|lclid|mac"
)
_TIME = re.compile("time|date|datetime|date_?time|timestamp|tstp|ds|day|hour|(date|hour)_.*")
_VALUE = re.compile(
    "value|reading|consumption|usage|use|y|target|volume|demand|load|lit(er|re)s?|"
    "(kwh|energy|consumption|usage|volume|use|value)[_/(].*|kwh|energy|l|m3"
)
_LOOKED_AT = 100  # rows


class Columns(NamedTuple):
    """Column numbers of a long table."""

    client: int
    time: int
    value: int


def find_columns(sheet: Sheet) -> Columns | None:
    """Where client, time and value are, by name or else by what three columns hold.

    None if the table is not a long one.
    """
    names = [re.sub(r"[\s.\-]+", "_", name.lower()) for name in sheet.header]
    found = []
    for pattern in (_CLIENT, _TIME, _VALUE):
        found.append([i for i, name in enumerate(names) if pattern.fullmatch(name)])
    if found[0] and found[1]:
        rest = [i for i in range(len(names)) if i not in (found[0][0], found[1][0])]
        values = [i for i in found[2] if i in rest] or (rest if len(rest) == 1 else [])
        if values:
            return Columns(found[0][0], found[1][0], values[0])
    if len(names) == 3:
        is_time = [_holds_times(sheet, i) for i in range(3)]
        is_text = [_holds_names(sheet, i) for i in range(3)]
        if is_time[1] and not is_time[0]:
            return Columns(0, 1, 2)
        if is_time[0] and is_text[1] and not is_text[2]:
            return Columns(1, 0, 2)
    return None


def _holds_times(sheet: Sheet, column: int) -> bool:
    cells = sheet.frame[column].iloc[:_LOOKED_AT]
    if pd.api.types.is_datetime64_any_dtype(cells):
        return True
    return bool(cells.astype(str).str.strip().str.fullmatch(ISO_DATE).iloc[0])


def _holds_names(sheet: Sheet, column: int) -> bool:
    cells = sheet.frame[column].iloc[:_LOOKED_AT]
    text = cells.astype(str).str.replace(",", ".", regex=False)
    return bool((pd.to_numeric(text, errors="coerce").isna() & cells.notna()).all())


class Long:
    """A long table; `client_ids` are its clients in order of appearance."""

    def __init__(self, sheet: Sheet, columns: Columns | None = None):
        columns = columns or find_columns(sheet)
        if columns is None:
            raise DataError(
                f"{sheet.path}, row 1: no columns for client, time and value among "
                f"{', '.join(sheet.header[:6])}. Name them client, time and value."
            )
        self._sheet, self._columns = sheet, columns
        self._code_r, unique = pd.factorize(sheet.frame[columns.client].astype(object))
        absent = np.flatnonzero(self._code_r < 0)
        if len(absent):
            raise DataError(
                f"{sheet.path}, row {sheet.row_t[absent[0]]}, column "
                f"{sheet.header[columns.client]!r}: the client has no name ({len(absent)} such "
                "rows). Name it or take the row out."
            )
        merged, names = pd.factorize(pd.Series(unique, dtype=object).astype(str).str.strip())
        self._code_r = merged[self._code_r]
        self.client_ids = list(names)

    def to_table(self, wanted: list[str], resample: str, zone: str) -> Table:
        """The wanted clients on one regular grid, whose step is the median of all clients'.

        See `Reader`. Clients may read at different minutes: each has a grid of its own, and its
        readings stand at the shared grid's step in which they fall. A client is left out if a
        reading is negative, if a time has two different readings, or if its times are no grid.
        """
        rows, notes = self._rows_of(wanted)
        again_r, differs_r = _repeats(rows)
        left_out = _negative(wanted, rows)
        for at in np.flatnonzero(differs_r):
            left_out.setdefault(rows.client_r[at], _two_readings(wanted, rows, int(at)))
        if again_r.any():
            notes.append(f"{np.count_nonzero(again_r & ~differs_r)} exact repeats dropped")
        rows = rows.only(self._used(rows, left_out) & ~again_r)

        step = self._step(wanted, rows)
        own = _own_grids(rows, step)
        left_out |= _off_grid(wanted, rows, own, step)
        use_r = self._used(rows, left_out)
        rows, own = rows.only(use_r), own.only(use_r)
        moved = np.count_nonzero(own.off_r)
        if moved:
            notes.append(f"{moved} times moved by up to {own.off_r.max()} s to the grid")
        times, slot_r = self._shared_grid(wanted, rows, own, step)

        kept = [i for i in range(len(wanted)) if i not in left_out]
        column = np.full(len(wanted), -1)
        column[kept] = np.arange(len(kept))
        values_tn = np.full((len(times), len(kept)), np.nan)
        values_tn[slot_r, column[rows.client_r]] = rows.value_r
        excluded = tuple(left_out[i] for i in sorted(left_out))
        ids = tuple(wanted[i] for i in kept)
        table = Table(times, ids, values_tn, "", "; ".join(notes), "", excluded=excluded)
        return resampled(table, resample, zone)

    def _rows_of(self, wanted: list[str]) -> tuple[_Rows, list[str]]:
        """The wanted clients' rows, and what was done to them, in words."""
        sheet, names = self._sheet, np.asarray(self.client_ids, dtype=object)
        new_code = np.full(len(names), -1)
        number_of = {name: i for i, name in enumerate(self.client_ids)}
        new_code[[number_of[c] for c in wanted]] = np.arange(len(wanted))
        at = np.flatnonzero(new_code[self._code_r] >= 0)
        time_r = times_of(sheet, self._columns.time)[at].astype(np.int64)
        value_r = numbers_of(sheet, self._columns.value, names[self._code_r[at]], at)
        rows = _Rows(new_code[self._code_r[at]], time_r, value_r, sheet.row_t[at])
        order = np.lexsort((rows.time_r, rows.client_r))
        notes = ["rows sorted by time"] if (np.diff(order) < 0).any() else []
        return rows.only(order), notes

    def _used(self, rows: _Rows, left_out: dict[int, Excluded]) -> np.ndarray:
        """`[R]` whether a row's client takes part. Errors: DataError if nobody does."""
        use_r = ~np.isin(rows.client_r, list(left_out))
        if not use_r.any():
            raise nobody(self._sheet, list(left_out.values()))
        return use_r

    def _step(self, wanted: list[str], rows: _Rows) -> int:
        """Median seconds from one row of a client to its next. Errors: DataError if none has."""
        distance = np.diff(rows.time_r)[np.diff(rows.client_r) == 0]
        if not len(distance):
            raise DataError(
                f"{self._sheet.path}: no client has two rows (row {rows.row_r[0]} is all there is "
                f"of {wanted[rows.client_r[0]]}). Give series."
            )
        return median_step(distance)

    def _shared_grid(
        self, wanted: list[str], rows: _Rows, own: _OwnGrids, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The grid's times, and `[R]` the slot of each row in it.

        Errors: DataError if it is next to nothing but gaps.
        """
        origin = rows.time_r.min()
        base_r, off_r = slots(own.start_r - origin, step)
        # A client that reads at a minute of its own belongs to the step that it falls in.
        base_r = np.where(off_r > OFF_GRID * step, (own.start_r - origin) // step, base_r)
        slot_r = base_r + own.slot_r
        num_slots = int(slot_r.max()) + 1
        longest = np.bincount(rows.client_r).max()
        if num_slots > MOSTLY_GAPS * longest + 1000:
            by_time = np.argsort(rows.time_r, kind="stable")
            gap = np.diff(rows.time_r[by_time]).argmax()
            a, b = by_time[gap], by_time[gap + 1]
            client_r, time_r, _, row_r = rows
            raise DataError(
                f"{self._sheet.path}, rows {row_r[a]} and {row_r[b]} (clients "
                f"{wanted[client_r[a]]!r} and {wanted[client_r[b]]!r}): from "
                f"{time_in_words(time_r[a])} to {time_in_words(time_r[b])} there is no row, at "
                f"steps of {step_in_words(step)}. Correct the date."
            )
        times = np.datetime64(int(origin), "s") + np.arange(num_slots) * np.timedelta64(step, "s")
        return times, slot_r


class _Rows(NamedTuple):
    """Rows by client and time: `[R]` client's number, seconds, reading, row of the file."""

    client_r: np.ndarray
    time_r: np.ndarray
    value_r: np.ndarray
    row_r: np.ndarray

    def only(self, which_r: np.ndarray | slice) -> _Rows:
        return _Rows(*(column[which_r] for column in self))


class _OwnGrids(NamedTuple):
    """`[R]` of each row: its client's first time, the step it is closest to, seconds off it."""

    start_r: np.ndarray
    slot_r: np.ndarray
    off_r: np.ndarray

    def only(self, which_r: np.ndarray) -> _OwnGrids:
        return _OwnGrids(*(column[which_r] for column in self))


def _own_grids(rows: _Rows, step: int) -> _OwnGrids:
    first_k = np.flatnonzero(np.diff(rows.client_r, prepend=-1))
    num_rows_k = np.diff(np.append(first_k, len(rows.client_r)))
    start_r = np.repeat(rows.time_r[first_k], num_rows_k)
    return _OwnGrids(start_r, *slots(rows.time_r - start_r, step))


def _off_grid(wanted: list[str], rows: _Rows, own: _OwnGrids, step: int) -> dict[int, Excluded]:
    """Clients with a row that lies between the steps, or two rows in one step."""
    same_client = np.diff(rows.client_r) == 0
    twice_r = np.append(False, same_client & (np.diff(own.slot_r) == 0))
    wrong = np.flatnonzero((own.off_r > OFF_GRID * step) | twice_r)
    clients, first, counts = np.unique(rows.client_r[wrong], return_index=True, return_counts=True)
    return {
        i: Excluded(
            wanted[i],
            f"row {rows.row_r[at]}: {time_in_words(rows.time_r[at])} does not lie on the grid of "
            f"steps of {step_in_words(step)} (the median) from {time_in_words(own.start_r[at])} "
            f"({count} such rows); give its readings at one step",
        )
        for i, at, count in zip(clients, wrong[first], counts, strict=True)
    }


def _negative(wanted: list[str], rows: _Rows) -> dict[int, Excluded]:
    """Clients with a reading below zero."""
    found = {}
    for i in np.unique(rows.client_r[rows.value_r < 0]):
        own = rows.only(slice(*np.searchsorted(rows.client_r, [i, i + 1])))
        own = own.only(np.argsort(own.row_r))
        found[i] = negative_reading(wanted[i], own.row_r, own.value_r)
    return found


def _repeats(rows: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """`[R]` whether a row has the client and time of the row before; and another reading."""
    client_r, time_r, value_r, _ = rows
    again_r = (np.diff(client_r) == 0) & (np.diff(time_r) == 0)
    equal_r = (value_r[1:] == value_r[:-1]) | (np.isnan(value_r[1:]) & np.isnan(value_r[:-1]))
    return np.append(False, again_r), np.append(False, again_r & ~equal_r)


def _two_readings(wanted: list[str], rows: _Rows, at: int) -> Excluded:
    """Why a client is left out whose row `at` contradicts the one before."""
    client_r, time_r, value_r, row_r = rows
    return Excluded(
        wanted[client_r[at]],
        f"rows {row_r[at - 1]} and {row_r[at]}: {time_in_words(time_r[at])} has the readings "
        f"{value_r[at - 1]:g} and {value_r[at]:g}; keep one (where clocks are set back, write "
        "times in UTC)",
    )
