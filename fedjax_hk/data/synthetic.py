"""A fleet of made-up households whose groups are known: the data set that is always there."""

from __future__ import annotations

import hashlib

import numpy as np

from fedjax_hk.data.table import Table

_FIRST_DAY = np.datetime64("2015-01-01", "s")  # a Thursday
_FIRST_WEEKDAY = 3  # Monday is 0

#             Mon   Tue   Wed   Thu   Fri   Sat   Sun
_WEEK_GD = np.array(
    [
        [1.30, 1.25, 1.25, 1.25, 1.15, 0.40, 0.40],  # 0: at home on working days
        [0.65, 0.65, 0.70, 0.65, 0.85, 1.75, 1.75],  # 1: at home at weekends
        [1.00, 1.00, 1.00, 1.00, 1.00, 1.00, 1.00],  # 2: every day alike
        [0.90, 0.90, 0.90, 0.95, 1.05, 1.20, 1.10],  # 3: second home
    ]
)
_YEAR_G = np.array([0.10, 0.12, 0.08, 1.00])  # yearly swing of log use; 3 is treated apart
_PERSISTENCE_G = np.array([0.15, -0.35, 0.93, 0.75])  # of one day's surprise to the next
_NOISE_G = np.array([0.22, 0.25, 0.30, 0.35])  # standard deviation of log use
NUM_GROUPS = len(_WEEK_GD)


def synthetic_fleet(num_clients: int = 184, num_days: int = 730, seed: int = 0) -> Table:
    """Daily litres of made-up households, with the group of each kept as truth.

    A reading is level x weekly profile x yearly swing x exp(autocorrelated noise), then
    vacations, leaks, missing readings and late starts. The four groups differ in how
    tomorrow follows from the last days, not only in shape, so that forecasters trained
    on them have different weights:

      0  strong working days, little at weekends; a day's surprise is forgotten
      1  strong weekends; a high day is followed by a lower one
      2  no weekly rhythm; slow drift, tomorrow is like today
      3  second homes: nearly empty in winter, busy in summer, persistent

    About one household in twenty is a planted outlier (-1), of three kinds in turn:
    erratic (independent heavy-tailed days), nearly empty with rare large spikes, and
    inverse (high and low days alternate). All of this is invented: the groups are
    farther apart than those of real meters, and a rule that finds them here has not
    been shown to find any in a real fleet.

    Args:
      num_clients: N, at least 1.
      num_days: T, at least 2.
      seed: same seed, same readings.

    Returns:
      Table of daily litres from 2015-01-01; levels are lognormal around 200 L a day;
      about a third of the households start later and keep at least 120 days.
    """
    if num_clients < 1 or num_days < 2 or seed < 0:
        raise ValueError(
            "Expected num_clients >= 1, num_days >= 2 and seed >= 0, "
            f"got {num_clients}, {num_days} and {seed}."
        )
    rng = np.random.default_rng(seed)
    planted_n, kind_n = _plant(rng, num_clients)
    group_n = np.where(planted_n < 0, 2, planted_n)
    level_n = 200.0 * rng.lognormal(0.0, 0.45, num_clients)
    shape_tn = _rhythms(rng, group_n, num_days) * np.exp(_noise(rng, group_n, num_days))
    shape_tn = _outliers(rng, shape_tn, kind_n)
    shape_tn = _vacations(rng, shape_tn)
    values_tn = level_n * (shape_tn + _leaks(rng, num_days, num_clients))
    # 0.1 L is finer than a meter; it also absorbs last-bit differences of exp between
    # platforms, so that the fingerprint agrees.
    values_tn = np.round(values_tn, 1)
    values_tn[_missing(rng, num_days, num_clients)] = np.nan
    times = _FIRST_DAY + np.arange(num_days) * np.timedelta64(24 * 3600, "s")
    return Table(
        times=times,
        client_ids=tuple(f"h{i:04d}" for i in range(num_clients)),
        values_tn=values_tn,
        unit="L",
        source=f"synthetic fleet: {num_clients} households, {num_days} days, seed {seed}",
        fingerprint=hashlib.sha256(values_tn.tobytes()).hexdigest(),
        planted=planted_n.astype(np.int32),
    )


def _plant(rng, num_clients: int):
    """Group of each client (-1: outlier) and kind of outlier (-1: none), in random order."""
    num_outliers = round(num_clients / 20)
    planted_n = np.arange(num_clients) % NUM_GROUPS
    kind_n = np.full(num_clients, -1)
    planted_n[:num_outliers] = -1
    kind_n[:num_outliers] = np.arange(num_outliers) % 3
    order = rng.permutation(num_clients)
    return planted_n[order], kind_n[order]


