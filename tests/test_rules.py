"""Choices of the rules: weights, server steps, opinions, groupings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_hk import hk
from fedjax_hk.rules import CHOICES, RULES, server
from fedjax_hk.rules.grouping import Members, pair_quantiles
from fedjax_hk.rules.opinions import columns
from fedjax_hk.rules.weighting import client_weights
from fedjax_hk.settings.choices import GROUPINGS, SERVER_OPT, implementation
from fedjax_hk.types import HParams, Settings

WITHIN, BETWEEN = ("uniform", "samples"), CHOICES["between"]


def test_rows_name_choices_that_exist():
    for name, rule in RULES.items():
        assert rule.grouping in GROUPINGS, name
        for choice, values in CHOICES.items():
            assert getattr(rule, choice) in values, name


# Weights


@st.composite
def grouped(draw):
    """Labels (smallest member, -1 masked) of 7 clients, and their windows."""
    groups = draw(st.lists(st.integers(-1, 3), min_size=7, max_size=7))
    labels = [groups.index(g) if g >= 0 else -1 for g in groups]
    samples = draw(st.lists(st.integers(1, 600), min_size=7, max_size=7))
    return np.array(labels, np.int32), np.array(samples, np.int32)


_weights = jax.jit(client_weights, static_argnames=("within", "between", "min_coalition"))


@pytest.mark.parametrize("min_coalition", [1, 2, 5])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("within", WITHIN)
@settings(max_examples=25)
@given(case=grouped())
def test_weights_equal_the_definition(within, between, min_coalition, case):
    labels, samples = case
    options = {"within": within, "between": between, "min_coalition": min_coalition}
    weights, members = _weights(labels, samples, **options)
    expected, expected_members = reference.client_weights(labels, samples, **options)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(members, expected_members, rtol=1e-5, atol=1e-7)
    assert (np.asarray(weights) >= 0).all() and not np.asarray(weights)[labels < 0].any()
    assert abs(float(weights.sum()) - (labels >= 0).any()) < 1e-5


@given(case=grouped())
def test_two_weightings_that_the_grouping_does_not_change(case):
    labels, samples = case
    part = labels >= 0
    uniform, _ = _weights(labels, samples, within="uniform", between="size")
    np.testing.assert_allclose(uniform, part / max(part.sum(), 1), rtol=1e-5)
    by_samples, _ = _weights(labels, samples, within="samples", between="samples")
    held = np.where(part, samples, 0)
    np.testing.assert_allclose(by_samples, held / max(held.sum(), 1), rtol=1e-5)


@given(case=grouped())
def test_equal_coalitions_are_the_operators_weights(case):
    labels, samples = case
    weights, _ = _weights(labels, samples, within="uniform", between="equal")
    np.testing.assert_allclose(weights, hk.client_weights(labels), rtol=1e-5)


def test_an_outlier_alone_weighs_as_much_as_all_others():
    labels = np.array([0] * 49 + [49], np.int32)
    samples = np.full(50, 572, np.int32)
    for between, expected in (("equal", 0.5), ("size", 0.02), ("samples", 0.02)):
        weights, _ = client_weights(labels, samples, within="uniform", between=between)
        np.testing.assert_allclose(weights[49], expected, rtol=1e-5)
    weights, _ = client_weights(labels, samples, within="uniform", between="equal", min_coalition=2)
    np.testing.assert_allclose(weights, np.append(np.full(49, 1 / 49), 0), rtol=1e-5)


def test_clients_without_windows_weigh_nothing_by_samples():
    labels, samples = np.array([0, 0, 2, -1], np.int32), np.array([0, 4, 0, 9], np.int32)
    weights, _ = client_weights(labels, samples, within="samples", between="samples")
    np.testing.assert_allclose(weights, [0, 1, 0, 0])
    nobody = np.full(4, -1, np.int32)
    for within in WITHIN:
        for between in BETWEEN:
            weights, members = client_weights(nobody, samples, within=within, between=between)
            assert not np.any(weights) and not np.any(members)


# Server steps


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adam", [0.099005, 0.223605, 0.316921]),
        ("yogi", [0.099005, 0.223110, 0.315620]),
        ("adagrad", [0.009990, 0.022501, 0.031825]),
    ],
)
def test_first_steps_of_adaptive_servers(name, expected):
    # Deltas 1, 0.5, -0.2; the known numbers are for a momentum of 0.9 in all three.
    step, x, found = implementation("server_opt", name), jnp.zeros(1), []
    if name == "adagrad":
        step = server._adaptive(0.9, lambda v, d2: v + d2)
    state = step.init(x)
    for delta in (1.0, 0.5, -0.2):
        x, state = step.apply(state, x, x + delta, 0.1)
        found.append(float(x[0]))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_adagrad_has_no_momentum():
    step, x, v = implementation("server_opt", "adagrad"), 0.0, 1e-6
    state, found = step.init(jnp.zeros(1)), jnp.zeros(1)
    for delta in (1.0, 0.5, -0.2):
        found, state = step.apply(state, found, found + delta, 0.1)
        v += delta**2
        x += 0.1 * delta / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(found, [x], rtol=1e-5)


def test_plain_server_steps():
    x, average = jnp.array([1.0, -2.0]), jnp.array([3.0, 0.5])
    moved, state = implementation("server_opt", "mean").apply((), x, average, 0.3)
    np.testing.assert_array_equal(moved, average)
    moved, state = implementation("server_opt", "sgd").apply((), x, average, 1.0)
    np.testing.assert_allclose(moved, average, rtol=1e-6)
    moved, state = implementation("server_opt", "sgd").apply((), x, average, 0.25)
    np.testing.assert_allclose(moved, 0.75 * x + 0.25 * average, rtol=1e-6)
    assert state == ()


@pytest.mark.parametrize("name", SERVER_OPT)
def test_server_stays_where_clients_agree_with_it(name):
    step, x = implementation("server_opt", name), jnp.array([1.0, -2.0])
    state = step.init(x)
    for _ in range(3):
        moved, state = step.apply(state, x, x, 0.1)
        np.testing.assert_array_equal(moved, x)


def test_adam_and_yogi_start_alike_and_keep_v_positive():
    x, target = jnp.array([1.0]), jnp.array([1.7])
    steps = [implementation("server_opt", name) for name in ("adam", "yogi")]
    first = [step.apply(step.init(x), x, target, 0.1) for step in steps]
    np.testing.assert_allclose(first[0][0], first[1][0], rtol=1e-6)
    for name in ("adam", "yogi", "adagrad"):
        step, y = implementation("server_opt", name), x
        state, before = step.init(y), 0.0
        for delta in (1.0, 0.1, -0.4, 0.0, 2.0):
            y, state = step.apply(state, y, y + delta, 0.1)
            assert float(state[1][0]) >= (before if name == "adagrad" else 0)
            before = float(state[1][0])


# Opinions


def test_opinion_spaces():
    rng = np.random.default_rng(0)
    params, start = (rng.standard_normal((4, 6)).astype(np.float32) for _ in range(2))
    mask = np.array([True, False, True, True])
    np.testing.assert_array_equal(implementation("opinion", "weights")(params, start, mask), params)
    np.testing.assert_array_equal(
        implementation("opinion", "update")(params, start, mask), params - start
    )
    centered = implementation("opinion", "centered")(params, start, mask)
    np.testing.assert_allclose(centered, params - params[mask].mean(axis=0), rtol=1e-5, atol=1e-6)
    nobody = implementation("opinion", "centered")(params, start, np.zeros(4, bool))
    assert np.isfinite(nobody).all()


LEAVES = (("dense/bias", 2), ("dense/kernel", 3), ("lstm_0/kernel", 4))


def test_columns_by_name():
    assert columns(LEAVES, "") == slice(None)
    np.testing.assert_array_equal(columns(LEAVES, "kernel"), [2, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(columns(LEAVES, "^dense/"), [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(columns(LEAVES, "bias|lstm"), [0, 1, 5, 6, 7, 8])


def test_patterns_that_name_nothing():
    with pytest.raises(ValueError, match=r"--opinion_leaves=head: matches no .*lstm_0/kernel"):
        columns(LEAVES, "head")
    with pytest.raises(ValueError, match=r"--opinion_leaves=\(: not a regular .*dense/bias"):
        columns(LEAVES, "(")


# Groupings


_quantiles = jax.jit(pair_quantiles)


@given(
    seed=st.integers(0, 2**16),
    mask=st.lists(st.booleans(), min_size=8, max_size=8),
    levels=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_pair_quantiles_equal_those_of_numpy(seed, mask, levels):
    rng = np.random.default_rng(seed)
    apart = np.triu(rng.random((8, 8)), 1)
    apart = (apart + apart.T).astype(np.float32)
    mask, levels = np.array(mask), np.array(levels, np.float32)
    pairs = reference.pair_values(apart, mask)
    found = _quantiles(np.where(mask[:, None] & mask[None, :], apart, np.nan), mask, levels)
    if not len(pairs):
        assert np.isnan(found).all()
    else:
        np.testing.assert_allclose(found, np.quantile(pairs, levels), rtol=1e-4, atol=1e-6)


def test_pair_quantiles_of_one_client():
    assert np.isnan(
        pair_quantiles(np.zeros((1, 1), np.float32), np.ones(1, bool), np.ones(3))
    ).all()


@functools.cache
def _compiled(name, settings):
    grouping = implementation("grouping", name)(Settings(**dict(settings)))

    def apply(opinions, mask, keys, state, hparams, clients, planted):
        gram = hk.gram_matrix(opinions, mask=mask)
        state = grouping.init(opinions, len(planted)) if state is None else state
        members = Members(keys, clients, planted)
        return grouping.apply(state, opinions, gram, mask, members, hparams)

    return jax.jit(apply)


def apply(
    name, opinions, *, mask=None, key=0, state=None, hparams=None, clients=None, planted=None,
    **settings,
):  # fmt: skip
    """One application of a grouping to `[S, D]` opinions."""
    opinions = jnp.asarray(opinions, jnp.float32)
    mask = np.ones(len(opinions), bool) if mask is None else np.asarray(mask)
    hparams = jax.tree.map(np.float32, hparams or HParams())
    compiled = _compiled(name, tuple(sorted(settings.items())))
    keys = jax.random.split(jax.random.key(key), len(opinions))
    clients = np.arange(len(opinions)) if clients is None else np.asarray(clients)
    planted = np.arange(len(opinions), dtype=np.int32) % 3 if planted is None else planted
    return compiled(opinions, mask, keys, state, hparams, clients, planted)


def blobs(seed=0, scale=0.1, dim=5, sizes=(4, 3, 2)):
    rng = np.random.default_rng(seed)
    middles = 5 * np.eye(dim)[: len(sizes)] + rng.uniform(0, 0.5, (len(sizes), dim))
    group = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    opinions = middles[group] + scale * rng.standard_normal((len(group), dim))
    first = {g: int(np.flatnonzero(group == g)[0]) for g in set(group)}
    return opinions.astype(np.float32), np.array([first[g] for g in group])


@pytest.mark.parametrize("name", GROUPINGS)
def test_masked_clients_have_no_influence(name):
    opinions, _ = blobs()
    mask = np.array([True, False, True, True, False, True, True, True, False])
    expected, _ = apply(name, opinions, mask=mask)
    assert (np.asarray(expected.labels_s)[~mask] == -1).all()
    assert (np.asarray(expected.labels_s)[mask] >= 0).all()
    wild = np.where(mask[:, None], opinions, 1e6)
    found, _ = apply(name, wild, mask=mask)
    np.testing.assert_array_equal(found.labels_s, expected.labels_s)
    nobody, _ = apply(name, opinions, mask=np.zeros(9, bool))
    assert (np.asarray(nobody.labels_s) == -1).all()


def test_groupings_that_do_not_look():
    opinions, _ = blobs()
    mask = np.array([False, True, True, True, False, True, True, True, True])
    together, _ = apply("none", opinions, mask=mask)
    np.testing.assert_array_equal(together.labels_s, np.where(mask, 1, -1))
    alone, _ = apply("singletons", opinions, mask=mask)
    np.testing.assert_array_equal(alone.labels_s, np.where(mask, np.arange(9), -1))


FIXED_K = ("fixed_k_euclidean", "fixed_k_cosine")


@pytest.mark.parametrize("name", FIXED_K)
def test_ends_of_fixed_k_are_uniform_means(name):
    opinions, _ = blobs()
    for num_coalitions in (1, 9, 12):
        info, _ = apply(name, opinions, num_coalitions=num_coalitions)
        weights, _ = client_weights(
            info.labels_s, np.ones(9, np.int32), within="uniform", between="equal"
        )
        np.testing.assert_allclose(weights, np.full(9, 1 / 9), rtol=1e-5)


@pytest.mark.parametrize("name", FIXED_K)
def test_fixed_k_recovers_separated_blobs(name):
    # From one client of each blob; other starts can stay where two share a blob.
    opinions, expected = blobs()
    _, state = apply(name, opinions)
    rng = np.random.default_rng(0)
    for _ in range(5):
        first = [rng.choice(np.flatnonzero(expected == label)) for label in np.unique(expected)]
        later = state._replace(opinions_kd=jnp.asarray(opinions[first]))
        for _ in range(3):
            info, later = apply(name, opinions, state=later)
            np.testing.assert_array_equal(info.labels_s, expected)
    weights, _ = client_weights(
        info.labels_s, np.ones(9, np.int32), within="uniform", between="equal"
    )
    means = [opinions[expected == label].mean(axis=0) for label in np.unique(expected)]
    np.testing.assert_allclose(weights @ opinions, np.mean(means, axis=0), rtol=1e-5)


@pytest.mark.parametrize("name", FIXED_K)
def test_fixed_k_passes_equal_loops(name):
    opinions, _ = blobs(seed=3, scale=2.0)
    kind = "ball" if name.endswith("euclidean") else "cosine"
    centers = opinions[[1, 4, 8]]
    state = apply(name, opinions)[1]._replace(opinions_kd=jnp.asarray(centers))
    for _ in range(3):
        nearest, medoids = reference.fixed_k_pass(opinions, centers, kind)
        info, state = apply(name, opinions, state=state)
        np.testing.assert_array_equal(info.labels_s, [nearest.index(k) for k in nearest])
        # Next centers are members of their coalitions; empty ones start anew elsewhere.
        for k, medoid in enumerate(medoids):
            if medoid is not None:
                np.testing.assert_array_equal(state.opinions_kd[k], opinions[medoid])
                assert nearest[medoid] == k
        centers = np.asarray(state.opinions_kd)


def test_cosine_labels_do_not_depend_on_scale():
    opinions, _ = blobs(seed=3, scale=2.0)
    scaled = opinions * np.random.default_rng(0).uniform(0.1, 10, (9, 1))
    first, state = apply("fixed_k_cosine", opinions)
    again, _ = apply("fixed_k_cosine", scaled)
    np.testing.assert_array_equal(first.labels_s, again.labels_s)
    later, _ = apply("fixed_k_cosine", 7 * opinions, state=state)
    np.testing.assert_array_equal(
        later.labels_s, apply("fixed_k_cosine", opinions, state=state)[0].labels_s
    )


@pytest.mark.parametrize("name", FIXED_K)
def test_an_empty_coalition_starts_anew_at_the_farthest_client(name):
    opinions, _ = blobs(seed=1, sizes=(5, 4))
    opinions[3] = [0, 0, 0, 0, 30]
    _, state = apply(name, opinions)
    twice = jnp.stack([jnp.asarray(opinions[0])] * 3)  # ties go to the first: two are empty
    info, state = apply(name, opinions, state=state._replace(opinions_kd=twice))
    assert (np.asarray(info.labels_s) == 0).all()
    centers = np.asarray(state.opinions_kd)
    np.testing.assert_array_equal(centers[1], opinions[3])
    assert (centers[2] != centers[1]).any()
    assert all((center == opinions).all(axis=1).any() for center in centers)


@pytest.mark.parametrize("name", FIXED_K)
@pytest.mark.parametrize("present", [[5], [2, 7], [0, 3, 4, 8]])
def test_masked_clients_never_become_centers(name, present):
    opinions, _ = blobs()
    mask = np.isin(np.arange(9), present)
    for earlier in (None, apply(name, opinions)[1]):
        state = earlier
        for key in range(3):
            info, state = apply(name, opinions, mask=mask, key=key, state=state)
            for center in np.asarray(state.opinions_kd):
                assert (center == opinions[mask]).all(axis=1).any()
            assert (np.asarray(info.labels_s)[~mask] == -1).all()


@pytest.mark.parametrize("name", FIXED_K)
def test_centers_stay_while_nobody_is_there(name):
    opinions, _ = blobs()
    nobody = np.zeros(9, bool)
    _, fresh = apply(name, opinions, mask=nobody)
    assert not fresh.drawn
    _, state = apply(name, opinions)
    _, later = apply(name, opinions, mask=nobody, state=state)
    jax.tree.map(np.testing.assert_array_equal, later, state)


def test_quantile_thresholds_link_the_closest_share_of_the_pairs():
    opinions = np.random.default_rng(5).standard_normal((12, 20))
    apart = [[reference.one_minus_cos(a, b) for b in opinions] for a in opinions]
    pairs = reference.pair_values(apart, np.ones(12, bool))
    for tau in (0.5, 0.9):
        limits = []
        for name in ("hk_cosine", "hk_euclidean"):
            info, _ = apply(name, opinions, tau_mode="quantile", hparams=HParams(tau=tau))
            np.testing.assert_allclose(info.limit, np.quantile(pairs, 1 - tau), rtol=1e-5)
            limits.append(info.labels_s)
        np.testing.assert_array_equal(*limits)
        absolute, _ = apply("hk_cosine", opinions, hparams=HParams(tau=1 - float(info.limit)))
        np.testing.assert_array_equal(limits[0], absolute.labels_s)
    everyone, _ = apply("hk_cosine", opinions, tau_mode="quantile", hparams=HParams(tau=0.0))
    assert not np.any(everyone.labels_s)
    band, _ = apply(
        "hk_band", opinions, tau_mode="quantile", hparams=HParams(eps_lower=0.5, eps_upper=1.0)
    )
    np.testing.assert_allclose(band.limit, np.quantile(pairs, 0.5), rtol=1e-5)


def spread_opinions(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((10, 4)) + 1.5 * np.eye(4)[rng.integers(0, 4, 10)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tau", [0.5, 0.75, 0.9])
def test_meanings_of_tau(seed, tau):
    opinions, hparams = spread_opinions(seed), HParams(tau=tau)
    cosine, _ = apply("hk_cosine", opinions, hparams=hparams)
    matched, _ = apply("hk_euclidean", opinions, euclid_tau="matched", hparams=hparams)
    np.testing.assert_array_equal(cosine.labels_s, matched.labels_s)
    assert cosine.num_steps == matched.num_steps
    np.testing.assert_allclose(cosine.limit, matched.limit, rtol=1e-5)
    radius, _ = apply("hk_euclidean", opinions, hparams=hparams)
    same, _ = apply("hk_cosine", opinions, hparams=HParams(tau=1 - tau**2 / 2))
    np.testing.assert_array_equal(radius.labels_s, same.labels_s)
    linear, _ = apply("hk_euclidean", opinions, euclid_tau="linear", hparams=hparams)
    same, _ = apply("hk_cosine", opinions, hparams=HParams(tau=1 - 2 * (1 - tau) ** 2))
    np.testing.assert_array_equal(linear.labels_s, same.labels_s)
    band, _ = apply("hk_band", opinions, hparams=HParams(eps_lower=tau, eps_upper=1.0))
    jax.tree.map(np.testing.assert_array_equal, band, cosine)


def test_raw_radius():
    opinions, expected = blobs()
    info, _ = apply("hk_euclidean", opinions, use_epsilon=True, hparams=HParams(epsilon=2.0))
    np.testing.assert_array_equal(info.labels_s, expected)
    assert info.limit == 2 and info.converged and info.num_steps == 1
    assert implementation("grouping", "hk_euclidean")(Settings(use_epsilon=True)).kind == "ball"


@pytest.mark.parametrize("name", ["hk_cosine", "hk_euclidean", "hk_band"])
def test_hk_ends(name):
    opinions = spread_opinions(7)
    everyone = HParams(tau={"hk_cosine": -1.0}.get(name, 2.0), eps_lower=-1.0)
    info, _ = apply(name, opinions, hparams=everyone)
    assert not np.any(info.labels_s) and info.num_steps == 1
    nobody = HParams(tau={"hk_cosine": 0.999999}.get(name, 1e-4), eps_lower=0.999999)
    info, _ = apply(name, opinions, hparams=nobody)
    np.testing.assert_array_equal(info.labels_s, np.arange(10))
