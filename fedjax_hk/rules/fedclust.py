"""Coalitions that are formed once and last (FedClust)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.rules.agglomerative import agglomerate
from fedjax_hk.rules.grouping import (
    Grouping,
    pair_dissimilarity,
    pair_quantiles,
    settled,
    smallest_member,
)
from fedjax_hk.settings import thresholds
from fedjax_hk.types import Array, Settings


class Groups(NamedTuple):
    """Coalitions that last.

    Attributes:
      group_n: `[N]` int32 place of each client's group, -1 until it has taken part.
      centers_sd: `[S, D]` mean opinion of the first members of each group.
      num_groups: `[]` int32, 0 until the first round.
    """

    group_n: Array
    centers_sd: Array
    num_groups: Array


def fedclust(settings: Settings) -> Grouping:
    """FedClust (Islam et al. 2024): one shot in the first round, newcomers join the nearest.

    Distances are between parameters (of the last layer, by default); coalitions closer than
    `epsilon` merge, or than the distance that the share 1 - tau of the pairs stays below.
    """
    meaning = thresholds.of_settings("merge", settings)

    def init(opinions_sd, num_clients):
        size, dim = opinions_sd.shape
        unknown_n = jnp.full(num_clients, -1, jnp.int32)
        return Groups(unknown_n, jnp.zeros((size, dim), opinions_sd.dtype), jnp.int32(0))

    def first(state, opinions_sd, gram_ss, mask_s, clients_s, hparams):
        apart_ss = pair_dissimilarity(gram_ss, "ball")
        limit = hparams.epsilon
        if meaning.name == "merge":
            limit = pair_quantiles(apart_ss, mask_s, 1 - hparams.tau)
            limit = jnp.where(jnp.isnan(limit), 0, limit)
        labels_s, _ = agglomerate(apart_ss, mask_s, limit, linkage=settings.linkage)
        is_name_s = labels_s == jnp.arange(labels_s.shape[0])
        place_s = jnp.cumsum(is_name_s) - 1
        group_s = jnp.where(mask_s, place_s[labels_s], -1).astype(jnp.int32)
        of_first_s = jnp.argsort(~is_name_s)  # names first, in order
        centers_sd = hk.barycenters(opinions_sd, labels_s)[of_first_s]
        return Groups(
            state.group_n.at[clients_s].set(group_s),
            centers_sd,
            jnp.sum(is_name_s).astype(jnp.int32),
        )

    def later(state, opinions_sd, gram_ss, mask_s, clients_s, hparams):
        known_s, size = state.group_n[clients_s], mask_s.shape[0]
        stacked = jnp.concatenate([opinions_sd, state.centers_sd])
        exists_s = jnp.arange(size) < state.num_groups
        gram = hk.gram_matrix(stacked, mask=jnp.concatenate([mask_s, exists_s]))
        apart_ss = hk.dissimilarity(gram, "ball")[:size, size:]
        nearest_s = jnp.argmin(jnp.where(exists_s[None, :], apart_ss, jnp.inf), axis=1)
        joins_s = mask_s & (known_s < 0)
        group_s = jnp.where(joins_s, nearest_s.astype(jnp.int32), known_s)
        return state._replace(group_n=state.group_n.at[clients_s].set(group_s))

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        arguments = (state, opinions_sd, gram_ss, mask_s, members.clients_s, hparams)
        state = jax.lax.cond(state.num_groups == 0, first, later, *arguments)
        labels_s = jnp.where(mask_s, state.group_n[members.clients_s], -1)
        return settled(smallest_member(labels_s)), state

    return Grouping("ball", init, apply, fleet=lambda state, planted_n: state.group_n)
