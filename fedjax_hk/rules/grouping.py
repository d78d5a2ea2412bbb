"""Groupings: who is grouped with whom, from the opinions of this round's clients.

Each is a function of the compiled `Settings` that returns a `Grouping`; which there are stands in
`settings.choices`. Those that look at no opinion are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.types import Array, HParams, Params, Settings


class Members(NamedTuple):
    """Who the rows of the opinions are.

    Attributes:
      keys_s: `[S]` the clients' own random numbers.
      clients_s: `[S]` their positions in the fleet.
      planted_n: `[N]` int32 the fleet's planted groups, -1 for an outlier; () if unknown.
    """

    keys_s: Array
    clients_s: Array
    planted_n: Array | tuple = ()


class GroupingInfo(NamedTuple):
    """`labels_s` `[S]` int32 (smallest member, -1 if masked) and how they came about.

    `num_steps`, `converged`, `margin` and `residual` as in `hk.HKResult`; `limit` is the
    largest dissimilarity of neighbors, NaN for a grouping without a threshold.
    """

    labels_s: Array
    num_steps: Array
    converged: Array
    margin: Array
    residual: Array
    limit: Array


class Grouping(NamedTuple):
    """A means to a grouping.

    Attributes:
      kind: the dissimilarity that is compared, `cosine` (1 - cos) or `ball` (distance).
      init: `(opinions_sd, num_clients) -> state`.
      apply: `(state, opinions_sd, gram_ss, mask_s, members, hparams) -> (info, state)`.
      fleet: `(state, planted_n) -> [N]` group of every client of the fleet, -1 if unknown,
        for a grouping that lasts; None for one that is made anew each round.
      neighborhood: `(hparams, gram_ss, mask_s) -> hk.Neighborhood`, whom clients listen to;
        None for a grouping without a threshold.
    """

    kind: str
    init: Callable[[Array, int], Params]
    apply: Callable[..., tuple[GroupingInfo, Params]]
    fleet: Callable[[Params, Array], Array] | None = None
    neighborhood: Callable[[HParams, Array, Array], hk.Neighborhood] | None = None


def settled(labels_s: Array) -> GroupingInfo:
    """Info of a grouping that does not move opinions."""
    nan = jnp.float32(jnp.nan)
    return GroupingInfo(
        labels_s, jnp.int32(0), jnp.bool_(True), jnp.float32(jnp.inf), jnp.float32(0), nan
    )


def stateless(opinions_sd: Array, num_clients: int) -> tuple:
    """The state of a grouping that is made anew each round."""
    return ()


def together(settings: Settings) -> Grouping:
    """Everybody is in one coalition."""

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        first = jnp.argmax(mask_s).astype(jnp.int32)
        return settled(jnp.where(mask_s, first, -1)), state

    return Grouping("cosine", stateless, apply)


def singletons(settings: Settings) -> Grouping:
    """Everybody is alone."""

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        ids_s = jnp.arange(mask_s.shape[0], dtype=jnp.int32)
        return settled(jnp.where(mask_s, ids_s, -1)), state

    return Grouping("cosine", stateless, apply)


def planted(settings: Settings) -> Grouping:
    """The groups that the embedded fleet was made with; its outliers are alone."""

    def fleet(state, planted_n):
        ids_n = jnp.arange(planted_n.shape[0], dtype=jnp.int32)
        return jnp.where(planted_n < 0, jnp.max(planted_n) + 1 + ids_n, planted_n)

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        group_s = fleet(state, members.planted_n)[members.clients_s]
        return settled(smallest_member(jnp.where(mask_s, group_s, -1))), state

    return Grouping("cosine", stateless, apply, fleet=fleet)


def smallest_member(group_s: Array) -> Array:
    """Names every group by its smallest member; -1 stays."""
    same_ss = group_s[:, None] == group_s[None, :]
    return jnp.where(group_s >= 0, jnp.argmax(same_ss, axis=1).astype(jnp.int32), -1)


def pair_dissimilarity(gram_ss: Array, kind: str) -> Array:
    """`[S, S]` float32 as thresholds have it: 1 - cos (`cosine`), or distances (`ball`)."""
    apart_ss = hk.dissimilarity(gram_ss, kind)
    return jnp.sqrt(apart_ss) if kind == "ball" else apart_ss


def pair_quantiles(apart_ss: Array, mask_s: Array, levels: Array) -> Array:
    """Quantiles over the pairs of clients that take part, linear between ranks.

    Args:
      apart_ss: `[S, S]` symmetric.
      mask_s: `[S]` bool.
      levels: `[...]` in 0 to 1.

    Returns:
      `[...]`; NaN if there is no pair.
    """
    num_s = mask_s.shape[0]
    rows, columns = jnp.triu_indices(num_s, 1)
    valid = mask_s[rows] & mask_s[columns]
    ordered = jnp.sort(jnp.where(valid, apart_ss[rows, columns], jnp.inf))
    if ordered.size == 0:
        return jnp.full(jnp.shape(levels), jnp.nan, jnp.float32)
    last = jnp.sum(valid) - 1
    place = jnp.clip(jnp.asarray(levels, jnp.float32), 0, 1) * last
    low = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, ordered.size - 1)
    high = jnp.minimum(low + 1, jnp.maximum(last, 0))
    share = place - low
    value = ordered[low] + jnp.where(share > 0, share * (ordered[high] - ordered[low]), 0)
    return jnp.where(last >= 0, value, jnp.nan)
