"""From a table of readings to padded, masked and scaled windows of every client."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_hk.data.errors import DataError, first_reasons
from fedjax_hk.data.naive import naive_forecasts
from fedjax_hk.data.scaling import FITS, SCALERS, SCOPES, fit_scaler, window_scale
from fedjax_hk.data.spans import GAPS, Series, aligned, own_spans
from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded, Fleet, Samples


class _Windows(NamedTuple):
    """Which windows there are: `[N, W]` first input and target position, and validity."""

    first_nw: np.ndarray
    target_nw: np.ndarray
    exists_nw: np.ndarray
    usable_nw: np.ndarray


def build_fleet(
    table: Table,
    *,
    lookback: int = 12,
    horizon: int = 1,
    train_share: float = 0.8,
    scaler: str = "minmax",
    scaler_scope: str = "client",
    scaler_fit: str = "train",
    gaps: str = "mask",
) -> Fleet:
    """Cuts every client's series into windows: training first, test last.

    Each client's own span, first to last reading, is split by position: the first
    `floor(train_share * steps)` steps are its training span, targets in the rest are
    test targets, whose inputs may reach back into the training span. No training window
    and (with `scaler_fit="train"`) no scaler touches a reading of the test span. 730 days
    give 572 training and 146 test windows.

    Args:
      table: readings on a regular grid.
      lookback: L, input steps of a window.
      horizon: steps from the last input to the target.
      train_share: share of each span to train on, between 0 and 1.
      scaler: "minmax", "mean", "window_mean" (each window by the mean of its own
        inputs), "standard" or "robust"; see `scaling.fit_scaler`.
      scaler_scope: "client", or "fleet" to pool the readings of all clients kept.
      scaler_fit: "train", or "all" to fit on the test span too: a leak, only for
        comparison with work that did so.
      gaps: "mask" leaves out a window with a missing reading. "interpolate" fills its
        inputs between known readings, unless its last input is missing: filling that
        would take a reading from after the time of the forecast. Targets are never
        filled, no scaler is fitted to filled readings, and the naive forecasts see what
        the model sees.

    Returns:
      The fleet; padding, and windows with a missing input or target, have mask False.

    Raises:
      DataError: no client has enough readings; the message lists who lacks what.
      ValueError: an argument is out of its range.

    Source: spec section 5.1 and A24, A37 (FedHK section 5).

    Examples:
      >>> from fedjax_hk.data import synthetic_fleet
      >>> fleet = build_fleet(synthetic_fleet(num_clients=3, num_days=100), lookback=7)
      >>> fleet.client_ids, fleet.unit, fleet.train.inputs.shape[2:]
      (('h0000', 'h0001', 'h0002'), 'L', (7, 1))
    """
    _check_arguments(lookback, horizon, train_share, scaler, scaler_scope, scaler_fit, gaps)
    series = aligned(table, train_share, gaps)
    train = _train_windows(series, lookback, horizon)
    test = _test_windows(series, lookback, horizon)
    keep_n, reasons = _enough(table, series, train, test, lookback, horizon)
    if not keep_n.any():
        raise DataError(_nobody_left(table, reasons, lookback, horizon))
    series = Series(*(field[keep_n] for field in series))
    train, test = _trim(train, keep_n), _trim(test, keep_n)

    position_t = np.arange(series.series_nt.shape[1])
    train_nt = np.where(position_t < series.num_train_n[:, None], series.series_nt, np.nan)
    fit_nt = train_nt if scaler_fit == "train" else series.series_nt
    shift_n, scale_n = fit_scaler(fit_nt, scaler, scaler_scope)
    by_window = scaler == "window_mean"
    times_nw = table.times[
        np.minimum(series.start_n[:, None] + test.target_nw, len(table.times) - 1)
    ]
    step = table.times[1] - table.times[0]
    naive = naive_forecasts(series.inputs_nt, train_nt, test.target_nw, step, horizon)
    return Fleet(
        client_ids=tuple(np.asarray(table.client_ids, dtype=object)[keep_n]),
        unit=table.unit,
        train=_samples(series, train, lookback, shift_n, scale_n, by_window),
        test=_samples(series, test, lookback, shift_n, scale_n, by_window),
        test_times=np.where(test.exists_nw, times_nw, np.datetime64("NaT")),
        naive={k: np.where(test.usable_nw, v, np.nan) for k, v in naive.items()},
        excluded=(*table.excluded, *reasons),
        planted=None if table.planted is None else np.asarray(table.planted, np.int32)[keep_n],
        source=table.source,
        fingerprint=table.fingerprint,
        shift_n=shift_n,
        scale_n=scale_n,
    )


def without_test_span(table: Table, train_share: float = 0.8) -> Table:
    """The readings of every client's training span, for choosing settings.

    What `build_fleet` splits off of the result is a validation part: neither its windows, its
    scalers nor its naive forecasts touch the test span.
    """
    start_n, length_n, num_train_n = own_spans(table.values_tn, train_share)
    position_t1 = np.arange(len(table.times))[:, None]
    keep_tn = (length_n > 0) & (position_t1 < start_n + num_train_n)
    filled_tn = table.filled_tn
    return table._replace(
        values_tn=np.where(keep_tn, table.values_tn, np.nan),
        filled_tn=None if filled_tn is None else np.where(keep_tn, filled_tn, np.nan),
        source=f"{table.source}, test span put away (validation)",
    )


def next_windows(
    table: Table,
    shift_n: np.ndarray,
    scale_n: np.ndarray,
    *,
    lookback: int = 12,
    horizon: int = 1,
    scaler: str = "minmax",
    gaps: str = "mask",
) -> tuple[Samples, Samples, np.ndarray]:
    """What is known when the next reading is to be forecast.

    Args:
      table: readings on a regular grid.
      shift_n, scale_n: `[N]` of every client, as the forecaster was trained with.
      lookback, horizon, scaler, gaps: as of `build_fleet`.

    Returns:
      All windows of each client whose target is known; its last window (`[N, 1]`, mask False
      if a reading in it is missing), of which targets mean nothing; and the `[N]` times that
      are forecast, NaT for a client without a reading.
    """
    series = aligned(table, 1.0, gaps)
    by_window = scaler == "window_mean"
    history = _train_windows(series, lookback, horizon)
    # With horizon 0 the last input is the target, and it is known.
    enough_n = (series.length_n >= lookback).astype(np.int64)
    last = _windows(series, np.maximum(series.length_n - lookback, 0), enough_n, lookback, 0)
    step = table.times[1] - table.times[0]
    end_n = series.start_n + np.maximum(series.length_n, 1) - 1
    times_n = table.times[end_n] + horizon * step
    return (
        _samples(series, history, lookback, shift_n, scale_n, by_window),
        _samples(series, last, lookback, shift_n, scale_n, by_window),
        np.where(series.length_n > 0, times_n, np.datetime64("NaT")),
    )


def _check_arguments(lookback, horizon, train_share, scaler, scope, fit, gaps) -> None:
    for name, value in (("lookback", lookback), ("horizon", horizon)):
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"Expected {name} to be a whole number from 1, got {value!r}.")
    if not 0 < train_share < 1:
        raise ValueError(f"Expected train_share between 0 and 1, both excluded, got {train_share}.")
    choices = (
        ("scaler", scaler, SCALERS),
        ("scaler_scope", scope, SCOPES),
        ("scaler_fit", fit, FITS),
        ("gaps", gaps, GAPS),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"Expected {name} to be one of {', '.join(allowed)}, got {value!r}.")


def _train_windows(series: Series, lookback: int, horizon: int) -> _Windows:
    """Windows whose inputs and target all lie in the training span, oldest first."""
    reach = lookback + horizon - 1
    num_n = np.maximum(series.num_train_n - reach, 0)
    return _windows(series, np.zeros_like(num_n), num_n, lookback, horizon)


def _test_windows(series: Series, lookback: int, horizon: int) -> _Windows:
    """Windows whose target lies in the test span, oldest first; inputs may lie before it."""
    reach = lookback + horizon - 1
    first_target_n = np.maximum(series.num_train_n, reach)
    num_n = np.maximum(series.length_n - first_target_n, 0)
    return _windows(series, first_target_n - reach, num_n, lookback, horizon)


def _windows(series: Series, first_n, num_n, lookback: int, horizon: int) -> _Windows:
    """`num_n` windows in a row from position `first_n` on, padded to one count."""
    offset_w = np.arange(max(num_n.max(initial=0), 1))
    exists_nw = offset_w < num_n[:, None]
    first_nw = np.where(exists_nw, first_n[:, None] + offset_w, 0)
    reach = lookback + horizon - 1
    last = series.series_nt.shape[1] - 1
    target_nw = np.minimum(first_nw + reach, last)
    known_nt = np.isfinite(series.series_nt)
    # Inputs present in [first, first + lookback), from a running count of them.
    count_nt = np.pad(np.isfinite(series.inputs_nt).cumsum(axis=1), ((0, 0), (1, 0)))
    end_nw = np.minimum(first_nw + lookback, last + 1)
    present_nw = np.take_along_axis(count_nt, end_nw, axis=1) - np.take_along_axis(
        count_nt, first_nw, axis=1
    )
    target_known_nw = np.take_along_axis(known_nt, target_nw, axis=1)
    # A gap that is open at the last input was filled with what came after it.
    closed_nw = np.take_along_axis(known_nt, end_nw - 1, axis=1)
    usable_nw = exists_nw & (present_nw == lookback) & closed_nw & target_known_nw
    return _Windows(first_nw, target_nw, exists_nw, usable_nw)


def _trim(windows: _Windows, keep_n: np.ndarray) -> _Windows:
    """The windows of the clients kept, padded no further than these need."""
    width = windows.exists_nw[keep_n].sum(axis=1).max()
    return _Windows(*(field[keep_n, :width] for field in windows))


def _enough(table, series, train, test, lookback, horizon):
    """Who has enough windows, `[N]` bool, and why the others do not."""
    least = lookback + horizon + 2
    train_n, test_n = train.usable_nw.sum(axis=1), test.usable_nw.sum(axis=1)
    keep_n = (train_n >= least) & (test_n >= 1)
    reasons = []
    for i in np.flatnonzero(~keep_n):
        if series.length_n[i] == 0:
            reason = "no reading at all"
        else:
            num_known = int(np.isfinite(series.series_nt[i]).sum())
            reason = (
                f"{train_n[i]} usable training windows (at least {least} needed) and {test_n[i]} "
                f"usable test windows (at least 1 needed): {num_known} readings within "
                f"{series.length_n[i]} steps"
            )
        reasons.append(Excluded(table.client_ids[i], reason))
    return keep_n, tuple(reasons)


def _nobody_left(table: Table, reasons, lookback: int, horizon: int) -> str:
    excluded = (*table.excluded, *reasons)
    more = len(excluded) - 10
    rest = f"\n  and {more} more" if more > 0 else ""
    return (
        f"No client has enough readings for look-back {lookback} and horizon {horizon} in "
        f"{table.source}. Give longer series or a shorter look-back.{first_reasons(excluded)}{rest}"
    )


def _samples(series: Series, windows, lookback, shift_n, scale_n, by_window: bool) -> Samples:
    """Cuts the windows out and scales them in float64 before they become float32."""
    usable_nw = windows.usable_nw
    # Windows that run over the end (padding of short clients) must still be addressable.
    padded_nt = np.pad(series.inputs_nt, ((0, 0), (0, lookback)), constant_values=np.nan)
    view = np.lib.stride_tricks.sliding_window_view(padded_nt, lookback, axis=1)
    rows_n1 = np.arange(len(series.series_nt))[:, None]
    inputs_nwl = view[rows_n1, windows.first_nw]
    targets_nw = series.series_nt[rows_n1, windows.target_nw]
    shift_nw = np.broadcast_to(shift_n[:, None], usable_nw.shape)
    if by_window:
        scale_nw = window_scale(inputs_nwl, scale_n)
    else:
        scale_nw = np.broadcast_to(scale_n[:, None], usable_nw.shape)
    inputs_nwl -= shift_nw[:, :, None]
    inputs_nwl /= scale_nw[:, :, None]
    inputs_nwl[~usable_nw] = 0.0
    scaled_nw = np.where(usable_nw, (targets_nw - shift_nw) / scale_nw, 0.0)
    return Samples(
        inputs=inputs_nwl.astype(np.float32)[..., None],
        targets=scaled_nw.astype(np.float32),
        mask=usable_nw,
        scale=scale_nw.astype(np.float32),
        shift=shift_nw.astype(np.float32),
    )
