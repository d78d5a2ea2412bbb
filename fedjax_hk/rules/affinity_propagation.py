"""Affinity propagation: coalitions around exemplars, as many as the data say."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_hk.rules.grouping import (
    Grouping,
    pair_dissimilarity,
    settled,
    smallest_member,
    stateless,
)
from fedjax_hk.types import Array, Settings

MAX_STEPS, STABLE_STEPS = 200, 15  # scikit-learn's defaults


class Exemplars(NamedTuple):
    """`exemplar_s` `[S]` int32, whom each client belongs to (-1 if masked); steps; converged."""

    exemplar_s: Array
    num_steps: Array
    converged: Array


def wscc(settings: Settings) -> Grouping:
    """WSCC (Tian 2022): affinity propagation on the cosine, anew each round."""

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        apart_ss = pair_dissimilarity(gram_ss, "cosine")
        found = affinity_propagation(
            -apart_ss,
            mask_s,
            jax.vmap(jax.random.uniform)(members.keys_s),
            preference=settings.preference,
            damping=settings.damping,
        )
        info = settled(smallest_member(found.exemplar_s))
        return info._replace(num_steps=found.num_steps, converged=found.converged), state

    return Grouping("cosine", stateless, apply)


def affinity_propagation(
    similarity_ss: Array,
    mask_s: Array,
    draws_s: Array,
    *,
    preference: float | None = None,
    damping: float = 0.5,
) -> Exemplars:
    """Messages between all pairs until some clients are everybody's exemplars.

    Where messages do not settle, or all pairs are equally similar, everybody is in one
    coalition (spec 3.9).

    Args:
      similarity_ss: `[S, S]` symmetric; only differences matter.
      mask_s: `[S]` bool, False for clients that take no part.
      draws_s: `[S]` in 0 to 1, the clients' own; they decide between exemplars that are
        equally good, by a millionth of the similarities' range.
      preference: similarity of a client with itself; None for the median of the pairs.
        Below all similarities there are few coalitions, above them many.
      damping: share of the old messages, 0.5 to below 1.

    Source: Frey and Dueck 2007; the end (clusters refined once) as in scikit-learn.
    """
    size = mask_s.shape[0]
    eye_ss = jnp.eye(size, dtype=bool)
    pairs_ss = mask_s[:, None] & mask_s[None, :]
    apart_ss = pairs_ss & ~eye_ss
    lowest = jnp.min(jnp.where(apart_ss, similarity_ss, jnp.inf))
    highest = jnp.max(jnp.where(apart_ss, similarity_ss, -jnp.inf))
    span = jnp.where(highest > lowest, highest - lowest, 0)
    own = _median(similarity_ss, apart_ss) if preference is None else preference
    own_s = own + 1e-6 * span * draws_s
    s_ss = jnp.where(eye_ss, own_s[:, None], similarity_ss)
    s_ss = jnp.where(pairs_ss, s_ss, -jnp.inf)  # nobody follows, or is asked by, a masked one

    def messages(state):
        r_ss, a_ss, stable, _, step = state
        sum_ss = a_ss + s_ss
        first_s = jnp.argmax(sum_ss, axis=1)
        is_first_ss = first_s[:, None] == jnp.arange(size)[None, :]
        best_s = jnp.max(sum_ss, axis=1)
        second_s = jnp.max(jnp.where(is_first_ss, -jnp.inf, sum_ss), axis=1)
        rival_ss = jnp.where(is_first_ss, second_s[:, None], best_s[:, None])
        # The only one left has no rival.
        new_ss = s_ss - jnp.where(jnp.isfinite(rival_ss), rival_ss, 0)
        r_ss = damping * r_ss + (1 - damping) * jnp.where(pairs_ss, new_ss, 0)

        heard_ss = jnp.where(eye_ss, r_ss, jnp.maximum(r_ss, 0))
        others_ss = jnp.sum(jnp.where(pairs_ss, heard_ss, 0), axis=0)[None, :] - heard_ss
        new_ss = jnp.where(eye_ss, others_ss, jnp.minimum(others_ss, 0))
        a_ss = damping * a_ss + (1 - damping) * jnp.where(pairs_ss, new_ss, 0)

        now_s = _is_exemplar(r_ss, a_ss, mask_s)
        same = jnp.all(now_s == state[3]) & jnp.any(now_s)
        return r_ss, a_ss, jnp.where(same, stable + 1, 1), now_s, step + 1

    def moving(state):
        return (state[2] < STABLE_STEPS) & (state[4] < MAX_STEPS)

    zeros = jnp.zeros((size, size), s_ss.dtype)
    start = (zeros, zeros, jnp.int32(0), jnp.zeros(size, bool), jnp.int32(0))
    _, _, stable, exemplar_s, step = jax.lax.while_loop(moving, messages, start)
    converged = (stable >= STABLE_STEPS) & jnp.any(exemplar_s)
    found_s = _assign(s_ss, exemplar_s)
    # The member that its coalition is most similar to takes over, and clients choose again.
    same_ss = (found_s[:, None] == found_s[None, :]) & pairs_ss
    score_s = jnp.sum(jnp.where(same_ss, s_ss, 0), axis=0)
    central_s = jnp.argmax(jnp.where(same_ss, score_s[None, :], -jnp.inf), axis=1)
    found_s = _assign(s_ss, mask_s & (central_s == jnp.arange(size)))
    together = ~converged | (span == 0)
    found_s = jnp.where(together, jnp.argmax(mask_s), found_s)
    return Exemplars(
        jnp.where(mask_s, found_s, -1).astype(jnp.int32), step, converged | (span == 0)
    )


def _is_exemplar(r_ss: Array, a_ss: Array, mask_s: Array) -> Array:
    return mask_s & (jnp.diagonal(r_ss) + jnp.diagonal(a_ss) > 0)


def _assign(s_ss: Array, exemplar_s: Array) -> Array:
    """`[S]` the most similar exemplar; an exemplar is its own."""
    nearest_s = jnp.argmax(jnp.where(exemplar_s[None, :], s_ss, -jnp.inf), axis=1)
    return jnp.where(exemplar_s, jnp.arange(s_ss.shape[0]), nearest_s)


def _median(values_ss: Array, valid_ss: Array) -> Array:
    ordered = jnp.sort(jnp.where(valid_ss, values_ss, jnp.inf).ravel())
    num = jnp.sum(valid_ss)
    low, high = ordered[jnp.maximum(num - 1, 0) // 2], ordered[num // 2]
    return jnp.where(num > 0, (low + high) / 2, 0)
