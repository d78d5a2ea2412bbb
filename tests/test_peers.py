"""Whole rounds against others' code: Flower's strategies, and plain loops over the clients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from conftest import SIZES, Federation
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_hk.round import engine as engine_lib
from fedjax_hk.round.server import make_server
from fedjax_hk.round.state import upload
from fedjax_hk.round.training import make_trainer
from fedjax_hk.rules import RULES
from fedjax_hk.types import HParams

pytestmark = pytest.mark.slow


def federation_of(model, trainer, rule, num_clients) -> Federation:
    mesh = Mesh(np.array(jax.devices()[:1]), ("clients",))
    engine = engine_lib.make_engine(
        model, trainer, rule, num_clients=num_clients, clients_per_round=num_clients,
        mesh=mesh,
    )  # fmt: skip
    compiled = jax.jit(engine.round, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return Federation(model, trainer, engine, compiled)


# Flower: both sides aggregate the same models, so the server's half is called alone.

COUNTS = np.array([3, 11, 7, 1, 12, 5, 2, 9, 4, 8, 6])
NUM, SIZE = len(COUNTS), 12
SCALE = np.geomspace(0.03, 3, SIZE)  # of the parameters: where tau counts and where not
ABSENT = ((), (3,), (0, 10), (), (1, 4, 7), (5,), (2, 8, 9, 10), ())  # round by round


def answers(number):
    """Models `[S, D]` of a round: two groups, so that Krum's neighbors matter; and who answers."""
    rng = np.random.default_rng(number)
    models_sd = rng.standard_normal((NUM, SIZE))
    models_sd[:6] = models_sd[0] + 0.5 * models_sd[:6]
    models_sd[6:] = models_sd[6] + 0.5 * models_sd[6:] + 1
    models_sd = (SCALE * (models_sd + rng.standard_normal(SIZE))).astype(np.float32)
    # A model near the others' one round and far the next: v goes up and down (Yogi).
    models_sd *= np.float32((1, 0.2, 2, 0.05)[number % 4])
    mask_s = ~np.isin(np.arange(NUM), ABSENT[number])
    if number == 5:  # answers something that is no model
        models_sd[ABSENT[5], 1], mask_s[:] = np.nan, True
    return models_sd, mask_s


ADAPTIVE = {"eta": 0.05, "tau": 1e-3}
MOMENTS = {"beta_1": 0.9, "beta_2": 0.99}
UNIFORM = ("Krum",)  # strategies that weigh by samples where the method does not

PEERS = [
    ("fedavg", {}, {}, "FedAvg", {}),
    ("fedavg", {"server_opt": "sgd"}, {"server_lr": 0.3}, "FedAvgM", {"server_learning_rate": 0.3}),
    ("fedadam", {}, {"server_lr": 0.05}, "FedAdam", ADAPTIVE | MOMENTS),
    ("fedyogi", {}, {"server_lr": 0.05}, "FedYogi", ADAPTIVE | MOMENTS),
    ("fedadagrad", {}, {"server_lr": 0.05}, "FedAdagrad", ADAPTIVE),
    ("median", {}, {}, "FedMedian", {}),
    *(
        ("trimmed_mean", {}, {"trim": x}, "FedTrimmedAvg", {"beta": x})
        for x in (0, 0.1, 0.25, 0.45)
    ),
    *(("multi_krum", {}, {"trim": x}, "Krum", {}) for x in (0, 0.1, 0.25, 0.4)),
]


@pytest.fixture(scope="module")
def flower():
    # Here, not at the top: the import takes a second, also where slow tests are left out. It
    # warns of deprecations in what it needs itself, which importorskip ignores.
    pytest.importorskip("flwr.server.strategy", reason="the extra peers (Flower) is not installed")
    import flwr

    return flwr


@pytest.mark.parametrize(("agg", "choices", "numbers", "peer", "options"), PEERS)
def test_global_models_equal_those_of_flower(flower, agg, choices, numbers, peer, options):
    server = make_server(RULES[agg]._replace(**choices), num_clients=NUM)
    step = jax.jit(server.step)
    start = SCALE * np.random.default_rng(0).standard_normal(SIZE)
    state = server.init(jnp.asarray(start, jnp.float32), NUM)
    strategy = strategy_of(flower, peer, np.asarray(state.params, np.float64), options)
    keys_s = jax.random.split(jax.random.key(0), NUM)
    for number in range(len(ABSENT)):
        models_sd, mask_s = answers(number)
        sent = upload(models_sd, COUNTS, mask_s, state.params)
        state, _ = step(state, sent, keys_s, jax.tree.map(np.float32, HParams(**numbers)))
        present = ~np.isin(np.arange(NUM), ABSENT[number])
        np.testing.assert_array_equal(sent.present_s, present)
        models_sd = models_sd[present].astype(np.float64)
        counts_s = np.ones(NUM, int) if peer in UNIFORM else COUNTS
        if peer == "Krum":  # how many are not trusted, and kept; not shares
            strategy.num_malicious_clients = int(numbers["trim"] * len(models_sd))
            strategy.num_clients_to_keep = len(models_sd) - strategy.num_malicious_clients
        expected = aggregated(flower, strategy, number, models_sd, counts_s[present])
        np.testing.assert_allclose(state.params, expected, rtol=1e-5, atol=1e-6)


