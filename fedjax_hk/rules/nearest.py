"""Coalitions of clients and their nearest neighbors."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.rules.grouping import Grouping, settled, smallest_member, stateless
from fedjax_hk.types import Settings


def nearest(settings: Settings) -> Grouping:
    """Clients join the client whose opinion is nearest to theirs."""

    def apply(state, opinions_sd, gram_ss, mask_s, members, hparams):
        others_ss = mask_s[None, :] & ~jnp.eye(len(mask_s), dtype=bool)
        apart_ss = jnp.where(others_ss, hk.dissimilarity(gram_ss, "cosine"), jnp.inf)
        first_s = jnp.minimum(jnp.arange(len(mask_s)), jnp.argmin(apart_ss, axis=1))
        return settled(smallest_member(jnp.where(mask_s, first_s, -1))), state

    return Grouping("cosine", stateless, apply)
