"""The forecaster against plain loops, its start, and modules of users' own."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from fedjax_hk import models
from fedjax_hk.models import lstm
from fedjax_hk.models.lstm_kernel import lstm_states

EXAMPLE = jnp.zeros((2, 12, 1))


@pytest.fixture(scope="module")
def paper_model():
    return models.lstm_forecaster(EXAMPLE)


def test_parameters_of_the_paper(paper_model):
    assert paper_model.num_parameters == 7633
    assert dict(paper_model.leaves) == {
        "dense/bias": 8,
        "dense/kernel": 8 * 16,
        "lstm_0/bias": 128,
        "lstm_0/kernel": 128,
        "lstm_0/recurrent_kernel": 128 * 32,
        "lstm_1/bias": 64,
        "lstm_1/kernel": 64 * 32,
        "lstm_1/recurrent_kernel": 64 * 16,
        "output/bias": 1,
        "output/kernel": 8,
    }


def test_leaves_are_in_the_order_of_the_vector(paper_model):
    layers = paper_model.restore(jnp.arange(7633.0))
    first = 0
    for name, size in paper_model.leaves:
        layer, kind = name.split("/")
        np.testing.assert_array_equal(layers[layer][kind].ravel(), np.arange(first, first + size))
        first += size


def test_initializers_are_those_of_keras(paper_model):
    layers = jax.tree.map(
        np.asarray, paper_model.restore(jax.jit(paper_model.init)(jax.random.key(3)))
    )
    for name in ("lstm_0", "lstm_1"):
        kernel, recurrent, bias = (layers[name][k] for k in ("kernel", "recurrent_kernel", "bias"))
        units = recurrent.shape[1]
        # Keras' kernels are [inputs, 4 units]; ours are their transposes.
        bound = np.sqrt(6 / (kernel.shape[1] + 4 * units))
        assert bound * 0.9 < np.abs(kernel).max() <= bound
        np.testing.assert_allclose(recurrent.T @ recurrent, np.eye(units), atol=1e-5)
        np.testing.assert_array_equal(bias.reshape(4, units).sum(axis=1), [0, units, 0, 0])
    for name in ("dense", "output"):
        kernel = layers[name]["kernel"]
        bound = np.sqrt(6 / sum(kernel.shape))
        assert bound * 0.5 < np.abs(kernel).max() <= bound
        assert not layers[name]["bias"].any()


@pytest.mark.parametrize("output", ["relu", "softplus", "linear"])
def test_output_equals_plain_lstm(output):
    model = models.lstm_forecaster(
        jnp.zeros((1, 5, 2)), neurons=(3, 2), dense_neurons=4, output=output
    )
    rng = np.random.default_rng(1)
    params = model.init(jax.random.key(0)) + 0.3 * rng.standard_normal(model.num_parameters)
    params = params.at[-5:].set(0.5).astype(jnp.float32)  # an output above zero
    inputs = rng.standard_normal((9, 5, 2)).astype(np.float32)
    expected = reference.forecaster(model.restore(params), inputs, output)
    assert len(np.unique(expected)) > 3
    np.testing.assert_allclose(
        jax.jit(model.apply)(params, inputs, None), expected, rtol=1e-5, atol=1e-6
    )


def _scanned(weights, inputs):
    """The same layer, differentiated by JAX."""
    units, batch = weights.shape[0] // 4, inputs.shape[2]

    def step(carry, x):
        h, c = carry
        z = weights[:, :-1] @ jnp.concatenate([x, h]) + weights[:, -1:]
        i, f, g, o = jnp.split(z, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((units, batch))
    return jax.lax.scan(step, (zeros, zeros), inputs)[1]


def _layer_case(seed=0, units=3, features=2, length=6, batch=4):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((4 * units, features + units + 1)).astype(np.float32)
    inputs = rng.standard_normal((length, features, batch)).astype(np.float32)
    toward = rng.standard_normal((length, units, batch)).astype(np.float32)
    return weights, inputs, toward


def assert_close(actual, expected, tolerance):
    scale = np.abs(np.asarray(expected)).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("last_only", [False, True])
def test_gradient_equals_automatic_differentiation(last_only):
    weights, inputs, toward = _layer_case()
    if last_only:
        toward[:-1] = 0

    def slope(states):
        return jax.jit(
            jax.value_and_grad(lambda w, x: jnp.vdot(states(w, x), toward), argnums=(0, 1))
        )

    value, grads = slope(lstm_states)(weights, inputs)
    expected_value, expected = slope(_scanned)(weights, inputs)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for actual, wanted in zip(grads, expected, strict=True):
        assert_close(actual, wanted, 1e-5)


def test_second_derivatives():
    """Reverse over reverse, as Per-FedAvg's Hessian form needs; also batched over clients."""
    weights, inputs, toward = _layer_case(1)
    along = np.random.default_rng(2).standard_normal(weights.shape).astype(np.float32)

    def hessian_vector(states):
        def value(w, x):
            return jnp.sum((states(w, x) - toward) ** 2)

        def product(w, x):
            return jax.grad(lambda v: jnp.vdot(jax.grad(value)(v, x), along))(w)

        return jax.jit(jax.vmap(product))

    several = np.stack([weights, 0.5 * weights]), np.stack([inputs, inputs[::-1]])
    assert_close(hessian_vector(lstm_states)(*several), hessian_vector(_scanned)(*several), 1e-5)


