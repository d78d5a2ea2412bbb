"""A `Model` is a few pure functions; any Flax module becomes one. Here: the forecaster."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_hk.types import Array, Params

OUTPUTS = {"relu": nn.relu, "softplus": nn.softplus, "linear": lambda x: x}


class Model(NamedTuple):
    """A network without state, as a function of one parameter vector.

    A round compares, averages and moves models, for which they are vectors of D numbers;
    only the network itself knows that they have layers.

    Attributes:
      init: `key -> [D]` parameters.
      apply: `(params, inputs, dropout_key) -> outputs`, with params `[D]`, inputs
        `[B, ...]` and outputs `[B]` (logits `[B, C]` of classes); `dropout_key` is None when
        the model is judged.
      restore: `[D] -> ` the layers' parameters, as Flax has them.
      leaves: name and size of each of the layers' arrays, in the vector's order.
      layers: name and kind of the layers in forward order, None if unknown. Kinds: `lstm` and
        `dense` of this module, `linen_dense` and `conv` of Flax; the last one is the output.
    """

    init: Callable[[Array], Array]
    apply: Callable[[Array, Array, Array | None], Array]
    restore: Callable[[Array], Params]
    leaves: tuple[tuple[str, int], ...]
    layers: tuple[tuple[str, str], ...] | None = None

    @property
    def num_parameters(self) -> int:
        """D."""
        return sum(size for _, size in self.leaves)


def from_flax(module: nn.Module, example_inputs: Array, num_classes: int | None = None) -> Model:
    """Wraps a Flax (linen) module that maps inputs `[B, ...]` to `[B]` or `[B, 1]`, or with
    `num_classes` to logits `[B, num_classes]`.

    Bytes (uint8), such as the pixels of an image, reach the module as floats from 0 to 1. A
    module whose `__call__` takes `train` or `deterministic` is told whether it is being
    trained; its random numbers come from the stream `dropout`. An attribute
    `forward_layers` becomes `Model.layers`.

    Args:
      module: the network; it may hold parameters and nothing else.
      example_inputs: `[B, ...]`, one batch of inputs, for shapes only.
      num_classes: C; None for one number an input.

    Errors: ValueError for a module with other collections than `params` (such as batch
      statistics), or whose output has another shape.
    """
    arguments = inspect.signature(type(module).__call__).parameters

    def mode(train: bool) -> dict[str, bool]:
        if "train" in arguments:
            return {"train": train}
        return {"deterministic": not train} if "deterministic" in arguments else {}

    def layers(key: Array) -> Params:
        variables = module.init(key, _as_floats(example_inputs), **mode(False))
        if set(variables) != {"params"}:
            raise ValueError(
                f"Expected a module with the collection 'params' alone, got {sorted(variables)}; "
                "use layers without running statistics (LayerNorm, GroupNorm)."
            )
        return variables["params"]

    shapes = jax.eval_shape(layers, jax.random.key(0))
    _, restore = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

    def apply(params: Array, inputs: Array, dropout_key: Array | None) -> Array:
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        variables = {"params": restore(params)}
        outputs = module.apply(
            variables, _as_floats(inputs), **mode(dropout_key is not None), rngs=rngs
        )
        batch = inputs.shape[0]
        if num_classes is not None:
            if outputs.shape != (batch, num_classes):
                raise ValueError(
                    f"Expected logits of {num_classes} classes, shape ({batch}, {num_classes}), "
                    f"got {outputs.shape}."
                )
            return outputs
        if outputs.size != batch:
            raise ValueError(
                f"Expected one output an input, shape ({batch},), got {outputs.shape}."
            )
        return outputs.reshape(batch)

    def initial(key: Array) -> Array:
        return ravel_pytree(layers(key))[0]

    # A wrong output is told here, not in the middle of compiling a round.
    jax.eval_shape(lambda x: apply(initial(jax.random.key(0)), x, None), example_inputs)
    leaves = tuple(
        ("/".join(entry.key for entry in path), math.prod(leaf.shape))
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]
    )
    return Model(initial, apply, restore, leaves, getattr(module, "forward_layers", None))


def _as_floats(inputs: Array) -> Array:
    return inputs / jnp.float32(255) if inputs.dtype == jnp.uint8 else inputs


ALIVE_DRAWS = 64  # about half of the draws are alive with the paper's ReLU output


def alive_params(model: Model, key: Array, inputs: Array) -> Array:
    """The first of `ALIVE_DRAWS` initial draws whose output is not zero almost everywhere.

    A ReLU output that starts below zero on the data has no gradient: the whole fleet would
    stay at zero for the whole run. Drawing again keeps the initializers as they are.

    Args:
      key: of the run; draw k uses `fold_in(key, k)`.
      inputs: `[M, ...]` windows to probe with.

    Returns:
      `[D]`.

    Errors: ValueError if no draw is alive.
    """

    def draw(index, inputs):  # inputs as a constant would be folded while compiling
        params = model.init(jax.random.fold_in(key, index))
        return params, jnp.mean(model.apply(params, inputs, None) != 0)

    attempt = jax.jit(draw)
    for index in range(ALIVE_DRAWS):
        params, alive = attempt(index, inputs)
        if alive > 0.9:
            return params
    raise ValueError(
        f"Expected a model that starts alive, got {ALIVE_DRAWS} draws whose output is zero on "
        "the data; use --activation=softplus or another model."
    )


def lstm_forecaster(
    example_inputs: Array,
    *,
    neurons: tuple[int, ...] = (32, 16),
    dense_neurons: int = 8,
    dropout: float = 0.2,
    output: str = "relu",
) -> Model:
    """The FedHK paper's forecaster: LSTM 32, LSTM 16, Dense 8 ReLU, Dense 1 (Table 3).

    7,633 parameters with one input feature. Dropout follows each LSTM layer.

    Args:
      example_inputs: `[B, L, F]`, for shapes only.
      output: last activation, one of `OUTPUTS`. The paper's ReLU can die.

    Source: FedHK paper, section 5.3; Keras initializers (spec A30).
    """
    module = LSTMForecaster(tuple(neurons), dense_neurons, dropout, output)
    return from_flax(module, example_inputs)


class LSTMForecaster(nn.Module):
    """See `lstm_forecaster`. Activations are feature-major, `[features, batch]`: on a CPU
    the gates are then contiguous row blocks, which is nearly twice as fast."""

    neurons: tuple[int, ...]
    dense_neurons: int
    dropout: float
    output: str

    @property
    def forward_layers(self) -> tuple[tuple[str, str], ...]:
        """Name and kind of each layer, see `Model`."""
        recurrent = [(f"lstm_{index}", "lstm") for index in range(len(self.neurons))]
        return (*recurrent, ("dense", "dense"), ("output", "dense"))

    @nn.compact
    def __call__(self, inputs: Array, train: bool = False) -> Array:
        """Maps `[B, L, F]` to `[B]`."""
        sequence = jnp.transpose(inputs, (1, 2, 0))
        for index, neurons in enumerate(self.neurons):
            sequence = LSTM(neurons, name=f"lstm_{index}")(sequence)
            if index == len(self.neurons) - 1:
                sequence = sequence[-1]  # only the last state is read out
            if train and self.dropout:
                sequence = drop(sequence, self.dropout, self.make_rng("dropout"))
        hidden = nn.relu(Dense(self.dense_neurons, name="dense")(sequence))
        return OUTPUTS[self.output](Dense(1, name="output")(hidden))[0]


class Dense(nn.Module):
    """A dense layer on `[features, batch]`."""

    neurons: int

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        kernel_init = nn.initializers.glorot_uniform(in_axis=-1, out_axis=-2)
        kernel = self.param("kernel", kernel_init, (self.neurons, inputs.shape[0]))
        bias = self.param("bias", nn.initializers.zeros, (self.neurons,))
        return kernel @ inputs + bias[:, None]


class LSTM(nn.Module):
    """One layer on `[L, features, batch]`; returns every hidden state, `[L, neurons, batch]`."""

    neurons: int

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        features, rows = inputs.shape[1], 4 * self.neurons
        kernel_init = nn.initializers.glorot_uniform(in_axis=-1, out_axis=-2)
        kernel = self.param("kernel", kernel_init, (rows, features))
        recurrent = self.param(
            "recurrent_kernel", nn.initializers.orthogonal(), (rows, self.neurons)
        )
        bias = self.param("bias", _forget_one, (rows,))
        return lstm_states(jnp.concatenate([kernel, recurrent, bias[:, None]], axis=1), inputs)


def _forget_one(key: Array, shape: tuple[int], dtype=jnp.float32) -> Array:
    """Zero biases, one for the forget gate (Keras `unit_forget_bias`)."""
    del key
    neurons = shape[0] // 4
    return jnp.zeros(shape, dtype).at[neurons : 2 * neurons].set(1)


def drop(x: Array, rate: float, key: Array) -> Array:
    """Dropout; the rate is met to 2^-32."""
    keep = cheap_bits(key, x.shape) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, x / (1 - rate), 0)


def cheap_bits(key: Array, shape: tuple[int, ...]) -> Array:
    """32 random bits an entry, good enough for dropout masks, at a tenth of threefry's cost.

    Two rounds of multiply and xor-shift on a counter, keyed between them; the constants are
    those of the integer hash "lowbias32" (Wellons 2018), chosen for low avalanche bias.
    """
    words = jax.random.key_data(key).astype(jnp.uint32)
    counter = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    x = counter * jnp.uint32(0x9E3779B9) + words[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ words[-1] ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


@jax.custom_vjp
def lstm_states(weights: Array, inputs: Array) -> Array:
    """Hidden states of an LSTM that starts at zero.

    The backward pass is written out: automatic differentiation stores and adds a weight
    gradient for every time step, here it is accumulated in the loop.

    Args:
      weights: `[4U, F + U + 1]` rows input, forget, candidate, output gate; columns
        input, state, bias.
      inputs: `[L, F, B]`.

    Returns:
      `[L, U, B]`.
    """
    return _forward(weights, inputs)[0]


def _forward(weights: Array, inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    neurons, batch = weights.shape[0] // 4, inputs.shape[2]
    ones = jnp.ones((1, batch), inputs.dtype)
    zeros = jnp.zeros((neurons, batch), inputs.dtype)

    def step(carry, x):
        h, c = carry
        z = weights @ jnp.concatenate([x, h, ones])
        i, f = jax.nn.sigmoid(z[:neurons]), jax.nn.sigmoid(z[neurons : 2 * neurons])
        g, o = jnp.tanh(z[2 * neurons : 3 * neurons]), jax.nn.sigmoid(z[3 * neurons :])
        c_next = f * c + i * g
        squashed = jnp.tanh(c_next)
        h_next = o * squashed
        return (h_next, c_next), (h_next, h, c, i, f, g, o, squashed)

    _, (states, *saved) = jax.lax.scan(step, (zeros, zeros), inputs)
    return states, (weights, inputs, *saved)


def _backward(saved: tuple[Array, ...], states_bar: Array) -> tuple[Array, Array]:
    weights, inputs, h, c, i, f, g, o, squashed = saved
    neurons, (length, features, batch) = weights.shape[0] // 4, inputs.shape
    # All that does not depend on the loop is computed before it, for all steps at once; the
    # barrier keeps XLA from fusing it back into the loop, where it ran 40 % slower (CPU).
    gate_slopes = jnp.stack(
        [g * i * (1 - i), c * f * (1 - f), i * (1 - g**2), squashed * o * (1 - o)], axis=1
    )
    cell_slope = o * (1 - squashed**2)
    columns = jnp.concatenate([inputs, h, jnp.ones((length, 1, batch), inputs.dtype)], axis=1)
    transposed = weights[:, : features + neurons].T
    gate_slopes, cell_slope, columns, transposed = jax.lax.optimization_barrier(
        (gate_slopes, cell_slope, columns, transposed)
    )

    def step(carry, now):
        h_bar, c_bar, weights_bar = carry
        state_bar, gate_slope, cell_slope, f, column = now
        h_bar = h_bar + state_bar
        c_bar = c_bar + h_bar * cell_slope
        z_bar = gate_slope * jnp.stack([c_bar, c_bar, c_bar, h_bar])
        z_bar = z_bar.reshape(4 * neurons, batch)
        weights_bar = weights_bar + column @ z_bar.T
        column_bar = transposed @ z_bar
        return (column_bar[features:], c_bar * f, weights_bar), column_bar[:features]

    zeros = jnp.zeros((neurons, batch), inputs.dtype)
    (_, _, weights_bar), inputs_bar = jax.lax.scan(
        step,
        (zeros, zeros, jnp.zeros_like(weights.T)),
        (states_bar, gate_slopes, cell_slope, f, columns),
        reverse=True,
    )
    return weights_bar.T, inputs_bar


lstm_states.defvjp(_forward, _backward)
