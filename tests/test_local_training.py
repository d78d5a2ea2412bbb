"""One client's training against loops in float64 and against closed forms."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from fedjax_hk import models
from fedjax_hk.round.training import ADAM_EPSILON, adam, make_trainer
from fedjax_hk.settings.choices import LOCAL, implementation
from fedjax_hk.tasks import FORECAST
from fedjax_hk.types import HParams, Samples

BATCH, EPOCHS, WIDTH = 4, 3, 13
START = np.array([0.2, -0.7], np.float32)  # offset, slope
CORRECTION = np.array([0.3, -0.2], np.float32)  # of SCAFFOLD, added to every gradient
SIZES = (0, 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH + 1)
HPARAMS = HParams(learning_rate=0.05, mu=0.5, alpha=0.1, quantile=0.8)


def as_arrays(hparams):
    return jax.tree.map(np.float32, hparams)


@functools.cache
def line_trainer(model, **options):
    trainer = make_trainer(model, epochs=EPOCHS, batch_size=BATCH, **options)
    return trainer, jax.jit(trainer.train)


def one_client(samples, size, width=WIDTH, seed=0) -> Samples:
    return Samples(*(x[0] for x in samples((size,), seed, width)))


def shuffled_batches(samples, key):
    """The batches of every epoch, as training draws them."""
    epochs = []
    for epoch_key in jax.random.split(key, EPOCHS):
        rank = np.asarray(jax.random.uniform(epoch_key, samples.mask.shape))
        order = [i for i in np.argsort(rank) if samples.mask[i]]
        windows = [(float(samples.inputs[i, -1, 0]), float(samples.targets[i])) for i in order]
        epochs.append([windows[k : k + BATCH] for k in range(0, len(windows), BATCH)])
    return epochs


def train(
    trainer, samples, *, key=0, num_batches=None, hparams=HPARAMS, start=START, correction=0.0
):
    trainer, step = trainer
    if num_batches is None:
        num_batches = -(-int(samples.mask.sum()) // BATCH)
    state = trainer.init_optimizer(jnp.asarray(start))
    numbers = np.int32(num_batches), as_arrays(hparams), np.float32(1), np.float32(correction)
    return step(start, state, samples, jax.random.key(key), *numbers)


def descent(objective, loss, start):
    """The float64 direction of each objective, from the papers' formulas."""

    def grad(params, batch):
        return reference.line_loss(params, batch, loss, HPARAMS.quantile)

    def direction(params, batches):
        if objective == "plain":
            return grad(params, batches[0])
        if objective == "prox":
            value, slope = grad(params, batches[0])
            return value, slope + HPARAMS.mu * (params - start)
        if objective.startswith("scaffold"):
            value, slope = grad(params, batches[0])
            return value, slope + CORRECTION
        adapted = params - HPARAMS.alpha * grad(params, batches[0])[1]
        value, outer = grad(adapted, batches[1])
        if objective == "perfedavg_hf":
            outer = outer - HPARAMS.alpha * reference.line_hessian(batches[2]) @ outer
        return value, outer

    return direction


