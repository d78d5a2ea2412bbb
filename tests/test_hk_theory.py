"""The operator against loops in float64 and against what is known of the model.

Numbers H2 to H16 and the invariants are those of the operator's theory: Hegarty and Wedin
for equally spaced opinions, Zabarianska and Proskurnikov for sets that are not symmetric.
"""

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
import reference_hk as reference
import scipy.sparse.csgraph
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedjax_hk import hk

pytestmark = pytest.mark.usefixtures("strict")


_interact = jax.jit(hk.interact, static_argnames=("state_norm", "trajectory_steps"))


def interact(opinions, neighborhood, **options):
    """`hk.interact` in one compiled program for all sizes: masked rows and zero columns."""
    opinions = np.asarray(opinions, np.float32)
    num_clients, dim = opinions.shape
    rows = 32 if num_clients <= 32 else num_clients
    padded = np.full((rows, 8 if dim <= 8 else dim), 0, np.float32)
    padded[:num_clients, :dim] = opinions
    padded[num_clients:] = np.nan
    mask = np.arange(rows) < num_clients
    result = jax.device_get(_interact(padded, neighborhood, mask=mask, **options))
    assert np.all(result.labels_s[num_clients:] == -1)
    trajectory = result.trajectory
    return result._replace(
        labels_s=result.labels_s[:num_clients],
        sizes_s=result.sizes_s[:num_clients],
        weights_s=result.weights_s[:num_clients],
        influence_ss=result.influence_ss[:num_clients, :num_clients],
        trajectory=None if trajectory is None else trajectory[:, :num_clients, :num_clients],
    )


def column(*values):
    return np.asarray(values, np.float32)[:, None]


def positions(result, opinions):
    return np.asarray(result.influence_ss, np.float64) @ np.asarray(opinions, np.float64)


def grouping(labels):
    labels = np.asarray(labels)
    return {frozenset(np.flatnonzero(labels == k).tolist()) for k in set(labels.tolist()) if k >= 0}


