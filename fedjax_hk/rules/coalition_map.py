"""Coalitions of the same opinions under many thresholds; the inner products are shared."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_hk import hk
from fedjax_hk.rules.partitions import MAX_STEPS, pair_quantiles
from fedjax_hk.types import Array


class CoalitionMap(NamedTuple):
    """Attributes:
    limits_t: `[T]` largest dissimilarity of neighbors, ascending.
    num_coalitions_t: `[T]` int32.
    largest_t: `[T]` int32 members of the largest coalition.
    changes_t: `[T]` bool, eq. (16) differs from the plain mean.
    """

    limits_t: np.ndarray
    num_coalitions_t: np.ndarray
    largest_t: np.ndarray
    changes_t: np.ndarray


def coalition_map(
    gram_ss: Array, mask_s: Array, kind: str, *, state_norm: str = "none", num_limits: int = 48
) -> CoalitionMap:
    """Runs the interaction at `num_limits` quantiles of the pairs' dissimilarities.

    Args:
      gram_ss: from `hk.gram_matrix`.
      mask_s: `[S]` bool.
      kind: `cosine` (limits are 1 - cos) or `ball` (limits are distances).
    """
    levels = jnp.linspace(0, 1, num_limits)
    return CoalitionMap(*map(np.asarray, _map(gram_ss, mask_s, levels, kind, state_norm)))


def splitting_limit(found: CoalitionMap) -> float | None:
    """The widest limit under which the partition changes the average; None if none does."""
    where = np.flatnonzero(found.changes_t)
    return float(found.limits_t[where[-1]]) if len(where) else None


def _map(gram_ss, mask_s, levels, kind, state_norm):
    @jax.jit
    def run(gram_ss, mask_s, levels):
        apart_ss = hk.dissimilarity(gram_ss, kind)
        if kind == "ball":
            apart_ss = jnp.sqrt(apart_ss)
        limits_t = pair_quantiles(apart_ss, mask_s, levels)
        near_t = hk.Neighborhood(kind, limits_t, jnp.zeros_like(limits_t))

        def one(near):
            found = hk.interact_from_gram(
                gram_ss, near, mask=mask_s, max_steps=MAX_STEPS, state_norm=state_norm
            )
            size = jnp.maximum(jnp.sum(mask_s), 1)
            uniform_s = jnp.where(mask_s, 1 / size, 0)
            changes = jnp.max(jnp.abs(found.weights_s - uniform_s)) * size > 1e-5
            return found.num_coalitions, jnp.max(found.sizes_s), changes

        return limits_t, *jax.vmap(one)(near_t)

    return run(gram_ss, mask_s, levels)