def test_dropout_meets_its_rate_and_keeps_the_mean():
    ones = jnp.ones((200, 500))
    dropped = np.asarray(jax.jit(lstm.drop, static_argnums=1)(ones, 0.2, jax.random.key(0)))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.8)}
    # Six standard deviations of 100,000 draws.
    assert abs(np.mean(dropped == 0) - 0.2) < 6 * np.sqrt(0.2 * 0.8 / dropped.size)


def test_dropout_masks_of_different_keys_are_unrelated():
    keys = jax.random.split(jax.random.key(1), 64)
    ones = jnp.ones((16, 32))
    drop = jax.jit(jax.vmap(lambda key: lstm.drop(ones, 0.5, key)))
    masks = np.asarray(drop(keys)).reshape(64, -1) > 0
    assert abs(masks.mean() - 0.5) < 6 * 0.5 / np.sqrt(masks.size)
    agree = (masks[:, None] == masks[None, :]).mean(axis=2)[np.triu_indices(64, 1)]
    assert np.abs(agree - 0.5).max() < 6 * 0.5 / np.sqrt(masks.shape[1])
    # Neither do neighboring units of one mask agree more often than by chance.
    beside = (masks[:, 1:] == masks[:, :-1]).mean()
    assert abs(beside - 0.5) < 6 * 0.5 / np.sqrt(masks.size)


def test_dropout_only_while_training(tiny_model):
    model = tiny_model("dropout_lstm")
    params = jnp.abs(model.init(jax.random.key(0)))
    inputs = jnp.ones((64, 3, 1))
    judged = np.asarray(jax.jit(lambda p, x: model.apply(p, x, None))(params, inputs))
    assert len(np.unique(judged)) == 1 and judged[0] > 0
    train = jax.jit(model.apply)
    trained, again, other = (
        np.asarray(train(params, inputs, jax.random.key(k))) for k in (1, 1, 2)
    )
    np.testing.assert_array_equal(trained, again)
    assert len(np.unique(trained)) > 1 and (trained != other).any()


def test_starts_alive_where_the_first_draw_is_dead(tiny_model):
    model = tiny_model("dropout_lstm")
    inputs = jnp.asarray(np.random.default_rng(0).random((20, 3, 1)), jnp.float32)

    def alive(params):
        return jnp.mean(model.apply(params, inputs, None) != 0)

    @jax.jit
    @jax.vmap
    def first_draws(seed):
        params = model.init(jax.random.fold_in(jax.random.key(seed), 0))
        return params, alive(params)

    first, shares = first_draws(jnp.arange(20))
    dead, live = np.flatnonzero(shares == 0), np.flatnonzero(shares > 0.9)
    assert len(dead) >= 3 and len(live) >= 3  # it happens with common seeds
    revived = models.alive_params(model, jax.random.key(int(dead[0])), inputs)
    assert alive(revived) > 0.9
    kept = models.alive_params(model, jax.random.key(int(live[0])), inputs)
    np.testing.assert_allclose(kept, first[live[0]], rtol=1e-6)


