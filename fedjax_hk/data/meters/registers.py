"""From a register's readings at any times to totals of regular periods.

A register counts upwards, so what a household used between two readings is known however
far apart they are. Totals are differences of the register at the periods' edges: nothing
is lost at a gap, and nothing counted twice.
"""

from __future__ import annotations

import bisect

import numpy as np

# Liters that a register may run back, by backflow or between two interleaved registers,
# before the reading counts as a wrong one.
_BACKFLOW = 10


def clean(register_r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Takes out readings that the rest of the register contradicts.

    The longest rising part is believed, so a register that jumps up and comes back loses
    the jump, and not all that follows. Readings slightly below it count as no use.

    Args:
      register_r: `[R]` readings of one meter, oldest first.

    Returns:
      `[R]` rising readings, and `[R]` which of them to use.
    """
    keep_r = np.ones(len(register_r), bool)
    highest_r = np.maximum.accumulate(register_r)
    lowest_r = np.minimum.accumulate(register_r[::-1])[::-1]
    # Where nothing before is above anything after, the longest rising part of the whole is
    # that of the pieces on both sides; pieces of one reading need no search.
    cut = np.flatnonzero(highest_r[:-1] <= lowest_r[1:]) + 1
    edges = np.concatenate(([0], cut, [len(register_r)]))
    for piece in np.flatnonzero(np.diff(edges) > 1):
        part = slice(edges[piece], edges[piece + 1])
        keep_r[part] = longest_rising(register_r[part])
    latest_r = np.maximum.accumulate(np.where(keep_r, register_r, -np.inf))
    below_r = ~keep_r & (register_r < latest_r) & (register_r >= latest_r - _BACKFLOW)
    return np.where(below_r, latest_r, register_r), keep_r | below_r


def longest_rising(values_r: np.ndarray) -> np.ndarray:
    """Which values make up a longest part that never falls, `[R]` bool.

    Source: patience sorting (Fredman, 1975), in O(R log R).
    """
    ends: list[float] = []  # smallest last value of a rising part, by its length
    ends_at: list[int] = []
    previous = []
    for i, value in enumerate(values_r.tolist()):
        length = bisect.bisect_right(ends, value)
        previous.append(ends_at[length - 1] if length else -1)
        if length == len(ends):
            ends.append(value)
            ends_at.append(i)
        else:
            ends[length], ends_at[length] = value, i
    keep_r = np.zeros(len(values_r), bool)
    i = ends_at[-1] if ends_at else -1
    while i >= 0:
        keep_r[i] = True
        i = previous[i]
    return keep_r


def totals(
    time_r: np.ndarray, register_r: np.ndarray, edge_t: np.ndarray, widest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Use in each period of one meter.

    The register at an edge is interpolated between the readings around it.

    Args:
      time_r: `[R]` seconds, rising.
      register_r: `[R]` rising readings.
      edge_t: `[T + 1]` seconds, where the periods meet.
      widest: seconds that the two readings around an edge may be apart.

    Returns:
      `[T]` use, NaN if an edge is not known; and `[T]` the same without regard to `widest`,
      which shares the volume of a gap evenly over its periods.
    """
    after_t = np.searchsorted(time_r, edge_t, "left")
    before_t = np.searchsorted(time_r, edge_t, "right") - 1
    inside_t = (before_t >= 0) & (after_t < len(time_r))
    after_t, before_t = np.minimum(after_t, len(time_r) - 1), np.maximum(before_t, 0)
    apart_t = np.maximum(time_r[after_t] - time_r[before_t], 0)
    share_t = (edge_t - time_r[before_t]) / np.maximum(apart_t, 1)
    register_t = register_r[before_t] + share_t * (register_r[after_t] - register_r[before_t])
    # Rounding hides that a share of a difference is not exact, and keeps the order.
    register_t = np.where(inside_t, np.round(register_t, 6), np.nan)
    filled_t = np.diff(register_t)
    known_t = inside_t & (apart_t <= widest)
    return np.where(known_t[1:] & known_t[:-1], filled_t, np.nan), filled_t
