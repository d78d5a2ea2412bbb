"""The server's half alone: models in, the next model out, without a network or a trainer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_hk.round.server import make_server
from fedjax_hk.round.state import upload
from fedjax_hk.rules import RULES
from fedjax_hk.types import HParams

MODELS = np.array([[1.0, 0, 2], [1, 0.1, 2], [0, 1, -1], [0.1, 1, -1], [9, 9, 9]], np.float32)
COUNTS = np.array([1, 3, 2, 2, 5])
MASK = np.array([True, True, True, True, False])
HPARAMS = jax.tree.map(np.float32, HParams(tau=0.9))


def stepped(agg, models_sd=MODELS, mask_s=MASK, start=None, **choices):
    server = make_server(RULES[agg]._replace(**choices), num_clients=len(models_sd))
    start = jnp.zeros(3) if start is None else jnp.asarray(start, jnp.float32)
    state = server.init(start, len(models_sd))
    keys_s = jax.random.split(jax.random.key(0), len(models_sd))
    sent = upload(models_sd, COUNTS, mask_s, start)
    return jax.jit(server.step)(state, sent, keys_s, HPARAMS)


def test_fedavg_weighs_by_samples_those_who_reported():
    state, aggregate = stepped("fedavg")
    np.testing.assert_allclose(aggregate.weights_s, np.array([1, 3, 2, 2, 0]) / 8, rtol=1e-6)
    np.testing.assert_allclose(state.params, COUNTS[:4] @ MODELS[:4] / 8, rtol=1e-6)


def test_coalitions_weigh_the_same():
    state, aggregate = stepped("hk_cosine")
    np.testing.assert_array_equal(aggregate.found.labels_s, [0, 0, 2, 2, -1])
    centers = np.array([MODELS[:2].mean(axis=0), MODELS[2:4].mean(axis=0)])
    np.testing.assert_allclose(aggregate.centers_sd[:4], centers[[0, 0, 1, 1]], rtol=1e-6)
    np.testing.assert_allclose(state.params, centers.mean(axis=0), rtol=1e-6)


def test_who_is_not_finite_is_as_if_absent():
    broken = MODELS.copy()
    broken[4, 1] = np.nan
    state, aggregate = stepped("hk_cosine", broken, None)
    expected, _ = stepped("hk_cosine")
    np.testing.assert_array_equal(state.params, expected.params)
    assert aggregate.found.labels_s[4] == -1


@pytest.mark.parametrize("agg", ["fedavg", "fedadam", "hk_cosine", "median"])
def test_nobody_changes_nothing(agg):
    start = np.array([3.0, -1, 2], np.float32)
    state, aggregate = stepped(agg, mask_s=np.zeros(5, bool), start=start)
    np.testing.assert_array_equal(state.params, start)
    assert (np.asarray(aggregate.found.labels_s) == -1).all()
    assert not np.asarray(aggregate.weights_s).any()


def test_opinions_are_taken_from_what_was_sent_out():
    start = np.array([1.0, 0.5, 0.5], np.float32)
    _, of_weights = stepped("hk_cosine", MODELS + 50, start=start)
    _, of_updates = stepped("hk_cosine", MODELS + start, start=start, opinion="update")
    assert (np.asarray(of_weights.found.labels_s)[:4] == 0).all()
    np.testing.assert_array_equal(of_updates.found.labels_s, [0, 0, 2, 2, -1])
