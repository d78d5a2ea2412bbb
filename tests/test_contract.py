"""Every rule passes the same checks; a new row of RULES is tested by being there."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_hk.rules import RULES
from fedjax_hk.types import HParams

SIZES, COHORT = (5, 3, 8, 1, 4, 0), 5
HPARAMS = HParams(learning_rate=0.01)
# Windows that are shuffled as one have their numbers from their places.
SEPARATE = [agg for agg, rule in RULES.items() if rule.select != "pooled"]
# Rows that differ from another one in a single formula, or not at all on a line.
ALIKE = {"fedyogi", "fedadagrad", "fedcw_select", "fedcw_weight", "trimmed_mean", "fedma"}


def fast_first(names):
    return [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in names]


def federation_of(federation, agg, model="line", **options):
    return federation(agg, num_clients=len(SIZES), cohort=COHORT, model=model, **options)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("model", ["line", pytest.param("dropout_lstm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("agg", fast_first(RULES))
def test_two_rounds(agg, model, federation, fleet):
    """Structure, shapes, dtypes; one trace; finite; on the simplex; padding; seeds."""
    fed = federation_of(federation, agg, model)
    start, few = fed.start(), fleet(SIZES)
    before = fed.round._cache_size()
    state, infos = fed.run(few, rounds=2, hparams=HPARAMS)
    assert fed.round._cache_size() - before <= 1  # none if another test ran this program
    assert shapes(state) == shapes(jax.tree.map(jax.numpy.asarray, start))
    assert shapes(infos[0]) == shapes(infos[1])
    # Distances are infinite for a client that has not been seen.
    finite = state._replace(server=state.server._replace(distances=()))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(finite))
    for info in infos:
        assert info.labels_s.dtype == np.int32 and info.cohort_s.dtype == np.int32
        assert np.isfinite(info.errors.mse).all() and np.isfinite(info.loss_s).all()
        present = info.present_s
        has_windows = (np.array(SIZES)[info.cohort_s] > 0) | (info.cohort_s < 0)  # < 0: pooled
        np.testing.assert_array_equal(present, info.sampled_s & has_windows)
        np.testing.assert_array_equal(info.labels_s >= 0, present)
        assert (info.weights_s >= 0).all() and not info.weights_s[~present].any()
        assert abs(info.weights_s.sum() - 1) < 1e-5
    again, _ = fed.run(few, rounds=2, hparams=HPARAMS)
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.slow
@pytest.mark.parametrize("agg", SEPARATE)
def test_padding_has_no_influence(agg, federation, fleet):
    fed = federation_of(federation, agg)
    state, infos = fed.run(fleet(SIZES), hparams=HPARAMS)
    wide, wide_infos = fed.run(fleet(SIZES, width=11), hparams=HPARAMS)
    jax.tree.map(np.testing.assert_array_equal, wide, state)
    np.testing.assert_array_equal(wide_infos[0].labels_s, infos[0].labels_s)


@pytest.mark.slow
@pytest.mark.parametrize("agg", RULES)
def test_vmap_over_two_learning_rates(agg, federation, fleet):
    fed, few = federation_of(federation, agg), fleet(SIZES)
    rates = np.array([0.001, 0.05], np.float32)
    hparams = jax.tree.map(np.float32, HPARAMS)._replace(learning_rate=rates)
    axes = HParams(*([None] * len(HParams._fields)))._replace(learning_rate=0)
    batched = jax.jit(jax.vmap(fed.engine.round, in_axes=(None, None, None, None, axes)))
    states, infos, _ = batched(fed.start(), few, np.int32(0), jax.random.key(0), hparams)
    for cell, rate in enumerate(rates):
        state, (info,) = fed.run(few, hparams=HPARAMS._replace(learning_rate=rate))
        np.testing.assert_allclose(states.params[cell], state.params, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(infos.labels_s[cell], info.labels_s)


@pytest.mark.slow
@pytest.mark.parametrize("agg", RULES)
def test_jit_equals_running_operation_by_operation(agg, federation, fleet):
    # Few and short: a round takes half a minute this way.
    fed = federation(agg, num_clients=3, epochs=1)
    few = fleet((5, 3, 0))
    expected, (info,) = fed.run(few, hparams=HPARAMS)
    hparams = jax.tree.map(np.float32, HPARAMS)
    with jax.disable_jit():
        state, plain, _ = fed.engine.round(
            fed.start(),
            jax.tree.map(jax.numpy.asarray, few),
            np.int32(0),
            jax.random.key(0),
            hparams,
        )
    np.testing.assert_array_equal(plain.labels_s, info.labels_s)
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("agg", fast_first(SEPARATE))
def test_client_order_does_not_matter(agg, federation, fleet):
    """Random numbers are the clients' own: who is sampled, batches, dropout, first centers."""
    fed = federation_of(federation, agg)
    few, order = fleet(SIZES), np.array([3, 0, 5, 1, 4, 2])
    turned = jax.tree.map(lambda x: x[order], few)
    first, (info,) = fed.run(few, hparams=HPARAMS)
    second, (other,) = fed.run(turned, hparams=HPARAMS)
    np.testing.assert_allclose(second.params, first.params, rtol=1e-5, atol=1e-7)

    place = {client: k for k, client in enumerate(order[other.cohort_s])}
    assert set(place) == set(info.cohort_s)
    same = np.array([place[client] for client in info.cohort_s])
    np.testing.assert_allclose(other.weights_s[same], info.weights_s, rtol=1e-5)
    labels_s, other_s = info.labels_s, other.labels_s[same]
    np.testing.assert_array_equal(
        other_s[:, None] == other_s[None, :], labels_s[:, None] == labels_s[None, :]
    )
