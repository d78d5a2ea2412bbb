"""Long tables: one row a client and time, in any order, with any step."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters.regular import MOSTLY_GAPS, OFF_GRID, median_step, slots
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

    def to_table(self, wanted: list[str]) -> Table:
        """The wanted clients on one regular grid, whose step is the median of all clients'.

        Clients may read at different minutes: each has a grid of its own, and its readings
        stand at the shared grid's step in which they fall. A client is left out if a reading
        is negative, if a time has two different readings, or if its times are no grid.

        Errors: DataError if nobody is left, or a cell cannot be read.
        """
        sheet, names = self._sheet, np.asarray(self.client_ids, dtype=object)
        new_code = np.full(len(names), -1)
        number_of = {name: i for i, name in enumerate(self.client_ids)}
        new_code[[number_of[c] for c in wanted]] = np.arange(len(wanted))
        rows = np.flatnonzero(new_code[self._code_r] >= 0)
        code_r = new_code[self._code_r[rows]]
        time_r = times_of(sheet, self._columns.time)[rows].astype(np.int64)
        value_r = numbers_of(sheet, self._columns.value, names[self._code_r[rows]], rows)
        order = np.lexsort((time_r, code_r))
        notes = ["rows sorted by time"] if (np.diff(order) < 0).any() else []
        code_r, time_r, value_r = code_r[order], time_r[order], value_r[order]
        row_r = sheet.row_t[rows][order]

        bad_n: dict[int, Excluded] = {}
        for i in np.unique(code_r[value_r < 0]):
            own = slice(*np.searchsorted(code_r, [i, i + 1]))
            by_row = np.argsort(row_r[own])
            bad_n[i] = negative_reading(wanted[i], row_r[own][by_row], value_r[own][by_row])
        same = (np.diff(code_r) == 0) & (np.diff(time_r) == 0)
        equal = (value_r[1:] == value_r[:-1]) | (np.isnan(value_r[1:]) & np.isnan(value_r[:-1]))
        for at in np.flatnonzero(same & ~equal):
            bad_n.setdefault(code_r[at], _two_readings(wanted, code_r, time_r, value_r, row_r, at))
        keep_r = ~np.isin(code_r, list(bad_n)) & ~np.append(False, same)
        if same.any():
            notes.append(f"{np.count_nonzero(same & equal)} exact repeats dropped")
        code_r, time_r, value_r, row_r = (x[keep_r] for x in (code_r, time_r, value_r, row_r))
        if not len(code_r):
            raise nobody(sheet, list(bad_n.values()))
        grid, slot_r = self._grid(wanted, code_r, time_r, row_r, bad_n, notes)
        kept = [i for i in range(len(wanted)) if i not in bad_n]
        if not kept:
            raise nobody(sheet, list(bad_n.values()))
        column = np.full(len(wanted), -1)
        column[kept] = np.arange(len(kept))
        values_tn = np.full((len(grid), len(kept)), np.nan)
        use_r = column[code_r] >= 0
        values_tn[slot_r[use_r], column[code_r[use_r]]] = value_r[use_r]
        return Table(
            grid,
            tuple(wanted[i] for i in kept),
            values_tn,
            "",
            "; ".join(notes),
            "",
            excluded=tuple(bad_n[i] for i in sorted(bad_n)),
        )

    def _grid(self, wanted, code_r, time_r, row_r, bad_n, notes):
        """Shared grid, and `[R]` slot of each row; adds to `bad_n` and `notes`."""
        path = self._sheet.path
        inside = np.diff(code_r) == 0
        distance = np.diff(time_r)[inside]
        if not len(distance):
            raise DataError(
                f"{path}: no client has two rows (row {row_r[0]} is all there is of "
                f"{wanted[code_r[0]]}). Give series."
            )
        step = median_step(distance)
        first_r = np.flatnonzero(np.diff(code_r, prepend=-1))
        start_r = np.repeat(time_r[first_r], np.diff(np.append(first_r, len(code_r))))
        own_r, off_r = slots(time_r - start_r, step)
        wrong_r = (off_r > OFF_GRID * step) | np.append(False, inside & (np.diff(own_r) == 0))
        for at in np.flatnonzero(wrong_r):
            if code_r[at] not in bad_n:
                count = int(wrong_r[code_r == code_r[at]].sum())
                bad_n[code_r[at]] = Excluded(
                    wanted[code_r[at]],
                    f"row {row_r[at]}: {_show(time_r[at])} does not lie on the grid of steps of "
                    f"{_step(step)} (the median) from {_show(start_r[at])} ({count} such rows); "
                    "give its readings at one step",
                )
        use_r = ~np.isin(code_r, list(bad_n))
        if not use_r.any():
            raise nobody(self._sheet, list(bad_n.values()))
        origin = time_r[use_r].min()
        base, off_base = slots(start_r - origin, step)
        # A client that reads at a minute of its own belongs to the step that it falls in.
        base = np.where(off_base > OFF_GRID * step, (start_r - origin) // step, base)
        slot_r = np.where(use_r, base + own_r, 0)
        num_slots = int(slot_r.max()) + 1
        longest = np.bincount(code_r[use_r]).max()
        if num_slots > MOSTLY_GAPS * longest + 1000:
            by_time = np.flatnonzero(use_r)[np.argsort(time_r[use_r], kind="stable")]
            gap = np.diff(time_r[by_time]).argmax()
            a, b = by_time[gap], by_time[gap + 1]
            raise DataError(
                f"{path}, rows {row_r[a]} and {row_r[b]} (clients {wanted[code_r[a]]!r} and "
                f"{wanted[code_r[b]]!r}): from {_show(time_r[a])} to {_show(time_r[b])} there is "
                f"no row, at steps of {_step(step)}. Correct the date."
            )
        moved = np.count_nonzero(off_r[use_r])
        if moved:
            notes.append(f"{moved} times moved by up to {off_r[use_r].max()} s to the grid")
        grid = np.datetime64(int(origin), "s") + np.arange(num_slots) * np.timedelta64(step, "s")
        return grid, slot_r


def _two_readings(wanted, code_r, time_r, value_r, row_r, at) -> Excluded:
    return Excluded(
        wanted[code_r[at]],
        f"rows {row_r[at]} and {row_r[at + 1]}: {_show(time_r[at])} has the readings "
        f"{value_r[at]:g} and {value_r[at + 1]:g}; keep one (where clocks are set back, write "
        "times in UTC)",
    )


def _show(seconds: int) -> str:
    return str(np.datetime64(int(seconds), "s"))


def _step(seconds: int) -> str:
    return str(np.timedelta64(int(seconds), "s").astype(object))
