"""Wide tables: first column time, one column a client, an empty cell is missing."""

from __future__ import annotations

import numpy as np

from fedjax_hk.data.errors import DataError, first_reasons
from fedjax_hk.data.meters.regular import regular_grid
from fedjax_hk.data.meters.reshape import resampled
from fedjax_hk.data.meters.sheet import Sheet, numbers_of, times_of
from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded


class Wide:
    """A wide table; `client_ids` are its columns but the first."""

    def __init__(self, sheet: Sheet):
        self._sheet = sheet
        self.client_ids = sheet.header[1:]

    def to_table(self, wanted: list[str], resample: str, zone: str) -> Table:
        """The wanted clients on a regular grid, whose step is the rows' median distance.

        See `Reader`. A client with a negative reading is left out.
        """
        sheet = self._sheet
        times = times_of(sheet, 0)
        _refuse_repeats(sheet, times)
        number_of = {name: i + 1 for i, name in enumerate(self.client_ids)}
        values_tn = np.empty((len(times), len(wanted)))
        for i, client in enumerate(wanted):
            values_tn[:, i] = numbers_of(sheet, number_of[client], client, slice(None))
        positive_n = ~(values_tn < 0).any(axis=0)
        excluded = tuple(
            negative_reading(wanted[i], sheet.row_t, values_tn[:, i])
            for i in np.flatnonzero(~positive_n)
        )
        wanted = [wanted[i] for i in np.flatnonzero(positive_n)]
        if not wanted:
            raise nobody(sheet, excluded)
        times, values_tn, notes = regular_grid(
            sheet.path, times, sheet.row_t, values_tn[:, positive_n]
        )
        table = Table(times, tuple(wanted), values_tn, "", "; ".join(notes), "", excluded=excluded)
        return resampled(table, resample, zone)


def negative_reading(client: str, row_t: np.ndarray, value_t: np.ndarray) -> Excluded:
    """Why a client with readings below zero is left out."""
    bad = np.flatnonzero(value_t < 0)
    return Excluded(
        client,
        f"a meter does not run backwards: row {row_t[bad[0]]} has {value_t[bad[0]]} "
        f"({len(bad)} negative readings)",
    )


def nobody(sheet: Sheet, excluded) -> DataError:
    """What to raise if every client of a file is left out."""
    return DataError(f"{sheet.path}: no client can be used.{first_reasons(excluded)}")


def _refuse_repeats(sheet: Sheet, times: np.ndarray) -> None:
    order = np.argsort(times, kind="stable")
    again = np.flatnonzero(times[order][1:] == times[order][:-1])
    if len(again):
        first, second = order[again[0]], order[again[0] + 1]
        raise DataError(
            f"{sheet.path}, rows {sheet.row_t[first]} and {sheet.row_t[second]}: the time "
            f"{sheet.frame[0].iloc[first]} is there twice ({len(again)} such pairs). Keep one "
            "row a time; where clocks are set back, write times in UTC."
        )
