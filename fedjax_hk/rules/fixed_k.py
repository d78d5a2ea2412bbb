"""A given number of coalitions around medoids."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.rules.grouping import Grouping, settled, smallest_member
from fedjax_hk.types import Array, Settings


class Centers(NamedTuple):
    """Centers of the coalitions, carried from round to round.

    Attributes:
      opinions_kd: `[K, D]`.
      drawn: `[]` bool, False until the first round.
    """

    opinions_kd: Array
    drawn: Array


def _fixed_k(settings: Settings, kind: str) -> Grouping:
    """K coalitions around medoids, one pass a round (El Hanjri et al. 2024, reconstructed).

    Clients join the nearest center; the member nearest to a coalition's barycenter is its
    next center. The first centers are clients drawn at random; an empty coalition starts
    anew at the client that is farthest from its center.
    """
    num_k = settings.num_coalitions

    def init(opinions_sd, num_clients):
        zeros = jnp.zeros((num_k, opinions_sd.shape[1]), opinions_sd.dtype)
        return Centers(zeros, jnp.bool_(False))

    def distances(opinions_sd, centers_kd, mask_s):
        """`[S, K]`; inf for masked clients."""
        stacked = jnp.concatenate([opinions_sd, centers_kd])
        mask = jnp.concatenate([mask_s, jnp.ones(num_k, bool)])
        apart = hk.dissimilarity(hk.gram_matrix(stacked, mask=mask), kind)
        return jnp.where(mask_s[:, None], apart[: mask_s.shape[0], mask_s.shape[0] :], jnp.inf)

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        rank_s = jnp.where(mask_s, jax.vmap(jax.random.uniform)(members.keys_s), jnp.inf)
        # Fewer clients than centers: the first one stands in for those that are missing.
        few_k = jnp.arange(num_k) < jnp.sum(mask_s)
        random_k = jnp.argsort(rank_s)[jnp.where(few_k, jnp.arange(num_k), 0)]
        centers_kd = jnp.where(state.drawn, state.opinions_kd, opinions_sd[random_k])

        apart_sk = distances(opinions_sd, centers_kd, mask_s)
        nearest_s = jnp.argmin(apart_sk, axis=1)
        labels_s = smallest_member(jnp.where(mask_s, nearest_s, -1))
        of_sk = (nearest_s[:, None] == jnp.arange(num_k)[None, :]) & mask_s[:, None]

        # The row of any member holds the coalition's mean.
        means_kd = hk.barycenters(opinions_sd, labels_s)[jnp.argmax(of_sk, axis=0)]
        from_mean_sk = jnp.where(of_sk, distances(opinions_sd, means_kd, mask_s), jnp.inf)
        lonely_s = jnp.where(mask_s, jnp.min(apart_sk, axis=1), -jnp.inf)
        empty_k = ~jnp.any(of_sk, axis=0)
        # More empty coalitions than clients: the last ones share a client, not a masked one.
        spare = jnp.minimum(jnp.cumsum(empty_k), jnp.sum(mask_s)) - 1
        spare_k = jnp.argsort(-lonely_s)[spare]
        medoid_k = jnp.where(empty_k, spare_k, jnp.argmin(from_mean_sk, axis=0))
        anyone = jnp.any(mask_s)
        next_kd = jnp.where(anyone, opinions_sd[medoid_k], centers_kd)
        return settled(labels_s), Centers(next_kd, state.drawn | anyone)

    return Grouping(kind, init, apply)


def fixed_k_euclidean(settings: Settings) -> Grouping:
    """By the distance."""
    return _fixed_k(settings, "ball")


def fixed_k_cosine(settings: Settings) -> Grouping:
    """By the cosine."""
    return _fixed_k(settings, "cosine")
