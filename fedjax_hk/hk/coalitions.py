"""Coalitions: who belongs together, what they weigh, and where their centers are.

S clients. A coalition is named by its smallest member, so every array has the fixed shape
S and the names do not depend on how the coalitions were found.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .affinity import check_leaves, check_mask
from .precision import AnyArray, Array

PyTree = Any


def components(links_ss: AnyArray, mask: AnyArray | None = None) -> Array:
    """Connected components of an undirected graph.

    "Opinions that ended within delta of each other", eq. (11) of the FedHK paper, is not
    transitive; its transitive closure is what names coalitions.

    Args:
      links_ss: `[S, S]` bool, symmetric; the diagonal does not matter.
      mask: `[S]` bool, False for clients that take no part.

    Returns:
      `[S]` int32, the smallest client of each one's component; -1 for a masked client.
    """
    num_clients = links_ss.shape[0]
    mask = check_mask(mask, num_clients)
    ids_s = jnp.arange(num_clients, dtype=jnp.int32)
    links_ss = (links_ss | (ids_s[:, None] == ids_s[None, :])) & mask[:, None] & mask[None, :]

    def smallest_linked(labels_s):
        return jnp.min(jnp.where(links_ss, labels_s[None, :], num_clients), axis=1)

    def sweep(state):
        labels_s, _ = state
        lower_s = smallest_linked(labels_s)
        # Following the label of one's label halves the way to go, so that a long chain
        # takes few sweeps. A masked client holds S, which no index reaches.
        lower_s = jnp.minimum(lower_s, lower_s.at[lower_s].get(mode="fill", fill_value=num_clients))
        return lower_s, jnp.any(lower_s != labels_s)

    first_s = smallest_linked(ids_s)
    labels_s, _ = lax.while_loop(lambda state: state[1], sweep, (first_s, jnp.any(first_s < ids_s)))
    return jnp.where(mask, labels_s, -1)


def coalition_sizes(labels_s: AnyArray) -> Array:
    """`[S]` int32: members of the coalition that is named s, 0 where s names none."""
    ids_s = jnp.arange(labels_s.shape[0], dtype=labels_s.dtype)
    return jnp.sum(labels_s[None, :] == ids_s[:, None], axis=1, dtype=jnp.int32)


def client_weights(labels_s: AnyArray) -> Array:
    """Weight of every client when coalitions weigh the same, `1 / (K |C(i)|)`.

    Args:
      labels_s: `[S]` coalition of each client, -1 where masked.

    Returns:
      `[S]` float32, not negative, sum 1; zeros where masked.

    Source: eqs. (15) and (16) of the FedHK paper.
    """
    num_coalitions = jnp.sum(coalition_sizes(labels_s) > 0, dtype=jnp.int32)
    own_size_s = jnp.sum(_same_coalition(labels_s), axis=1, dtype=jnp.int32)
    shares_s = (num_coalitions * own_size_s).astype(jnp.float32)
    return jnp.where(labels_s >= 0, 1.0 / jnp.maximum(shares_s, 1.0), 0.0)


def barycenters(tree: PyTree, labels_s: AnyArray, mask: AnyArray | None = None) -> PyTree:
    """Every client's row becomes the mean of its coalition, eq. (15) of the FedHK paper.

    Args:
      tree: pytree of floating leaves `[S, ...]`.
      labels_s: `[S]` coalition of each client; negative where masked.
      mask: `[S]` bool, False for further clients to leave out.

    Returns:
      Pytree of the same shapes and dtypes. A singleton's row is its own, bit for bit; the
      rows of masked clients are zeros, and what they held has no influence.

    Raises:
      ValueError: as for `gram_matrix`.
    """
    num_clients = check_leaves(tree, "tree")[0].shape[0]
    valid_s = (labels_s >= 0) & check_mask(mask, num_clients)
    same_ss = _same_coalition(labels_s) & valid_s[:, None] & valid_s[None, :]
    sizes_s = jnp.maximum(jnp.sum(same_ss, axis=1, dtype=jnp.int32), 1)

    def of_leaf(leaf):
        if leaf.size == 0:
            return leaf
        dtype = _at_least_float32(leaf.dtype)
        rows = jnp.where(valid_s[:, None], leaf.reshape(num_clients, -1), 0.0).astype(dtype)
        # A product with zeros and ones, because sums by label (scatter-add) come out in
        # another order each time on a GPU.
        sums = jnp.matmul(same_ss.astype(dtype), rows, precision=lax.Precision.HIGHEST)
        return (sums / sizes_s[:, None].astype(dtype)).reshape(leaf.shape).astype(leaf.dtype)

    return jax.tree.map(of_leaf, tree)


def average(tree: PyTree, weights_s: AnyArray) -> PyTree:
    """Weighted sum over clients, such as eq. (16) of the FedHK paper.

    Args:
      tree: pytree of floating leaves `[S, ...]`.
      weights_s: `[S]`; a client whose weight is 0 has no influence, even if it holds NaN.

    Returns:
      Pytree of leaves `[...]` of the same dtypes.

    Raises:
      ValueError: as for `gram_matrix`.
    """
    num_clients = check_leaves(tree, "tree")[0].shape[0]
    if weights_s.shape != (num_clients,):
        raise ValueError(f"Expected weights_s of shape ({num_clients},), got {weights_s.shape}.")

    def of_leaf(leaf):
        if leaf.size == 0:
            return jnp.zeros(leaf.shape[1:], leaf.dtype)
        dtype = _at_least_float32(leaf.dtype)
        weights = weights_s.astype(dtype)

        # One client at a time: XLA's CPU back end (jax 0.10.2) copies the whole leaf both for
        # a matrix product and for a masked sum over the client axis.
        def add(total, client):
            weight, row = client
            return total + jnp.where(weight != 0, weight * row.astype(dtype), 0.0), None

        # Zeros that vary over the mesh axes of both, as a loop inside shard_map wants them.
        start = jnp.where(jnp.isnan(leaf[0]), 0.0, 0.0).astype(dtype)
        start += jnp.where(jnp.isnan(weights[0]), 0.0, 0.0).astype(dtype)
        return lax.scan(add, start, (weights, leaf))[0].astype(leaf.dtype)

    return jax.tree.map(of_leaf, tree)


def _at_least_float32(dtype):
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def _same_coalition(labels_s: AnyArray) -> Array:
    """`[S, S]` bool, False in the rows and columns of masked clients."""
    return (labels_s[:, None] == labels_s[None, :]) & (labels_s[:, None] >= 0)
