"""Loops in float64 that say what the data package and the metrics must return."""

from __future__ import annotations

import math
import statistics

import numpy as np


def span(series):
    """First position and length of a client's own span; `series` is a list, NaN missing."""
    known = [t for t, x in enumerate(series) if not math.isnan(x)]
    return (known[0], known[-1] + 1 - known[0]) if known else (0, 0)


def fit(train, scaler):
    """Shift and scale of one client from the readings it may learn from."""
    known = [x for x in train if not math.isnan(x)]
    mean = sum(known) / len(known)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in known) / len(known))
    if scaler == "minmax":
        shift, scale = min(known), max(known) - min(known)
    elif scaler in ("mean", "window_mean"):
        shift, scale = 0.0, mean
    elif scaler == "standard":
        shift, scale = mean, deviation
    else:
        q1, q2, q3 = (float(np.quantile(known, q)) for q in (0.25, 0.5, 0.75))
        shift, scale = q2, (q3 - q1) or deviation
    return shift, scale if scale > 1e-12 * max(abs(x) for x in known) else 1.0


def client_windows(series, lookback, horizon, train_share, scaler, fit_all=False):
    """Windows of one client: two lists (train, test) of (inputs, target, scale, shift, t).

    Entries of windows with a missing reading are None.
    """
    start, length = span(series)
    own = series[start : start + length]
    num_train = math.floor(train_share * length + 1e-9)
    shift, scale = fit(own if fit_all else own[:num_train], scaler)
    train, test = [], []
    for target in range(lookback + horizon - 1, length):
        first = target - horizon - lookback + 1
        inputs = own[first : first + lookback]
        own_scale = scale
        if scaler == "window_mean" and not any(map(math.isnan, inputs)):
            mean = sum(inputs) / lookback
            own_scale = mean if mean >= 0.1 * scale else scale
        window = None
        if not any(map(math.isnan, [*inputs, own[target]])):
            scaled = [(x - shift) / own_scale for x in inputs]
            window = (scaled, (own[target] - shift) / own_scale, own_scale, shift, start + target)
        (train if target < num_train else test).append(window)
    return train, test


def client_naive(series, t, horizon, train_share, week):
    """The four naive forecasts of reading `t`, which may use readings up to `t - horizon`."""
    start, length = span(series)
    num_train = math.floor(train_share * length + 1e-9)
    train = [x for x in series[start : start + num_train] if not math.isnan(x)]

    def at(position):
        return series[position] if position >= start else math.nan

    back = week
    while back < horizon:
        back += week
    last = [at(t - horizon - i) for i in range(week)]
    last = [x for x in last if not math.isnan(x)]
    return {
        "yesterday": at(t - horizon),
        "last_week": at(t - back),
        "mean_7_days": sum(last) / len(last) if 7 * len(last) >= 4 * week else math.nan,
        "train_median": statistics.median(train),
    }


def errors(forecast, targets, mask, scale, shift):
    """Errors of one client as a dictionary; lists of W."""
    used = [w for w in range(len(targets)) if mask[w]]
    if not used:
        names = ("mse", "mae", "mae_units", "rmse_units", "wape", "accuracy")
        return dict.fromkeys(names, math.nan) | {"num_windows": 0}
    error = [forecast[w] - targets[w] for w in used]
    units = [e * scale[w] for e, w in zip(error, used, strict=True)]
    total = sum(abs(targets[w] * scale[w] + shift[w]) for w in used)
    wape = sum(map(abs, units)) / total if total > 0 else math.nan
    n = len(used)
    return {
        "mse": sum(e * e for e in error) / n,
        "mae": sum(map(abs, error)) / n,
        "mae_units": sum(map(abs, units)) / n,
        "rmse_units": math.sqrt(sum(e * e for e in units) / n),
        "wape": wape,
        "accuracy": math.nan if math.isnan(wape) else max(0.0, 1.0 - wape),
        "num_windows": n,
    }


def longest_rising_length(values):
    """Length of a longest part that never falls, by comparing every pair."""
    best = []
    for i, value in enumerate(values):
        best.append(1 + max((best[j] for j in range(i) if values[j] <= value), default=0))
    return max(best, default=0)


def register_at(times, register, t, widest):
    """Register at second `t` by a line between the readings around it, NaN if too far apart."""
    before = [i for i, x in enumerate(times) if x <= t]
    after = [i for i, x in enumerate(times) if x >= t]
    if not before or not after:
        return math.nan
    a, b = before[-1], after[0]
    apart = max(times[b] - times[a], 0)
    if apart > widest:
        return math.nan
    return register[a] + (t - times[a]) / max(apart, 1) * (register[b] - register[a])
