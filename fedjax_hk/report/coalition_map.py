"""Coalitions of the same opinions under many thresholds; the inner products are shared."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_hk import hk
from fedjax_hk.rules.grouping import pair_dissimilarity, pair_quantiles
from fedjax_hk.rules.hegselmann_krause import MAX_STEPS
from fedjax_hk.rules.weighting import equals_plain_mean
from fedjax_hk.settings.thresholds import Meaning
from fedjax_hk.types import AnyArray


class CoalitionMap(NamedTuple):
    """Attributes:
    limits_t: `[T]` largest dissimilarity of neighbors.
    num_coalitions_t: `[T]` int32.
    largest_t: `[T]` int32 members of the largest coalition.
    changes_t: `[T]` bool, eq. (16) differs from the plain mean.
    sizes_ts: `[T, S]` int32 sizes of the coalitions, largest first, 0 beyond the last.
    """

    limits_t: np.ndarray
    num_coalitions_t: np.ndarray
    largest_t: np.ndarray
    changes_t: np.ndarray
    sizes_ts: np.ndarray


def coalition_map(
    gram_ss: AnyArray, mask_s: AnyArray, kind: str, limits_t: AnyArray, *, state_norm: str = "none"
) -> CoalitionMap:
    """Runs the interaction under each limit.

    Args:
      gram_ss: from `hk.gram_matrix`.
      mask_s: `[S]` bool.
      kind: `cosine` (limits are 1 - cos) or `ball` (limits are distances).
      limits_t: `[T]` largest dissimilarity of neighbors; `pair_limits` gives useful ones.
    """
    limits_t = jnp.asarray(limits_t, jnp.float32)
    found = _map(gram_ss, mask_s, limits_t, kind=kind, state_norm=state_norm)
    return CoalitionMap(*map(np.asarray, (limits_t, *found)))


def pair_limits(gram_ss: AnyArray, mask_s: AnyArray, kind: str, num_limits: int = 48) -> np.ndarray:
    """`[num_limits]` quantiles of the pairs' dissimilarities, ascending.

    They are dense among the closest pairs: one link pulls others in its wake, so that few
    links may already join everybody.
    """
    levels = jnp.linspace(0, 1, num_limits) ** 3
    return np.asarray(_quantiles(gram_ss, mask_s, levels, kind=kind))


def splitting_threshold(
    gram_ss: AnyArray, mask_s: AnyArray, meaning: Meaning, *, state_norm: str = "none"
) -> str | None:
    """The widest of some thresholds under which the grouping changes the average.

    Near 1 a float32 cosine has few digits, so that what is tried is the threshold as it is
    written, and both as a run (float32) and as the operator (float64) understand it.

    Args:
      gram_ss, mask_s: as in `coalition_map`.
      meaning: of the threshold, one with a limit (see `thresholds.meaning_of`, outright).

    Returns:
      The threshold as text with few digits; None if no threshold that was tried does it.
    """
    limit_of, text_of = meaning.limit, meaning.text
    if limit_of is None or text_of is None:
        raise ValueError(f"Expected a threshold with a limit, got {meaning.name}.")
    limits_t = pair_limits(gram_ss, mask_s, meaning.kind)
    usable = [float(limit) for limit in limits_t if np.isfinite(limit) and limit > 0]
    texts = [text_of(limit) for limit in usable]
    if not texts:
        return None
    exact_t = np.array([float(text) for text in texts])
    both = np.concatenate([limit_of(exact_t), limit_of(exact_t.astype(np.float32))])
    found = coalition_map(gram_ss, mask_s, meaning.kind, both, state_norm=state_norm)
    where = np.flatnonzero(found.changes_t.reshape(2, -1).all(axis=0))
    return texts[where[-1]] if len(where) else None


@functools.partial(jax.jit, static_argnames="kind")
def _quantiles(gram_ss, mask_s, levels, *, kind):
    return pair_quantiles(pair_dissimilarity(gram_ss, kind), mask_s, levels)


@functools.partial(jax.jit, static_argnames=("kind", "state_norm"))
def _map(gram_ss, mask_s, limits_t, *, kind, state_norm):
    def one(near):
        found = hk.interact_from_gram(
            gram_ss, near, mask=mask_s, max_steps=MAX_STEPS, state_norm=state_norm
        )
        changes = ~equals_plain_mean(found.weights_s, mask_s)
        sizes_s = -jnp.sort(-found.sizes_s)
        return found.num_coalitions, sizes_s[0], changes, sizes_s

    return jax.vmap(one)(hk.Neighborhood(kind, limits_t, jnp.zeros_like(limits_t)))