@pytest.mark.parametrize("objective", LOCAL)
def test_equals_a_loop_over_shuffled_batches(objective, samples, tiny_model):
    trainer = line_trainer(tiny_model("line"), objective=objective)
    for size in SIZES:
        client = one_client(samples, size)
        corrected = objective.startswith("scaffold")
        result = train(trainer, client, key=size, correction=CORRECTION * corrected)
        params, loss, steps = reference.adam_steps(
            START,
            shuffled_batches(client, jax.random.key(size)),
            HPARAMS.learning_rate,
            descent(objective, "mse", START.astype(np.float64)),
            implementation("local", objective).batches,
        )
        np.testing.assert_allclose(result.params, params, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(result.loss, loss, rtol=2e-5)
        assert result.num_steps == steps
    assert steps == EPOCHS * -(-4 // implementation("local", objective).batches)


LOSSES = FORECAST.judge.losses


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_against_loops(loss, samples, tiny_model):
    trainer = line_trainer(tiny_model("line"), loss=LOSSES[loss])
    client = one_client(samples, 9)
    result = train(trainer, client, key=5)
    params, value, _ = reference.adam_steps(
        START,
        shuffled_batches(client, jax.random.key(5)),
        HPARAMS.learning_rate,
        descent("plain", loss, START),
    )
    np.testing.assert_allclose(result.params, params, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(result.loss, value, rtol=2e-5)


def test_loss_values():
    error = jnp.array([-2.0, -0.05, 0.0, 0.05, 2.0])
    expected = {
        "mse": [4, 0.0025, 0, 0.0025, 4],
        "mae": [2, 0.05, 0, 0.05, 2],
        "huber": [0.195, 0.00125, 0, 0.00125, 0.195],  # quadratic up to 0.1
        "quantile": [0.4, 0.01, 0, 0.04, 1.6],  # too low a forecast costs 4 times as much
    }
    assert list(expected) == list(LOSSES)
    targets = error + 0.25
    for name, values in expected.items():
        found = LOSSES[name](targets, jnp.full(5, 0.25), 0.8)
        np.testing.assert_allclose(found, values, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("objective", ["plain", "perfedavg_hf"])
def test_neither_padding_nor_more_batches_have_influence(objective, samples, tiny_model):
    trainer = line_trainer(tiny_model("line"), objective=objective)
    for size in (1, BATCH + 1):
        expected = train(trainer, one_client(samples, size))
        garbage = one_client(samples, size)
        garbage.inputs[size:], garbage.targets[size:] = 1e6, -1e6  # masked, so never used
        for client in (one_client(samples, size, WIDTH + 10), garbage):
            result = train(trainer, client)
            jax.tree.map(np.testing.assert_array_equal, result, expected)
        for num_batches in (3, 7, 20):
            result = train(trainer, one_client(samples, size), num_batches=num_batches)
            jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_masked_windows_among_the_valid_ones_are_not_used(samples, tiny_model):
    trainer = line_trainer(tiny_model("line"))
    client = one_client(samples, 9)
    client.mask[[0, 3, 4]] = False
    expected = train(trainer, client)
    client.inputs[[0, 3, 4]], client.targets[[0, 3, 4]] = 50, 50
    jax.tree.map(np.testing.assert_array_equal, train(trainer, client), expected)
    assert expected.num_steps == EPOCHS * 2


@pytest.mark.parametrize("objective", LOCAL)
def test_a_client_without_windows_changes_nothing(objective, samples, tiny_model):
    trainer = line_trainer(tiny_model("line"), objective=objective)
    for num_batches in (0, 3):
        result = train(trainer, one_client(samples, 0), num_batches=num_batches)
        np.testing.assert_array_equal(result.params, START)
        before = trainer[0].init_optimizer(START)
        jax.tree.map(np.testing.assert_array_equal, result.opt_state, before)
        assert result.loss == 0 and result.num_steps == 0


def test_prox_without_pull_is_plain_to_the_bit(samples, tiny_model):
    plain = line_trainer(tiny_model("line"))
    prox = line_trainer(tiny_model("line"), objective="prox")
    client = one_client(samples, 9)
    free = HPARAMS._replace(mu=0.0)
    # Operation by operation: compiled, the two programs are fused differently.
    with jax.disable_jit():
        without = train(prox, client, hparams=free)
        jax.tree.map(np.testing.assert_array_equal, without, train(plain, client))
    compiled = train(prox, client, hparams=free)
    np.testing.assert_allclose(compiled.params, train(plain, client).params, rtol=1e-5)
    pulled = train(prox, client, hparams=HPARAMS._replace(mu=5.0))
    assert np.linalg.norm(pulled.params - START) < np.linalg.norm(without.params - START)


def test_keys_decide_the_order(samples, tiny_model):
    trainer = line_trainer(tiny_model("line"))
    client = one_client(samples, 9)
    first, again, other = (train(trainer, client, key=key).params for key in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_adam_is_that_of_keras():
    assert ADAM_EPSILON == 1e-7
    optimizer, params = adam(0.1), jnp.zeros(1)
    grad = jnp.array([1e-7])  # as large as epsilon: half a step
    updates, _ = optimizer.update(grad, optimizer.init(params), params)
    np.testing.assert_allclose(updates, [-0.05], rtol=1e-4)


def test_optimizer_state_can_be_carried_on(samples, tiny_model):
    """Two trainings of which the second gets the state: Adam goes on counting."""
    trainer = line_trainer(tiny_model("line"))
    client = one_client(samples, BATCH)
    first = train(trainer, client)
    second = trainer[1](
        first.params,
        first.opt_state,
        client,
        jax.random.key(1),
        np.int32(1),
        as_arrays(HPARAMS),
    )
    assert first.opt_state[0].count == EPOCHS and second.opt_state[0].count == 2 * EPOCHS
    batches = shuffled_batches(client, jax.random.key(0)) + shuffled_batches(
        client, jax.random.key(1)
    )
    params, _, _ = reference.adam_steps(
        START, batches, HPARAMS.learning_rate, descent("plain", "mse", START)
    )
    np.testing.assert_allclose(second.params, params, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("loss", ["mse", "quantile"])
def test_adapting_is_one_step_on_all_windows(loss, samples, tiny_model):
    model, client = tiny_model("line"), one_client(samples, 9)
    windows = list(zip(client.inputs[:9, -1, 0], client.targets[:9], strict=True))
    _, grad = reference.line_loss(START, windows, loss, HPARAMS.quantile)
    for objective in LOCAL:
        trainer, _ = line_trainer(model, objective=objective, loss=LOSSES[loss])
        adapted = trainer.adapt(START, client, HPARAMS)
        if objective.startswith("perfedavg"):
            np.testing.assert_allclose(adapted, START - HPARAMS.alpha * grad, rtol=1e-5)
        else:
            np.testing.assert_array_equal(adapted, START)


def test_gradient_is_over_all_windows(samples, tiny_model):
    trainer, _ = line_trainer(tiny_model("line"))
    client = one_client(samples, 9)
    value, grad = trainer.gradient(jnp.asarray(START), client)
    windows = list(zip(client.inputs[:9, -1, 0], client.targets[:9], strict=True))
    expected_value, expected = reference.line_loss(START, windows)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(grad, expected, rtol=1e-5)
    value, grad = trainer.gradient(jnp.asarray(START), one_client(samples, 0))
    assert value == 0 and not grad.any()


# Closed forms: two clients with losses a (x - b)^2 / 2, a = (1, 10), b = (0, 1), equal
# shares, gradient steps of 0.02. A window with input sqrt(a / 2) and target b sqrt(a / 2)
# has that as its squared error.
CURVATURE, CENTER, STEP = np.array([1.0, 10.0]), np.array([0.0, 1.0]), 0.02


class Slope(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return self.param("slope", nn.initializers.zeros, ()) * inputs[:, 0, 0]


def fixed_point(objective, *, epochs, rounds, windows=(1, 1), batch_size=1, **hparams):
    model = models.from_flax(Slope(), jnp.zeros((1, 1, 1)))
    trainer = make_trainer(
        model, objective=objective, epochs=epochs, batch_size=batch_size, optimizer=optax.sgd
    )
    root = np.sqrt(CURVATURE / 2)
    width = max(windows)
    mask = np.arange(width)[None, :] < np.array(windows)[:, None]
    inputs = np.where(mask, root[:, None], 0).astype(np.float32)
    targets = np.where(mask, (CENTER * root)[:, None], 0).astype(np.float32)
    clients = Samples(inputs[:, :, None, None], targets, mask, targets, targets)
    hparams = as_arrays(HParams(**{"learning_rate": STEP, **hparams}))

    def one_round(_, x):
        def local(samples):
            state = trainer.init_optimizer(x)
            return trainer.train(x, state, samples, jax.random.key(0), width, hparams).params

        return jnp.mean(jax.vmap(local)(clients), axis=0)

    return float(jax.jit(lambda x: jax.lax.fori_loop(0, rounds, one_round, x))(jnp.zeros(1))[0])


def test_fixed_points_of_fedavg():
    assert abs(fixed_point("plain", epochs=10, rounds=80) - 0.829923) < 2e-6
    # 3 and 12 local steps: as many windows, one a batch.
    uneven = fixed_point("plain", epochs=1, rounds=80, windows=(3, 12))
    assert abs(uneven - 0.940603) < 2e-6


@pytest.mark.parametrize(
    ("mu", "expected"), [(0.1, 0.521327), (1, 0.645161), (10, 0.846154), (100, 0.901786)]
)
def test_fixed_points_of_fedprox_with_exact_solves(mu, expected):
    # Steps of 1 / (10 + mu) solve the stiffer client at once, the other in 200 or fewer.
    found = fixed_point("prox", epochs=200, rounds=400, mu=mu, learning_rate=1 / (10 + mu))
    assert abs(found - expected) < 1e-5


@pytest.mark.parametrize(
    ("objective", "expected"), [("perfedavg_fo", 0.840336), ("perfedavg_hf", 0.734754)]
)
def test_fixed_points_of_perfedavg(objective, expected):
    found = fixed_point(objective, epochs=1, rounds=500, alpha=0.05)
    assert abs(found - expected) < 2e-6


@pytest.mark.parametrize("objective", ["perfedavg_fo", "perfedavg_hf"])
def test_perfedavg_without_inner_step_is_plain_on_the_second_batch(objective, samples, tiny_model):
    trainer = line_trainer(tiny_model("line"), objective=objective)
    client = one_client(samples, 3 * BATCH)
    result = train(trainer, client, hparams=HPARAMS._replace(alpha=0.0))
    params, _, steps = reference.adam_steps(
        START,
        shuffled_batches(client, jax.random.key(0)),
        HPARAMS.learning_rate,
        lambda y, batches: reference.line_loss(y, batches[1]),
        implementation("local", objective).batches,
    )
    np.testing.assert_allclose(result.params, params, rtol=2e-5, atol=2e-6)
    assert result.num_steps == steps


def test_hessian_form_on_the_forecaster(samples, tiny_model):
    """Second derivatives through the LSTM are exact: they meet finite differences."""
    model = tiny_model("lstm")
    trainer = make_trainer(
        model, objective="perfedavg_hf", epochs=1, batch_size=16, optimizer=optax.sgd
    )
    client = one_client(samples, 9)
    start = model.init(jax.random.key(4)) * 2
    hparams = as_arrays(HParams(learning_rate=1.0, alpha=0.1))
    result = jax.jit(trainer.train)(
        start, trainer.init_optimizer(start), client, jax.random.key(0), 1, hparams
    )
    grad = jax.jit(lambda y: trainer.gradient(y, client)[1])
    outer = grad(start - 0.1 * grad(start))
    step = 1e-2 / jnp.linalg.norm(outer)
    product = (grad(start + step * outer) - grad(start - step * outer)) / (2 * step)
    expected = outer - 0.1 * product
    assert np.linalg.norm(0.1 * product) > 0.02 * np.linalg.norm(outer)
    np.testing.assert_allclose(
        start - result.params, expected, atol=2e-3 * float(jnp.linalg.norm(0.1 * product)) + 1e-6
    )
