"""Thresholds, and the coalitions that they would make."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_hk import hk
from fedjax_hk.report.coalition_map import coalition_map, pair_limits, splitting_threshold
from fedjax_hk.settings import thresholds

MEANINGS = {
    "cosine": hk.cosine,
    "radius": hk.unit_ball,
    "matched": lambda tau: hk.unit_ball(jnp.sqrt(2 * (1 - jnp.float32(tau)))),
    "linear": lambda tau: hk.unit_ball(2 * (1 - jnp.float32(tau))),
    "distance": hk.ball,
}


@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("spread", [pytest.param(0.3, marks=pytest.mark.slow), 1e-3])
def test_the_threshold_that_is_named_splits(meaning, spread):
    rng = np.random.default_rng(3)  # at a spread of 1e-3, 1 - cos is around 1e-6
    groups_sd = rng.standard_normal((3, 100))[[0] * 9 + [1] * 7 + [2] * 4]
    opinions_sd = 1 + spread * (groups_sd + 0.3 * rng.standard_normal((20, 100)))
    opinions_sd = opinions_sd.astype(np.float32)
    gram = hk.gram_matrix(opinions_sd)
    text = splitting_threshold(gram, np.ones(20, bool), thresholds.MEANINGS[meaning])
    assert text is not None
    assert len(text) <= 12
    exact = float(text)
    as_run = jnp.float32(exact)  # a run traces its thresholds in float32
    for threshold in (exact, as_run):
        found = hk.interact_from_gram(gram, MEANINGS[meaning](threshold))
        assert np.ptp(np.asarray(found.weights_s)) > 1e-5


def test_opinions_that_no_threshold_splits():
    gram = hk.gram_matrix(np.ones((5, 3), np.float32))
    assert splitting_threshold(gram, np.ones(5, bool), thresholds.MEANINGS["cosine"]) is None
    assert splitting_threshold(gram, np.arange(5) < 1, thresholds.MEANINGS["cosine"]) is None
    assert splitting_threshold(gram, np.zeros(5, bool), thresholds.MEANINGS["distance"]) is None


def test_coalition_map_equals_plain_calls():
    rng = np.random.default_rng(5)
    gram, mask = hk.gram_matrix(rng.standard_normal((12, 8)).astype(np.float32)), np.arange(12) < 11
    limits_t = pair_limits(gram, mask, "cosine", 9)
    assert (np.diff(limits_t) >= 0).all()
    found = coalition_map(gram, mask, "cosine", limits_t)
    for i, limit in enumerate(limits_t):
        near = hk.Neighborhood("cosine", jnp.float32(limit), jnp.float32(0))
        one = hk.interact_from_gram(gram, near, mask=mask)
        assert found.num_coalitions_t[i] == one.num_coalitions
        assert found.largest_t[i] == one.sizes_s.max()
        weights_s = np.asarray(one.weights_s)[mask]
        assert found.changes_t[i] == (np.abs(weights_s * 11 - 1).max() > 1e-5)
