"""Errors against loops, spread by hand, agreement against scikit-learn."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_data as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from fedjax_hk import metrics
from fedjax_hk.data import Table, build_fleet, synthetic_fleet
from fedjax_hk.tasks import forecast_errors
from fedjax_hk.types import Samples


def random_samples(seed, num=5, width=9):
    rng = np.random.default_rng(seed)
    mask = rng.random((num, width)) < 0.7
    mask[0] = False
    targets = np.where(mask, rng.random((num, width)), 0).astype(np.float32)
    scale = rng.uniform(50, 400, (num, width)).astype(np.float32)
    shift = rng.uniform(0, 20, (num, width)).astype(np.float32)
    forecast = rng.random((num, width)).astype(np.float32)
    forecast[~mask] = np.nan
    return forecast, Samples(None, targets, mask, scale, shift)


def table_of(columns):
    values = np.stack(columns, axis=1)
    times = np.datetime64("2015-01-01", "s") + np.arange(len(values)) * np.timedelta64(1, "D")
    ids = tuple(f"c{i}" for i in range(len(columns)))
    return Table(times.astype("datetime64[s]"), ids, values, "L", "made up", "")


def assert_errors(found, row, expected, rtol):
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name)[row], value, rtol, err_msg=name)


@pytest.mark.parametrize("seed", range(4))
def test_client_errors_equal_loops(seed):
    forecast, samples = random_samples(seed)
    found = jax.jit(forecast_errors.client_errors)(forecast, samples)
    for row in range(len(forecast)):
        parts = [np.asarray(x[row], float).tolist() for x in (forecast, *samples[1:])]
        assert_errors(found, row, reference.errors(*parts), 2e-6)
    assert found.num_windows.dtype == jnp.int32
    assert math.isnan(found.mse[0]) and found.num_windows[0] == 0


def test_jit_equals_plain_and_padding_has_no_influence():
    forecast, samples = random_samples(0)
    plain = forecast_errors.client_errors(forecast, samples)
    pad = ((0, 0), (0, 6))
    wide = Samples(None, *(np.pad(x, pad) for x in samples[1:]))
    padded = forecast_errors.client_errors(np.pad(forecast, pad, constant_values=np.inf), wide)
    for a, b in zip(plain, padded, strict=True):
        np.testing.assert_allclose(a, b, 1e-6)


def test_batched_over_models():
    forecast, samples = random_samples(0)
    many = jnp.stack([forecast, 2 * forecast])
    found = jax.vmap(forecast_errors.client_errors, in_axes=(0, None))(many, samples)
    one = forecast_errors.client_errors(2 * forecast, samples)
    np.testing.assert_allclose(found.mae_units[1], one.mae_units, 1e-6)


def test_a_home_that_uses_nothing_in_the_test_span():
    rng = np.random.default_rng(0)
    for low in (0.0, 5.3):  # a minimum above zero leaves rounding where zero should be
        empties = np.r_[rng.random(80) * 300 + low, np.zeros(20)]
        lives = rng.random(100) * 300
        for scaler in ("minmax", "standard", "robust", "mean"):
            fleet = build_fleet(table_of([empties, lives, np.zeros(100)]), scaler=scaler)
            found = forecast_errors.client_errors(
                np.full(fleet.test.mask.shape, 0.5, "f4"), fleet.test
            )
            assert np.isfinite(found.mae_units).all() and np.isfinite(found.rmse_units).all()
            np.testing.assert_array_equal(np.isnan(found.wape), [True, False, True])
            np.testing.assert_array_equal(np.isnan(found.accuracy), [True, False, True])
            naive = forecast_errors.naive_errors(fleet)["yesterday"]
            np.testing.assert_array_equal(np.isnan(naive.wape), [True, False, True])
            counts = metrics.spread(found.accuracy, higher_is_better=True)
            assert counts["num_clients"] == 1 and counts["num_left_out"] == 2
            assert np.isfinite(counts["worst_tenth"])


def test_perfect_and_useless_forecasts():
    _, samples = random_samples(1)
    perfect = forecast_errors.client_errors(samples.targets, samples)
    np.testing.assert_array_equal(perfect.accuracy[1:], 1)
    np.testing.assert_array_equal(perfect.mse[1:], 0)
    useless = forecast_errors.client_errors(samples.targets + 1e3, samples)
    np.testing.assert_array_equal(useless.accuracy[1:], 0)
    lost = forecast_errors.client_errors(np.full_like(samples.targets, np.nan), samples)
    assert np.isnan(lost.mse).all() and np.isnan(lost.accuracy).all()


def test_wrong_shape_is_named():
    forecast, samples = random_samples(0)
    with pytest.raises(ValueError, match=r"Expected forecasts.*\(5, 9\), got \(5, 8\)"):
        forecast_errors.client_errors(forecast[:, :8], samples)


@pytest.mark.parametrize("scaler", ["minmax", "window_mean"])
def test_naive_errors_equal_loops(scaler):
    fleet = build_fleet(synthetic_fleet(12, 300, seed=2), scaler=scaler)
    found = forecast_errors.naive_errors(fleet)
    assert list(found) == list(fleet.naive)
    test = fleet.test
    for name, units in fleet.naive.items():
        for row in range(len(units)):
            mask = test.mask[row] & np.isfinite(units[row])
            scale, shift = test.scale[row].astype(float), test.shift[row].astype(float)
            scaled = (units[row] - shift) / scale
            parts = (scaled, test.targets[row].astype(float), mask, scale, shift)
            expected = reference.errors(*(x.tolist() for x in parts))
            assert_errors(found[name], row, expected, 1e-9)
        assert found[name].mse.dtype == np.float64


def test_naive_errors_and_model_errors_speak_of_the_same_units():
    fleet = build_fleet(synthetic_fleet(6, 300))
    units = np.nan_to_num(fleet.naive["train_median"])
    scaled = ((units - fleet.test.shift) / fleet.test.scale).astype(np.float32)
    model = forecast_errors.client_errors(scaled, fleet.test)
    naive = forecast_errors.naive_errors(fleet)["train_median"]
    for a, b in zip(model, naive, strict=True):
        np.testing.assert_allclose(a, b, 1e-4)


def test_dead_clients():
    mask = np.array([[True, True], [True, True], [True, False], [False, False], [True, True]])
    forecast = np.array([[0, 0], [0, 1e-30], [0, 5], [0, 0], [-0.0, np.nan]], np.float32)
    found = jax.jit(forecast_errors.dead_clients)(forecast, mask)
    np.testing.assert_array_equal(found, [True, False, True, False, False])


def test_spread_by_hand():
    values = np.arange(20.0)
    found = metrics.spread(np.r_[values, np.nan, np.nan])
    assert found["num_clients"] == 20 and found["num_left_out"] == 2
    assert found["mean"] == 9.5 and found["median"] == 9.5
    assert found["q10"] == pytest.approx(1.9) and found["q90"] == pytest.approx(17.1)
    assert found["std"] == pytest.approx(values.std())
    assert found["worst_tenth"] == 18.5
    assert metrics.spread(values, higher_is_better=True)["worst_tenth"] == 0.5
    assert metrics.spread([3.0])["worst_tenth"] == 3.0
    nobody = metrics.spread(jnp.array([jnp.nan]))
    assert nobody["num_clients"] == 0 and math.isnan(nobody["mean"])
    assert list(nobody) == list(found)


labels = st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 3)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(labels)
def test_adjusted_rand_index_equals_scikit_learn(pairs):
    a, b = np.array(pairs).T
    assert metrics.adjusted_rand_index(a, b) == pytest.approx(adjusted_rand_score(a, b), abs=1e-12)
    singletons = np.where(b < 0, 100 + np.arange(len(b)), b)
    expected = adjusted_rand_score(a, singletons)
    assert metrics.agreement(a, b) == pytest.approx(expected, abs=1e-12)


def test_agreement_with_planted_groups():
    planted = np.array([0, 0, 1, 1, -1, -1])
    assert metrics.agreement([0, 0, 2, 2, 4, 5], planted) == 1.0
    assert metrics.agreement([0, 0, 2, 2, 4, 4], planted) < 1.0
    assert metrics.agreement(np.zeros(6, int), planted) == 0.0
    assert metrics.agreement([0, -1, 2, 2, 4, -1], planted) == 1.0  # masked clients left out
    assert math.isnan(metrics.agreement([-1] * 6, planted))
    with pytest.raises(ValueError, match="Expected"):
        metrics.agreement([0, 1], planted)
    with pytest.raises(ValueError, match="Expected"):
        metrics.adjusted_rand_index([0, 1], [0])


def test_bootstrap_interval_by_hand():
    values = np.random.default_rng(1).normal(3.0, 2.0, 200)
    found = metrics.bootstrap_interval(np.r_[values, np.nan, np.inf])
    assert found.num == 200 and found.mean == pytest.approx(values.mean())
    half = 1.96 * values.std() / np.sqrt(200)  # what the mean of many clients tends to
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert metrics.bootstrap_interval(values) == metrics.bootstrap_interval(values)
    assert metrics.bootstrap_interval(values) != metrics.bootstrap_interval(values, seed=1)
    rng = np.random.default_rng(5)
    means = [np.mean([values[rng.integers(200)] for _ in range(200)]) for _ in range(400)]
    low, high = np.quantile(means, (0.025, 0.975))
    assert (found.low, found.high) == (
        pytest.approx(low, abs=0.2 * half),
        pytest.approx(high, abs=0.2 * half),
    )
    same = metrics.bootstrap_interval([2.0, 2.0, 2.0])
    assert (same.mean, same.low, same.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("values", [[], [math.nan], [5.0]])
def test_no_interval_of_fewer_than_two_clients(values):
    found = metrics.bootstrap_interval(values)
    assert math.isnan(found.low) and math.isnan(found.high)
    assert found.num == np.isfinite(values).sum()


def test_usage_equals_loops():
    table = synthetic_fleet(4, 100)
    values = table.values_tn.copy()
    values[::3, 1] = 0
    values[50:60, 2] = np.nan
    fleet = build_fleet(table._replace(values_tn=values))
    mean_n, zero_n = forecast_errors.usage(fleet)
    for i, client in enumerate(fleet.client_ids):
        column = values[:, table.client_ids.index(client)]
        seen = []
        for t in range(12, len(column)):
            # Training windows end with the training span, test windows begin after it.
            if np.isfinite(column[t - 12 : t + 1]).all():
                seen.append(column[t])
        assert mean_n[i] == pytest.approx(np.mean(seen), rel=1e-5)
        assert zero_n[i] == pytest.approx(np.mean(np.array(seen) == 0))
    assert zero_n[1] > 0.3
