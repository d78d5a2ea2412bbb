"""Between a zone's wall clock and UTC, for whole arrays; days and weeks of that clock."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np

from fedjax_hk.data.errors import DataError

DAY, HOUR = 86400, 3600
STEPS = {"hourly": HOUR, "daily": DAY, "weekly": 7 * DAY}  # seconds of a period
_MONDAY = 4 * DAY  # 1970-01-05, the first Monday of the epoch
_YEARS = 1970, 2101


class Clock(NamedTuple):
    """Offsets of a zone in seconds, piece by piece; all times are seconds since 1970.

    Attributes:
      change_k: `[K]` UTC instants at which the offset changes.
      offset_k: `[K + 1]` offset before the first change and after each.
    """

    change_k: np.ndarray
    offset_k: np.ndarray

    def to_utc(self, local: np.ndarray, second: np.ndarray | bool = False) -> np.ndarray:
        """UTC of wall clock times; `second` takes the later of a repeated hour's two."""
        before, after = self.offset_k[:-1], self.offset_k[1:]
        latest = np.searchsorted(self.change_k + np.maximum(before, after), local, "right")
        earliest = np.searchsorted(self.change_k + np.minimum(before, after), local, "right")
        # A time that the spring's change skips is read with the offset before it.
        repeated = (earliest > latest) & (self.offset_k[earliest] < self.offset_k[latest])
        return local - self.offset_k[np.where(repeated & second, earliest, latest)]

    def is_repeated(self, local: np.ndarray) -> np.ndarray:
        """Whether the wall clock shows these times twice."""
        return self.to_utc(local, True) != self.to_utc(local, False)

    def to_local(self, utc: np.ndarray) -> np.ndarray:
        """Wall clock times of UTC."""
        return utc + self.offset_k[np.searchsorted(self.change_k, utc, "right")]

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
        low, high = (int(self.to_local(np.array([t]))[0]) - origin for t in (first, last))
        name = np.arange(low // step, -(-high // step) + 1) * step + origin
        return self.to_utc(name), name[:-1]


@functools.cache
def clock(zone: str) -> Clock:
    """The clock of a zone such as "Europe/Madrid"; "" is UTC.

    Errors: DataError if there is no such zone.
    """
    if not zone:
        return Clock(np.zeros(0, np.int64), np.zeros(1, np.int64))
    try:
        info = ZoneInfo(zone)
    except (KeyError, ValueError, OSError):  # not found; a path; a folder of zones
        raise DataError(
            f"--timezone={zone}: there is no such zone; write it like Europe/Madrid."
        ) from None
    changes, offsets = [], [_offset(info, datetime(_YEARS[0], 1, 1, tzinfo=UTC))]
    day = datetime(_YEARS[0], 1, 1, tzinfo=UTC)
    while day.year < _YEARS[1]:
        if _offset(info, day + timedelta(days=10)) != offsets[-1]:
            low, high = day, day + timedelta(days=10)
            while high - low > timedelta(seconds=1):
                middle = low + timedelta(seconds=(high - low) // timedelta(seconds=2))
                if _offset(info, middle) == offsets[-1]:
                    low = middle
                else:
                    high = middle
            changes.append(int(high.timestamp()))
            offsets.append(_offset(info, high))
        day += timedelta(days=10)
    return Clock(np.array(changes, np.int64), np.array(offsets, np.int64))


def _offset(zone: ZoneInfo, utc: datetime) -> int:
    return int(utc.astimezone(zone).utcoffset().total_seconds())
