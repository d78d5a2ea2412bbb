"""Whole rounds of the methods: what they reduce to, where they come to rest, who takes part,
what happens when clients fail, are slow, or attack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_contract
from jax.sharding import Mesh

from fedjax_hk import models
from fedjax_hk.round import engine as engine_lib
from fedjax_hk.round.state import FleetArrays, Traffic
from fedjax_hk.round.training import make_trainer
from fedjax_hk.rules import CHOICES, RULES, Rule, averages
from fedjax_hk.settings.choices import Choice
from fedjax_hk.types import HParams, Samples

NUM = 6
HPARAMS = HParams(learning_rate=0.05, tau=0.5)


def equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def close(left, right, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), left, right)


# What methods reduce to: the reduction map


@pytest.fixture(scope="module")
def fedavg(federation, fleet):
    return federation("fedavg").run(fleet(), rounds=3, hparams=HPARAMS)[0].params


@pytest.fixture(scope="module")
def fedcw(federation):
    return federation("fedcw")


def test_fedcw_without_decay_and_beta_is_fedavg(fedcw, fedavg, fleet):
    hparams = HPARAMS._replace(beta=0.0, select_decay=0.0)
    state, infos = fedcw.run(fleet(), rounds=3, hparams=hparams)
    close(state.params, fedavg)
    assert all(info.sampled_s.all() for info in infos)


SAME_AS_FEDAVG = {
    "fedma": ({}, HPARAMS),  # a line has no hidden units
    "fedavg": ({"server_opt": "sgd"}, HPARAMS),
    "trimmed_mean": ({"within": "samples", "between": "samples"}, HPARAMS._replace(trim=0.0)),
    "wscc": ({"serve": "global"}, HPARAMS),
    "fedclust": ({"serve": "global"}, HPARAMS),
}


@pytest.mark.slow
@pytest.mark.parametrize("agg", SAME_AS_FEDAVG)
def test_other_ways_to_fedavg(agg, federation, fleet, fedavg):
    choices, hparams = SAME_AS_FEDAVG[agg]
    state, _ = federation(agg, choices=choices).run(fleet(), rounds=3, hparams=hparams)
    close(state.params, fedavg)


@pytest.mark.slow
def test_fedclust_ends_are_fedavg_and_local_training(federation, fleet, fedavg):
    fed = federation("fedclust", use_epsilon=True)
    state, _ = fed.run(fleet(), rounds=3, hparams=HPARAMS._replace(epsilon=1e9))
    close(state.params, fedavg)
    close(state.memory_n["start"], np.broadcast_to(np.asarray(fedavg), (NUM, 2)))
    alone, _ = fed.run(fleet(), rounds=3, hparams=HPARAMS._replace(epsilon=0.0))
    local, _ = federation("local").run(fleet(), rounds=3, hparams=HPARAMS)
    close(alone.memory_n["start"], local.memory_n["start"])


@pytest.mark.slow
def test_wscc_ends_are_fedavg_and_local_training(federation, fleet, fedavg):
    """With a low preference there is one exemplar, with the highest everybody is one."""
    state, infos = federation("wscc", preference=-2.0).run(fleet(), rounds=3, hparams=HPARAMS)
    assert [info.num_coalitions for info in infos] == [1, 1, 1]
    close(state.params, fedavg)
    close(state.memory_n["start"], np.broadcast_to(np.asarray(fedavg), (NUM, 2)))
    alone, _ = federation("wscc", preference=0.0).run(fleet(), rounds=3, hparams=HPARAMS)
    local, _ = federation("local").run(fleet(), rounds=3, hparams=HPARAMS)
    close(alone.memory_n["start"], local.memory_n["start"])


# Where methods come to rest: two clients with losses a (x - b)^2 / 2

CURVATURE, OPTIMUM = np.array([1.0, 10.0]), np.array([0.0, 1.0])


def quadratic_model():
    """One parameter; with input sqrt(a / 2) and target sqrt(a / 2) b the loss is as above."""
    return models.Model(
        lambda key: jnp.ones(1), lambda params, inputs, key: inputs[:, -1, 0] * params[0],
        lambda params: {"x": params}, (("x", 1),), (),
    )  # fmt: skip


def quadratic_fleet(steps):
    width = max(steps)
    mask = np.arange(width)[None, :] < np.array(steps)[:, None]
    root = np.sqrt(CURVATURE / 2)[:, None] * mask
    targets = (root * OPTIMUM[:, None]).astype(np.float32)
    inputs = root[:, :, None, None].astype(np.float32)
    samples = Samples(inputs, targets, mask, np.ones_like(targets), np.zeros_like(targets))
    return FleetArrays(samples, samples, np.ones(2, bool), np.arange(2, dtype=np.uint32))


def at_rest(agg, steps, hparams=None, rounds=400, choices=None):
    """The state after many rounds of one batch a step, plain gradient descent at 0.02."""
    rule = RULES[agg]._replace(within="uniform", between="size", **(choices or {}))
    model = quadratic_model()
    trainer = make_trainer(model, objective=rule.local, epochs=1, batch_size=1, optimizer=optax.sgd)
    engine = engine_lib.make_engine(
        model, trainer, rule, num_clients=2, clients_per_round=2,
        mesh=Mesh(np.array(jax.devices()[:1]), ("clients",)),
    )  # fmt: skip
    hparams = jax.tree.map(np.float32, (hparams or HParams())._replace(learning_rate=0.02))
    fleet, key = jax.tree.map(jnp.asarray, quadratic_fleet(steps)), jax.random.key(0)

    @jax.jit
    def many(state):
        def one(number, state):
            return engine.round(state, fleet, number, key, hparams)[0]

        return jax.lax.fori_loop(0, rounds, one, state)

    return many(engine.init(jnp.ones(1)))


AT_REST = [
    ("fedavg", (10, 10), {}, 0.829923),
    ("fedavg", (3, 12), {}, 0.940603),
    ("fednova", (3, 12), {}, 0.798346),
    ("perfedavg_fo", (2, 2), {"alpha": 0.05}, 0.840336),
    ("perfedavg_hf", (3, 3), {"alpha": 0.05}, 0.734754),
]


@pytest.mark.slow
@pytest.mark.parametrize(("agg", "steps", "numbers", "expected"), AT_REST)
def test_known_points_of_rest(agg, steps, numbers, expected):
    # Per-FedAvg takes 2 or 3 batches a step: one meta-step a round.
    state = at_rest(agg, steps, HParams(**numbers), rounds=2000)
    np.testing.assert_allclose(state.params, [expected], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("agg", "steps"), [("fednova", (10, 10)), ("scaffold", (1, 1))])
def test_equal_work_and_single_steps_are_fedavg(agg, steps):
    """FedNova where all take as many steps; SCAFFOLD where its one step is FedSGD's."""
    expected = at_rest("fedavg", steps, rounds=5).params
    assert abs(float(expected[0]) - 1) > 1e-2  # where it started
    close(at_rest(agg, steps, rounds=5).params, expected)


