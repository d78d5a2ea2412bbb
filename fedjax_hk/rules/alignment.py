"""Matching hidden neurons: which of one network's neurons plays the part of which of another's.

The neurons of a hidden layer can change places, with all that leads to and from them, and the
network stays the same function. Averaging two networks whose neurons are ordered differently
mixes neurons that have nothing to do with each other.

Source: FedMA (Wang et al. 2020), at fixed width and in one pass (spec 3.7): the server matches
every client's neurons one to one to the global model's, then `SWEEPS` times to the clients' mean.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_hk import hk
from fedjax_hk.types import Array

SWEEPS = 2


class Neurons(NamedTuple):
    """Places in the parameter vector that belong to the H neurons of a hidden layer.

    Attributes:
      features_hk: `[H, K]` what neurons are compared by: weights from the layer before, biases.
      parts: matrices `[H, ...]` whose rows change places together, one after the other: what
        leads to a unit, then what leads from it. Recurrent weights are in both.
    """

    features_hk: np.ndarray
    parts: tuple[np.ndarray, np.ndarray]


def hidden_neurons(model: Any) -> tuple[Neurons, ...]:
    """The hidden layers of a `models.Model`, in forward order; none for a linear one.

    Errors: ValueError if the model does not say how it is built.
    """
    if model.layers is None:
        raise ValueError(
            "--align=neurons: the model does not say in which order its layers come; give its "
            "module an attribute `forward_layers`, or use --align=none."
        )
    places = model.restore(jnp.arange(model.num_parameters, dtype=jnp.float32))
    places = jax.tree.map(lambda x: np.asarray(x).astype(np.int64), places)
    layers = [(places[name], kind) for name, kind in model.layers]
    neurons = []
    for (layer, kind), (following, next_kind) in itertools.pairwise(layers):
        features_hk, to_hk, from_hk = _of_layer(layer, kind)
        size = len(features_hk)
        from_hk = np.concatenate([from_hk, _inputs_of(following, next_kind, size)], axis=1)
        neurons.append(
            Neurons(features_hk, (np.concatenate([features_hk, to_hk], axis=1), from_hk))
        )
    return tuple(neurons)


def _of_layer(layer: dict[str, np.ndarray], kind: str) -> tuple[np.ndarray, ...]:
    """Per unit: features, recurrent weights that lead to it, and that lead from it."""
    kernel, bias = layer["kernel"], layer["bias"]
    if kind == "lstm":  # rows are four gates of all neurons
        recurrent = layer["recurrent_kernel"]
        size = recurrent.shape[1]
        gates = kernel.reshape(4, size, -1).transpose(1, 0, 2).reshape(size, -1)
        features = np.concatenate([gates, bias.reshape(4, size).T], axis=1)
        square = recurrent.reshape(4, size, size)
        to, away = (square.transpose(axes).reshape(size, -1) for axes in ((1, 0, 2), (2, 0, 1)))
        return features, to, away
    # `dense` is feature-major, [out, in]; Flax's layers have their outputs last.
    rows = kernel if kind == "dense" else np.moveaxis(kernel, -1, 0).reshape(len(bias), -1)
    nothing = np.zeros((len(bias), 0), np.int64)
    return np.concatenate([rows, bias[:, None]], axis=1), nothing, nothing


def _inputs_of(layer: dict[str, np.ndarray], kind: str, size: int) -> np.ndarray:
    """Per unit of the layer before: the weights that read it.

    After a convolution, a dense layer reads each channel at many pixels; channels come last.
    """
    kernel = layer["kernel"]
    if kind in ("lstm", "dense"):
        return np.moveaxis(kernel.reshape(len(kernel), -1, size), -1, 0).reshape(size, -1)
    pixels = kernel.reshape(-1, size, kernel.shape[-1])
    return np.moveaxis(pixels, 1, 0).reshape(size, -1)


def aligned(
    models_sd: Array, reference: Array, share_s: Array, neurons: tuple[Neurons, ...]
) -> Array:
    """The same functions, with neurons in the order that fits the others best.

    Args:
      models_sd: `[S, D]`.
      reference: `[D]` the global model.
      share_s: `[S]` weights of the mean that is matched to in the sweeps.
      neurons: from `hidden_neurons`.
    """
    to = jax.vmap(lambda model, reference: match(model, reference, neurons), in_axes=(0, None))
    models_sd = to(models_sd, reference)
    for _ in range(SWEEPS):
        models_sd = to(models_sd, hk.average(models_sd, share_s))
    return models_sd


def match(model: Array, reference: Array, neurons: tuple[Neurons, ...]) -> Array:
    """`[D]` the model with its neurons in the reference's order, layer by layer."""
    for layer in neurons:
        ours, theirs = model[layer.features_hk], reference[layer.features_hk]
        # Squared distances, but for what is the same for every order.
        cost = -jnp.matmul(theirs, ours.T, precision=jax.lax.Precision.HIGHEST)
        rows, columns = optax.assignment.hungarian_algorithm(cost)
        order = jnp.zeros(len(cost), columns.dtype).at[rows].set(columns)
        stay = jnp.arange(len(cost), dtype=order.dtype)
        gain = jnp.trace(cost) - jnp.sum(cost[stay, order])
        # What is as good as it is, stays: rounding moves nobody.
        worth = gain > 1e-6 * jnp.sum(jnp.abs(jnp.diagonal(cost)))
        model = permuted(model, jnp.where(worth, order, stay), layer)
    return model


def permuted(model: Array, order: Array, layer: Neurons) -> Array:
    """`[D]` the same function; unit u is the one that was `order[u]`."""
    for part in layer.parts:
        model = model.at[part].set(model[jnp.asarray(part)[order]])
    return model
