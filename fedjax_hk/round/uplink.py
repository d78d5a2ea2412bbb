"""What goes wrong on purpose: clients that do not answer, are slow, or attack.

Who it is, is drawn from the clients' names, the round and the seed, with numbers of their own:
who is sampled, and what is trained, stays as it would be without.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_hk.keys import ATTACK, DROP, STRAGGLE, client_keys
from fedjax_hk.types import Array, HParams

# Draws keys for a purpose and clients' ids: `(purpose, ids_s) -> keys_s`.
Draw = Callable[[int, Array], Array]


def drops(draw: Draw, ids_s: Array, hparams: HParams) -> Array:
    """`[S]` bool, does not answer this round (`drop_rate`)."""
    return jax.vmap(jax.random.uniform)(draw(DROP, ids_s)) < hparams.drop_rate


def work_shares(draw: Draw, ids_s: Array, hparams: HParams) -> Array:
    """`[S]` share of its steps that each client does: 1, or any for a straggler."""
    slow_s, share_s = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(draw(STRAGGLE, ids_s)).T
    return jnp.where(slow_s < hparams.straggler_rate, share_s, 1.0)


def attackers(run_key: Array, ids_n: Array, share: Array) -> Array:
    """`[N]` bool, who attacks during the whole run: `share` of the fleet, rounded."""
    draws_n = jax.vmap(jax.random.bits)(client_keys(run_key, ATTACK, 0, ids_n))
    rank_n = jnp.argsort(jnp.argsort(draws_n))
    return rank_n < jnp.floor(share * ids_n.shape[0] + 0.5)


def attacked(kind: str, sent_sd: Array, base_sd: Array, keys_s: Array, hparams: HParams) -> Array:
    """`[S, D]` what attackers send instead of their models."""
    update_sd = sent_sd - base_sd
    return base_sd + ATTACKS[kind](update_sd, keys_s, hparams.attack_scale)


def _noise(update_sd: Array, keys_s: Array, scale: Array) -> Array:
    """Gaussian noise, about `scale` times as long as the update."""
    noise_sd = jax.vmap(lambda key: jax.random.normal(key, update_sd.shape[1:]))(keys_s)
    length_s = jnp.sqrt(jnp.mean(update_sd**2, axis=1, keepdims=True))
    return update_sd + scale * length_s * noise_sd


ATTACKS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "sign_flip": lambda update_sd, keys_s, scale: -scale * update_sd,
    "scale": lambda update_sd, keys_s, scale: scale * update_sd,
    "noise": _noise,
}