@pytest.mark.slow
def test_fednova_at_rest_between_other_steps():
    share = (1 - (1 - 0.02 * CURVATURE) ** np.array([5, 8])) / np.array([5, 8])
    state = at_rest("fednova", (5, 8), rounds=2000)
    np.testing.assert_allclose(state.params, [share @ OPTIMUM / share.sum()], atol=2e-5)


@pytest.mark.parametrize(
    ("steps", "option"),
    [((3, 12), "scaffold"), pytest.param((10, 10), "scaffold", marks=pytest.mark.slow),
     pytest.param((3, 12), "scaffold_start", marks=pytest.mark.slow)],
)  # fmt: skip
def test_scaffold_reaches_the_optimum(steps, option):
    state = at_rest("scaffold", steps, choices={"local": option})
    np.testing.assert_allclose(state.params, [10 / 11], atol=1e-4)
    np.testing.assert_allclose(state.memory_n["control"][:, 0], [0.909091, -0.909091], atol=1e-3)


@pytest.fixture(scope="module")
def scaffold(federation):
    return federation("scaffold")


def test_scaffold_rounds(scaffold, federation, fleet):
    """First as uniform FedAvg; silent clients keep their control variates."""
    few = fleet()._replace(available_n=np.arange(NUM) != 2)
    state, _ = scaffold.run(few, hparams=HPARAMS)
    uniform = federation("fedavg", choices={"within": "uniform", "between": "size"})
    close(state.params, uniform.run(few, hparams=HPARAMS)[0].params)
    controls = np.asarray(state.memory_n["control"])
    assert not controls[2].any() and np.abs(controls[np.arange(NUM) != 2]).min() > 0
    later, _ = scaffold.run(few, rounds=2, state=state, first=1, hparams=HPARAMS)
    assert np.isfinite(later.params).all() and not np.asarray(later.memory_n["control"])[2].any()
    # Control variates travel too.
    assert scaffold.engine.traffic == Traffic(16, 16)
    assert uniform.engine.traffic == Traffic(8, 8)