def _rhythms(rng, group_n, num_days: int):
    """Weekly profile times yearly swing, `[T, N]`, each household with its own variation."""
    num_clients = len(group_n)
    day_t = np.arange(num_days)
    weekday_t = (day_t + _FIRST_WEEKDAY) % 7
    week_nd = _WEEK_GD[group_n] * np.exp(0.06 * rng.standard_normal((num_clients, 7)))
    week_nd /= week_nd.mean(axis=1, keepdims=True)
    peak_n = 205.0 + 10.0 * rng.standard_normal(num_clients)  # late July
    season_tn = np.cos(2 * np.pi * (day_t[:, None] - peak_n) / 365.25)
    year_tn = np.exp(_YEAR_G[group_n] * season_tn)
    # Second homes: a smooth switch between an empty winter and a full summer.
    summer_tn = 0.03 + 1.6 / (1.0 + np.exp(-5.0 * (season_tn - 0.2)))
    return week_nd.T[weekday_t] * np.where(group_n == 3, summer_tn, year_tn)


def _noise(rng, group_n, num_days: int):
    """Autocorrelated noise of first order around 0, `[T, N]`, of the group's deviation."""
    num_clients = len(group_n)
    persistence_n = _PERSISTENCE_G[group_n] + 0.03 * rng.standard_normal(num_clients)
    persistence_n = np.clip(persistence_n, -0.95, 0.96)
    surprise_tn = rng.standard_normal((num_days, num_clients))
    surprise_tn[1:] *= np.sqrt(1.0 - persistence_n**2)
    noise_tn = np.empty((num_days, num_clients))
    noise_tn[0] = surprise_tn[0]
    for t in range(1, num_days):
        noise_tn[t] = persistence_n * noise_tn[t - 1] + surprise_tn[t]
    return noise_tn * _NOISE_G[group_n]


def _outliers(rng, shape_tn, kind_n):
    """Replaces the readings of planted outliers by those of their kind."""
    num_days, _ = shape_tn.shape
    for kind in range(3):
        members = np.flatnonzero(kind_n == kind)
        size = (num_days, len(members))
        if kind == 0:
            shape_tn[:, members] = rng.lognormal(-0.6, 1.1, size)
        elif kind == 1:
            spike = rng.random(size) < 0.02
            shape_tn[:, members] = 0.01 * rng.random(size) + spike * rng.uniform(2.0, 6.0, size)
        else:
            swing = np.where(np.arange(num_days) % 2, 1.8, 0.2)[:, None]
            shape_tn[:, members] = swing * rng.lognormal(0.0, 0.15, size)
    return shape_tn


def _spans(rng, num_days: int, num_clients: int, shortest: int, longest: int):
    """One random stretch of days a client, `[T, N]` bool."""
    start_n = rng.integers(0, num_days, num_clients)
    end_n = start_n + rng.integers(shortest, longest + 1, num_clients)
    day_t1 = np.arange(num_days)[:, None]
    return (day_t1 >= start_n) & (day_t1 < end_n)


def _vacations(rng, shape_tn):
    """Lets use fall to next to nothing during two to three stretches a year."""
    num_days, num_clients = shape_tn.shape
    away_tn = np.zeros(shape_tn.shape, dtype=bool)
    for _ in range(max(1, round(2.5 * num_days / 365))):
        away_tn |= _spans(rng, num_days, num_clients, 4, 16)
    dripping_tn = 0.02 * rng.random(shape_tn.shape)
    return np.where(away_tn, shape_tn * dripping_tn, shape_tn)


def _leaks(rng, num_days: int, num_clients: int):
    """Constant extra use for two to eight weeks in a quarter of the households, `[T, N]`."""
    size_n = np.where(rng.random(num_clients) < 0.25, rng.uniform(0.3, 1.2, num_clients), 0.0)
    return size_n * _spans(rng, num_days, num_clients, 14, 56)


def _missing(rng, num_days: int, num_clients: int):
    """Late starts of about a third of the households, and few scattered gaps, `[T, N]` bool."""
    shortest = min(120, num_days)
    length_n = np.exp(rng.uniform(np.log(shortest), np.log(num_days), num_clients)).astype(int)
    length_n = np.where(rng.random(num_clients) < 0.35, length_n, num_days)
    length_n = np.clip(length_n, shortest, num_days)
    late_tn = np.arange(num_days)[:, None] < num_days - length_n
    gap_tn = rng.random((num_days, num_clients)) < 0.002
    gap_tn |= (rng.random(num_clients) < 0.1) & _spans(rng, num_days, num_clients, 2, 6)
    return late_tn | gap_tn