class Silent(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return 0 * nn.Dense(1)(inputs[:, -1])


def test_no_live_start_is_an_error():
    model = models.from_flax(Silent(), EXAMPLE)
    with pytest.raises(ValueError, match=r"64 draws.*--activation=softplus"):
        models.alive_params(model, jax.random.key(0), jnp.ones((4, 12, 1)))


class WithTrain(nn.Module):
    @nn.compact
    def __call__(self, inputs, train: bool):
        hidden = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(inputs[:, :, 0]))
        return nn.Dense(1)(hidden)


class WithDeterministic(nn.Module):
    @nn.compact
    def __call__(self, inputs, deterministic: bool = False):
        hidden = nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(8)(inputs[:, :, 0]))
        return nn.Dense(1)(hidden)[:, 0]


class WithNeither(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(1)(inputs[:, :, 0])


@pytest.mark.parametrize("module", [WithTrain(), WithDeterministic(), WithNeither()])
def test_users_own_modules(module):
    model = models.from_flax(module, EXAMPLE)
    params = model.init(jax.random.key(0))
    assert params.shape == (model.num_parameters,)
    inputs = jnp.ones((3, 12, 1))
    judged = model.apply(params, inputs, None)
    assert judged.shape == (3,)
    trained = model.apply(params, inputs, jax.random.key(1))
    assert trained.shape == (3,)
    assert np.array_equal(judged, trained) == isinstance(module, WithNeither)
    direct = module.apply(
        {"params": model.restore(params)},
        inputs,
        *([False] if isinstance(module, WithTrain) else []),
        **({"deterministic": True} if isinstance(module, WithDeterministic) else {}),
    )
    np.testing.assert_array_equal(judged, np.ravel(direct))


class WithStatistics(nn.Module):
    @nn.compact
    def __call__(self, inputs, train: bool = False):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(inputs[:, :, 0]))


def test_running_statistics_are_refused():
    with pytest.raises(ValueError, match=r"batch_stats.*LayerNorm"):
        models.from_flax(WithStatistics(), EXAMPLE)


def test_one_output_an_input():
    with pytest.raises(ValueError, match=r"one output an input.*\(2,\).*\(2, 3\)"):
        models.from_flax(nn.Sequential([lambda x: x[:, -1], nn.Dense(3)]), EXAMPLE)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 2), (3, 1)])
def test_outputs_of_any_shape(shape):
    size = int(np.prod(shape))
    module = nn.Sequential([lambda x: x[:, -1], nn.Dense(size), lambda x: x.reshape(-1, *shape)])
    model = models.from_flax(module, EXAMPLE, shape)
    params = jnp.ones(model.num_parameters)
    assert model.apply(params, jnp.ones((5, 12, 1)), None).shape == (5, *shape)


def test_axes_of_length_one_do_not_count_and_no_axes_are_swapped():
    def of(given, expected):
        size = int(np.prod(given))
        layers = [lambda x: x[:, -1], nn.Dense(size), lambda x: x.reshape(-1, *given)]
        return models.from_flax(nn.Sequential(layers), EXAMPLE, expected)

    assert of((3, 1), (1, 3)).num_parameters == 6
    for given, expected in (((3, 2), (2, 3)), ((6,), (2, 3)), ((3,), ())):
        with pytest.raises(ValueError, match="change the module's last layer or output_shape"):
            of(given, expected)
    with pytest.raises(ValueError, match=r"outputs of shape \(2, 3\) an input, shape \(2, 2, 3\)"):
        of((3, 2), (2, 3))
    pooled = nn.Sequential([lambda x: x[:, -1].T, nn.Dense(2)])  # [1, 2]: the batch is gone
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(1, 2\)"):
        models.from_flax(pooled, EXAMPLE)