# Who takes part


def test_fedcw_asks_the_farthest(fedcw, fleet):
    hparams = HPARAMS._replace(select_decay=0.5, min_clients=2.0)
    few, state = fleet(), fedcw.start()
    for number, count in enumerate([6, 4, 3, 2, 2]):
        before = state
        state, (info,) = fedcw.run(few, state=state, first=number, hparams=hparams)
        asked = info.cohort_s[:count]
        assert info.sampled_s.tolist() == [True] * count + [False] * (NUM - count)
        assert (np.diff(asked) > 0).all() and len(set(info.cohort_s)) == NUM
        last = np.asarray(before.server.distances.last_n)
        if number:
            assert set(asked) == set(np.argsort(-last)[:count])
        others = np.setdiff1d(np.arange(NUM), asked)
        equal(np.asarray(state.server.distances.last_n)[others], last[others])
        assert (np.asarray(state.server.distances.last_n)[asked] != last[asked]).all()
        # Who is not asked does nothing and counts nothing.
        idle = ~info.sampled_s
        assert not info.present_s[idle].any() and not info.steps_s[idle].any()
        assert not info.weights_s[idle].any() and (info.labels_s[idle] == -1).all()
        assert (info.steps_s[~idle] > 0).all()
    assert np.isfinite(state.params).all()


def test_fewer_clients_do_not_compile_again(fedcw, fleet):
    before = fedcw.round._cache_size()
    fedcw.run(fleet(), rounds=4, hparams=HPARAMS._replace(select_decay=0.5, min_clients=2.0))
    assert fedcw.round._cache_size() - before <= 1


# Clients that fail, are slow, or attack


def test_everyone_is_in_exactly_one_lasting_coalition(federation, fleet):
    """Positions in a cohort are never taken for clients, however cohorts change."""
    sizes, cohort = test_contract.SIZES, test_contract.COHORT
    fed = test_contract.federation_of(federation, "fedclust")
    few, state = fleet(sizes), fed.start()
    groups = np.full(len(sizes), -1)
    for number in range(12):
        state, (info,) = fed.run(few, state=state, first=number, hparams=HPARAMS)
        seen = info.cohort_s[info.present_s]
        now = np.asarray(state.server.grouping.group_n)
        assert (now[seen] >= 0).all()
        kept = groups >= 0
        equal(now[kept], groups[kept])  # one shot: nobody changes
        equal(np.setdiff1d(np.flatnonzero(now != groups), seen), np.array([]))
        labels = info.labels_s[info.present_s]
        equal(labels[:, None] == labels, now[seen][:, None] == now[seen])
        # Members hold the same model, whether they took part or not.
        starts = np.asarray(state.memory_n["start"])
        for group in set(now[seen]):
            equal(starts[now == group], np.broadcast_to(starts[now == group][0], (
                (now == group).sum(), 2)))  # fmt: skip
        groups = now
    assert cohort < len(sizes) and (groups >= 0).sum() == (np.array(sizes) > 0).sum()


def test_clients_that_do_not_answer(federation, fleet):
    fed, few = test_contract.federation_of(federation, "fedavg"), fleet()
    _, calm = fed.run(few, rounds=50, hparams=HPARAMS)
    state, infos = fed.run(few, rounds=50, hparams=HPARAMS._replace(drop_rate=0.3))
    for info, expected in zip(infos, calm, strict=True):
        equal(info.cohort_s, expected.cohort_s)
    silent = 1 - np.mean([info.present_s for info in infos])
    assert abs(silent - 0.3) < 4 * np.sqrt(0.21 / 250)
    assert np.isfinite(state.params).all()
    # All of them: the model stays as it is.
    same, (info,) = fed.run(few, state=state, hparams=HPARAMS._replace(drop_rate=1.0))
    equal(same.params, state.params)
    assert not info.present_s.any() and not info.reported_s.any() and not info.weights_s.any()


