"""The made-up fleet: deterministic, varied, and its groups truly differ."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_hk.data import build_fleet, synthetic_fleet
from fedjax_hk.data.synthetic import NUM_GROUPS


def test_same_seed_same_readings():
    one, two, other = synthetic_fleet(), synthetic_fleet(), synthetic_fleet(seed=1)
    np.testing.assert_array_equal(one.values_tn, two.values_tn)
    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert len(one.fingerprint) == 64


def test_the_default_fleet():
    table = synthetic_fleet()
    values = table.values_tn
    assert values.shape == (730, 184) and values.dtype == np.float64
    assert table.times[0] == np.datetime64("2015-01-01") and table.unit == "L"
    assert (np.diff(table.times) == np.timedelta64(1, "D")).all()
    assert len(set(table.client_ids)) == 184
    assert np.nanmin(values) >= 0 and 100 < np.nanmean(values) < 300
    filled = np.nan_to_num(values, nan=-1)
    assert len(np.unique(filled, axis=1).T) == 184  # no two alike
    known = np.isfinite(values)
    length = 730 - known.argmax(axis=0)
    assert (length == 730).mean() > 0.5 and (length < 600).mean() > 0.1
    assert length.min() >= 110
    assert not known[-1].all() or not known[365:].all()  # some readings are missing
    counts = [(table.planted == g).sum() for g in range(-1, NUM_GROUPS)]
    assert counts[0] == 9 and sum(counts) == 184 and min(counts[1:]) >= 40
    assert table.planted.dtype == np.int32


def test_every_client_is_usable():
    fleet = build_fleet(synthetic_fleet())
    assert len(fleet.client_ids) == 184 and fleet.excluded == ()
    assert fleet.train.mask.shape == (184, 572) and fleet.test.mask.shape == (184, 146)
    assert fleet.planted.shape == (184,)


def test_groups_have_their_rhythms():
    table = synthetic_fleet(num_clients=160)
    values = np.log(table.values_tn + 1)
    weekend = np.isin((np.arange(730) + 3) % 7, (5, 6))
    day = np.arange(730) % 365
    warm, cold = (day > 170) & (day < 250), (day < 50) | (day > 330)
    weekly, yearly = [], []
    for group in range(NUM_GROUPS):
        of_group = values[:, table.planted == group]
        weekly.append(np.nanmedian(of_group[weekend]) - np.nanmedian(of_group[~weekend]))
        yearly.append(np.nanmedian(of_group[warm]) - np.nanmedian(of_group[cold]))
    assert weekly[0] < -0.5 and weekly[1] > 0.5 and abs(weekly[2]) < 0.15
    assert yearly[3] > 1.5 and max(yearly[:3]) < 0.7


def test_groups_differ_in_how_tomorrow_follows_from_the_last_days():
    """A linear forecaster of one group is clearly worse on every other group."""
    fleet = build_fleet(synthetic_fleet())
    fits, parts = [], []
    for group in range(NUM_GROUPS):
        rows = fleet.planted == group
        mask = fleet.train.mask[rows]
        inputs = fleet.train.inputs[rows][mask][..., 0].astype(float)
        inputs = np.c_[inputs, np.ones(len(inputs))]
        targets = fleet.train.targets[rows][mask].astype(float)
        fits.append(np.linalg.lstsq(inputs, targets, rcond=None)[0])
        parts.append((inputs, targets))
    error = np.array([[np.mean((x @ w - y) ** 2) for w in fits] for x, y in parts])
    worse = error / np.diag(error)[:, None]
    np.fill_diagonal(worse, np.inf)
    assert worse.min() > 1.04, worse


@pytest.mark.parametrize(("num_clients", "num_days"), [(1, 2), (3, 60), (40, 90)])
def test_small_fleets(num_clients, num_days):
    table = synthetic_fleet(num_clients, num_days)
    assert table.values_tn.shape == (num_days, num_clients)


@pytest.mark.parametrize("arguments", [(0, 10), (3, 1), (3, 10, -1)])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="Expected num_clients"):
        synthetic_fleet(*arguments)
