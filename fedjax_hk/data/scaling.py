"""Shift and scale of every client, fitted on the readings it may learn from.

A scaled reading is `(reading - shift) / scale`. Spec A24: per-client min-max of the
training span is the paper's, and nothing is clipped in the test span.
"""

from __future__ import annotations

import warnings

import numpy as np

SCALERS = ("minmax", "mean", "window_mean", "standard", "robust")
SCOPES = ("client", "fleet")
FITS = ("train", "all")

# A window whose mean is below this share of the client's mean (an empty home with a
# dripping tap) is scaled by the client's mean instead: dividing by next to nothing would
# make the first day back a target of several thousand, and MSE would see only that day.
_EMPTY_WINDOW = 0.1
# A spread below this share of the largest reading is rounding, not variation.
_ROUNDING = 1e-12
_SMALLEST = 1e-15  # in units; float32 cannot divide by much less


def fit_scaler(fit_nt: np.ndarray, scaler: str, scope: str) -> tuple[np.ndarray, np.ndarray]:
    """Shift and scale of each client.

    Args:
      fit_nt: `[N, T]` float64 readings to fit on, NaN elsewhere; every client has one.
      scaler: "minmax" (shift min, scale max - min), "mean" and "window_mean" (shift 0,
        scale mean), "standard" (mean, standard deviation), "robust" (median,
        interquartile range; the standard deviation where that range is 0, as it is for
        homes that stand empty more than three days of four).
      scope: "client", or "fleet" to pool the readings of all clients.

    Returns:
      `[N]` shift and `[N]` scale in units, float64; scale 1 for a constant series.
    """
    pooled = fit_nt.reshape(1, -1) if scope == "fleet" else fit_nt
    low, high = np.nanmin(pooled, axis=1), np.nanmax(pooled, axis=1)
    mean = np.nanmean(pooled, axis=1)
    if scaler == "minmax":
        shift, scale = low, high - low
    elif scaler in ("mean", "window_mean"):
        shift, scale = np.zeros_like(mean), mean
    elif scaler == "standard":
        shift, scale = mean, np.nanstd(pooled, axis=1)
    else:
        quarter, shift, three_quarters = np.nanquantile(pooled, (0.25, 0.5, 0.75), axis=1)
        scale = three_quarters - quarter
        scale = np.where(scale > 0, scale, np.nanstd(pooled, axis=1))
    largest = np.maximum(np.abs(low), np.abs(high))
    scale = np.where(scale > np.maximum(_ROUNDING * largest, _SMALLEST), scale, 1.0)
    num_clients = len(fit_nt)
    return np.broadcast_to(shift, num_clients), np.broadcast_to(scale, num_clients)


def window_scale(inputs_nwl: np.ndarray, client_scale_n: np.ndarray) -> np.ndarray:
    """Scale of each window for "window_mean": the mean of its own inputs, `[N, W]` units.

    The client's own scale takes over where that mean is nothing or next to nothing.
    """
    with warnings.catch_warnings():  # windows of nothing but missing readings are masked
        warnings.simplefilter("ignore", RuntimeWarning)
        mean_nw = inputs_nwl.mean(axis=2)
    fallback_n1 = client_scale_n[:, None]
    return np.where(mean_nw >= _EMPTY_WINDOW * fallback_n1, mean_nw, fallback_n1)
