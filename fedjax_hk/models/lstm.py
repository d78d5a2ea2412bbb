"""The forecaster of the FedHK paper, feature-major, with its dropout."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_hk.models.lstm_kernel import lstm_states
from fedjax_hk.models.model import Model, from_flax
from fedjax_hk.types import AnyArray, Array

OUTPUTS = {"relu": nn.relu, "softplus": nn.softplus, "linear": lambda x: x}


def lstm_forecaster(
    example_inputs: AnyArray,
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
