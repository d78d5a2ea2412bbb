"""A round: equalities between rules, who is left out, who is served what, its figures."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import Mesh

from fedjax_hk import hk, keys, parallel
from fedjax_hk.round import engine as engine_lib
from fedjax_hk.round import measures
from fedjax_hk.round.state import RoundInfo
from fedjax_hk.rules import selection
from fedjax_hk.settings.choices import OPINION, implementation
from fedjax_hk.tasks import TASKS
from fedjax_hk.types import HParams

NUM = 6
HPARAMS = HParams(learning_rate=0.05, tau=0.5)


def equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@functools.cache
def train_alone(trainer):
    """One client's training, compiled once for all that ask."""
    return jax.jit(trainer.train)


def locals_of(fed, fleet, state, info, *, seed=0, number=0, hparams=HPARAMS):
    """The cohort's local models, trained one by one with the same keys."""
    hparams, models = jax.tree.map(np.float32, hparams), []
    train, starts = train_alone(fed.trainer), state.memory_n.get("start")
    for client in info.cohort_s:
        start = state.params if starts is None else starts[client]
        key = keys.client_key(jax.random.key(seed), keys.TRAIN, number, client)
        one = jax.tree.map(lambda x, client=client: x[client], fleet.train)
        result = train(start, fed.trainer.init_optimizer(start), one, key, 4, hparams)
        models.append(np.asarray(result.params, np.float64))
    return np.array(models)


# Rules that must agree


def test_fedprox_without_pull_is_fedavg_to_the_bit(federation, fleet):
    fedavg, _ = federation("fedavg").run(fleet(), rounds=3, hparams=HPARAMS)
    fedprox, _ = federation("fedprox").run(fleet(), rounds=3, hparams=HPARAMS._replace(mu=0.0))
    equal(fedavg.params, fedprox.params)
    pulled, _ = federation("fedprox").run(fleet(), rounds=3, hparams=HPARAMS._replace(mu=9.0))
    assert (np.asarray(pulled.params) != np.asarray(fedavg.params)).any()


def test_groupings_that_change_nothing_are_the_uniform_mean(federation, fleet):
    uniform = {"within": "uniform", "between": "size"}
    expected, (info,) = federation("fedavg", choices=uniform).run(fleet(), hparams=HPARAMS)
    assert info.changes_nothing
    np.testing.assert_allclose(info.weights_s, np.full(NUM, 1 / NUM), rtol=1e-6)

    def check(fed, hparams, num_coalitions):
        state, (info,) = fed.run(fleet(), hparams=hparams)
        assert info.num_coalitions == num_coalitions
        assert info.changes_nothing
        np.testing.assert_allclose(state.params, expected.params, rtol=1e-6, atol=1e-7)

    check(federation("hk_cosine"), HPARAMS._replace(tau=-1.0), 1)
    check(federation("hk_cosine"), HPARAMS._replace(tau=1.0), NUM)
    check(federation("fixed_k_cosine", num_coalitions=1), HPARAMS, 1)
    sized = federation("hk_cosine", choices={"between": "size", "opinion": "centered"})
    state, (info,) = sized.run(fleet(), hparams=HPARAMS)
    assert 1 < info.num_coalitions < NUM
    np.testing.assert_allclose(state.params, expected.params, rtol=1e-6, atol=1e-7)


def test_local_is_training_alone(federation, fleet):
    fed, few = federation("local"), fleet()
    state, _ = fed.run(few, rounds=3, hparams=HPARAMS)
    alone = fed.start()
    for number in range(3):
        nothing = dict.fromkeys(RoundInfo._fields)
        info = RoundInfo(**nothing | {"cohort_s": np.arange(NUM)})
        models = locals_of(fed, few, alone, info, number=number)
        alone = alone._replace(memory_n={"start": jnp.asarray(models, jnp.float32)})
    np.testing.assert_allclose(
        state.memory_n["start"], alone.memory_n["start"], rtol=1e-5, atol=1e-6
    )
    assert len(np.unique(np.asarray(state.memory_n["start"]), axis=0)) == NUM


