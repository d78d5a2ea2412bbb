"""Puts rows onto a regular grid of times, so that positions are times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters.clock import step_in_words

# A time may lie this share of a step off the grid: a local midnight is one hour of 24
# off in summer. Farther off, it is no longer clear which step a reading belongs to.
OFF_GRID = 0.25
# A grid this many times longer than the rows comes from a wrong date, not from gaps.
MOSTLY_GAPS = 20


def median_step(distance: np.ndarray) -> int:
    """The lower median of distances in seconds: one that occurs."""
    middle = (len(distance) - 1) // 2
    return int(np.partition(distance, middle)[middle])


def slots(since_start: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The step that each time is closest to, and how many seconds it is off."""
    # Half a step up and floor, in whole seconds: exact, unlike a float and np.round.
    slot = (2 * since_start + step) // (2 * step)
    return slot, np.abs(since_start - slot * step)


def regular_grid(
    path: Path, times: np.ndarray, row_t: np.ndarray, values_tn: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Sorts rows by time and fills absent times with missing readings.

    Args:
      path: for messages.
      times: `[T]` datetime64[s], each once, in any order.
      row_t: `[T]` row in the file, for messages.
      values_tn: `[T, N]` readings.

    Returns:
      times and readings on the grid, and what was done, in words.

    Raises:
      DataError: fewer than two rows, a time off the grid, or next to nothing but gaps.
    """
    if len(times) < 2:
        raise DataError(f"{path} has one row of readings (row {row_t[0]}). Give a series.")
    notes = []
    order = np.argsort(times)
    if (np.diff(order) < 0).any():
        notes.append("rows sorted by time")
    times, row_t, values_tn = times[order], row_t[order], values_tn[order]
    distance = np.diff(times).astype(np.int64)
    step = median_step(distance)
    slot_t, off_t = slots((times - times[0]).astype(np.int64), step)
    wrong = np.flatnonzero((off_t > OFF_GRID * step) | (np.diff(slot_t, prepend=-1) == 0))
    if len(wrong):
        raise DataError(
            f"{path}, row {row_t[wrong[0]]}: {times[wrong[0]]} does not lie on the grid of steps "
            f"of {step_in_words(step)} (the median) from {times[0]} ({len(wrong)} such rows). "
            "Resample the readings to one step."
        )
    num_slots = int(slot_t[-1]) + 1
    if num_slots > MOSTLY_GAPS * len(times) + 1000:
        widest = distance.argmax()
        raise DataError(
            f"{path}, rows {row_t[widest]} and {row_t[widest + 1]}: from {times[widest]} to "
            f"{times[widest + 1]} there is no row, at steps of {step_in_words(step)}. "
            "Correct the date."
        )
    if off_t.any():
        notes.append(f"{np.count_nonzero(off_t)} times moved by up to {off_t.max()} s to the grid")
    if num_slots > len(times):
        notes.append(f"{num_slots - len(times)} absent times filled with missing readings")
    grid = times[0] + np.arange(num_slots) * np.timedelta64(step, "s")
    on_grid_tn = np.full((num_slots, values_tn.shape[1]), np.nan)
    on_grid_tn[slot_t] = values_tn
    return grid, on_grid_tn, notes
