"""One round: select, train all at once, group, average, serve, judge.

A round is one compiled program. Everything it makes stays on the device; the caller reads
`RoundInfo` when it wants to.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_hk import hk
from fedjax_hk.local_training import HParams, Trainer
from fedjax_hk.models import Model
from fedjax_hk.rules import Rule
from fedjax_hk.rules.opinions import OPINIONS, columns
from fedjax_hk.rules.partitions import PARTITIONS, Settings, pair_dissimilarity, pair_quantiles
from fedjax_hk.rules.server import SERVER_STEPS
from fedjax_hk.rules.weighting import client_weights, equals_plain_mean
from fedjax_hk.tasks import TASKS, Task
from fedjax_hk.types import Array, Params, Samples

AFFINITY_LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
SELECT, TRAIN, PARTITION, INIT = range(4)  # purposes of random numbers


class FleetArrays(NamedTuple):
    """What a round reads.

    Attributes:
      train, test: windows of all clients.
      available_n: `[N]` bool, False for a client that does not answer.
      ids_n: `[N]` uint32, what a client's random numbers are derived from, so that they do
        not depend on its place in the fleet; see `stable_ids`.
    """

    train: Samples
    test: Samples
    available_n: Array
    ids_n: Array


class ServerState(NamedTuple):
    """What the next round needs.

    Attributes:
      params: `[D]` the global model.
      starts_nd: `[N, D]` what each client starts from, with `serve=coalition`; else ().
      opt_n: `[N, ...]` the clients' optimizer states where they are kept; else ().
      partition: state of the partition.
      server_opt: state of the server step.
    """

    params: Array
    starts_nd: Array | tuple
    opt_n: Params
    partition: Params
    server_opt: Params


class RoundInfo(NamedTuple):
    """What a reader wants to know of a round.

    Attributes:
      cohort_s: `[S]` positions of the sampled clients in the fleet, ascending.
      present_s: `[S]` bool, took part: available, has windows, and came back finite.
      finite_s: `[S]` bool, came back finite.
      labels_s: `[S]` int32 coalition, named by its smallest member; -1 if left out.
      weights_s: `[S]` weight of each client in the global model.
      loss_s: `[S]` mean training loss over the round's steps.
      num_coalitions, num_steps, converged, margin, residual: of the partition, `[]`.
      limit: `[]` largest dissimilarity of neighbors, NaN without a threshold.
      affinity_q: `[5]` dissimilarity of the pairs at `AFFINITY_LEVELS`.
      grams: inner products of the opinions in every opinion space (a key of `OPINIONS`), for
        looking at other thresholds; see `hk.gram_matrix`.
      changes_nothing: `[]` bool, the weights equal those of the uniform mean.
      dispersion: `[]` weighted mean squared distance of the local models to their mean.
      dissimilarity: `[]` sum of the local models' distances to their coalition's barycenter.
      gradient_dissimilarity, gradient_norm: `[]`, eq. (3); NaN if not asked for.
      dead_n: `[N]` bool, what it is served has died (see the task's `dead`).
      errors: the task's record, each `[N]`, of what each client is served.
      forecast_nw: `[N, W_test]` scaled forecasts that were judged, or `[N, W_test, C]` logits.
    """

    cohort_s: Array
    present_s: Array
    finite_s: Array
    labels_s: Array
    weights_s: Array
    loss_s: Array
    num_coalitions: Array
    num_steps: Array
    converged: Array
    margin: Array
    residual: Array
    limit: Array
    affinity_q: Array
    grams: dict[str, Params]
    changes_nothing: Array
    dispersion: Array
    dissimilarity: Array
    gradient_dissimilarity: Array
    gradient_norm: Array
    dead_n: Array
    errors: NamedTuple
    forecast_nw: Array


class Engine(NamedTuple):
    """Pure functions of a federated run.

    Attributes:
      init: `(params) -> ServerState`.
      round: `(state, fleet, round_number, run_key, hparams) -> (ServerState, RoundInfo)`.
      forecast: `(state, fleet, hparams) -> [N, W_test]` scaled test forecasts, or
        `[N, W_test, C]` logits.
      mesh: devices over which clients are spread.
    """

    init: Callable[..., ServerState]
    round: Callable[..., tuple[ServerState, RoundInfo]]
    forecast: Callable[..., Array]
    mesh: Mesh


def client_key(run_key: Array, purpose: int, round_number: Array, client_id: Array) -> Array:
    """Same (run, purpose, round, client): same numbers, whatever the order."""
    key = jax.random.fold_in(jax.random.fold_in(run_key, purpose), round_number)
    return jax.random.fold_in(key, client_id)


def client_keys(run_key: Array, purpose: int, round_number: Array, ids_n: Array) -> Array:
    """`[N]` keys, `client_key` of each client."""
    return jax.vmap(lambda one: client_key(run_key, purpose, round_number, one))(ids_n)


def stable_ids(client_ids: Sequence[str]) -> np.ndarray:
    """`[N]` uint32 from the clients' names alone (CRC-32)."""
    return np.array([zlib.crc32(name.encode()) for name in client_ids], np.uint32)


def make_engine(
    model: Model,
    trainer: Trainer,
    rule: Rule,
    *,
    task: Task = TASKS["forecast"],
    num_clients: int,
    clients_per_round: int,
    batch_size: int = 32,
    settings: Settings | None = None,
    opinion_leaves: str = "",
    min_coalition: int = 1,
    keep_optimizer: bool = False,
    gradient_dissimilarity: bool = False,
    chunk: int = 0,
    mesh: Mesh | None = None,
) -> Engine:
    """Composes a rule's choices into the functions of a run.

    Args:
      rule: see `fedjax_hk.rules`.
      task: what the test outputs are judged by; see `fedjax_hk.tasks`.
      settings: of the partition.
      opinion_leaves: regular expression over parameter names.
      chunk: clients that a device trains at once; 0 chooses (see `default_chunk`).
      mesh: one axis, over which clients are spread; by default all devices.

    Errors: ValueError for a pattern that matches no parameter, or more clients a round than
      there are.
    """
    if not 1 <= clients_per_round <= num_clients:
        raise ValueError(
            f"Expected 1 <= clients_per_round <= {num_clients} (the fleet), "
            f"got {clients_per_round}."
        )
    settings = settings or Settings()
    mesh = mesh or Mesh(np.array(jax.devices()), ("clients",))
    chunk = chunk or default_chunk()
    partition, server = PARTITIONS[rule.partition](settings), SERVER_STEPS[rule.server_opt]
    personal = rule.serve == "coalition"

    compared = columns(model.leaves, opinion_leaves)

    def init(params: Array) -> ServerState:
        return ServerState(
            params,
            _repeat(params, num_clients) if personal else (),
            _repeat(trainer.init_optimizer(params), num_clients) if keep_optimizer else (),
            partition.init(_repeat(params, clients_per_round)[:, compared]),
            server.init(params),
        )

    def judge(state: ServerState, fleet: FleetArrays, hparams: HParams):
        """`[N, W, ...]` test outputs of what each client is served."""

        def one(params, train, inputs):
            return _apply(model, trainer.adapt(params, train, hparams), inputs)

        def block(batched, shared):
            starts, train, inputs = batched
            params = starts if personal else shared
            return jax.vmap(one, in_axes=(0 if personal else None, 0, 0))(params, train, inputs)

        batched = (state.starts_nd, fleet.train, fleet.test.inputs)
        return map_clients(block, batched, state.params, mesh=mesh, chunk=chunk)

    def train_cohort(state, fleet, cohort_s, start_sd, round_number, run_key, hparams):
        keys_s = client_keys(run_key, TRAIN, round_number, fleet.ids_n[cohort_s])
        kept_s = _rows(state.opt_n, cohort_s)

        def block(batched, shared):
            starts, kept, samples, keys = batched
            # Clients of a chunk step together, so the chunk's longest one sets the pace.
            num_batches = -(-jnp.max(jnp.sum(samples.mask, axis=1)) // batch_size)
            states = kept if keep_optimizer else jax.vmap(trainer.init_optimizer)(starts)
            result = jax.vmap(trainer.train, in_axes=(0, 0, 0, 0, None, None))(
                starts, states, samples, keys, num_batches, shared
            )
            return result if keep_optimizer else result._replace(opt_state=())

        batched = (start_sd, kept_s, _rows(fleet.train, cohort_s), keys_s)
        return map_clients(block, batched, hparams, mesh=mesh, chunk=chunk)

    def gradients(params, fleet):
        """Eq. (3): mean squared distance of the clients' gradients to the fleet's."""
        if not gradient_dissimilarity:
            return jnp.float32(jnp.nan), jnp.float32(jnp.nan)

        def block(samples, shared):
            return jax.vmap(lambda one: trainer.gradient(shared, one)[1])(samples)

        grads_nd = map_clients(block, fleet.train, params, mesh=mesh, chunk=chunk)
        # A client whose data is not finite is left out, as it is of the round.
        finite_n = jnp.all(jnp.isfinite(grads_nd), axis=1)
        samples_n = jnp.where(finite_n, jnp.sum(fleet.train.mask, axis=1), 0)
        has_n = samples_n > 0
        mean_d = hk.average(grads_nd, samples_n / jnp.sum(samples_n))
        apart_n = jnp.sum((grads_nd - mean_d[None, :]) ** 2, axis=1)
        total = jnp.sum(jnp.where(has_n, apart_n, 0)) / jnp.sum(has_n)
        return total, jnp.linalg.norm(mean_d)

    def one_round(state, fleet, round_number, run_key, hparams):
        cohort_s = sample_cohort(run_key, round_number, fleet.ids_n, clients_per_round)
        start_sd = (
            state.starts_nd[cohort_s] if personal else _repeat(state.params, clients_per_round)
        )
        result = train_cohort(state, fleet, cohort_s, start_sd, round_number, run_key, hparams)
        samples_s = jnp.sum(fleet.train.mask, axis=1)[cohort_s]
        finite_s = jnp.all(jnp.isfinite(result.params), axis=1) & jnp.isfinite(result.loss)
        present_s = finite_s & fleet.available_n[cohort_s] & (samples_s > 0)
        params_sd = jnp.where(present_s[:, None], result.params, start_sd)

        opinions = {
            name: of(params_sd, start_sd, present_s)[:, compared] for name, of in OPINIONS.items()
        }
        grams = {name: hk.gram_matrix(one, mask=present_s) for name, one in opinions.items()}
        opinions_sd, gram_ss = opinions[rule.opinion], grams[rule.opinion]
        keys_s = client_keys(run_key, PARTITION, round_number, fleet.ids_n[cohort_s])
        found, partition_state = partition.apply(
            state.partition, opinions_sd, gram_ss, present_s, keys_s, hparams
        )
        labels_s = found.labels_s
        weights_s, members_s = client_weights(
            labels_s,
            samples_s,
            within=rule.within,
            between=rule.between,
            min_coalition=min_coalition,
        )
        centers_sd = _barycenters(params_sd, labels_s, members_s)

        average = hk.average(params_sd, weights_s)
        params, server_state = server.apply(
            state.server_opt, state.params, average, hparams.server_lr
        )
        anyone = jnp.any(present_s)
        starts_nd, opt_n = state.starts_nd, state.opt_n
        if personal:
            served_sd = jnp.where(present_s[:, None], centers_sd, start_sd)
            starts_nd = starts_nd.at[cohort_s].set(served_sd)
        if keep_optimizer:
            kept_s = _where_rows(present_s, result.opt_state, _rows(opt_n, cohort_s))
            opt_n = jax.tree.map(lambda x, rows: x.at[cohort_s].set(rows), opt_n, kept_s)
        state = ServerState(
            jnp.where(anyone, params, state.params),
            starts_nd,
            opt_n,
            partition_state,
            jax.tree.map(
                lambda new, old: jnp.where(anyone, new, old), server_state, state.server_opt
            ),
        )

        outputs_nw = judge(state, fleet, hparams)
        heterogeneity = gradients(state.params, fleet)
        apart_ss = pair_dissimilarity(gram_ss, partition.kind)
        info = RoundInfo(
            cohort_s=cohort_s,
            present_s=present_s,
            finite_s=finite_s,
            labels_s=labels_s,
            weights_s=weights_s,
            loss_s=result.loss,
            num_coalitions=jnp.sum(labels_s == jnp.arange(clients_per_round)),
            num_steps=found.num_steps,
            converged=found.converged,
            margin=found.margin,
            residual=found.residual,
            limit=found.limit,
            affinity_q=pair_quantiles(apart_ss, present_s, jnp.array(AFFINITY_LEVELS)),
            grams=grams,
            changes_nothing=equals_plain_mean(weights_s, present_s),
            dispersion=_dispersion(params_sd, samples_s, present_s),
            dissimilarity=_within_dissimilarity(params_sd, centers_sd, present_s, partition.kind),
            gradient_dissimilarity=heterogeneity[0],
            gradient_norm=heterogeneity[1],
            dead_n=task.dead(outputs_nw, fleet.test.mask),
            errors=task.errors(outputs_nw, fleet.test),
            forecast_nw=outputs_nw,
        )
        return state, info

    return Engine(init, one_round, judge, mesh)


def default_chunk() -> int:
    """Clients a device trains at once: few on a CPU, so that they stay in its cache."""
    return 5 if jax.default_backend() == "cpu" else 1024


def sample_cohort(run_key: Array, round_number: Array, ids_n: Array, size: int) -> Array:
    """`[S]` distinct positions, uniform, ascending (FedHK paper, section 5.1).

    Those with the smallest of the clients' own draws: it depends on the seed, the round and
    who the clients are, not on their order nor on who dropped out before.
    """
    draws_n = jax.vmap(jax.random.bits)(client_keys(run_key, SELECT, round_number, ids_n))
    return jnp.sort(jnp.argsort(draws_n)[:size])


def map_clients(
    function: Callable, batched: Params, shared: Params, *, mesh: Mesh, chunk: int
) -> Params:
    """Applies `function(chunk of batched, shared)` to chunks of clients, on all devices.

    Args:
      function: handles the leading axis itself, by `vmap`.
      batched: leaves `[S, ...]`, split over devices and then into chunks of at most `chunk`.
      shared: what every chunk sees.

    Returns:
      Leaves `[S, ...]`, the same on every device.
    """
    size = jax.tree.leaves(batched)[0].shape[0]
    per_device = -(-size // mesh.size)
    num_chunks = -(-per_device // chunk)
    width = -(-per_device // num_chunks)
    total = mesh.size * num_chunks * width
    # The last chunks are filled up with clients from the front, whose results are dropped.
    filled = jnp.arange(total) % size

    def on_device(batched, shared):
        chunks = jax.tree.map(lambda x: x.reshape(num_chunks, width, *x.shape[1:]), batched)
        results = jax.lax.map(lambda one: function(one, shared), chunks)
        return jax.tree.map(lambda x: x.reshape(num_chunks * width, *x.shape[2:]), results)

    axis = mesh.axis_names[0]
    results = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(axis), P()), out_specs=P(axis), check_vma=False
    )(batched if total == size else _rows(batched, filled), shared)
    everywhere = NamedSharding(mesh, P())
    results = jax.lax.with_sharding_constraint(results, everywhere)
    return jax.tree.map(lambda x: x[:size], results)


def compile_round(
    engine: Engine, state: ServerState, fleet: FleetArrays, run_key: Array, hparams: HParams
) -> Callable:
    """The round, compiled ahead of time: it cannot compile again.

    The returned function takes `(state, fleet, round_number, run_key, hparams)` with arrays
    placed by `place`.
    """
    everywhere = NamedSharding(engine.mesh, P())
    jitted = jax.jit(engine.round, in_shardings=everywhere, out_shardings=everywhere)
    lowered = jitted.lower(state, fleet, jnp.int32(0), run_key, hparams)
    # On a CPU, level 3 compiles a third longer and runs no faster (jax 0.10.2).
    on_cpu = engine.mesh.devices.flat[0].platform == "cpu"
    return lowered.compile({"xla_backend_optimization_level": 2} if on_cpu else None)


def place(tree: Params, mesh: Mesh) -> Params:
    """Arrays on every device of the mesh, numbers as float32."""

    def put(x):
        x = np.float32(x) if isinstance(x, float) else x
        return jax.device_put(x, NamedSharding(mesh, P()))

    return jax.tree.map(put, tree)


def _apply(model: Model, params: Array, inputs: Array) -> Array:
    """Outputs for inputs `[W, ...]`, in blocks where layers of all of them at once would take
    the memory of many models: a client's test images, not its windows."""
    block = max(1, 2**18 // math.prod(inputs.shape[1:]))
    if inputs.shape[0] <= block:
        return model.apply(params, inputs, None)
    return jax.lax.map(lambda x: model.apply(params, x[None], None)[0], inputs, batch_size=block)


def _repeat(tree: Params, size: int) -> Params:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *jnp.shape(x))), tree)


def _rows(tree: Params, index_s: Array) -> Params:
    return jax.tree.map(lambda x: x[index_s], tree)


def _where_rows(mask_s: Array, new_s: Params, old_s: Params) -> Params:
    def choose(new, old):
        return jnp.where(mask_s.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new_s, old_s)


def _barycenters(params_sd: Array, labels_s: Array, members_s: Array) -> Array:
    """Weighted barycenters: eq. (15) where members weigh the same."""
    size_s = jnp.sum(labels_s[:, None] == labels_s[None, :], axis=1)
    return hk.barycenters(params_sd * (members_s * size_s)[:, None], labels_s)


def _dispersion(params_sd: Array, samples_s: Array, present_s: Array) -> Array:
    """Eq. (5) for this round's local models: `sum_i p_i |w_i - mean|^2`, p by samples."""
    share_s = jnp.where(present_s, samples_s, 0)
    share_s = share_s / jnp.maximum(jnp.sum(share_s), 1)
    apart_sd = params_sd - hk.average(params_sd, share_s)[None, :]
    return jnp.sum(share_s * jnp.sum(apart_sd**2, axis=1))


def _within_dissimilarity(params_sd, centers_sd, present_s, kind: str) -> Array:
    """Eq. (8): sum of the distances, or of 1 - cos, to the own coalition's barycenter."""
    if kind == "ball":
        apart_s = jnp.sqrt(jnp.sum((params_sd - centers_sd) ** 2, axis=1))
    else:
        # 1 - cos = |u - v|^2 / 2 for unit vectors: no digits are lost near 1.
        apart_sd = _unit_rows(params_sd) - _unit_rows(centers_sd)
        apart_s = 0.5 * jnp.sum(apart_sd**2, axis=1)
    return jnp.sum(jnp.where(present_s, apart_s, 0))


def _unit_rows(rows_sd: Array) -> Array:
    norm_s = jnp.linalg.norm(rows_sd, axis=1, keepdims=True)
    return rows_sd / jnp.where(norm_s > 0, norm_s, 1)
