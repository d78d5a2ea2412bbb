"""A round from its parts: select, clients, uplink, server, serve, judge; and how it is compiled.

A round is one compiled program. Everything it makes stays on the device; the caller reads
`RoundInfo` when it wants to, and asks for what is large by programs of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_hk import hk
from fedjax_hk.keys import FINETUNE, GROUPING, SELECT, client_keys
from fedjax_hk.models import Model
from fedjax_hk.parallel import default_chunk, map_clients
from fedjax_hk.round import measures
from fedjax_hk.round.clients import Clients, empty_memory, kept_by_clients, pooled, remember
from fedjax_hk.round.evaluate import Evaluator
from fedjax_hk.round.server import make_server
from fedjax_hk.round.state import (
    Aggregate,
    FleetArrays,
    RoundInfo,
    RoundState,
    Snapshot,
    Traffic,
    Upload,
)
from fedjax_hk.round.training import LocalResult, Trainer
from fedjax_hk.round.uplink import Wire, stages
from fedjax_hk.rules import Rule
from fedjax_hk.rules.alignment import hidden_neurons
from fedjax_hk.rules.grouping import pair_dissimilarity, pair_quantiles
from fedjax_hk.rules.opinions import columns
from fedjax_hk.rules.serve import served_alike
from fedjax_hk.rules.weighting import equals_plain_mean
from fedjax_hk.settings.choices import implementation
from fedjax_hk.tasks import TASKS, Task
from fedjax_hk.types import Array, HParams, Params, Settings

CPU_LEVEL = 2  # of XLA: level 3 compiles a third longer and runs no faster (jax 0.10.2)


class Engine(NamedTuple):
    """Pure functions of a federated run.

    Attributes:
      init: `(params) -> RoundState`.
      round: `(state, fleet, round_number, run_key, hparams) -> (RoundState, RoundInfo, Snapshot)`.
      outputs: `(state, fleet, hparams) -> [N, W_test, ...]` what everybody's model says of its
        test samples: scaled forecasts, or logits.
      gram: `(snapshot, space) -> ` inner products of the opinions in a space, a value of
        `--opinion`; see `hk.gram_matrix`.
      mesh: devices over which clients are spread.
      traffic: of one client and round.
    """

    init: Callable[[Array], RoundState]
    round: Callable[..., tuple[RoundState, RoundInfo, Snapshot]]
    outputs: Callable[..., Array]
    gram: Callable[[Snapshot, str], Params]
    mesh: Mesh
    traffic: Traffic

    def chunk(self, length: int) -> Callable:
        """Several rounds without the host in between.

        Returns:
          `(state, fleet, first, count, run_key, hparams) -> (state, infos, snapshot)`: rounds
          `first` to `first + count - 1`, at most `length` of them. Leaves of `infos` are
          `[length, ...]`, of which the first `count` are told; the snapshot is of the last.
        """
        if length == 1:  # a plain round, to the bit

            def one(state, fleet, first, count, run_key, hparams):
                state, info, snapshot = self.round(state, fleet, first, run_key, hparams)
                return state, jax.tree.map(lambda x: x[None], info), snapshot

            return one

        def many(state, fleet, first, count, run_key, hparams):
            shapes = jax.eval_shape(self.round, state, fleet, first, run_key, hparams)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1:])
            infos = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), zeros[0])

            def body(index, carry):
                state, infos, _ = carry
                state, info, snapshot = self.round(state, fleet, first + index, run_key, hparams)
                infos = jax.tree.map(lambda all_, one: all_.at[index].set(one), infos, info)
                return state, infos, snapshot

            return jax.lax.fori_loop(0, count, body, (state, infos, zeros[1]))

        return many


def make_engine(
    model: Model,
    trainer: Trainer,
    rule: Rule,
    *,
    task: Task = TASKS["forecast"],
    num_clients: int,
    clients_per_round: int,
    settings: Settings | None = None,
    opinion_leaves: str = "",
    personal_layers: str = "",
    min_coalition: int = 1,
    keep_optimizer: bool = False,
    gradient_spread: bool = False,
    attack: str = "none",
    finetuner: Trainer | None = None,
    chunk: int = 0,
    mesh: Mesh | None = None,
) -> Engine:
    """Composes a rule's choices into the functions of a run.

    Args:
      rule: see `fedjax_hk.rules`.
      task: what the test outputs are judged by; see `fedjax_hk.tasks`.
      settings: of the grouping and the weights.
      opinion_leaves: regular expression over parameter names.
      personal_layers: regular expression over the names of parameters that stay at the client.
      min_coalition: coalitions with fewer members weigh nothing.
      keep_optimizer: clients keep their optimizer's state from round to round.
      gradient_spread: whether eq. (3) is told each round.
      attack: what attackers send, a value of `--attack`.
      finetuner: clients are judged a second time after its epochs.
      chunk: clients that a device trains at once; 0 chooses (see `default_chunk`).
      mesh: one axis, over which clients are spread; by default all devices.

    Errors: ValueError for a pattern that matches no parameter or leaves none to compare, more
      clients a round than there are, or a model whose hidden neurons cannot be matched.
    """
    if not 1 <= clients_per_round <= num_clients:
        raise ValueError(
            f"Expected 1 <= clients_per_round <= {num_clients} (the fleet), "
            f"got {clients_per_round}."
        )
    mesh = mesh or Mesh(np.array(jax.devices()), ("clients",))
    compared, personal = _columns(model, opinion_leaves, personal_layers)
    size = 1 if rule.select == "pooled" else clients_per_round
    kept = kept_by_clients(rule, trainer, keep_optimizer=keep_optimizer, personal=personal)
    neurons = hidden_neurons(model) if rule.align == "neurons" else ()
    mapper = functools.partial(map_clients, mesh=mesh, chunk=chunk or default_chunk())
    clients = Clients(trainer, personal, rule.average == "nova", mapper)
    uplink = stages(personal=personal, attack=attack, neurons=neurons)
    server = make_server(
        rule,
        num_clients=num_clients,
        settings=settings,
        min_coalition=min_coalition,
        compared=compared,
    )
    select = implementation("select", rule.select)
    evaluator = Evaluator(model, trainer, personal, mapper)

    def init(params: Array) -> RoundState:
        return RoundState(server.init(params, size), empty_memory(kept, params, num_clients))

    def one_round(state, fleet, round_number, run_key, hparams):
        pool = pooled(fleet) if rule.select == "pooled" else fleet

        def draw(purpose: int, ids_n: Array) -> Array:
            return client_keys(run_key, purpose, round_number, ids_n)

        select_keys_n = draw(SELECT, pool.ids_n)
        cohort = select(state.server.distances, select_keys_n, size, hparams)
        upload, local = clients.run(state, pool, cohort, draw, hparams)
        ids_s = pool.ids_n[cohort.clients_s]
        wire = Wire(draw, run_key, pool.ids_n, ids_s, state.params, hparams)
        for stage in uplink:
            upload = stage(upload, wire)
        next_server, aggregate = server.step(
            state.server, upload, draw(GROUPING, ids_s), hparams, pool.planted_n
        )
        after = RoundState(next_server, serve(state, upload, local, aggregate))
        info, snapshot = tell(after, fleet, draw, upload, local, aggregate, hparams)
        return after, info, snapshot

    def serve(state, upload: Upload, local: LocalResult, aggregate: Aggregate) -> dict[str, Params]:
        memory_n = remember(kept, state.memory_n, upload, local, aggregate.centers_sd)
        if "start" in memory_n and not isinstance(aggregate.group_n, tuple):
            start_nd = served_alike(
                memory_n["start"], aggregate.group_n, upload.clients_s, upload.present_s,
                aggregate.centers_sd,
            )  # fmt: skip
            memory_n = memory_n | {"start": start_nd}
        return memory_n

    def tell(after, fleet, draw, upload, local, aggregate, hparams) -> tuple[RoundInfo, Snapshot]:
        outputs_nw = evaluator.outputs(after, fleet, hparams)
        finetuned: NamedTuple | tuple[()] = ()
        if finetuner is not None:
            keys_n = draw(FINETUNE, fleet.ids_n)
            tuned_nw = evaluator.finetuned(finetuner, after, fleet, keys_n, hparams)
            finetuned = task.judge.errors(tuned_nw, fleet.test)
        spread = (jnp.float32(jnp.nan),) * 2
        if gradient_spread:
            spread = evaluator.gradient_spread(after.params, fleet)
        info = RoundInfo(
            **describe(upload, local, aggregate, server.measure),
            gradient_spread=spread[0],
            gradient_norm=spread[1],
            dead_n=task.judge.dead(outputs_nw, fleet.test.mask),
            errors=task.judge.errors(outputs_nw, fleet.test),
            finetuned_errors=finetuned,
        )
        return info, Snapshot(upload.base_sd, upload.sent_sd, upload.present_s)

    def gram(snapshot: Snapshot, space: str) -> Params:
        return hk.gram_matrix(server.opinions(space, *snapshot), mask=snapshot.present_s)

    sent = 4 * (model.num_parameters - (0 if personal is None else len(personal)))
    sent += 4 * model.num_parameters if trainer.control else 0
    alone = rule.grouping == "singletons" and rule.serve == "coalition"
    if alone or rule.select == "pooled":
        sent = 0
    return Engine(init, one_round, evaluator.outputs, gram, mesh, Traffic(sent, sent))


def _columns(model: Model, opinion_leaves: str, personal_layers: str) -> tuple[Any, Any]:
    """Columns of the parameters that are compared, and of those that stay at the client."""
    compared = columns(model.leaves, opinion_leaves)
    if not personal_layers:
        return compared, None
    every = np.arange(model.num_parameters)
    personal = every[columns(model.leaves, personal_layers, "personal_layers")]
    # The server never sees what stays at the client.
    compared = np.setdiff1d(every[compared], personal)
    if compared.size == 0:
        raise ValueError(
            f"--personal_layers={personal_layers}: the server sees nothing of what "
            "--opinion_leaves compares; let other layers stay at the client."
        )
    return compared, personal


def describe(
    upload: Upload, local: LocalResult, aggregate: Aggregate, measure: str
) -> dict[str, Array]:
    """What the round itself says: fields of `RoundInfo`, without those of the whole fleet."""
    found, present_s, sent_sd = aggregate.found, upload.present_s, upload.sent_sd
    apart_ss = pair_dissimilarity(aggregate.gram, measure)
    return dict(
        cohort_s=upload.clients_s,
        present_s=present_s,
        finite_s=upload.finite_s,
        sampled_s=upload.sampled_s,
        reported_s=upload.reported_s,
        attacker_s=upload.attacker_s,
        labels_s=found.labels_s,
        weights_s=aggregate.weights_s,
        loss_s=local.loss,
        steps_s=local.num_steps,
        num_coalitions=jnp.sum(found.labels_s == jnp.arange(len(found.labels_s))),
        num_steps=found.num_steps,
        converged=found.converged,
        margin=found.margin,
        residual=found.residual,
        limit=found.limit,
        dissimilarity_q=pair_quantiles(apart_ss, present_s, jnp.array(measures.QUANTILE_LEVELS)),
        changes_nothing=equals_plain_mean(aggregate.weights_s, present_s),
        dispersion=measures.dispersion(sent_sd, upload.num_samples_s, present_s),
        within_spread=measures.within_spread(sent_sd, aggregate.centers_sd, present_s, measure),
    )


def compile_chunk(
    engine: Engine,
    length: int,
    state: RoundState,
    fleet: FleetArrays,
    run_key: Array,
    hparams: HParams,
) -> Callable:
    """`Engine.chunk(length)`, compiled ahead of time: it cannot compile again.

    The returned function takes arrays placed by `parallel.place`.
    """
    everywhere = NamedSharding(engine.mesh, P())
    jitted = jax.jit(engine.chunk(length), in_shardings=everywhere, out_shardings=everywhere)
    number = jnp.int32(0)
    lowered = jitted.lower(state, fleet, number, number, run_key, hparams)
    return lowered.compile(compiler_options(engine.mesh))


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """How the programs of a run are compiled."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": CPU_LEVEL} if on_cpu else None
