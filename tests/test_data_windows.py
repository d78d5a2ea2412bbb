"""Windows, scaling and naive forecasts against loops; what a test span may influence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_data as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_hk.data import (
    DataError,
    Table,
    build_fleet,
    next_windows,
    synthetic_fleet,
    without_test_span,
)
from fedjax_hk.data.scaling import SCALERS
from fedjax_hk.data.windows import GAPS
from fedjax_hk.types import Excluded

DAY = np.timedelta64(24 * 3600, "s")


def make_table(columns, step=DAY, **kwargs):
    """A table of the given series, padded at the end with missing readings."""
    length = max(len(c) for c in columns)
    values = np.full((length, len(columns)), np.nan)
    for i, column in enumerate(columns):
        values[: len(column), i] = column
    times = np.datetime64("2015-01-01", "s") + np.arange(length) * step
    ids = tuple(f"c{i}" for i in range(len(columns)))
    return Table(times, ids, values, "L", "made up", "0" * 64, **kwargs)


def messy_table(seed, num_days=90, step=DAY, num_clients=6):
    """Late starts, early ends, gaps, an empty and a constant client."""
    rng = np.random.default_rng(seed)
    values = rng.gamma(1.5, 100.0, (num_days, num_clients))
    values[:, 1] = 50.0
    values[: num_days // 6, 2] = np.nan
    values[-(num_days // 7) :, 3] = np.nan
    values[rng.random(values.shape) < 0.03] = np.nan
    values[num_days // 3 : num_days // 3 + 9, 4] = np.nan
    values[:, 5] *= rng.random(num_days) < 0.15  # mostly zero: no interquartile range
    return make_table(list(values.T), step)


def check_against_loops(table, fleet, *, lookback, horizon, share, scaler, fit_all, week):
    """Every client kept: windows, scales, masks, times and naive forecasts."""
    for row, client in enumerate(fleet.client_ids):
        series = table.values_tn[:, table.client_ids.index(client)].tolist()
        expected = reference.client_windows(series, lookback, horizon, share, scaler, fit_all)
        for samples, windows in zip((fleet.train, fleet.test), expected, strict=True):
            mask = np.zeros(samples.mask.shape[1], bool)
            mask[: len(windows)] = [w is not None for w in windows]
            np.testing.assert_array_equal(samples.mask[row], mask)
            assert not samples.inputs[row][~mask].any() and not samples.targets[row][~mask].any()
            found = zip(
                samples.inputs[row][mask][..., 0],
                samples.targets[row][mask],
                samples.scale[row][mask],
                samples.shift[row][mask],
                strict=True,
            )
            there = [w[:4] for w in windows if w is not None]
            for got, wanted in zip(zip(*found, strict=True), zip(*there, strict=True), strict=True):
                np.testing.assert_allclose(got, wanted, 1e-6, 1e-7)
        used = [i for i, w in enumerate(expected[1]) if w is not None]
        at = [expected[1][i][4] for i in used]
        np.testing.assert_array_equal(fleet.test_times[row, used], table.times[at])
        naive = [reference.client_naive(series, t, horizon, share, week) for t in at]
        for name, forecast in fleet.naive.items():
            np.testing.assert_allclose(forecast[row, used], [n[name] for n in naive], 1e-12)
            assert np.isnan(np.delete(forecast[row], used)).all()
        assert np.isnat(fleet.test_times[row, len(expected[1]) :]).all()


@pytest.mark.parametrize("scaler", SCALERS)
def test_equals_loops(scaler):
    table = messy_table(1)
    fleet = build_fleet(table, lookback=4, scaler=scaler)
    assert len(fleet.client_ids) == 6
    check_against_loops(
        table,
        fleet,
        lookback=4,
        horizon=1,
        share=0.8,
        scaler=scaler,
        fit_all=False,
        week=7,
    )


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lookback=st.integers(1, 6),
    horizon=st.integers(1, 9),
    share=st.sampled_from([0.5, 0.7, 0.8]),
    scaler=st.sampled_from(SCALERS),
    fit_all=st.booleans(),
)
def test_equals_loops_at_random(seed, lookback, horizon, share, scaler, fit_all):
    table = messy_table(seed, 120)
    fleet = build_fleet(
        table,
        lookback=lookback,
        horizon=horizon,
        train_share=share,
        scaler=scaler,
        scaler_fit="all" if fit_all else "train",
    )
    check_against_loops(
        table,
        fleet,
        lookback=lookback,
        horizon=horizon,
        share=share,
        scaler=scaler,
        fit_all=fit_all,
        week=7,
    )


def test_a_week_is_counted_in_steps():
    table = messy_table(3, 500, np.timedelta64(6 * 3600, "s"))
    fleet = build_fleet(table)
    check_against_loops(
        table,
        fleet,
        lookback=12,
        horizon=1,
        share=0.8,
        scaler="minmax",
        fit_all=False,
        week=28,
    )


def test_steps_that_do_not_divide_a_week():
    series = np.arange(1.0, 61.0)
    fleet = build_fleet(make_table([series], 2 * DAY), lookback=3)
    assert np.isnan(fleet.naive["last_week"]).all()
    assert np.isfinite(fleet.naive["mean_7_days"]).all()
    fleet = build_fleet(make_table([series], 30 * DAY), lookback=3)
    assert np.isnan(fleet.naive["last_week"]).all() and np.isnan(fleet.naive["mean_7_days"]).all()
    assert np.isfinite(fleet.naive["yesterday"]).all()


def test_two_years_of_days_give_the_counts_of_the_paper():
    table = make_table([np.random.default_rng(0).random(730)])
    fleet = build_fleet(table)
    assert fleet.train.mask.shape == (1, 572) and fleet.train.mask.all()
    assert fleet.test.mask.shape == (1, 146) and fleet.test.mask.all()
    assert fleet.test_times[0, 0] == table.times[584]
    assert fleet.test_times[0, -1] == table.times[729]


def test_shapes_and_kinds():
    fleet = build_fleet(messy_table(0), lookback=5)
    for samples in (fleet.train, fleet.test):
        num, width = samples.mask.shape
        assert samples.inputs.shape == (num, width, 5, 1)
        assert samples.targets.shape == samples.scale.shape == samples.shift.shape == (num, width)
        assert samples.mask.dtype == bool
        for part in (samples.inputs, samples.targets, samples.scale, samples.shift):
            assert part.dtype == np.float32 and np.isfinite(part).all()
        assert (samples.scale > 0).all()
    assert fleet.test_times.dtype == np.dtype("datetime64[s]")
    assert list(fleet.naive) == ["yesterday", "last_week", "mean_7_days", "train_median"]


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("scope", ["client", "fleet"])
def test_units_come_back(scaler, scope):
    table = messy_table(5)
    fleet = build_fleet(table, lookback=4, scaler=scaler, scaler_scope=scope)
    test = fleet.test
    units = test.targets.astype(float) * test.scale + test.shift
    for row, client in enumerate(fleet.client_ids):
        series = dict(zip(table.times, table.values_tn[:, int(client[1:])], strict=True))
        for i in np.flatnonzero(test.mask[row]):
            expected = series[fleet.test_times[row, i]]
            np.testing.assert_allclose(units[row, i], expected, 1e-5, 1e-4)


def test_fleet_scope_pools_the_training_spans():
    table = make_table([np.r_[np.arange(80.0), 999.0 * np.ones(20)], np.arange(100.0) + 50])
    fleet = build_fleet(table, scaler_scope="fleet")
    assert (fleet.train.shift == 0).all() and (fleet.train.scale == 129).all()
    leaky = build_fleet(table, scaler_scope="fleet", scaler_fit="all")
    assert (leaky.train.scale == 999).all()


def test_known_min_max_and_no_clipping():
    fleet = build_fleet(make_table([np.arange(100.0)]), lookback=3)
    assert (fleet.train.scale == 79).all() and (fleet.train.shift == 0).all()
    assert fleet.train.targets.min() >= 0 and fleet.train.targets.max() == 1
    assert fleet.test.targets.max() == np.float32(99 / 79)


# --- failure kind 14: nothing of the test span in the training ---------------------------


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("scope", ["client", "fleet"])
def test_test_span_does_not_leak(scaler, scope, gaps):
    table = synthetic_fleet(8, 200, seed=3)
    rng = np.random.default_rng(0)
    changed = table.values_tn.copy()
    for i in range(8):
        start, length = reference.span(table.values_tn[:, i].tolist())
        first, last = start + math.floor(0.8 * length + 1e-9), start + length
        changed[first:last, i] = rng.gamma(1.0, 5e4, last - first)
        changed[first + 2 : last - 3, i][rng.random(last - first - 5) < 0.2] = np.nan
    holes = rng.random(changed.shape) < 0.02
    holes[120:] = False
    changed[holes] = np.nan
    table = table._replace(values_tn=np.where(holes, np.nan, table.values_tn))
    how = {"scaler": scaler, "scaler_scope": scope, "gaps": gaps}
    before = build_fleet(table, **how)
    after = build_fleet(table._replace(values_tn=changed), **how)
    assert before.client_ids == after.client_ids
    for old, new in zip(before.train, after.train, strict=True):
        np.testing.assert_array_equal(old, new)
    if scaler != "window_mean":  # there each window is scaled by its own inputs
        np.testing.assert_array_equal(before.test.scale, after.test.scale)
    np.testing.assert_array_equal(before.test.shift, after.test.shift)
    assert not np.array_equal(before.test.targets, after.test.targets)
    medians = [np.nanmax(f.naive["train_median"], axis=1) for f in (before, after)]
    np.testing.assert_array_equal(*medians)


def test_training_readings_all_matter():
    """The reverse of the leak test: the last training reading is used."""
    series = np.random.default_rng(0).random(100)
    before = build_fleet(make_table([series])).train
    series[79] += 5
    after = build_fleet(make_table([series])).train
    assert not np.array_equal(before.scale, after.scale)


@pytest.mark.parametrize("horizon", [1, 3, 8])
def test_naive_forecasts_do_not_look_ahead(horizon):
    series = np.random.default_rng(0).random(100)
    before = build_fleet(make_table([series]), horizon=horizon)
    for w in range(before.test.mask.shape[1]):
        changed = series.copy()
        target = 80 + w
        changed[target - horizon + 1 :] = 77.0
        after = build_fleet(make_table([changed]), horizon=horizon, scaler_fit="train")
        for name, forecast in before.naive.items():
            if name != "train_median" or target - horizon + 1 >= 80:
                assert forecast[0, w] == after.naive[name][0, w], name


def test_naive_forecasts_with_missing_readings():
    series = np.arange(100.0)
    series[[85, 86, 87, 88]] = np.nan
    fleet = build_fleet(make_table([series]), lookback=1)
    at = {t: w for w, t in enumerate(range(80, 100))}
    assert fleet.test.mask[0, at[90]]
    assert np.isnan(fleet.naive["mean_7_days"][0, at[90]])  # 3 of 7
    assert fleet.naive["mean_7_days"][0, at[93]] == (89 + 90 + 91 + 92) / 4
    assert np.isnan(fleet.naive["last_week"][0, at[93]])
    assert fleet.naive["last_week"][0, at[91]] == 84
    assert fleet.naive["train_median"][0, at[90]] == 39.5


# --- gaps ---------------------------------------------------------------------------------


def test_interpolated_inputs_are_a_line_or_the_gaps_own_volume():
    series = np.arange(100.0)
    series[[50, 51, 90]] = np.nan
    table = make_table([series])
    fleet = build_fleet(table, lookback=4, gaps="interpolate")
    units = fleet.train.inputs[..., 0] * fleet.train.scale[..., None]
    # A window whose last input is missing is left out, and so is a missing target.
    np.testing.assert_array_equal(
        np.flatnonzero(~fleet.train.mask[0]) + 4,
        [50, 51, 52],  # by the target's position
    )
    np.testing.assert_allclose(units[0, 49], [49, 50, 51, 52], rtol=1e-5)
    np.testing.assert_array_equal(np.flatnonzero(~fleet.test.mask[0]) + 80, [90, 91])
    assert all(np.isfinite(v[fleet.test.mask]).all() for v in fleet.naive.values())
    filled_tn = table.values_tn.copy()
    filled_tn[[50, 51], 0] = 7.0, 8.0
    own = build_fleet(table._replace(filled_tn=filled_tn), lookback=4, gaps="interpolate")
    units = own.train.inputs[..., 0] * own.train.scale[..., None]
    np.testing.assert_allclose(units[0, 49], [49, 7, 8, 52], rtol=1e-5)
    np.testing.assert_array_equal(own.train.scale, fleet.train.scale)
    np.testing.assert_array_equal(own.test.mask, fleet.test.mask)


@settings(max_examples=15)
@given(seed=st.integers(0, 999), horizon=st.integers(1, 4))
def test_interpolation_adds_windows_changes_none_and_does_not_look_ahead(seed, horizon):
    table = messy_table(seed, num_clients=6)
    masked = build_fleet(table, lookback=5, horizon=horizon)
    filled = build_fleet(table, lookback=5, horizon=horizon, gaps="interpolate")
    chosen = [filled.client_ids.index(c) for c in masked.client_ids]
    for name in ("train", "test"):
        few, many = getattr(masked, name), getattr(filled, name)
        width = few.mask.shape[1]
        assert many.mask[chosen, :width][few.mask].all()
        assert many.mask.sum() > few.mask.sum()
        for a, b in zip(few[:2], many[:2], strict=True):
            np.testing.assert_array_equal(a[few.mask], b[chosen, :width][few.mask])
    rng = np.random.default_rng(seed)
    client = rng.integers(len(filled.client_ids))
    window = rng.choice(np.flatnonzero(filled.test.mask[client]))
    column = table.client_ids.index(filled.client_ids[client])
    target = np.searchsorted(table.times, filled.test_times[client, window])
    changed = table.values_tn.copy()
    later = changed[target - horizon + 1 :, column]
    later[np.isfinite(later)] = 999.0
    after = build_fleet(
        table._replace(values_tn=changed), lookback=5, horizon=horizon, gaps="interpolate"
    )

    def units(fleet):
        test = fleet.test
        return (test.inputs[..., 0] * test.scale[..., None] + test.shift[..., None])[client, window]

    np.testing.assert_allclose(units(after), units(filled), rtol=1e-3, atol=1e-3)


# --- clients of every size (failure kind 11) and unusual homes (kind 18) -----------------


def test_clients_of_every_size():
    rng = np.random.default_rng(0)
    sizes = [0, 1, 2, 14, 15, 31, 32, 33, 44, 53, 54, 55, 10_000]
    fleet = build_fleet(make_table([rng.random(n) for n in sizes]))
    # 12 + 1 + 2 = 15 training windows need 27 training days of 34 days.
    assert fleet.client_ids == tuple(f"c{i}" for i, n in enumerate(sizes) if n >= 34)
    reasons = {e.client: e.reason for e in fleet.excluded}
    assert set(reasons) == {f"c{i}" for i, n in enumerate(sizes) if n < 34}
    assert reasons["c0"] == "no reading at all"
    assert (
        "13 usable training windows (at least 15 needed)" in reasons["c6"] or "33 " in reasons["c7"]
    )
    counts = fleet.train.mask.sum(axis=1)
    np.testing.assert_array_equal(counts, [math.floor(0.8 * n) - 12 for n in sizes if n >= 34])
    assert fleet.train.mask.shape[1] == counts.max()


def test_padding_does_not_change_the_others():
    rng = np.random.default_rng(1)
    short, long = rng.random(60), rng.random(400)
    alone = build_fleet(make_table([short]))
    both = build_fleet(make_table([short, long]))
    for one, two in zip((*alone.train, *alone.test), (*both.train, *both.test), strict=True):
        np.testing.assert_array_equal(one[0], two[0, : one.shape[1]])
    assert not both.train.mask[0, alone.train.mask.shape[1] :].any()
    for name, forecast in alone.naive.items():
        np.testing.assert_array_equal(forecast[0], both.naive[name][0, : forecast.shape[1]])
        assert np.isnan(both.naive[name][0, forecast.shape[1] :]).all()


def test_clients_left_out_leave_no_trace():
    rng = np.random.default_rng(2)
    series = [rng.random(90), rng.random(3) * 1e6, rng.random(70)]
    kept = build_fleet(make_table([series[0], series[2]]), scaler_scope="fleet")
    fleet = build_fleet(
        make_table(series, planted=np.array([2, 1, -1]), excluded=(Excluded("x", "why"),)),
        scaler_scope="fleet",
    )
    assert fleet.client_ids == ("c0", "c2")
    assert [e.client for e in fleet.excluded] == ["x", "c1"]
    np.testing.assert_array_equal(fleet.planted, [2, -1])
    for one, two in zip((*kept.train, *kept.test), (*fleet.train, *fleet.test), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("scaler", SCALERS)
def test_constant_and_empty_homes_are_kept(scaler):
    fleet = build_fleet(make_table([np.full(100, 0.1), np.zeros(100)]), scaler=scaler)
    assert fleet.client_ids == ("c0", "c1")
    for samples in (fleet.train, fleet.test):
        assert samples.mask.any(axis=1).all()
        assert np.isfinite(samples.targets).all() and (samples.scale > 0).all()
        assert np.abs(samples.targets).max() <= 1.0 + 1e-6


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("size", [1e-300, 1e-12, 1e14])
def test_readings_of_any_size(scaler, size):
    series = size * np.random.default_rng(0).random(100)
    fleet = build_fleet(make_table([series]), scaler=scaler)
    for part in (*fleet.train, *fleet.test):
        assert np.isfinite(part).all()
    assert (fleet.train.scale > 0).all()


def test_a_home_that_empties_for_the_test_span_is_kept():
    series = np.r_[np.random.default_rng(0).random(80) + 1, np.zeros(20)]
    for scaler in SCALERS:
        fleet = build_fleet(make_table([series]), scaler=scaler)
        units = fleet.test.targets * fleet.test.scale + fleet.test.shift
        np.testing.assert_allclose(units, 0, atol=1e-6)
        # The window mean falls to nothing; its scale must not.
        assert (fleet.test.scale > 0.05).all()


def test_a_client_without_test_readings_is_left_out():
    series = np.random.default_rng(0).random(100)
    series[75:99] = np.nan
    table = make_table([series, np.ones(100)])
    fleet = build_fleet(table)
    assert fleet.client_ids == ("c1",)
    assert "0 usable test windows" in fleet.excluded[0].reason


def test_nobody_left_lists_the_reasons():
    with pytest.raises(DataError, match="No client has enough") as caught:
        build_fleet(make_table([[1.0, 2.0], [np.nan], *([[1.0] * 9] * 12)]))
    text = str(caught.value)
    assert "c0: 0 usable training windows" in text and "c1: no reading at all" in text
    assert "and 4 more" in text and "made up" in text
    one_row = make_table([[1.0]])
    with pytest.raises(DataError):
        build_fleet(one_row)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lookback", 0),
        ("lookback", 2.5),
        ("horizon", 0),
        ("train_share", 1.0),
        ("train_share", math.nan),
        ("scaler", "max"),
        ("scaler_scope", "all"),
        ("scaler_fit", "test"),
    ],
)
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=rf"Expected {name}.*got"):
        build_fleet(messy_table(0), **{name: value})


# The window before the next reading


@pytest.mark.parametrize("scaler", ["minmax", "window_mean"])
def test_next_windows_end_at_the_last_reading(scaler):
    table = messy_table(3)
    values = table.values_tn
    shift, scale = np.arange(6.0), 1 + np.arange(6.0)
    history, last, times = next_windows(table, shift, scale, lookback=5, horizon=2, scaler=scaler)
    for i in range(6):
        known = np.flatnonzero(np.isfinite(values[:, i]))
        end = known[-1]
        assert times[i] == table.times[end] + 2 * DAY
        window = values[end - 4 : end + 1, i]
        whole = bool(np.isfinite(window).all())
        assert bool(last.mask[i, 0]) == whole
        if whole:
            per_unit = last.scale[i, 0]
            np.testing.assert_allclose(
                last.inputs[i, 0, :, 0] * per_unit + shift[i], window, 1e-5, 1e-5
            )
            if scaler == "minmax":
                assert per_unit == scale[i]
        first, count = known[0], end - known[0] + 1
        targets = [values[first + j + 6, i] for j in range(count - 6)]
        assert history.mask[i].sum() == sum(
            bool(np.isfinite(values[first + j : first + j + 5, i]).all() and np.isfinite(target))
            for j, target in enumerate(targets)
        )


def test_next_windows_of_a_client_that_is_too_short_or_empty():
    table = make_table([range(1, 21), range(1, 5), [np.nan]])
    _, last, times = next_windows(table, np.zeros(3), np.ones(3), lookback=5)
    assert last.mask[:, 0].tolist() == [True, False, False]
    assert times[0] == table.times[19] + DAY
    assert np.isnat(times[2])


def test_scaling_of_the_fleet_is_that_of_its_windows():
    table = messy_table(4)
    fleet = build_fleet(table, lookback=5)
    np.testing.assert_array_equal(fleet.train.shift[:, 0], np.float32(fleet.shift_n))
    np.testing.assert_array_equal(fleet.train.scale[:, 0], np.float32(fleet.scale_n))


# A validation part


def test_without_the_test_span_nothing_of_it_is_left():
    table = messy_table(3)._replace(filled_tn=messy_table(3).values_tn)
    whole, kept = build_fleet(table), without_test_span(table)
    fleet = build_fleet(kept)
    for row, client in enumerate(fleet.client_ids):
        place = whole.client_ids.index(client)
        first_test = np.nanmin(whole.test_times[place])
        assert fleet.test_times[row][fleet.test.mask[row]].max() < first_test
        column = table.client_ids.index(client)
        known = np.isfinite(kept.values_tn[:, column])
        np.testing.assert_array_equal(kept.values_tn[known, column], table.values_tn[known, column])
        np.testing.assert_array_equal(np.isfinite(kept.filled_tn[:, column]), known)
        span = np.flatnonzero(np.isfinite(table.values_tn[:, column]))
        steps = span[-1] - span[0] + 1
        assert np.flatnonzero(known)[-1] < span[0] + math.floor(0.8 * steps + 1e-9)
    # Whatever the test span holds, the validation fleet is the same to the bit.
    other = table.values_tn.copy()
    other[np.isfinite(other) & ~np.isfinite(kept.values_tn)] = 1e6
    again = build_fleet(without_test_span(table._replace(values_tn=other)))
    for part in ("train", "test"):
        for one, two in zip(getattr(fleet, part), getattr(again, part), strict=True):
            np.testing.assert_array_equal(one, two)
    assert "test span put away" in fleet.source