@pytest.mark.parametrize("agg", ["fedavg", "hk_cosine"])
def test_one_client_is_local_training(agg, federation, fleet):
    fed, one = federation(agg, num_clients=1), fleet((7,))
    state, (info,) = fed.run(one, hparams=HPARAMS)
    expected = locals_of(fed, one, fed.start(), info)[0]
    np.testing.assert_allclose(state.params, expected, rtol=1e-5)
    assert info.weights_s == 1 and info.labels_s == 0 and np.isnan(info.dissimilarity_q).all()


def test_two_clients(federation, fleet):
    fed = federation("hk_cosine", num_clients=2)
    for tau, num in ((-1.0, 1), (1 - 1e-7, 2)):
        _, (info,) = fed.run(fleet((7, 5)), hparams=HPARAMS._replace(tau=tau))
        assert info.num_coalitions == num and info.weights_s.tolist() == [0.5, 0.5]


# A round against loops


def test_round_against_loops(federation, fleet):
    """Weights, mean, barycenters, and the figures of eqs. (3), (5) and (8)."""
    fed = federation(
        "hk_cosine",
        choices={"opinion": "centered", "serve": "coalition"},
        gradient_spread=True,
    )
    few, start = fleet(), fed.start()
    state, (info,) = fed.run(few, hparams=HPARAMS)
    models = locals_of(fed, few, start, info)
    sizes = few.train.mask.sum(axis=1)
    weights, _ = reference.client_weights(info.labels_s, sizes, "uniform", "equal")
    assert 1 < info.num_coalitions < NUM and not info.changes_nothing
    np.testing.assert_allclose(info.weights_s, weights, rtol=1e-6)
    np.testing.assert_allclose(state.params, weights @ models, rtol=1e-5)
    centers = np.array([models[info.labels_s == label].mean(axis=0) for label in info.labels_s])
    np.testing.assert_allclose(state.memory_n["start"], centers, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(info.cohort_s, np.arange(NUM))

    share = sizes / sizes.sum()
    dispersion = share @ ((models - share @ models) ** 2).sum(axis=1)
    np.testing.assert_allclose(info.dispersion, dispersion, rtol=1e-4)
    within = sum(reference.one_minus_cos(m, c) for m, c in zip(models, centers, strict=True))
    np.testing.assert_allclose(info.within_spread, within, rtol=1e-4, atol=1e-6)

    opinions = models - models.mean(axis=0)
    apart = [[reference.one_minus_cos(a, b) for b in opinions] for a in opinions]
    pairs = reference.pair_values(apart, np.ones(NUM, bool))
    expected = np.quantile(pairs, measures.QUANTILE_LEVELS)
    np.testing.assert_allclose(info.dissimilarity_q, expected, rtol=1e-4, atol=1e-6)

    grads = []
    for i in range(NUM):
        x, y = few.train.inputs[i, : sizes[i], -1, 0], few.train.targets[i, : sizes[i]]
        params = np.asarray(state.params, np.float64)
        grads.append(reference.line_loss(params, list(zip(x, y, strict=True)))[1])
    mean = share @ np.array(grads)
    apart = np.mean([((g - mean) ** 2).sum() for g in grads])
    np.testing.assert_allclose(info.gradient_spread, apart, rtol=1e-4)
    np.testing.assert_allclose(info.gradient_norm, np.linalg.norm(mean), rtol=1e-4)

    # Everyone is judged with what it is served.
    served = np.asarray(state.memory_n["start"])
    forecast = served[:, :1] + served[:, 1:] * few.test.inputs[:, :, -1, 0]
    mse = ((forecast - few.test.targets) ** 2).mean(axis=1)
    np.testing.assert_allclose(info.errors.mse, mse, rtol=1e-4)


@pytest.mark.slow
def test_raw_radius_measures_distances(federation, fleet):
    fed, few = federation("hk_euclidean", use_epsilon=True), fleet()
    _, (info,) = fed.run(few, hparams=HPARAMS._replace(epsilon=0.1))
    models = locals_of(fed, few, fed.start(), info)
    apart = [[np.linalg.norm(a - b) for b in models] for a in models]
    pairs = reference.pair_values(apart, np.ones(NUM, bool))
    expected = np.quantile(pairs, measures.QUANTILE_LEVELS)
    np.testing.assert_allclose(info.dissimilarity_q, expected, rtol=1e-4)
    centers = np.array([models[info.labels_s == label].mean(axis=0) for label in info.labels_s])
    within = np.linalg.norm(models - centers, axis=1).sum()
    np.testing.assert_allclose(info.within_spread, within, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(info.limit, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["min_coalition", "opinion_leaves"])
def test_further_choices(choice, federation, fleet):
    options = {"min_coalition": 3} if choice == "min_coalition" else {"opinion_leaves": "slope"}
    fed = federation("hk_cosine", choices={"opinion": "centered"}, **options)
    _, (info,) = fed.run(fleet(), hparams=HPARAMS)
    if choice == "min_coalition":
        sizes = (info.labels_s[:, None] == info.labels_s[None, :]).sum(axis=1)
        assert (sizes < 3).any() and (sizes >= 3).any()
        np.testing.assert_array_equal(info.weights_s > 0, sizes >= 3)
    else:  # one number each: those above the mean, and those below
        models = locals_of(fed, fleet(), fed.start(), info)
        above = models[:, 1] > models[:, 1].mean()
        np.testing.assert_array_equal(info.labels_s == info.labels_s[0], above == above[0])


# Who takes part


@pytest.fixture(scope="module")
def sampled(federation):
    """Three of six clients a round, served their coalition's barycenter."""
    return federation(
        "hk_cosine",
        cohort=3,
        choices={"opinion": "update", "serve": "coalition"},
        keep_optimizer=True,
    )


def test_everyone_is_in_exactly_one_coalition(sampled, fleet):
    few = fleet()
    state, infos = sampled.start(), []
    for number in range(25):
        before = state
        state, (info,) = sampled.run(few, state=state, first=number, hparams=HPARAMS)
        infos.append(info)
        assert len(set(info.cohort_s)) == 3 and (np.diff(info.cohort_s) > 0).all()
        # Labels are positions within the cohort; a coalition is named by its first member.
        for position, label in enumerate(info.labels_s):
            assert 0 <= label <= position and info.labels_s[label] == label
        assert info.num_coalitions == len(set(info.labels_s))
        others = np.setdiff1d(np.arange(NUM), info.cohort_s)
        equal(
            np.asarray(state.memory_n["start"])[others],
            np.asarray(before.memory_n["start"])[others],
        )
        rest = jax.tree.map(
            lambda x, others=others: np.asarray(x)[others], before.memory_n["optimizer"]
        )
        equal(
            jax.tree.map(
                lambda x, others=others: np.asarray(x)[others], state.memory_n["optimizer"]
            ),
            rest,
        )
        served = np.asarray(state.memory_n["start"])[info.cohort_s]
        for label in set(info.labels_s):
            rows = served[info.labels_s == label]
            equal(rows, np.broadcast_to(rows[0], rows.shape))
    assert len({tuple(i.cohort_s) for i in infos}) > 5
    assert len({int(i.num_coalitions) for i in infos}) > 1
    # Kept optimizers have counted the steps of all rounds in which their client took part.
    steps = np.zeros(NUM)
    for info in infos:
        for client in info.cohort_s:
            steps[client] += 2 * -(-int(few.train.mask[client].sum()) // 4)
    np.testing.assert_array_equal(state.memory_n["optimizer"][0].count, steps)


def test_seeds(sampled, fleet):
    (first, one), (again, two), (_, three) = (
        sampled.run(fleet(), rounds=3, seed=seed, hparams=HPARAMS) for seed in (1, 1, 2)
    )
    equal(first, again)
    equal(one, two)
    assert any((a.cohort_s != b.cohort_s).any() for a, b in zip(one, three, strict=True))
    drawn = {
        tuple(np.asarray(jax.random.key_data(keys.client_key(jax.random.key(s), p, r, c))))
        for s in range(2) for p in range(4) for r in range(3) for c in range(5)
    }  # fmt: skip
    assert len(drawn) == 2 * 4 * 3 * 5


def test_cohorts_are_uniform_without_replacement():
    ids = jnp.arange(6, dtype=jnp.uint32)

    def cohort(seed, r, size):
        drawn = keys.client_keys(jax.random.key(seed), keys.SELECT, r, ids[: 6 if size == 3 else 4])
        return selection.uniform((), drawn, size, None).clients_s

    draw = jax.jit(jax.vmap(lambda r: cohort(0, r, 3)))
    cohorts = np.asarray(draw(jnp.arange(3000)))
    assert (np.diff(cohorts, axis=1) > 0).all()
    counts = np.bincount(cohorts.ravel(), minlength=6)
    assert abs(counts - 1500).max() < 5 * np.sqrt(3000 * 0.25)
    pairs = np.zeros((6, 6))
    for drawn in cohorts:
        pairs[np.ix_(drawn, drawn)] += 1
    expected = 3000 * 3 * 2 / (6 * 5)
    assert abs(pairs[np.triu_indices(6, 1)] - expected).max() < 5 * np.sqrt(3000 * 0.2 * 0.8)
    everyone = cohort(1, 0, 4)
    np.testing.assert_array_equal(everyone, range(4))


def test_who_is_sampled_does_not_depend_on_who_dropped_out(sampled, fleet):
    few, rng = fleet(), np.random.default_rng(0)
    _, infos = sampled.run(few, rounds=10, hparams=HPARAMS)
    state = sampled.start()
    for number, expected in enumerate(infos):
        dropped = few._replace(available_n=rng.random(NUM) > 0.5)
        state, (info,) = sampled.run(dropped, state=state, first=number, hparams=HPARAMS)
        equal(info.cohort_s, expected.cohort_s)
        equal(info.present_s, dropped.available_n[info.cohort_s])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("agg", ["fedavg", "hk_cosine", "fixed_k_cosine"])
@pytest.mark.parametrize("wild", [np.nan, np.inf])
def test_a_non_finite_client_is_as_if_it_were_not_there(agg, wild, federation, fleet):
    fed, client = federation(agg), 2
    few = fleet()
    absent = few._replace(available_n=np.arange(NUM) != client)
    broken = fleet()
    broken.train.inputs[client, 1] = wild
    expected, (without,) = fed.run(absent, hparams=HPARAMS)
    state, (info,) = fed.run(broken, hparams=HPARAMS)
    equal(state, expected)
    np.testing.assert_array_equal(info.finite_s, np.arange(NUM) != client)
    np.testing.assert_array_equal(info.present_s, without.present_s)
    for name in (
        "labels_s",
        "weights_s",
        "dissimilarity_q",
        "dispersion",
        "within_spread",
        "errors",
    ):
        equal(getattr(info, name), getattr(without, name))
    assert without.finite_s.all() and info.labels_s[client] == -1


def test_gradient_dissimilarity_leaves_non_finite_clients_out(federation, fleet):
    fed = federation(
        "hk_cosine",
        choices={"opinion": "centered", "serve": "coalition"},
        gradient_spread=True,
    )
    broken = fleet()
    broken.train.inputs[2] = np.nan
    _, (info,) = fed.run(broken, hparams=HPARAMS)
    assert np.isfinite(info.gradient_spread) and np.isfinite(info.gradient_norm)


@pytest.mark.parametrize("reason", ["unavailable", "empty", "non-finite"])
def test_nobody_left(reason, federation, fleet):
    options = {"choices": {"server_opt": "adam"}, "keep_optimizer": True}
    for agg in ("fixed_k_euclidean", "local"):
        fed = federation(agg, **(options if agg != "local" else {}))
        few = fleet((0,) * NUM, width=8) if reason == "empty" else fleet()
        earlier, _ = fed.run(fleet(), rounds=2, hparams=HPARAMS)
        if reason == "unavailable":
            few = few._replace(available_n=np.zeros(NUM, bool))
        if reason == "non-finite":
            few.train.targets[:] = np.where(few.train.mask, np.nan, 0)
        state, (info,) = fed.run(few, state=earlier, first=2, hparams=HPARAMS)
        equal(state, earlier)
        assert not info.present_s.any() and (info.labels_s == -1).all()
        assert not info.weights_s.any() and info.num_coalitions == 0
        assert np.isnan(info.dissimilarity_q).all()
        assert np.isfinite(info.dispersion) and np.isfinite(info.within_spread)


def test_clients_of_all_sizes_in_one_cohort(federation, fleet):
    sizes = (0, 1, 3, 4, 5, 40)
    state, (info,) = federation("fedavg").run(fleet(sizes), hparams=HPARAMS)
    np.testing.assert_allclose(info.weights_s, np.array(sizes) / 53, rtol=1e-6)
    np.testing.assert_array_equal(info.present_s, np.array(sizes) > 0)
    assert np.isfinite(state.params).all()


def test_dead_clients_are_counted(federation, fleet):
    fed, few = federation("fedavg"), fleet()
    silent = few._replace(available_n=np.zeros(NUM, bool))
    silent.test.mask[1] = False
    zero = fed.start().with_params(jnp.zeros(2))
    _, (info,) = fed.run(silent, state=zero, hparams=HPARAMS)
    np.testing.assert_array_equal(info.dead_n, np.arange(NUM) != 1)
    _, (info,) = fed.run(few, hparams=HPARAMS)
    assert not info.dead_n.any()


def test_personal_models_are_judged_after_adapting(federation, fleet):
    fed, few = federation("perfedavg_fo"), fleet()
    hparams = HPARAMS._replace(alpha=0.1)
    state, (info,) = fed.run(few, hparams=hparams)
    mse, params = [], np.asarray(state.params, np.float64)
    for i in range(NUM):
        valid = few.train.mask[i]
        x, y = few.train.inputs[i, valid, -1, 0], few.train.targets[i, valid]
        adapted = params - 0.1 * reference.line_loss(params, list(zip(x, y, strict=True)))[1]
        forecast = adapted[0] + adapted[1] * few.test.inputs[i, :, -1, 0]
        mse.append(((forecast - few.test.targets[i]) ** 2).mean())
    np.testing.assert_allclose(info.errors.mse, mse, rtol=1e-4)


# The same result however the clients are laid out


@pytest.mark.parametrize(
    ("chunk", "devices"),
    [(1, 1), (5, 2), pytest.param(3, 1, marks=pytest.mark.slow),
     pytest.param(2, 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_chunks_and_devices_do_not_matter(chunk, devices, federation, fleet):
    choices = {"opinion": "update", "serve": "coalition"}
    expected, (info,) = federation("hk_cosine", choices=choices, chunk=6).run(
        fleet(), hparams=HPARAMS
    )
    fed = federation("hk_cosine", choices=choices, chunk=chunk, devices=devices)
    state, (other,) = fed.run(fleet(), hparams=HPARAMS)
    assert info.margin > 1e-3 and info.num_coalitions > 1
    np.testing.assert_array_equal(other.labels_s, info.labels_s)
    np.testing.assert_allclose(state.params, expected.params, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        state.memory_n["start"], expected.memory_n["start"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("size", [1, 2, 5, 7])
@pytest.mark.parametrize(("chunk", "devices"), [(1, 1), (3, 1), (3, 2), (9, 2)])
def test_map_clients_is_a_map(size, chunk, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("clients",))
    rows = jnp.arange(2.0 * size).reshape(size, 2)
    found = jax.jit(
        lambda x: parallel.map_clients(
            lambda block, shared: {"sum": block.sum(axis=1) + shared},
            x, jnp.float32(10), mesh=mesh, chunk=chunk,
        )
    )(rows)  # fmt: skip
    np.testing.assert_array_equal(found["sum"], rows.sum(axis=1) + 10)


# Compiling


def test_compiled_rounds(federation, fleet):
    """Compiled once, ahead of time; nothing of a round is fetched to the host."""
    fed = federation("hk_cosine")
    few, key, hparams, start = parallel.place(
        (fleet(), jax.random.key(0), HPARAMS, fed.start()), fed.engine.mesh
    )
    compiled = engine_lib.compile_chunk(fed.engine, 1, start, few, key, hparams)
    numbers = parallel.place(list(np.arange(3, dtype=np.int32)), fed.engine.mesh)
    state = start
    for number in numbers:
        state, infos, snapshot = compiled(state, few, number, numbers[1], key, hparams)
    jitted, expected = fed.run(fleet(), rounds=3, hparams=HPARAMS)
    np.testing.assert_allclose(state.params, jitted.params, rtol=1e-5)
    np.testing.assert_array_equal(infos.labels_s[0], expected[-1].labels_s)
    np.testing.assert_array_equal(snapshot.present_s, expected[-1].present_s)
    # Another shape is an error, not another compilation.
    wide = parallel.place(fleet(width=20), fed.engine.mesh)
    with pytest.raises(TypeError):
        compiled(state, wide, numbers[0], numbers[1], key, hparams)


@pytest.mark.parametrize("length", [1, 3])
def test_nothing_of_a_round_goes_to_the_host(length, federation, fleet):
    # A guard against transfers never fires on a CPU, so the program itself is looked at.
    fed = federation("hk_cosine")
    one = np.int32(1)
    arguments = (fed.start(), fleet(), one, one, jax.random.key(0), HPARAMS)
    text = str(jax.make_jaxpr(fed.engine.chunk(length))(*arguments))
    assert "while" in text and not re.search("callback|infeed|outfeed|device_put", text)
    calls = str(jax.make_jaxpr(lambda x: jax.debug.callback(print, x))(1.0))
    assert "callback" in calls  # what would be found


def test_a_chunk_of_rounds_is_its_rounds(federation, fleet):
    fed = federation("hk_cosine", choices={"opinion": "update", "serve": "coalition"})
    place = fed.place
    start, few, hparams = place((fed.start(), fleet(), jax.tree.map(np.float32, HPARAMS)))
    chunk = jax.jit(fed.engine.chunk(4))
    expected, infos = fed.run(fleet(), rounds=3, hparams=HPARAMS)
    state, found, snapshot = chunk(start, few, np.int32(0), np.int32(3), jax.random.key(0), hparams)
    np.testing.assert_allclose(state.params, expected.params, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        state.memory_n["start"], expected.memory_n["start"], rtol=1e-5, atol=1e-6
    )
    for index, info in enumerate(infos):
        one = jax.tree.map(lambda x, index=index: np.asarray(x)[index], found)
        np.testing.assert_array_equal(one.labels_s, info.labels_s)
        np.testing.assert_allclose(one.errors.mae, info.errors.mae, rtol=1e-4, atol=1e-6)
    assert not np.asarray(found.present_s)[3].any()  # beyond the count
    assert snapshot.sent_sd.shape == (NUM, 2)
    # The rest of a run whose length is no multiple is the same program.
    rest, *_ = chunk(state, few, np.int32(3), np.int32(1), jax.random.key(0), hparams)
    further, _ = fed.run(fleet(), state=expected, first=3, hparams=HPARAMS)
    np.testing.assert_allclose(rest.params, further.params, rtol=1e-5, atol=1e-7)


def test_what_is_large_is_made_when_asked(federation, fleet):
    fed = federation("hk_cosine", choices={"opinion": "update"})
    key, few = jax.random.key(0), fleet()
    hparams = jax.tree.map(np.float32, HPARAMS)
    after, info, snapshot = fed.round(fed.start(), few, np.int32(0), key, hparams)
    for name in OPINION:
        space = implementation("opinion", name)
        opinions = space(snapshot.sent_sd, snapshot.base_sd, snapshot.present_s)
        expected = np.asarray(opinions, np.float64)
        found = hk.inner_products(jax.jit(fed.engine.gram, static_argnums=1)(snapshot, name))
        np.testing.assert_allclose(found, expected @ expected.T, rtol=1e-5, atol=1e-9)
    outputs_nw = jax.jit(fed.engine.outputs)(after, few, hparams)
    errors = TASKS["forecast"].judge.errors(outputs_nw, few.test)
    np.testing.assert_allclose(errors.mae, info.errors.mae, rtol=1e-6)


def test_rounds_are_traced_once(federation, fleet):
    fed = federation("fedavg")
    fed.run(fleet(), hparams=HPARAMS)
    before = fed.round._cache_size()
    for seed, rate in ((0, 0.1), (3, 0.2)):
        fed.run(fleet(), rounds=3, seed=seed, hparams=HPARAMS._replace(learning_rate=rate))
    assert fed.round._cache_size() == before


def test_impossible_cohorts_are_refused(federation):
    with pytest.raises(ValueError, match=r"1 <= clients_per_round <= 6 .*got 7"):
        federation("fedavg", cohort=7)
    with pytest.raises(ValueError, match=r"got -1"):
        federation("fedavg", cohort=-1)
    with pytest.raises(ValueError, match=r"--opinion_leaves=head.*offset, slope"):
        federation("fedavg", opinion_leaves="head")