def groups(num_clients, dim, num_groups, noise, seed):
    """Opinions around random unit directions, away from ties almost surely."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(num_groups, dim))
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    member = rng.integers(num_groups, size=num_clients)
    scale = np.exp(rng.normal(0, 0.3, size=(num_clients, 1)))
    spread = noise * rng.normal(size=(num_clients, dim)) / np.sqrt(dim)
    return ((centers[member] + spread) * scale).astype(np.float32)


SPACED_MOVES = (1, 2, 5, 6, 6, 6, 6, 7, 10, 11, 11, 11, 11, 12, 15, 16, 16, 16, 16, 17, 20)
SPACED_MOVES += (21, 21, 21, 21, 22, 25, 26, 26)


@pytest.mark.parametrize("n", range(2, 31))
def test_equally_spaced_opinions_end_in_triples(n):  # H3, on ties: the slack decides
    opinions = np.arange(n, dtype=np.float32)[:, None]
    result = interact(opinions, hk.ball(1.0))
    assert result.converged
    assert result.num_steps == SPACED_MOVES[n - 2]
    if n >= 6:
        sizes = np.asarray(result.sizes_s)
        side = [3] * (n // 6)
        middle = [n % 6] if n % 6 else []
        assert sizes[sizes > 0].tolist() == side + middle + side


@pytest.mark.parametrize(
    "n, limits",
    [
        (6, [Fraction(2885, 1728), Fraction(5755, 1728)]),
        (7, [Fraction(26185, 15552), Fraction(3), Fraction(67127, 15552)]),
    ],
)
def test_equally_spaced_limits(n, limits):  # H4
    opinions = np.arange(n, dtype=np.float32)[:, None]
    result = interact(opinions, hk.ball(1.0))
    ends = positions(result, opinions)[np.flatnonzero(np.asarray(result.sizes_s)), 0]
    np.testing.assert_allclose(ends, [float(x) for x in limits], rtol=1e-6)


def test_two_pairs_and_an_outlier():  # H5
    opinions = column(0, 0.1, 0.2, 5, 5.1, 20)
    result = interact(opinions, hk.ball(1.0))
    np.testing.assert_allclose(
        positions(result, opinions)[:, 0], [0.1] * 3 + [5.05] * 2 + [20], rtol=1e-6
    )
    assert (result.num_steps, result.num_coalitions) == (1, 3)
    assert result.labels_s.tolist() == [0, 0, 0, 3, 3, 5]
    assert result.sizes_s.tolist() == [3, 0, 0, 2, 0, 1]
    np.testing.assert_allclose(hk.average(opinions, result.weights_s), [8.383333], rtol=1e-6)
    np.testing.assert_allclose(opinions.mean(), 5.066667, rtol=1e-6)


def test_small_diameter_is_consensus_at_the_mean_in_one_step():  # H6
    opinions = groups(9, 4, 1, 0.3, seed=1)
    epsilon = 1.001 * np.sqrt(reference.dissimilarities(opinions, "ball").max())
    result = interact(opinions, hk.ball(epsilon))
    assert (result.num_coalitions, result.num_steps, bool(result.converged)) == (1, 1, True)
    expected = np.tile(opinions.mean(axis=0), (9, 1))
    np.testing.assert_allclose(positions(result, opinions), expected, rtol=1e-5, atol=1e-6)


def test_order_is_kept_and_gaps_stay_open():  # H7
    values = np.sort(np.random.default_rng(2).uniform(0, 30, 40)).astype(np.float32)
    result = interact(values[:, None], hk.ball(1.0), trajectory_steps=20)
    path = np.asarray(result.trajectory, np.float64) @ values
    gaps = np.diff(path, axis=1)
    assert np.all(gaps > -1e-5)
    open_gaps = gaps[0] > 1.0
    assert open_gaps.any() and np.all(gaps[:, open_gaps] > 1.0)


@pytest.mark.parametrize("n, radius, moves", [(12, 1.3, 6), (20, 1.2, 5), (24, 1.5, 7)])
def test_separated_components_can_merge(n, radius, moves):  # H8
    angle = 2 * np.pi * np.arange(n) / n
    ring = radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    opinions = np.concatenate([ring, np.zeros((1, 2))]).astype(np.float32)
    assert len(set(reference.components(reference.dissimilarities(opinions, "ball") <= 1))) > 1
    result = interact(opinions, hk.ball(1.0))
    assert (result.num_coalitions, result.num_steps, bool(result.converged)) == (1, moves, True)


def test_number_of_coalitions_is_not_monotone():  # H9
    opinions = column(0, 1, 3, 7, 10, 12)
    wide, wider = (interact(opinions, hk.ball(eps)) for eps in (4.0, 5.0))
    assert (wide.num_coalitions, wide.num_steps) == (1, 7)
    assert (wider.num_coalitions, wider.num_steps) == (2, 2)
    np.testing.assert_allclose(positions(wide, opinions)[:, 0], 497773 / 93312, rtol=1e-6)
    np.testing.assert_allclose(positions(wider, opinions)[[0, 5], 0], [65 / 36, 82 / 9], rtol=1e-6)


def test_hull_shrinks_and_the_mean_moves():  # H10
    opinions = column(0, 0.4, 0.8, 1.7)
    result = interact(opinions, hk.ball(1.0))
    np.testing.assert_allclose(positions(result, opinions).mean(), 0.69375, atol=1e-5)
    cloud = groups(20, 3, 4, 0.5, seed=3)
    result = interact(cloud, hk.ball(0.8), trajectory_steps=20)
    path = np.asarray(result.trajectory, np.float64) @ cloud
    assert np.all(np.diff(path.max(axis=1), axis=0) < 1e-6)
    assert np.all(np.diff(path.min(axis=1), axis=0) > -1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_potential_falls_by_four_times_the_moves(seed):  # H2
    opinions = groups(15, 3, 4, 0.6, seed)
    epsilon = 0.7
    result = interact(opinions, hk.ball(epsilon), trajectory_steps=20)
    path = np.asarray(result.trajectory, np.float64) @ opinions

    def potential(z):
        return np.minimum(reference.dissimilarities(z, "ball"), epsilon**2).sum()

    for before, after in itertools.pairwise(path):
        fall = potential(before) - potential(after)
        assert fall >= 4 * np.square(after - before).sum() - 1e-5


def test_band_pair_does_not_swap():  # H15
    opinions = np.asarray([[1, 0], [0.6, 0.8]], np.float32)
    result = interact(opinions, hk.band(0.5, 0.7), state_norm="every_step")
    assert result.converged and result.num_steps == 1
    assert result.num_coalitions == 1


def pentagon():
    angle = 2 * np.pi * np.arange(5) / 5
    return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def test_projected_band_on_a_pentagon_cycles():  # H16
    # Rounding of the start grows 4.8 times a step and ends the cycle at last, in loops too.
    result = interact(
        pentagon(),
        hk.band(-0.9, -0.7),
        state_norm="every_step",
        trajectory_steps=20,
        max_steps=8,
    )
    assert not result.converged
    assert result.num_steps == 8
    path = np.asarray(result.trajectory, np.float64) @ pentagon()
    np.testing.assert_allclose(path[0:7:2], path[2:9:2], atol=0.05)
    assert np.abs(path[1:8] + path[:7]).max() < 0.05  # every move flips all directions


def test_raw_band_on_a_pentagon_shrinks_to_nothing():  # H16
    result = interact(pentagon(), hk.band(-0.9, -0.7), trajectory_steps=20)
    path = np.asarray(result.trajectory, np.float64) @ pentagon()
    np.testing.assert_allclose(
        np.linalg.norm(path, axis=2)[:3], [[1] * 5, [0.206] * 5, [0.0424] * 5], rtol=2e-3
    )
    assert result.converged and np.isfinite(result.influence_ss).all()


def test_seven_clients_in_a_band_cycle():  # H16
    opinions = np.asarray(
        [
            [0.9111, 0.4122],
            [-0.0951, -0.9955],
            [-0.9973, -0.0733],
            [0.4898, -0.8718],
            [-0.9583, 0.2857],
            [-0.8249, -0.5653],
            [-0.1645, 0.9864],
        ],
        np.float32,
    )
    result = interact(opinions, hk.band(0.05, 0.355), state_norm="every_step", trajectory_steps=20)
    assert not result.converged
    path = np.asarray(result.trajectory, np.float64) @ opinions
    ends = [[-0.7481, -0.6635], [-0.1466, -0.9892]]
    found = path[20][[1, 5]]
    before = path[19][[1, 5]]
    order = slice(None) if abs(found[0, 0] - ends[0][0]) < 1e-2 else slice(None, None, -1)
    np.testing.assert_allclose(found[order], ends, atol=5e-3)
    np.testing.assert_allclose(before[order], ends[::-1], atol=5e-3)


# Opinions and neighborhoods that no tie decides, for comparison with the loops.
CASES = {
    "ball": (hk.ball, ("ball", lambda t: t), 0.75),
    "cosine": (hk.cosine, ("cosine", lambda t: 1 - t), 0.8),
    "unit_ball": (hk.unit_ball, ("cosine", lambda t: t * t / 2), 0.6),
}


@pytest.mark.parametrize("state_norm", ["none", "init", "every_step"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_equals_loops(name, state_norm, seed):  # H12, H13
    make, (kind, limit_of), threshold = CASES[name]
    opinions = groups(14, 6, 4, 0.7, seed)
    expected = reference.interact(opinions, kind, limit_of(threshold), state_norm=state_norm)
    result = interact(opinions, make(threshold), state_norm=state_norm)
    assert result.labels_s.tolist() == expected.labels.tolist()
    assert (result.num_steps, result.converged) == (expected.num_steps, expected.converged)
    np.testing.assert_allclose(positions(result, opinions), expected.positions, atol=2e-6)
    np.testing.assert_allclose(result.weights_s, reference.client_weights(expected.labels))
    if state_norm == "none":
        np.testing.assert_allclose(np.sum(result.influence_ss, axis=1), 1, rtol=1e-6)
    if expected.converged:
        for members in grouping(result.labels_s):
            coalition = positions(result, opinions)[sorted(members)]
            assert np.ptp(coalition, axis=0).max() < 1e-5
    if expected.converged and kind == "ball":
        ends = positions(result, opinions)[np.flatnonzero(np.asarray(result.sizes_s))]
        x = reference.dissimilarities(ends, "ball")
        assert np.all(x[~np.eye(len(x), dtype=bool)] > limit_of(threshold) ** 2)


@pytest.mark.parametrize("state_norm", ["none", "every_step"])
@pytest.mark.parametrize("seed", range(3))
def test_band_equals_loops(state_norm, seed):
    opinions = groups(12, 5, 3, 0.8, seed)
    expected = reference.interact(opinions, "cosine", 0.6, 0.1, state_norm=state_norm, tol=1e-7)
    result = interact(opinions, hk.band(0.4, 0.9), state_norm=state_norm, tol=1e-7)
    assert result.labels_s.tolist() == expected.labels.tolist()
    assert bool(result.converged) == expected.converged


def test_everything_and_nothing():  # invariants 1 and 2
    opinions = groups(8, 5, 3, 0.5, seed=5)
    everyone = [hk.cosine(-1.0), hk.ball(np.inf), hk.unit_ball(2.0)]
    for neighborhood in everyone:
        result = interact(opinions, neighborhood)
        assert (result.num_coalitions, result.num_steps) == (1, 1)
        np.testing.assert_allclose(result.weights_s, 1 / 8, rtol=1e-6)
    for neighborhood in [hk.cosine(1.0), hk.ball(0.0), hk.unit_ball(0.0)]:
        result = interact(opinions, neighborhood)
        assert (result.num_coalitions, result.num_steps) == (8, 0)
        assert result.labels_s.tolist() == list(range(8))
        np.testing.assert_allclose(result.weights_s, 1 / 8, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_unit_ball_is_cosine_and_band_up_to_one_is_cosine(seed):  # invariants 4 and 5
    opinions = groups(12, 4, 4, 0.8, seed)
    for tau in (0.5, 0.75, 0.9):
        from_ball = interact(opinions, hk.unit_ball(tau))
        from_cosine = interact(opinions, hk.cosine(1 - tau**2 / 2))
        jax.tree.map(np.testing.assert_array_equal, from_ball, from_cosine)
        for max_steps in (1, 50):
            from_band = interact(opinions, hk.band(tau, 1.0), max_steps=max_steps)
            from_cosine = interact(opinions, hk.cosine(tau), max_steps=max_steps)
            jax.tree.map(np.testing.assert_array_equal, from_band, from_cosine)


@pytest.mark.parametrize("make, threshold", [(v[0], v[2]) for v in CASES.values()])
def test_symmetries(make, threshold):  # invariant 6 and H11
    rng = np.random.default_rng(7)
    opinions = groups(13, 5, 4, 0.7, seed=11)
    plain = grouping(interact(opinions, make(threshold)).labels_s)

    order = rng.permutation(13)
    permuted = interact(opinions[order], make(threshold)).labels_s
    assert {frozenset(order[sorted(c)].tolist()) for c in grouping(permuted)} == plain

    rotation = np.linalg.qr(rng.normal(size=(5, 5)))[0].astype(np.float32)
    assert grouping(interact(opinions @ rotation, make(threshold)).labels_s) == plain

    for factor in (1e-8, 37.0, 1e12):
        scaled = threshold * factor if make is hk.ball else threshold
        result = interact(opinions * np.float32(factor), make(scaled))
        assert grouping(result.labels_s) == plain
    if make is hk.ball:
        assert grouping(interact(opinions + np.float32(3), make(threshold)).labels_s) == plain


def test_translation_changes_the_cosine():  # invariant 6
    opinions = np.asarray([[1, 0], [0, 1], [-1, 0]], np.float32)
    assert interact(opinions, hk.cosine(0.9)).num_coalitions == 3
    assert interact(opinions + np.float32(100), hk.cosine(0.9)).num_coalitions == 1


def test_rescaled_clients_only_matter_without_normalization():  # H11
    rng = np.random.default_rng(3)
    scale = np.exp(rng.normal(size=(14, 1))).astype(np.float32)
    for seed in range(4):
        opinions = groups(14, 4, 4, 0.9, seed)
        for state_norm in ("init", "every_step"):
            one, other = (
                interact(x, hk.cosine(0.7), state_norm=state_norm)
                for x in (opinions, opinions * scale)
            )
            np.testing.assert_array_equal(one.labels_s, other.labels_s)


@pytest.mark.parametrize("dim", [3, 100_003])
def test_duplicates_share_a_coalition(dim):  # invariant 7
    opinions = np.random.default_rng(4).normal(size=(6, dim)).astype(np.float32)
    opinions = opinions[[0, 1, 2, 3, 4, 5, 3, 0]]
    for neighborhood in (hk.ball(0.0), hk.cosine(1.0), hk.unit_ball(0.0), hk.band(1.0, 1.0)):
        assert interact(opinions, neighborhood).labels_s.tolist() == [0, 1, 2, 3, 4, 5, 3, 0]


def test_lq_coordinates_give_the_same_run():  # invariant 8
    opinions = groups(9, 40, 3, 0.8, seed=8)
    lower = np.linalg.qr(opinions.T.astype(np.float64))[1].T.astype(np.float32)
    one, other = (interact(x, hk.cosine(0.6)) for x in (opinions, lower))
    np.testing.assert_array_equal(one.labels_s, other.labels_s)
    np.testing.assert_allclose(one.influence_ss, other.influence_ss, atol=1e-6)


@pytest.mark.parametrize("tau", [-0.5, 0.3, 0.8, 0.99])
def test_weights_by_size_are_the_uniform_mean(tau):  # invariants 3 and 9
    opinions = groups(11, 5, 3, 0.6, seed=9)
    result = interact(opinions, hk.cosine(tau))
    weights = np.asarray(result.weights_s)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)
    assert np.all(weights > 0)
    sizes = np.asarray(result.sizes_s)[np.asarray(result.labels_s)]
    by_size = weights * sizes * int(result.num_coalitions) / 11
    np.testing.assert_allclose(by_size, 1 / 11, rtol=1e-6)
    model = hk.average(opinions, result.weights_s)
    centers = np.asarray(hk.barycenters(opinions, result.labels_s))
    names = np.flatnonzero(np.asarray(result.sizes_s))
    np.testing.assert_allclose(model, centers[names].mean(axis=0), rtol=1e-4, atol=1e-6)


def test_model_depends_on_opinions_through_labels_only():  # invariant 10
    opinions = groups(10, 5, 3, 0.5, seed=10)
    models = np.random.default_rng(0).normal(size=(10, 7)).astype(np.float32)
    nudged = opinions + np.float32(1e-5) * groups(10, 5, 3, 0.5, seed=1)
    one, other = (interact(x, hk.cosine(0.7)) for x in (opinions, nudged))
    np.testing.assert_array_equal(one.labels_s, other.labels_s)
    np.testing.assert_array_equal(
        hk.average(models, one.weights_s), hk.average(models, other.weights_s)
    )


def test_zero_opinions():
    opinions = np.asarray([[0, 0], [1, 0], [0, 0], [1, 0.01]], np.float32)
    result = interact(opinions, hk.cosine(0.5))
    assert result.labels_s.tolist() == [0, 1, 2, 1]
    assert np.all(np.isfinite(result.influence_ss))
    for state_norm in ("init", "every_step"):
        result = interact(opinions, hk.cosine(0.5), state_norm=state_norm)
        assert result.labels_s.tolist() == [0, 1, 2, 1]
    assert interact(opinions, hk.ball(0.5)).labels_s.tolist() == [0, 1, 0, 1]
    assert interact(opinions, hk.cosine(0.0)).num_coalitions == 1
    assert interact(np.zeros((3, 2), np.float32), hk.ball(0.0)).num_coalitions == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.5))
@example(0, 0.0)
@example(1, 0.5)
def test_components_equal_scipy_and_networkx(seed, density):
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.random((17, 17)) < density, 1)
    links = upper | upper.T
    labels = np.asarray(jax.jit(hk.components)(links))
    _, theirs = scipy.sparse.csgraph.connected_components(links)
    assert grouping(labels) == grouping(theirs)
    graph = networkx.from_numpy_array(links)
    assert grouping(labels) == {frozenset(c) for c in networkx.connected_components(graph)}
    assert all(labels[k] == k and k == min(np.flatnonzero(labels == k)) for k in set(labels))


def test_components_of_a_long_shuffled_chain():
    order = np.random.default_rng(0).permutation(300)
    links = np.zeros((300, 300), bool)
    links[order[:-1], order[1:]] = links[order[1:], order[:-1]] = True
    assert np.all(np.asarray(hk.components(links)) == 0)


@functools.cache
def sizes_of_run():
    return jax.jit(lambda x, n, m: hk.interact(x, n, mask=m))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["ball", "cosine", "band"]),
    st.floats(0.0, 1.0),
    st.sampled_from([1e-6, 1e-3, 1.0]),
    st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_random_inputs(seed, kind, threshold, noise, mask):
    rng = np.random.default_rng(seed)
    opinions = rng.normal(size=4) + noise * rng.normal(size=(9, 4))
    opinions = opinions.astype(np.float32)
    mask = np.asarray(mask)
    if kind == "ball":
        neighborhood, args = hk.ball(threshold * noise), ("ball", threshold * noise)
    elif kind == "cosine":
        limit = threshold * noise**2
        neighborhood = hk.Neighborhood("cosine", np.float32(limit), np.float32(0))
        args = ("cosine", limit)
    else:
        limit, floor = threshold * noise**2, 0.3 * threshold * noise**2
        neighborhood = hk.Neighborhood("cosine", np.float32(limit), np.float32(floor))
        args = ("cosine", limit, floor)
    result = sizes_of_run()(opinions, neighborhood, mask)
    labels = np.asarray(result.labels_s)
    assert np.all((labels >= 0) == mask)
    assert int(result.num_coalitions) == len(grouping(labels))
    sizes = np.asarray(result.sizes_s)
    assert sizes.sum() == mask.sum()
    weights = np.asarray(result.weights_s)
    assert np.all(np.isfinite(weights)) and np.all(weights[~mask] == 0)
    np.testing.assert_allclose(weights.sum(), 1.0 if mask.any() else 0.0, rtol=1e-6)
    influence = np.asarray(result.influence_ss)
    assert np.all(influence[~mask] == 0) and np.all(influence[:, ~mask] == 0)
    if mask.any() and result.margin > 1e-3 and result.converged:
        expected = reference.interact(opinions[mask], *args)
        ours = np.searchsorted(np.flatnonzero(mask), labels[mask])
        assert ours.tolist() == expected.labels.tolist()


def test_thresholds_keep_their_digits():
    assert np.float64(hk.cosine(1 - 1e-7).limit) == pytest.approx(1e-7, rel=1e-6)
    assert np.float64(hk.unit_ball(1e-4).limit) == pytest.approx(5e-9, rel=1e-6)
    assert jnp.shape(hk.band(np.array([0.1, 0.2]), 0.9).floor) == (2,)
