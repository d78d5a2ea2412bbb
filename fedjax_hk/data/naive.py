"""Forecasts that need no model, in units: the least that a model has to beat."""

from __future__ import annotations

import numpy as np

_WEEK_SECONDS = 7 * 24 * 3600
# A mean over fewer than four of the last seven days says more about the gap than the week.
_LEAST_SHARE = 4 / 7


def naive_forecasts(
    series_nt: np.ndarray,
    train_nt: np.ndarray,
    positions_nw: np.ndarray,
    step: np.timedelta64,
    horizon: int,
) -> dict[str, np.ndarray]:
    """Naive forecasts of the readings at `positions_nw`, made `horizon` steps earlier.

    Args:
      series_nt: `[N, T]` float64 readings, NaN where missing.
      train_nt: the same with NaN outside each client's training span.
      positions_nw: `[N, W]` position in time of each target, within `[0, T)`.
      step: time between two readings.
      horizon: steps from the last known reading to the target.

    Returns:
      name to `[N, W]` float64 units; NaN where readings that it needs are missing:
      "yesterday": the last known reading (at hourly steps the last hour);
      "last_week": the reading at the same time a week before the target (as many weeks
        as the horizon asks for); nowhere if a week is no whole number of steps;
      "mean_7_days": mean of the last known seven days, with at least 4/7 of them present;
      "train_median": median of the client's training span.
    """
    step_seconds = int(step / np.timedelta64(1, "s"))
    week = _WEEK_SECONDS // step_seconds
    known_nw = positions_nw - horizon
    missing_nw = np.full(positions_nw.shape, np.nan)
    if week and _WEEK_SECONDS % step_seconds == 0:
        weeks_back = -(-horizon // week)  # data after the last input may not be used
        last_week = _at(series_nt, positions_nw - weeks_back * week)
    else:
        last_week = missing_nw
    median_n1 = np.nanmedian(train_nt, axis=1, keepdims=True)
    return {
        "yesterday": _at(series_nt, known_nw),
        "last_week": last_week,
        "mean_7_days": _at(_trailing_mean(series_nt, week), known_nw) if week else missing_nw,
        "train_median": np.broadcast_to(median_n1, positions_nw.shape).copy(),
    }


def _at(values_nt: np.ndarray, positions_nw: np.ndarray) -> np.ndarray:
    """`values_nt` at `positions_nw`, NaN before the start."""
    found = np.take_along_axis(values_nt, np.maximum(positions_nw, 0), axis=1)
    return np.where(positions_nw >= 0, found, np.nan)


def _trailing_mean(values_nt: np.ndarray, width: int) -> np.ndarray:
    """Mean of the `width` readings that end at each position, NaN if too few are there."""
    known_nt = np.isfinite(values_nt)
    before = ((0, 0), (width - 1, 0))

    def windows(array_nt):
        return np.lib.stride_tricks.sliding_window_view(np.pad(array_nt, before), width, axis=1)

    # Window by window and not from a running sum, whose rounding would turn the zeros
    # of an empty home into small readings.
    total = windows(np.where(known_nt, values_nt, 0.0)).sum(axis=2)
    count = windows(known_nt.astype(np.float64)).sum(axis=2)
    enough = count >= _LEAST_SHARE * width - 1e-9
    return np.where(enough, total / np.maximum(count, 1.0), np.nan)
