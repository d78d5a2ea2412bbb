"""Serving: what clients start from, and are judged with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_hk.types import Array


class Serving(NamedTuple):
    """What a client holds after a round, where it is not the global model.

    Attributes:
      held: `centers_sd -> [S, D]` what each client of the round holds from then on, as its start
        and to be judged with; None where everybody is served the global model.
    """

    held: Callable[[Array], Array] | None


global_model = Serving(None)
own_coalition = Serving(lambda centers_sd: centers_sd)


def served_alike(
    start_nd: Array, group_n: Array, clients_s: Array, present_s: Array, held_sd: Array
) -> Array:
    """Members of a lasting coalition hold its model, whether they took part or not.

    Args:
      start_nd: `[N, D]` what everybody holds.
      group_n: `[N]` int32 lasting group of every client, -1 if unknown.
      clients_s, present_s: `[S]` who was in the round, and took part.
      held_sd: `[S, D]` what those hold.
    """
    group_s = jnp.where(present_s, group_n[clients_s], -1)
    same_ns = (group_n[:, None] == group_s[None, :]) & (group_s >= 0)[None, :]
    member_n = jnp.argmax(same_ns, axis=1)
    return jnp.where(jnp.any(same_ns, axis=1)[:, None], held_sd[member_n], start_nd)