def test_slow_clients(federation, fleet):
    fed, few = test_contract.federation_of(federation, "fedavg"), fleet()
    _, (full,) = fed.run(few, hparams=HPARAMS)
    windows = few.train.mask.sum(axis=1)
    equal(full.steps_s, 2 * -(-windows[full.cohort_s] // 4))
    _, (some,) = fed.run(few, hparams=HPARAMS._replace(straggler_rate=1.0))
    assert (some.steps_s >= 1).all() and (some.steps_s <= full.steps_s).all()
    assert (some.steps_s < full.steps_s).any() and some.present_s.all()
    equal(some.cohort_s, full.cohort_s)


@pytest.mark.slow
@pytest.mark.parametrize("agg", ["median", "trimmed_mean", "multi_krum"])
def test_four_of_twenty_send_minus_ten_times_their_update(agg, federation, fleet):
    sizes = (6,) * 20
    options = {"num_clients": 20, "attack": "sign_flip"}
    few = fleet(sizes, groups=1)
    hparams = HPARAMS._replace(attack_share=0.2, attack_scale=10.0, trim=0.2)
    calm, (_, quiet) = federation(agg, **options).run(
        few, rounds=2, hparams=hparams._replace(attack_share=0.0)
    )
    state, (_, info) = federation(agg, **options).run(few, rounds=2, hparams=hparams)
    assert info.attacker_s.sum() == 4 and not quiet.attacker_s.any()
    moved = np.linalg.norm(
        np.asarray(calm.params) - np.asarray(federation("fedavg").start().params)
    )
    assert np.linalg.norm(np.asarray(state.params) - np.asarray(calm.params)) < 0.35 * moved
    if agg == "multi_krum":
        assert not info.weights_s[info.attacker_s].any()


# Layers that stay, and epochs before judging


def test_personal_layers_and_fine_tuning(federation, fleet, tiny_model):
    tuner = make_trainer(tiny_model("line"), epochs=1, batch_size=4)
    fed = federation("fedavg", cohort=4, personal_layers="offset", finetuner=tuner)
    few, start = fleet(), fed.start()
    state, (info,) = fed.run(few, hparams=HPARAMS)
    own = np.asarray(state.memory_n["personal"])[:, 0]
    idle = np.setdiff1d(np.arange(NUM), info.cohort_s)
    # The offset never leaves the client, and the server's never changes.
    assert own.shape == (NUM,) and state.params[0] == start.params[0]
    equal(own[idle], np.asarray(start.memory_n["personal"])[idle, 0])
    assert len(set(own[info.cohort_s])) == 4
    assert fed.engine.traffic == Traffic(4, 4)
    # Clients are judged with their own offset and everybody's slope ...
    forecast = own[:, None] + float(state.params[1]) * few.test.inputs[:, :, -1, 0]
    mse = ((forecast - few.test.targets) ** 2).mean(axis=1)
    np.testing.assert_allclose(info.errors.mse, mse, rtol=1e-4)
    # ... and once more after an epoch.
    assert np.isfinite(info.finetuned_errors.mse).all()
    assert (info.finetuned_errors.mse != info.errors.mse).all()


def test_layers_that_leave_nothing_to_compare_are_refused(federation):
    with pytest.raises(ValueError, match=r"--personal_layers=\.: .*--opinion_leaves"):
        federation("hk_cosine", personal_layers=".")
    with pytest.raises(ValueError, match=r"--personal_layers=head: matches no .*offset, slope"):
        federation("hk_cosine", personal_layers="head")


# References


@pytest.mark.slow
def test_centralized_is_one_client_with_all_windows(federation, fleet):
    few = fleet()
    state, (info,) = federation("centralized").run(few, hparams=HPARAMS)
    assert info.cohort_s.tolist() == [-1] and info.weights_s.tolist() == [1]
    assert info.steps_s == 2 * -(-int(few.train.mask.sum()) // 4)
    # A client that is silent, or not finite, is not in it.
    broken = fleet()
    broken.train.inputs[2] = np.nan
    without = few._replace(available_n=np.arange(NUM) != 2)
    found, _ = federation("centralized").run(broken, hparams=HPARAMS)
    expected, _ = federation("centralized").run(without, hparams=HPARAMS)
    equal(found.params, expected.params)
    assert (np.asarray(found.params) != np.asarray(state.params)).any()


def test_a_rule_is_tested_by_being_registered(monkeypatch, federation, fleet):
    """A new average, and a row that names it: the contract holds it to everything."""

    def heaviest(models_sd, start_sd, weights_s, effort_s, trim):
        return models_sd[jnp.argmax(weights_s)]

    monkeypatch.setattr(averages, "heaviest", heaviest, raising=False)
    choice = Choice("the heaviest client's model", "fedjax_hk.rules.averages:heaviest")
    monkeypatch.setitem(CHOICES["average"], "heaviest", choice)
    monkeypatch.setitem(RULES, "toy", Rule(average="heaviest"))
    test_contract.test_two_rounds("toy", "line", federation, fleet)
    test_contract.test_client_order_does_not_matter("toy", federation, fleet)
