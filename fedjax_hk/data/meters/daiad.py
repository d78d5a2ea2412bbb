"""DAIAD water meters: raw registers, as `daiad_rows` reads them, become totals of periods."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from fedjax_hk.data.errors import DataError, first_reasons
from fedjax_hk.data.meters import registers
from fedjax_hk.data.meters.clock import DAY, HOUR, Clock, clock, time_in_words
from fedjax_hk.data.meters.daiad_rows import Readings, parse
from fedjax_hk.data.meters.files import File
from fedjax_hk.data.meters.regular import MOSTLY_GAPS
from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded

ZONE = "Europe/Madrid"
UNIT = "L"
# A register at midnight is trusted if the readings around it are this far apart at most.
_WIDEST = {"hourly": 3 * HOUR // 2, "daily": 6 * HOUR, "weekly": 6 * HOUR}
_FLATTENED = "readings slightly below the register counted as no use"
_MANY_DROPPED = 0.05  # share of a meter's readings; beyond it the user is told


class Meters:
    """Raw files of meters, parsed; `client_ids` are their user keys."""

    def __init__(self, files: list[File]):
        self.files = files
        number_of: dict[str, int] = {}
        self._parts = [parse(file, number_of) for file in files]
        self.client_ids = list(number_of)

    def to_table(self, wanted: list[str], resample: str, zone: str) -> Table:
        """Totals of the wanted meters: per local calendar day or week, or per hour of UTC.

        See `Reader`; "" is daily, and Alicante's zone.
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
                f"{time_in_words(first)} and {time_in_words(last)} UTC. Give longer series or "
                "--resample=hourly."
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
        counts: Counter[str] = Counter()
        many = []
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
            counts["exact repeats dropped"] += again.sum()
            counts[_FLATTENED] += (rising_r != register_r).sum()
            counts["readings that the register contradicts dropped"] += (~keep_r).sum()
            if (~keep_r).mean() > _MANY_DROPPED:
                many.append(f"{name} ({(~keep_r).sum()} of {len(keep_r)})")
        notes = [f"{len(rows.meter_r)} readings"]
        notes += [f"{count} {what}" for what, count in counts.items() if count]
        if many:
            notes.append(
                f"more than {_MANY_DROPPED:.0%} of the readings dropped: {', '.join(many[:5])}"
            )
        return meters, excluded, notes


def _merged(parts: list[Readings]) -> tuple[Readings, np.ndarray]:
    """All files' rows one after another, and `[R]` which file each is from."""
    file_r = np.repeat(np.arange(len(parts), dtype=np.int16), [len(p.meter_r) for p in parts])
    return Readings(*(np.concatenate(column) for column in zip(*parts, strict=True))), file_r


def _oldest_first(rows: Readings, file_r: np.ndarray, local_clock: Clock):
    """UTC of every row; the order by meter and time; and where each meter begins in it."""
    # One run is one meter in one file.
    run_r = rows.meter_r * np.int64(file_r[-1] + 1) + file_r
    order = _as_read_off(run_r, rows.local_r)
    local_r = rows.local_r[order]
    utc_r = np.empty_like(local_r)
    utc_r[order] = local_clock.to_utc(local_r, _is_second(run_r[order], local_r, local_clock))
    final = order[np.lexsort((utc_r[order], rows.meter_r[order]))]
    num_meters = int(rows.meter_r.max()) + 1
    edges = np.searchsorted(rows.meter_r[final], np.arange(num_meters + 1))
    return utc_r, final, edges


def _as_read_off(run_r: np.ndarray, local_r: np.ndarray) -> np.ndarray:
    """`[R]` rows run by run in file order, turned round where a run's newest row comes first."""
    order = np.argsort(run_r, kind="stable")
    starts = np.flatnonzero(np.diff(run_r[order], prepend=-1))
    length = np.diff(np.append(starts, len(order)))
    rise = np.sign(np.diff(local_r[order], prepend=0))
    rise[starts] = 0  # from one run to the next
    newest_first = np.add.reduceat(rise, starts) < 0
    position = np.arange(len(order))
    mirrored = np.repeat(2 * starts + length - 1, length) - position
    return order[np.where(np.repeat(newest_first, length), mirrored, position)]


def _is_second(run_r: np.ndarray, local_r: np.ndarray, local_clock: Clock) -> np.ndarray:
    """`[R]` whether a row, in the order it was read off, is of an hour's second time.

    A wall clock shows an hour twice when it is set back. The second time begins where the
    clock does not go on from one row to the next.
    """
    second_r = np.zeros(len(local_r), bool)
    hour = np.flatnonzero(local_clock.is_repeated(local_r))
    if len(hour):
        # One group is one run's rows of one such hour.
        groups = [run_r[hour], local_r[hour] // DAY]
        back = pd.Series(local_r[hour]).groupby(groups).diff() <= 0
        second_r[hour] = back.groupby(groups).cummax().to_numpy()
    return second_r


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
            f"{files[0].path}: meter {first} begins at {time_in_words(start)} UTC and meter {last} "
            f"ends at {time_in_words(end)}, but no meter has readings on more than {longest + 1} "
            "days. Correct the date, or choose meters by --clients."
        )
    return int(start), int(end)


def _negative(files, rows: Readings, file_r: np.ndarray, negative: np.ndarray) -> str:
    first = negative[np.lexsort((rows.row_r[negative], file_r[negative]))[0]]
    return (
        f"a register does not go below zero: {files[file_r[first]].path.name}, row "
        f"{rows.row_r[first]} has {rows.register_r[first]:g} ({len(negative)} such readings). "
        "Correct it or take the row out"
    )
