"""Groupings: who is grouped with whom, from the opinions of this round's clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.rules.affinity_propagation import affinity_propagation
from fedjax_hk.rules.agglomerative import agglomerate
from fedjax_hk.types import Array, Params

MAX_STEPS = 50  # inner steps; the paper saw at most ten, theory allows many more (spec H1)


class Settings(NamedTuple):
    """Choices that are fixed when the round is compiled (flags of the same names)."""

    tau_mode: str = "absolute"
    euclid_tau: str = "radius"
    state_norm: str = "none"
    use_epsilon: bool = False
    num_coalitions: int = 3
    preference: float | None = None
    damping: float = 0.5
    linkage: str = "average"
    distance_scale: str = "mean"


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
      groups: False where nothing is grouped: one coalition, or everybody alone.
      fleet: `(state, planted_n) -> [N]` group of every client of the fleet, -1 if unknown,
        for a grouping that lasts; None for one that is made anew each round.
    """

    kind: str
    init: Callable[[Array, int], Params]
    apply: Callable[..., tuple[GroupingInfo, Params]]
    groups: bool = True
    fleet: Callable[[Params, Array], Array] | None = None


def _settled(labels_s: Array) -> GroupingInfo:
    """Info of a grouping that does not move opinions."""
    nan = jnp.float32(jnp.nan)
    return GroupingInfo(
        labels_s, jnp.int32(0), jnp.bool_(True), jnp.float32(jnp.inf), jnp.float32(0), nan
    )


def _stateless(opinions_sd: Array, num_clients: int) -> tuple:
    return ()


def _none(settings: Settings) -> Grouping:
    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        first = jnp.argmax(mask_s).astype(jnp.int32)
        return _settled(jnp.where(mask_s, first, -1)), state

    return Grouping("cosine", _stateless, apply, groups=False)


def _singletons(settings: Settings) -> Grouping:
    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        ids_s = jnp.arange(mask_s.shape[0], dtype=jnp.int32)
        return _settled(jnp.where(mask_s, ids_s, -1)), state

    return Grouping("cosine", _stateless, apply, groups=False)


def _hk(neighborhood: Callable[..., hk.Neighborhood]):
    """The Hegselmann-Krause interaction with one of the paper's neighborhoods."""

    def make(settings: Settings) -> Grouping:
        def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
            near = neighborhood(settings, hparams, gram_ss, mask_s)
            result = hk.interact_from_gram(
                gram_ss, near, mask=mask_s, max_steps=MAX_STEPS, state_norm=settings.state_norm
            )
            info = GroupingInfo(
                result.labels_s,
                result.num_steps,
                result.converged,
                result.margin,
                result.residual,
                jnp.asarray(near.limit, jnp.float32),
            )
            return info, state

        kind = "ball" if settings.use_epsilon else "cosine"
        return Grouping(kind, _stateless, apply)

    return make


def _share_linked(gram_ss: Array, mask_s: Array, level: Array) -> Array:
    """1 - cos below which the share `1 - level` of this round's pairs lies."""
    return pair_quantiles(hk.dissimilarity(gram_ss, "cosine"), mask_s, 1 - level)


def _cosine(settings, hparams, gram_ss, mask_s):
    """Eq. (13), or the radius whose share of linked pairs is `1 - tau`."""
    if settings.tau_mode == "quantile":
        limit = _share_linked(gram_ss, mask_s, hparams.tau)
        return hk.Neighborhood("cosine", limit, jnp.float32(0))
    return hk.cosine(hparams.tau)


def _euclidean(settings, hparams, gram_ss, mask_s):
    """Eq. (12): a raw radius, or one on unit vectors (spec A3 on what tau means there)."""
    if settings.use_epsilon:
        return hk.ball(hparams.epsilon)
    if settings.tau_mode == "quantile":
        return _cosine(settings, hparams, gram_ss, mask_s)
    tau = hparams.tau
    radius = {
        "radius": lambda: tau,
        "matched": lambda: jnp.sqrt(2 * (1 - jnp.asarray(tau))),
        "linear": lambda: 2 * (1 - jnp.asarray(tau)),
    }[settings.euclid_tau]()
    return hk.unit_ball(radius)


