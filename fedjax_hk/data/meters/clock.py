"""Between a zone's wall clock and UTC, for whole arrays; days and weeks of that clock."""

from __future__ import annotations

from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

from fedjax_hk.data.errors import DataError

DAY, HOUR = 86400, 3600
STEPS = {"hourly": HOUR, "daily": DAY, "weekly": 7 * DAY}  # seconds of a period
_MONDAY = 4 * DAY  # 1970-01-05, the first Monday of the epoch


class Clock(NamedTuple):
    """The wall clock of `zone`; all times are whole seconds since 1970, `[R]` int64.

    pandas before 3 knows a zone's changes until 2037.
    """

    zone: str

    def to_utc(self, local: np.ndarray, second: np.ndarray | bool = False) -> np.ndarray:
        """UTC of wall clock times; `second` takes the later of a repeated hour's two."""
        wall = _times(local)
        first = np.broadcast_to(np.logical_not(second), local.shape)
        utc = wall.tz_localize(self.zone, ambiguous=first, nonexistent="NaT")
        skipped = np.flatnonzero(utc.isna())
        found = _seconds(utc)
        if len(skipped):
            # A time that the spring's change skips is read with the offset before it.
            before = wall[skipped].tz_localize(self.zone, nonexistent="shift_backward")
            offset = _seconds(before.tz_localize(None)) - _seconds(before)
            found[skipped] = local[skipped] - offset
        return found

    def is_repeated(self, local: np.ndarray) -> np.ndarray:
        """Whether the wall clock shows these times twice."""
        # Times that spring skips are moved, so only those shown twice become none.
        choices = {"ambiguous": "NaT", "nonexistent": "shift_forward"}
        return _times(local).tz_localize(self.zone, **choices).isna()

    def to_local(self, utc: np.ndarray) -> np.ndarray:
        """Wall clock times of UTC."""
        return _seconds(_times(utc).tz_localize("UTC").tz_convert(self.zone).tz_localize(None))

    def edges(self, every: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Where periods begin and end, so that they cover [first, last] in UTC.

        Returns:
          `[T + 1]` UTC edges, and `[T]` the name of each period: its start by the wall
          clock for days and weeks, in UTC for hours, which a wall clock repeats and skips.
        """
        step = STEPS[every]
        if every == "hourly":
            name = np.arange(first // step, -(-last // step) + 1) * step
            return name, name[:-1]
        origin = _MONDAY if every == "weekly" else 0
        low, high = self.to_local(np.array([first, last])) - origin
        name = np.arange(low // step, -(-high // step) + 1) * step + origin
        return self.to_utc(name), name[:-1]


def clock(zone: str) -> Clock:
    """The clock of a zone such as "Europe/Madrid"; "" is UTC.

    Errors: DataError if there is no such zone.
    """
    try:
        return Clock(ZoneInfo(zone or "UTC").key)
    except (KeyError, ValueError, OSError):  # not found; a path; a folder of zones
        raise DataError(
            f"--timezone={zone}: there is no such zone; write it like Europe/Madrid."
        ) from None


def time_in_words(seconds: int) -> str:
    """An instant as "2016-01-31T13:05:00"."""
    return str(np.datetime64(int(seconds), "s"))


def step_in_words(step: int | np.timedelta64) -> str:
    """A step, of seconds if it is a number, as "1 day" or "30 minutes"."""
    seconds = int(np.timedelta64(step, "s").astype(np.int64))
    sizes = {"day": DAY, "hour": HOUR, "minute": 60, "second": 1}
    unit = next(unit for unit, size in sizes.items() if seconds % size == 0)
    many = seconds // sizes[unit]
    return f"{many} {unit}{'s' if many > 1 else ''}"


def _times(seconds: np.ndarray) -> pd.DatetimeIndex:
    return pd.DatetimeIndex(seconds.astype("datetime64[s]"))


def _seconds(times: pd.DatetimeIndex) -> np.ndarray:
    """Of times with a zone: in UTC."""
    return times.asi8.copy()
