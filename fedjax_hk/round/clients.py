"""The clients' half of a round: starts, local training, and what each client keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_hk.keys import STRAGGLE, TRAIN
from fedjax_hk.parallel import repeat, rows, where_rows
from fedjax_hk.round.state import FleetArrays, RoundState, Upload
from fedjax_hk.round.training import LocalResult, Trainer
from fedjax_hk.round.uplink import Draw
from fedjax_hk.rules import Rule
from fedjax_hk.rules.selection import Cohort
from fedjax_hk.settings.choices import implementation
from fedjax_hk.types import Array, HParams, Params

# `(function, batched, shared, count=None)`: see `parallel.map_clients`.
Mapper = Callable[..., Params]


class Kept(NamedTuple):
    """Something that clients keep from round to round.

    Attributes:
      init: `params [D] -> ` what a client has before its first round.
      after: `(LocalResult of leaves [S, ...], centers_sd) -> ` leaves `[S, ...]`, what the
        clients that took part in a round have after it.
    """

    init: Callable[[Array], Params]
    after: Callable[[LocalResult, Array], Params]


def kept_by_clients(
    rule: Rule, trainer: Trainer, *, keep_optimizer: bool, personal: np.ndarray | None
) -> dict[str, Kept]:
    """The entries of `RoundState.memory_n` that a run needs."""
    held = implementation("serve", rule.serve).held
    entries: dict[str, Kept] = {}
    if held is not None:
        entries["start"] = Kept(lambda params: params, lambda local, centers_sd: held(centers_sd))
    if keep_optimizer:
        entries["optimizer"] = Kept(trainer.init_optimizer, lambda local, _: local.opt_state)
    if trainer.control:
        entries["control"] = Kept(jnp.zeros_like, lambda local, _: local.control)
    if personal is not None:
        entries["personal"] = Kept(
            lambda params: params[personal], lambda local, _: local.params[:, personal]
        )
    return entries


def empty_memory(kept: dict[str, Kept], params: Array, num_clients: int) -> dict[str, Params]:
    """Before the first round: leaves `[N, ...]`."""
    return {name: repeat(one.init(params), num_clients) for name, one in kept.items()}


def remember(
    kept: dict[str, Kept],
    memory_n: dict[str, Params],
    upload: Upload,
    local: LocalResult,
    centers_sd: Array,
) -> dict[str, Params]:
    """What clients keep after a round; who took no part keeps what it had."""
    clients_s = upload.clients_s
    new_s = {name: one.after(local, centers_sd) for name, one in kept.items()}
    new_s = where_rows(upload.present_s, new_s, rows(memory_n, clients_s))
    return jax.tree.map(lambda held, new: held.at[clients_s].set(new), memory_n, new_s)


class Clients(NamedTuple):
    """What a cohort does in a round; fixed when the round is compiled.

    Attributes:
      trainer: of one client.
      personal: `[P]` columns of the parameters that stay at the client, None for none.
      measures_effort: whether the server asks for the coefficient sum of the steps.
      map: over chunks of clients.
    """

    trainer: Trainer
    personal: np.ndarray | None
    measures_effort: bool
    map: Mapper

    def run(
        self, state: RoundState, fleet: FleetArrays, cohort: Cohort, draw: Draw, hparams: HParams
    ) -> tuple[Upload, LocalResult]:
        """What the cohort sends, and what it holds itself; leaves `[S, ...]`."""
        size = cohort.clients_s.shape[0]
        memory_s = rows(state.memory_n, cohort.clients_s)
        base_sd = memory_s.get("start", repeat(state.params, size))
        start_sd = with_personal(base_sd, memory_s.get("personal"), self.personal)
        local = self.train(state, memory_s, fleet, cohort, start_sd, draw, hparams)

        num_samples_s = jnp.sum(fleet.train.mask, axis=1)[cohort.clients_s]
        finite_s = jnp.all(jnp.isfinite(local.params), axis=1) & jnp.isfinite(local.loss)
        available_s = fleet.available_n[cohort.clients_s]
        reported_s = cohort.sampled_s & available_s & (num_samples_s > 0)
        upload = Upload(
            clients_s=cohort.clients_s,
            sampled_s=cohort.sampled_s,
            base_sd=base_sd,
            sent_sd=local.params,
            num_samples_s=num_samples_s,
            effort_s=self.effort(fleet, local.num_steps, hparams),
            reported_s=reported_s,
            finite_s=finite_s,
            present_s=reported_s & finite_s,
            attacker_s=jnp.zeros(size, bool),
        )
        return upload, local

    def train(self, state, memory_s, fleet, cohort, start_sd, draw, hparams) -> LocalResult:
        """Every client's own training; zeros for those who are not sampled."""
        trainer, clients_s = self.trainer, cohort.clients_s
        correction_sd: Array | tuple = ()
        if trainer.control:
            mean_d = jnp.mean(state.memory_n["control"], axis=0)
            correction_sd = mean_d[None, :] - memory_s["control"]
        optimizer_s = memory_s.get("optimizer", ())
        keeps = "optimizer" in memory_s

        def block(batched, shared):
            starts, kept, samples, keys, shares, corrections = batched
            # Clients of a chunk step together, so the chunk's longest one sets the pace.
            num_batches = -(-jnp.max(jnp.sum(samples.mask, axis=1)) // trainer.batch_size)
            states = kept if keeps else jax.vmap(trainer.init_optimizer)(starts)
            result = jax.vmap(trainer.train, in_axes=(0, 0, 0, 0, None, None, 0, 0))(
                starts, states, samples, keys, num_batches, shared, shares, corrections
            )
            return result if keeps else result._replace(opt_state=())

        ids_s = fleet.ids_n[clients_s]
        batched = (
            start_sd, optimizer_s, rows(fleet.train, clients_s), draw(TRAIN, ids_s),
            work_shares(draw, ids_s, hparams), correction_sd,
        )  # fmt: skip
        return self.map(block, batched, hparams, count=cohort.num_asked)

    def effort(self, fleet: FleetArrays, steps_s: Array, hparams: HParams) -> Array:
        """`[S]` with what coefficient sum the clients' gradients enter their models."""
        if not self.measures_effort:
            return jnp.zeros(steps_s.shape[0])
        batches = -(-fleet.train.mask.shape[1] // self.trainer.batch_size)
        return self.trainer.coefficients(self.trainer.epochs * batches, hparams)[steps_s]


def with_personal(shared: Array, own: Array | None, columns: np.ndarray | None) -> Array:
    """Models `[..., D]` with the parameters `[..., P]` that stay at the client."""
    return shared if columns is None else shared.at[..., columns].set(own)


def work_shares(draw: Draw, ids_s: Array, hparams: HParams) -> Array:
    """`[S]` share of its steps that each client does: 1, or any for a straggler."""
    slow_s, share_s = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(draw(STRAGGLE, ids_s)).T
    return jnp.where(slow_s < hparams.straggler_rate, share_s, 1.0)


def pooled(fleet: FleetArrays) -> FleetArrays:
    """The windows of all clients as those of one; whose data is not finite, is left out."""

    def finite(x):
        return jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))

    train = fleet.train
    usable_n = fleet.available_n & finite(train.inputs) & finite(train.targets)
    train = train._replace(mask=train.mask & usable_n[:, None])
    train = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), train)
    return fleet._replace(
        train=train, available_n=jnp.ones(1, bool), ids_n=jnp.zeros(1, jnp.uint32), planted_n=()
    )