def _band(settings, hparams, gram_ss, mask_s):
    """Eq. (14)."""
    if settings.tau_mode == "quantile":
        limit = _share_linked(gram_ss, mask_s, hparams.eps_lower)
        return hk.Neighborhood("cosine", limit, _share_linked(gram_ss, mask_s, hparams.eps_upper))
    return hk.band(hparams.eps_lower, hparams.eps_upper)


class Centers(NamedTuple):
    """Centers of the coalitions, carried from round to round.

    Attributes:
      opinions_kd: `[K, D]`.
      drawn: `[]` bool, False until the first round.
    """

    opinions_kd: Array
    drawn: Array


def _fixed_k(kind: str):
    """K coalitions around medoids, one pass a round (El Hanjri et al. 2024, reconstructed).

    Clients join the nearest center; the member nearest to a coalition's barycenter is its
    next center. The first centers are clients drawn at random; an empty coalition starts
    anew at the client that is farthest from its center.
    """

    def make(settings: Settings) -> Grouping:
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
            labels_s = _smallest_member(jnp.where(mask_s, nearest_s, -1))
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
            return _settled(labels_s), Centers(next_kd, state.drawn | anyone)

        return Grouping(kind, init, apply)

    return make


def _smallest_member(group_s: Array) -> Array:
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


def _affinity_propagation(settings: Settings) -> Grouping:
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
        info = _settled(_smallest_member(found.exemplar_s))
        return info._replace(num_steps=found.num_steps, converged=found.converged), state

    return Grouping("cosine", _stateless, apply)


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


def _agglomerative(settings: Settings) -> Grouping:
    """FedClust (Islam et al. 2024): one shot in the first round, newcomers join the nearest.

    Distances are between parameters (of the last layer, by default); coalitions closer than
    `epsilon` merge, or than the distance that the share 1 - tau of the pairs stays below.
    """

    def init(opinions_sd, num_clients):
        size, dim = opinions_sd.shape
        unknown_n = jnp.full(num_clients, -1, jnp.int32)
        return Groups(unknown_n, jnp.zeros((size, dim), opinions_sd.dtype), jnp.int32(0))

    def first(state, opinions_sd, gram_ss, mask_s, clients_s, hparams):
        apart_ss = pair_dissimilarity(gram_ss, "ball")
        limit = hparams.epsilon
        if not settings.use_epsilon:
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
        return _settled(_smallest_member(labels_s)), state

    return Grouping("ball", init, apply, fleet=lambda state, planted_n: state.group_n)


def _planted(settings: Settings) -> Grouping:
    """The groups that the embedded fleet was made with; its outliers are alone."""

    def fleet(state, planted_n):
        ids_n = jnp.arange(planted_n.shape[0], dtype=jnp.int32)
        return jnp.where(planted_n < 0, jnp.max(planted_n) + 1 + ids_n, planted_n)

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        group_s = fleet(state, members.planted_n)[members.clients_s]
        return _settled(_smallest_member(jnp.where(mask_s, group_s, -1))), state

    return Grouping("cosine", _stateless, apply, fleet=fleet)


# Whom a client listens to: `(settings, hparams, gram_ss, mask_s) -> hk.Neighborhood`.
NEIGHBORHOODS: dict[str, Callable[..., hk.Neighborhood]] = {
    "hk_euclidean": _euclidean,
    "hk_cosine": _cosine,
    "hk_band": _band,
}

GROUPINGS: dict[str, Callable[[Settings], Grouping]] = {
    "none": _none,
    "singletons": _singletons,
    **{name: _hk(neighborhood) for name, neighborhood in NEIGHBORHOODS.items()},
    "fixed_k_euclidean": _fixed_k("ball"),
    "fixed_k_cosine": _fixed_k("cosine"),
    "affinity_propagation": _affinity_propagation,
    "agglomerative": _agglomerative,
    "planted": _planted,
}
