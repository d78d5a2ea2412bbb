"""What happens to models on their way to the server: a list of stages, `Upload -> Upload`.

Who does not report or attacks is drawn from the clients' names, the round and the seed, with
numbers of their own: who is sampled, and what is trained, stays as it would be without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_hk.keys import ATTACK, DROP, NOISE, client_keys
from fedjax_hk.round.state import Upload
from fedjax_hk.rules.alignment import Neurons, aligned
from fedjax_hk.settings.choices import implementation
from fedjax_hk.types import Array, HParams

# Draws keys for a purpose and clients' ids: `(purpose, ids_s) -> keys_s`.
Draw = Callable[[int, Array], Array]


class Wire(NamedTuple):
    """What a stage may read beside the upload.

    Attributes:
      draw: keys of this round.
      run_key: of the run, for what lasts the whole run.
      ids_n: `[N]` what the clients' random numbers are derived from; `ids_s` those of the cohort.
      params: `[D]` the global model.
      hparams: numbers.
    """

    draw: Draw
    run_key: Array
    ids_n: Array
    ids_s: Array
    params: Array
    hparams: HParams


Stage = Callable[[Upload, Wire], Upload]


def stages(
    *, personal: np.ndarray | None = None, attack: str = "none", neurons: tuple[Neurons, ...] = ()
) -> list[Stage]:
    """The stages of a run, in order.

    Args:
      personal: `[P]` columns of the parameters that stay at the client, None for none.
      attack: what attackers send, a value of `--attack`.
      neurons: hidden neurons to be matched, from `alignment.hidden_neurons`.
    """
    found: list[Stage] = [lose_reports, stand_in]
    if personal is not None:
        found.append(keep_personal(personal))
    if attack != "none":
        found.append(attack_with(attack))
    if neurons:
        found.append(align(neurons))
    return found


def lose_reports(upload: Upload, wire: Wire) -> Upload:
    """Some clients do not report this round (`drop_rate`)."""
    lost_s = jax.vmap(jax.random.uniform)(wire.draw(DROP, wire.ids_s)) < wire.hparams.drop_rate
    return upload._replace(
        reported_s=upload.reported_s & ~lost_s, present_s=upload.present_s & ~lost_s
    )


def stand_in(upload: Upload, wire: Wire) -> Upload:
    """Of who takes no part, the server has what it sent out: no NaN gets any further."""
    present_sd = upload.present_s[:, None]
    return upload._replace(sent_sd=jnp.where(present_sd, upload.sent_sd, upload.base_sd))


def keep_personal(columns: np.ndarray) -> Stage:
    """The server never sees the parameters that stay at the client."""

    def stage(upload: Upload, wire: Wire) -> Upload:
        sent_sd = upload.sent_sd.at[:, columns].set(upload.base_sd[:, columns])
        return upload._replace(sent_sd=sent_sd)

    return stage


def attack_with(kind: str) -> Stage:
    """Attackers send something else than they trained."""
    made = implementation("attack", kind)

    def stage(upload: Upload, wire: Wire) -> Upload:
        attacker_n = attackers(wire.run_key, wire.ids_n, wire.hparams.attack_share)
        attacker_s = attacker_n[upload.clients_s]
        update_sd = upload.sent_sd - upload.base_sd
        keys_s = wire.draw(NOISE, wire.ids_s)
        bad_sd = upload.base_sd + made(update_sd, keys_s, wire.hparams.attack_scale)
        attacks_sd = (attacker_s & upload.present_s)[:, None]
        return upload._replace(
            attacker_s=attacker_s, sent_sd=jnp.where(attacks_sd, bad_sd, upload.sent_sd)
        )

    return stage


def attackers(run_key: Array, ids_n: Array, share: Array) -> Array:
    """`[N]` bool, who attacks during the whole run: `share` of the fleet, rounded."""
    draws_n = jax.vmap(jax.random.bits)(client_keys(run_key, ATTACK, 0, ids_n))
    rank_n = jnp.argsort(jnp.argsort(draws_n))
    return rank_n < jnp.floor(share * ids_n.shape[0] + 0.5)


def sign_flip(update_sd: Array, keys_s: Array, scale: Array) -> Array:
    return -scale * update_sd


def scale(update_sd: Array, keys_s: Array, scale: Array) -> Array:
    return scale * update_sd


def noise(update_sd: Array, keys_s: Array, scale: Array) -> Array:
    """Gaussian noise, about `scale` times as long as the update."""
    noise_sd = jax.vmap(lambda key: jax.random.normal(key, update_sd.shape[1:]))(keys_s)
    length_s = jnp.sqrt(jnp.mean(update_sd**2, axis=1, keepdims=True))
    return update_sd + scale * length_s * noise_sd


def align(neurons: tuple[Neurons, ...]) -> Stage:
    """Hidden neurons are put into the order that fits the others best (FedMA)."""

    def stage(upload: Upload, wire: Wire) -> Upload:
        share_s = jnp.where(upload.present_s, upload.num_samples_s, 0)
        share_s = share_s / jnp.maximum(jnp.sum(share_s), 1)
        return upload._replace(sent_sd=aligned(upload.sent_sd, wire.params, share_s, neurons))

    return stage
