"""Agglomerative coalitions: the closest two merge until none is closer than a limit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_hk.types import Array


def agglomerate(
    apart_ss: Array, mask_s: Array, limit: Array, *, linkage: str = "average"
) -> tuple[Array, Array]:
    """Merges coalitions whose distance is below `limit`, closest first.

    Args:
      apart_ss: `[S, S]` distances.
      mask_s: `[S]` bool, False for clients that take no part.
      limit: `[]`; 0 merges nobody, infinity everybody.
      linkage: distance of coalitions; `average`, `complete`, `single` or `ward`.

    Returns:
      `[S]` int32 smallest member of each one's coalition, -1 if masked; `[]` number of merges.

    Source: Lance and Williams 1967, as scipy and scikit-learn have it.
    """
    size = mask_s.shape[0]
    ids_s = jnp.arange(size, dtype=jnp.int32)
    eye_ss = jnp.eye(size, dtype=bool)
    pairs_ss = mask_s[:, None] & mask_s[None, :] & ~eye_ss

    def closest(d_ss):
        place = jnp.argmin(d_ss)
        return jnp.minimum(place // size, place % size), jnp.maximum(place // size, place % size)

    def merge(state):
        d_ss, labels_s, counts_s, merges = state
        i, j = closest(d_ss)
        to_both = (d_ss[i], d_ss[j], d_ss[i, j], counts_s[i], counts_s[j], counts_s)
        merged_s = _merged(linkage, *to_both)
        # Rows of who is merged already, or masked, stay infinite.
        merged_s = jnp.where(jnp.isfinite(d_ss[i]) & jnp.isfinite(d_ss[j]), merged_s, jnp.inf)
        merged_s = jnp.where((ids_s == i) | (ids_s == j), jnp.inf, merged_s)
        d_ss = d_ss.at[i].set(merged_s).at[:, i].set(merged_s)
        d_ss = d_ss.at[j].set(jnp.inf).at[:, j].set(jnp.inf)
        labels_s = jnp.where(labels_s == j, i.astype(jnp.int32), labels_s)
        return d_ss, labels_s, counts_s.at[i].add(counts_s[j]), merges + 1

    start = (
        jnp.where(pairs_ss, apart_ss, jnp.inf),
        jnp.where(mask_s, ids_s, -1),
        jnp.ones(size),
        jnp.int32(0),
    )
    # A limit of infinity merges everybody, but nobody with an empty place.
    state = jax.lax.while_loop(
        lambda s: (jnp.min(s[0]) < limit) & jnp.isfinite(jnp.min(s[0])), merge, start
    )
    return state[1], state[3]


def _merged(linkage, to_i, to_j, between, num_i, num_j, num_k):
    """Distances of all coalitions k to the one that i and j become."""
    if linkage == "single":
        return jnp.minimum(to_i, to_j)
    if linkage == "complete":
        return jnp.maximum(to_i, to_j)
    if linkage == "average":
        return (num_i * to_i + num_j * to_j) / (num_i + num_j)
    total = (num_i + num_k) * to_i**2 + (num_j + num_k) * to_j**2 - num_k * between**2
    return jnp.sqrt(jnp.maximum(total / (num_i + num_j + num_k), 0))
