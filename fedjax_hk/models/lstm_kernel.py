"""All time steps of one LSTM layer, with a backward pass written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_hk.types import Array


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
