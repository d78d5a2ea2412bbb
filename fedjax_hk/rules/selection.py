"""Who takes part in a round."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_hk.types import Array, HParams


class Distances(NamedTuple):
    """How far clients' models ended from their start when they last took part.

    Attributes:
      last_n: `[N]`, infinite for a client that has not been seen.
      rounds: `[]` int32 rounds so far.
    """

    last_n: Array
    rounds: Array


class Cohort(NamedTuple):
    """Attributes:
    clients_s: `[S]` positions in the fleet; those who are asked come first, ascending.
    sampled_s: `[S]` bool, asked to train; the others only fill the array.
    num_asked: `[]` how many are asked, None where it is always all.
    """

    clients_s: Array
    sampled_s: Array
    num_asked: Array | None = None


def no_distances(num_clients: int) -> Distances:
    """Nobody has been seen."""
    return Distances(jnp.full(num_clients, jnp.inf), jnp.int32(0))


def observed(
    distances: Distances,
    clients_s: Array,
    sampled_s: Array,
    apart_s: Array,
    present_s: Array,
    reported_s: Array,
) -> Distances:
    """Keeps this round's distances; of who took no part, the last one (spec C4).

    A client that is asked and answers nothing usable goes last, so that it is not asked
    first for ever (spec C15); one that does not answer keeps its place.
    """
    before_s = distances.last_n[clients_s]
    useless_s = sampled_s & reported_s & ~present_s
    apart_s = jnp.where(present_s, apart_s, jnp.where(useless_s, 0, before_s))
    return Distances(distances.last_n.at[clients_s].set(apart_s), distances.rounds + 1)


def uniform(distances, keys_n: Array, size: int, hparams: HParams) -> Cohort:
    """Distinct clients, uniform, ascending (FedHK paper, section 5.1).

    Those with the smallest of the clients' own draws: it depends on the seed, the round and
    who the clients are, not on their order nor on who dropped out before.
    """
    draws_n = jax.vmap(jax.random.bits)(keys_n)
    return Cohort(jnp.sort(jnp.argsort(draws_n)[:size]), jnp.ones(size, bool))


def distance_decay(distances: Distances, keys_n: Array, size: int, hparams: HParams) -> Cohort:
    """Fewer and fewer clients, those farthest from their start first (FedCW, eqs. 4 to 6).

    Who has not been seen comes before everybody else; ties are drawn.
    """
    draws_n = jax.vmap(jax.random.bits)(keys_n)
    num_clients = draws_n.shape[0]
    count = num_sampled(distances.rounds, size, num_clients, hparams)
    ranked_s = jnp.lexsort((draws_n, -distances.last_n))[:size]
    sampled_s = jnp.arange(size) < count
    ordered_s = jnp.sort(jnp.where(sampled_s, ranked_s, ranked_s + num_clients))
    return Cohort(ordered_s % num_clients, sampled_s, count)


def num_sampled(rounds: Array, size: int, num_clients: int, hparams: HParams) -> Array:
    """`[]` int32, `max(ceil(size * exp(-decay * rounds)), min_clients)`, eqs. (5) and (6).

    The paper's fraction alpha is the clients a round over the clients of the fleet. A
    `min_clients` of 0 stands for a tenth of the fleet, but two (spec C11).
    """
    share = size * jnp.exp(-hparams.select_decay * rounds)
    # What is a whole number but for rounding is not taken for the next one (spec C13).
    count = jnp.ceil(share * (1 - 1e-6))
    tenth = max(2, -(-num_clients // 10))
    least = jnp.where(hparams.min_clients > 0, hparams.min_clients, tenth)
    return jnp.clip(jnp.maximum(count, least), 1, size).astype(jnp.int32)


def everything(distances, keys_n: Array, size: int, hparams: HParams) -> Cohort:
    """The one client that holds the windows of all (`select=pooled`); nobody of the fleet."""
    return Cohort(jnp.full(1, -1, jnp.int32), jnp.ones(1, bool))