def strategy_of(flower, peer, start, options):
    """Flower's strategy, with the definitions that are ours where they differ.

    The same in both: differences of models as pseudo-gradients, epsilon (`tau`) outside of the
    root, no momentum in Adagrad, n - f - 2 neighbors (at least one) in Krum, the middle of two
    values as median, no weights by samples in median and trimmed mean.

    Flower's are otherwise (1.42):
    - v starts at 0, not at tau ** 2 as Algorithm 2 of FedOpt does. It is set here.
    - Adam's learning rate is corrected for the bias, not in the algorithm. In late rounds the
      correction is 1 to the last digit, so `aggregated` counts from there.
    - Multi-Krum averages those it keeps by samples, the paper uniformly: all have 1 here.
    - The trimmed mean cuts int(beta n): 28 of 100 at 0.29, as the product is below 29. Shares
      here do not hit that.
    """
    parameters = flower.common.ndarrays_to_parameters(layers(start))
    strategy = getattr(flower.server.strategy, peer)(initial_parameters=parameters, **options)
    if "tau" in options:
        strategy.v_t = layers(np.full(SIZE, options["tau"] ** 2))
    return strategy


def aggregated(flower, strategy, number, models_sd, counts_s):
    common, late = flower.common, 10_000
    ok = common.Status(common.Code.OK, "")
    results = [
        (None, common.FitRes(ok, common.ndarrays_to_parameters(layers(model)), int(count), {}))
        for model, count in zip(models_sd, counts_s, strict=True)
    ]
    parameters, _ = strategy.aggregate_fit(late + number, results, [])
    return np.concatenate([x.ravel() for x in common.parameters_to_ndarrays(parameters)])


def layers(vector):
    """Flower's models are lists of arrays: a matrix and a bias."""
    return [vector[:8].reshape(2, 4), vector[8:]]


# Loops: one full batch a step under plain gradient descent, so no shuffling is in the way.

STEPS, RATE, ROUNDS, SILENT = 3, 0.1, 4, {1: 2, 2: 5}


@pytest.mark.parametrize("local", ["plain", "scaffold", "scaffold_start"])
def test_rounds_equal_loops(local, tiny_model, fleet):
    """FedAvg, and SCAFFOLD's options II and I as Karimireddy et al. 2020 print them."""
    rule = RULES["fedavg" if local == "plain" else "scaffold"]._replace(local=local)
    model = tiny_model("line")
    trainer = make_trainer(
        model, objective=local, epochs=STEPS, batch_size=max(SIZES), optimizer=optax.sgd
    )
    fed, few = federation_of(model, trainer, rule, len(SIZES)), fleet()
    batches = [
        list(zip(x[:size, -1, 0].astype(float), y[:size].astype(float), strict=True))
        for x, y, size in zip(few.train.inputs, few.train.targets, SIZES, strict=True)
    ]
    state, controls = fed.start(), np.zeros((len(SIZES), 2))
    params = np.asarray(state.params, np.float64)
    for number in range(ROUNDS):
        available_n = np.arange(len(SIZES)) != SILENT.get(number)
        state, _ = fed.run(
            few._replace(available_n=available_n), state=state, first=number,
            hparams=HParams(learning_rate=RATE),
        )  # fmt: skip
        params, controls = loop_round(params, controls, batches, np.flatnonzero(available_n), local)
        np.testing.assert_allclose(state.params, params, rtol=1e-5, atol=1e-6)
        if local != "plain":
            np.testing.assert_allclose(state.memory_n["control"], controls, rtol=1e-4, atol=1e-5)
            assert np.all(controls[available_n])


def loop_round(start, controls, batches, present, local):
    """The next model, and control variates `[N, 2]` (0 in FedAvg)."""
    mean, after, ends = controls.mean(axis=0), controls.copy(), []
    for i in present:
        y = start
        for _ in range(STEPS):
            y = y - RATE * (reference.line_loss(y, batches[i])[1] - controls[i] + mean)
        ends.append(y)
        if local == "scaffold":
            after[i] = controls[i] - mean + (start - y) / (STEPS * RATE)
        if local == "scaffold_start":
            after[i] = reference.line_loss(start, batches[i])[1]
    samples = [len(batches[i]) for i in present] if local == "plain" else None
    return np.average(ends, axis=0, weights=samples), after
