"""Choices of the methods the papers compare with, one by one: selection, weights, averages,
groupings, matching, local steps. What whole rounds do is in test_method_rounds.py."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from scipy import stats
from scipy.cluster import hierarchy
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import AffinityPropagation, AgglomerativeClustering
from test_rules import apply, blobs

from fedjax_hk import keys, models, parallel
from fedjax_hk.round import uplink
from fedjax_hk.round.training import make_trainer
from fedjax_hk.rules import selection
from fedjax_hk.rules.affinity_propagation import affinity_propagation
from fedjax_hk.rules.agglomerative import agglomerate
from fedjax_hk.rules.alignment import aligned, hidden_neurons, match, permuted
from fedjax_hk.rules.weighting import client_weights, distance_factor, krum_factor
from fedjax_hk.settings.choices import implementation
from fedjax_hk.settings.config import SETTINGS
from fedjax_hk.types import HParams

HPARAMS = jax.tree.map(np.float32, HParams())


def grouping_of(labels):
    """Labels as the smallest member of each group."""
    labels = list(labels)
    return np.array([labels.index(label) for label in labels])


# Who takes part


def test_fewer_and_fewer_clients_are_asked():
    hparams = HPARAMS._replace(min_clients=np.float32(5))
    counts = [int(selection.num_sampled(np.int32(t), 100, 100, hparams)) for t in range(0, 60, 6)]
    assert counts == [100, 75, 55, 41, 31, 23, 17, 13, 10, 7]
    late = np.int32(1000)
    assert selection.num_sampled(late, 100, 100, hparams) == 5
    assert selection.num_sampled(late, 100, 100, HPARAMS) == 10  # a tenth of the fleet
    assert selection.num_sampled(late, 9, 9, HPARAMS) == 2
    assert selection.num_sampled(late, 4, 9, hparams) == 4  # never more than there are places
    still = hparams._replace(select_decay=np.float32(0))
    assert selection.num_sampled(late, 70, 100, still) == 70


def test_the_farthest_are_asked_and_the_unseen_before_them():
    drawn = keys.client_keys(jax.random.key(0), keys.SELECT, 0, np.arange(6, dtype=np.uint32))
    hparams = HPARAMS._replace(min_clients=np.float32(1), select_decay=np.float32(np.log(2)))
    distances = selection.no_distances(6)
    draw = functools.partial(selection.distance_decay, hparams=hparams)
    first = draw(distances, drawn, 4)
    # Nobody is known: those whom uniform selection takes.
    np.testing.assert_array_equal(
        first.clients_s, selection.uniform((), drawn, 4, hparams).clients_s
    )
    assert first.num_asked == 4 and first.sampled_s.all()
    distances = selection.Distances(jnp.array([1.0, 5.0, jnp.inf, 3.0, 4.0, 0.0]), jnp.int32(1))
    second = draw(distances, drawn, 4)
    assert second.num_asked == 2
    np.testing.assert_array_equal(second.clients_s[:2], [1, 2])
    np.testing.assert_array_equal(second.sampled_s, [True, True, False, False])
    assert sorted(second.clients_s.tolist()) == [1, 2, 3, 4]
    # Client 2 answers nothing usable and goes last; client 1 is silent and keeps its place;
    # who was not asked keeps its distance.
    answered = jnp.array([False, True, False, False])
    after = selection.observed(
        distances,
        second.clients_s,
        second.sampled_s,
        jnp.array([9.0, jnp.nan, 9, 9]),
        jnp.zeros(4, bool),
        answered,
    )
    np.testing.assert_array_equal(after.last_n, [1, 5, 0, 3, 4, 0])
    assert after.rounds == 2


@pytest.mark.parametrize(("chunk", "devices"), [(2, 1), (2, 2), (9, 2)])
def test_map_over_the_first_clients(chunk, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("clients",))
    rows, chunks = jnp.arange(14.0).reshape(7, 2), []

    def one_chunk(block, shared):
        jax.debug.callback(lambda _: chunks.append(len(block)), block)
        return {"sum": block.sum(axis=1) + shared}

    @jax.jit
    def run(rows, count):
        return parallel.map_clients(
            one_chunk, rows, jnp.float32(10), mesh=mesh, chunk=chunk, count=count
        )["sum"]

    sums, width = np.asarray(rows).sum(axis=1) + 10, 2 if chunk == 2 else 4
    for count in (0, 1, 3, 7):
        chunks.clear()
        found = np.asarray(run(rows, jnp.int32(count)))
        jax.effects_barrier()
        np.testing.assert_array_equal(found, np.where(np.arange(7) < count, sums, 0))
        # Every device does as little as it can.
        assert chunks == [width] * devices * -(-count // (devices * width))


# Weights


def fedcw_weights(samples, apart, beta, labels=None, scale="raw"):
    labels = np.zeros(len(samples), np.int32) if labels is None else np.asarray(labels, np.int32)
    samples, apart = np.asarray(samples, np.int32), np.asarray(apart, np.float32)
    factor = distance_factor(apart, labels, samples, np.float32(beta), scale=scale)
    options = {"within": "distance", "between": "samples", "factor_s": factor}
    return np.asarray(client_weights(labels, samples, **options)[0])


def test_distance_weights():
    samples, apart = (100, 200, 50), np.array([12.0, 3.0, 30.0])
    known = fedcw_weights(samples, apart, 0.1)
    np.testing.assert_allclose(known, [0.206699, 0.168075, 0.625227], atol=1e-6)
    np.testing.assert_allclose(fedcw_weights(samples, apart + 40, 0.1), known, rtol=1e-4)
    by_samples = np.array(samples) / 350
    np.testing.assert_allclose(fedcw_weights(samples, apart, 0.0), by_samples, rtol=1e-6)
    np.testing.assert_allclose(fedcw_weights(samples, [7, 7, 7], 3.0), by_samples, rtol=1e-6)
    np.testing.assert_allclose(fedcw_weights(samples, apart, 30.0), [0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(fedcw_weights(samples, apart, -30.0), [0, 1, 0], atol=1e-6)
    # Over the mean, neither unit nor size of the model matter.
    scaled = fedcw_weights(samples, apart, 0.5, scale="mean")
    np.testing.assert_allclose(fedcw_weights(samples, 9 * apart, 0.5, scale="mean"), scaled, 1e-5)
    np.testing.assert_allclose(fedcw_weights(samples, apart, 0.5 / 15), scaled, rtol=1e-5)
    # Left out, or without windows.
    some = fedcw_weights((100, 200, 0), [12, np.nan, 3], 0.1, labels=[0, -1, 0])
    np.testing.assert_allclose(some, [1, 0, 0])
    nobody = fedcw_weights(samples, apart, 0.1, labels=[-1, -1, -1])
    assert not nobody.any()


def test_distance_weights_within_coalitions():
    labels, samples = [0, 0, 2, 2], (10, 30, 20, 20)
    found = fedcw_weights(samples, [1.0, 2.0, 500.0, 501.0], 1.0, labels=labels)
    for pair, apart in (((0, 1), (1.0, 2.0)), ((2, 3), (0.0, 1.0))):
        mass = np.array([samples[i] for i in pair]) * np.exp(apart)
        np.testing.assert_allclose(found[list(pair)], 0.5 * mass / mass.sum(), rtol=1e-4)


@pytest.mark.parametrize("trim", [0.0, 0.2, 0.4])
def test_krum_equals_loops(trim):
    rng = np.random.default_rng(0)
    for labels in ([0] * 9, [0, 1, 0, 1, 0, -1, 0, 0, 8]):
        opinions = rng.standard_normal((9, 4)).astype(np.float32)
        found = krum_factor(opinions, np.array(labels, np.int32), np.float32(trim))
        np.testing.assert_array_equal(found, reference.multi_krum(opinions, labels, trim))


def test_krum_leaves_out_who_is_far():
    rng = np.random.default_rng(1)
    models = rng.standard_normal((10, 6)).astype(np.float32)
    models[[2, 7]] += 50
    kept = krum_factor(models, np.zeros(10, np.int32), np.float32(0.2))
    np.testing.assert_array_equal(np.flatnonzero(kept == 0), [2, 7])


# Averages


def average(name, models, weights=None, *, start=None, effort=None, trim=0.2):
    models = np.asarray(models, np.float32)
    weights = np.full(len(models), 1 / len(models)) if weights is None else weights
    start = np.zeros_like(models) if start is None else start
    effort = np.ones(len(models)) if effort is None else effort
    arguments = (models, start, *(np.asarray(x, np.float32) for x in (weights, effort, trim)))
    return np.asarray(implementation("average", name)(*map(jnp.asarray, arguments)))


@pytest.mark.parametrize("size", [1, 2, 5, 6, 10, 23])
def test_robust_averages_equal_scipys(size):
    models = np.random.default_rng(size).standard_normal((size, 7))
    np.testing.assert_allclose(average("median", models), np.median(models, axis=0), rtol=1e-5)
    for trim in (0.0, 0.1, 0.2, 0.4):
        expected = stats.trim_mean(models, trim, axis=0)
        found = average("trimmed_mean", models, trim=trim)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@given(
    weights=st.lists(st.integers(0, 3), min_size=5, max_size=5).filter(any),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_a_weight_stands_for_as_many_clients(weights, seed):
    models = np.random.default_rng(seed).standard_normal((5, 3))
    share = np.array(weights) / sum(weights)
    wild = np.where((share > 0)[:, None], models, np.nan)  # weightless: whatever it holds
    expected = np.median(np.repeat(models, weights, axis=0), axis=0)
    np.testing.assert_allclose(average("median", wild, share), expected, rtol=1e-4, atol=1e-6)
    expected = np.average(models, axis=0, weights=share)
    found = average("trimmed_mean", wild, share, trim=0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_nova():
    rng = np.random.default_rng(0)
    models, start = rng.standard_normal((2, 4, 3)).astype(np.float32)
    start[:] = start[0]
    weights = np.array([0.1, 0.2, 0.3, 0.4])
    same = average("nova", models, weights, start=start, effort=np.full(4, 7.0))
    np.testing.assert_allclose(same, weights @ models, rtol=1e-4)
    effort = np.array([1.0, 2.0, 5.0, 9.0])
    found = average("nova", models, weights, start=start, effort=effort)
    direction = (weights / effort) @ (models - start)
    np.testing.assert_allclose(found, start[0] + (weights @ effort) * direction, rtol=1e-4)
    # Who did nothing neither moves the model nor breaks it.
    effort[0], models[0] = 0, start[0]
    assert np.isfinite(average("nova", models, weights, start=start, effort=effort)).all()


@pytest.mark.parametrize(
    ("optimizer", "objective", "steps", "expected"),
    [
        (optax.sgd, "plain", 7, 7.0),
        (functools.partial(optax.sgd, momentum=0.9), "plain", 7, 23.046721),
        (optax.sgd, "prox", 7, 6.033254),
        (functools.partial(optax.sgd, momentum=0.9), "prox", 7, 18.311565),
        (optax.adam, "plain", 90, 90.0),
    ],
)
def test_coefficients_of_the_optimizer(optimizer, objective, steps, expected, tiny_model):
    # The known values are for a learning rate times mu of 0.05.
    trainer = make_trainer(tiny_model("line"), objective=objective, optimizer=optimizer)
    hparams = HPARAMS._replace(learning_rate=np.float32(0.1), mu=np.float32(0.5))
    found = trainer.coefficients(steps, hparams)
    assert found.shape == (steps + 1,) and found[0] == 0
    np.testing.assert_allclose(found[-1], expected, rtol=3e-5)


# Coalitions by other means


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preference", [None, -0.7])
def test_affinity_propagation_equals_scikit_learns(seed, preference):
    opinions, _ = blobs(seed=seed, scale=0.6, sizes=(6, 5, 4))
    units = opinions / np.linalg.norm(opinions, axis=1, keepdims=True)
    similarity = (units @ units.T - 1).astype(np.float32)
    np.fill_diagonal(similarity, 0)
    peer_preference = np.median(similarity[~np.eye(15, dtype=bool)])
    peer = AffinityPropagation(
        affinity="precomputed",
        preference=peer_preference if preference is None else preference,
        random_state=0,
    ).fit(similarity)
    found = _propagate(similarity, np.ones(15, bool), preference=preference)
    assert found.converged
    np.testing.assert_array_equal(grouping_of(found.exemplar_s), grouping_of(peer.labels_))
    exemplar_s = np.asarray(found.exemplar_s)
    np.testing.assert_array_equal(exemplar_s[exemplar_s], exemplar_s)


@functools.partial(jax.jit, static_argnames="preference")
def _propagate(similarity, mask, preference=None):
    draws = jax.random.uniform(jax.random.key(0), (len(mask),))
    return affinity_propagation(similarity, mask, draws, preference=preference)


def test_affinity_propagation_ends():
    opinions, expected = blobs()
    info, _ = apply("affinity_propagation", opinions)
    np.testing.assert_array_equal(info.labels_s, expected)
    assert info.converged and info.num_steps < 200
    few, _ = apply("affinity_propagation", opinions, preference=-50.0)
    assert not np.any(few.labels_s)
    many, _ = apply("affinity_propagation", opinions, preference=0.5)
    np.testing.assert_array_equal(many.labels_s, np.arange(9))
    alike, _ = apply("affinity_propagation", np.ones((9, 5)))
    assert not np.any(alike.labels_s)
    # Who takes no part changes nothing for the others.
    mask = np.arange(9) != 4
    found, _ = apply("affinity_propagation", opinions, mask=mask)
    rest, _ = apply("affinity_propagation", opinions[mask])
    np.testing.assert_array_equal(grouping_of(found.labels_s[mask]), grouping_of(rest.labels_s))
    one, _ = apply("affinity_propagation", opinions[:1])
    assert one.labels_s.tolist() == [0]


@pytest.mark.parametrize("linkage", SETTINGS["linkage"].choices)
def test_agglomeration_equals_scikit_learns(linkage):
    opinions, _ = blobs(seed=2, scale=2.0, sizes=(5, 4, 3))
    apart = squareform(pdist(opinions)).astype(np.float32)
    merge = jax.jit(functools.partial(agglomerate, linkage=linkage))
    heights = hierarchy.linkage(pdist(opinions), linkage)[:, 2]
    for limit in (0.0, *(heights[:-1] + np.diff(heights) / 2), np.inf):
        labels, merges = merge(apart, np.ones(12, bool), np.float32(limit))
        peer = AgglomerativeClustering(
            n_clusters=None, distance_threshold=min(limit, 1e9), linkage=linkage
        ).fit(opinions)
        np.testing.assert_array_equal(labels, grouping_of(peer.labels_))
        assert merges == 12 - len(set(peer.labels_))
    # Masked clients are in no coalition and in nobody's way.
    mask = np.arange(12) % 3 != 1
    labels, _ = merge(np.where(mask[:, None] & mask, apart, np.nan), mask, np.float32(heights[4]))
    rest, _ = merge(apart[np.ix_(mask, mask)], np.ones(8, bool), np.float32(heights[4]))
    np.testing.assert_array_equal(grouping_of(np.asarray(labels)[mask]), grouping_of(rest))
    assert (np.asarray(labels)[~mask] == -1).all()


def test_fedclust_is_one_shot_and_newcomers_join_the_nearest():
    opinions, expected = blobs(sizes=(4, 3, 2))
    hparams = HParams(epsilon=3.0)
    first = expected != expected[8]  # client 8's group is new later
    mask = first | (np.arange(9) == 8)
    options = {"hparams": hparams, "use_epsilon": True, "planted": np.zeros(9, np.int32)}
    info, state = apply("agglomerative", opinions, mask=mask, **options)
    np.testing.assert_array_equal(grouping_of(info.labels_s[mask]), grouping_of(expected[mask]))
    assert (info.labels_s[~mask] == -1).all()
    # Everybody moves far away, and all others are new: they join, nobody else moves.
    later, state = apply("agglomerative", opinions + 0.01, state=state, **options)
    np.testing.assert_array_equal(later.labels_s, expected)
    shuffled = np.random.default_rng(0).permutation(opinions)
    for _ in range(2):
        again, state = apply("agglomerative", shuffled, state=state, **options)
        np.testing.assert_array_equal(again.labels_s, expected)
    # Rows are other clients in other rounds.
    order = np.array([8, 3, 0, 5, 1, 2, 4, 6, 7])
    turned, _ = apply("agglomerative", opinions, state=state, clients=order, **options)
    np.testing.assert_array_equal(turned.labels_s, grouping_of(expected[order]))


def test_fedclust_ends():
    opinions, _ = blobs()
    for epsilon, labels in ((0.0, np.arange(9)), (1e9, np.zeros(9))):
        hparams = HParams(epsilon=epsilon)
        info, _ = apply("agglomerative", opinions, use_epsilon=True, hparams=hparams)
        np.testing.assert_array_equal(info.labels_s, labels)


def test_planted_groups_are_taken_as_they_are():
    planted = np.array([1, 0, -1, 1, -1, 0, 0, 1, 0], np.int32)
    info, _ = apply("planted", blobs()[0], planted=planted)
    np.testing.assert_array_equal(info.labels_s, [0, 1, 2, 0, 4, 1, 1, 0, 1])
    order = np.arange(9)[::-1]
    info, _ = apply("planted", blobs()[0], planted=planted, clients=order)
    np.testing.assert_array_equal(info.labels_s, grouping_of([0, 1, 0, 0, 4, 1, 2, 0, 1]))


# Matching hidden units


class Perceptron(nn.Module):
    forward_layers = (("a", "linen_dense"), ("b", "linen_dense"), ("c", "linen_dense"))

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for name, units in (("a", 6), ("b", 5)):
            x = nn.relu(nn.Dense(units, name=name, bias_init=nn.initializers.normal(0.3))(x))
        return nn.Dense(1, name="c")(x)


class Convolutional(nn.Module):
    forward_layers = (("a", "conv"), ("b", "conv"), ("c", "linen_dense"), ("d", "linen_dense"))

    @nn.compact
    def __call__(self, x):
        for name, channels in (("a", 4), ("b", 3)):
            x = nn.relu(nn.Conv(channels, (3, 3), name=name)(x))
        x = nn.relu(nn.Dense(5, name="c")(x.reshape(len(x), -1)))
        return nn.Dense(1, name="d")(x)


def network(kind):
    key = jax.random.key(0)
    if kind == "lstm":
        inputs = jax.random.normal(key, (3, 5, 2))
        model = models.lstm_forecaster(
            inputs, neurons=(6, 4), dense_neurons=3, dropout=0.0, output="linear"
        )
    else:
        inputs = jax.random.normal(key, (3, 4, 4, 2))
        module = Perceptron() if kind == "mlp" else Convolutional()
        model = models.from_flax(module, inputs)
    return model, inputs


@pytest.mark.parametrize(
    "kind",
    ["lstm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mlp", "cnn"))],
)
def test_matched_averaging(kind):
    model, inputs = network(kind)
    units = hidden_neurons(model)
    assert len(units) == len(model.layers) - 1
    params = model.init(jax.random.key(1))
    # Every hidden parameter belongs to a unit, and none to two in the same step.
    for layer in units:
        for part in layer.parts:
            assert len(np.unique(part)) == part.size
    rng = np.random.default_rng(0)

    def shuffle(x):
        for layer in units:
            x = permuted(x, jnp.asarray(rng.permutation(len(layer.features_hk))), layer)
        return x

    expected = model.apply(params, inputs, None)
    turned = [shuffle(params) for _ in range(3)]
    for one in turned:
        assert np.abs(one - params).max() > 0.1
        np.testing.assert_allclose(model.apply(one, inputs, None), expected, rtol=1e-4, atol=1e-5)
    stacked = jnp.stack([params, *turned])
    fit = jax.jit(lambda models_sd, reference: aligned(
        models_sd, reference, jnp.full(4, 0.25), units))  # fmt: skip
    # The copies come back to the reference's order, whatever it is, and average to it.
    for reference_ in (params, turned[1]):
        np.testing.assert_allclose(fit(stacked, reference_), jnp.stack([reference_] * 4))
    naive = model.apply(stacked.mean(axis=0), inputs, None)
    assert np.abs(naive - expected).max() > 1e-2
    # Models that fit as they are, stay as they are: FedMA is FedAvg then.
    near = stacked[:1] + 0.01 * jax.random.normal(jax.random.key(2), (4, params.size))
    np.testing.assert_array_equal(fit(near, params), near)


def test_matching_is_the_cheapest_assignment():
    model, _ = network("mlp")
    first = hidden_neurons(model)[:1]
    ours, theirs = (model.init(jax.random.key(seed)) for seed in (1, 2))
    matched = jax.jit(lambda a, b: match(a, b, first))(ours, theirs)
    a, b = (np.asarray(x)[first[0].features_hk] for x in (ours, theirs))
    _, order = linear_sum_assignment(((b[:, None, :] - a[None, :, :]) ** 2).sum(axis=2))
    np.testing.assert_array_equal(np.asarray(matched)[first[0].features_hk], a[order])


def test_models_that_cannot_be_matched_are_refused(tiny_model):
    model = tiny_model("line")
    assert hidden_neurons(model) == ()
    with pytest.raises(ValueError, match=r"--align=neurons: .*`forward_layers`.*--align=none"):
        hidden_neurons(model._replace(layers=None))


# Disturbances


def test_attackers_are_a_share_of_the_fleet_by_name():
    ids = np.arange(20, dtype=np.uint32)
    bad = np.asarray(uplink.attackers(jax.random.key(0), ids, np.float32(0.2)))
    assert bad.sum() == 4
    order = np.random.default_rng(0).permutation(20)
    turned = uplink.attackers(jax.random.key(0), ids[order], np.float32(0.2))
    np.testing.assert_array_equal(turned, bad[order])
    other = uplink.attackers(jax.random.key(1), ids, np.float32(0.2))
    assert (np.asarray(other) != bad).any()


def test_attacks():
    base, update = np.full((2, 400), 3.0, np.float32), np.ones((2, 400), np.float32)
    drawn = jax.random.split(jax.random.key(0), 2)

    def send(kind):
        made = implementation("attack", kind)(update, drawn, np.float32(10))
        return base + np.asarray(made) - base

    np.testing.assert_allclose(send("sign_flip"), -10 * update, rtol=1e-5)
    np.testing.assert_allclose(send("scale"), 10 * update, rtol=1e-5)
    noise = send("noise")
    np.testing.assert_allclose((noise - 1).std(axis=1), 10, rtol=0.15)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.2
