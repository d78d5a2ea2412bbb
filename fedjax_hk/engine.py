"""One round: select, train all at once, group, average, serve, judge.

A round is one compiled program. Everything it makes stays on the device; the caller reads
`RoundInfo` when it wants to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_hk import hk, metrics
from fedjax_hk.local_training import HParams, Trainer
from fedjax_hk.models import Model
from fedjax_hk.rules import Rule
from fedjax_hk.rules.opinions import OPINIONS, pick_leaves
from fedjax_hk.rules.partitions import PARTITIONS, Settings, pair_quantiles
from fedjax_hk.rules.server import SERVER_STEPS
from fedjax_hk.rules.weighting import client_weights
from fedjax_hk.types import Array, Params, Samples

AFFINITY_LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
SELECT, TRAIN, PARTITION, INIT = range(4)  # purposes of random numbers


class FleetArrays(NamedTuple):
    """What a round reads: `train` and `test` windows, and `available_n` `[N]` bool."""

    train: Samples
    test: Samples
    available_n: Array


class ServerState(NamedTuple):
    """What the next round needs.

    Attributes:
      params: the global model.
      starts_n: `[N, ...]` what each client starts from, with `serve=coalition`; else ().
      opt_n: `[N, ...]` the clients' optimizer states where they are kept; else ().
      partition: state of the partition.
      server_opt: state of the server step.
    """

    params: Params
    starts_n: Params
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
      gram_ss: inner products of the opinions, for looking at other thresholds.
      changes_nothing: `[]` bool, the weights equal those of the uniform mean.
      dispersion: `[]` weighted mean squared distance of the local models to their mean.
      dissimilarity: `[]` sum of the local models' distances to their coalition's barycenter.
      gradient_dissimilarity, gradient_norm: `[]`, eq. (3); NaN if not asked for.
      dead_n: `[N]` bool, forecasts nothing but zeros on its test windows.
      errors: `ClientErrors`, each `[N]`, of what each client is served.
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
    gram_ss: Array
    changes_nothing: Array
    dispersion: Array
    dissimilarity: Array
    gradient_dissimilarity: Array
    gradient_norm: Array
    dead_n: Array
    errors: metrics.ClientErrors


class Engine(NamedTuple):
    """Pure functions of a federated run.

    Attributes:
      init: `(params) -> ServerState`.
      round: `(state, fleet, round_number, run_key, hparams) -> (ServerState, RoundInfo)`.
      forecast: `(state, fleet, hparams) -> [N, W_test]` scaled test forecasts.
      mesh: devices over which clients are spread.
    """

    init: Callable[..., ServerState]
    round: Callable[..., tuple[ServerState, RoundInfo]]
    forecast: Callable[..., Array]
    mesh: Mesh


def client_key(run_key: Array, purpose: int, round_number: Array, client: Array) -> Array:
    """Same (run, purpose, round, client): same numbers, whatever the order."""
    key = jax.random.fold_in(jax.random.fold_in(run_key, purpose), round_number)
    return jax.random.fold_in(key, client)


def make_engine(
    model: Model,
    trainer: Trainer,
    rule: Rule,
    *,
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

    def opinions_of(params_s, starts_s, mask_s):
        return pick_leaves(OPINIONS[rule.opinion](params_s, starts_s, mask_s), opinion_leaves)

    def init(params: Params) -> ServerState:
        rows = lambda tree, n: jax.tree.map(  # noqa: E731
            lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), tree
        )
        cohort = rows(params, clients_per_round)
        mask_s = jnp.ones(clients_per_round, bool)
        return ServerState(
            params,
            rows(params, num_clients) if personal else (),
            rows(trainer.init_optimizer(params), num_clients) if keep_optimizer else (),
            partition.init(opinions_of(cohort, cohort, mask_s)),
            server.init(params),
        )

    def judge(state: ServerState, fleet: FleetArrays, hparams: HParams):
        """`[N, W]` scaled forecasts of what each client is served."""

        def one(params, train, inputs):
            return model.apply(trainer.adapt(params, train, hparams), inputs, None)

        def block(batched, shared):
            starts, train, inputs = batched
            params = starts if personal else shared
            return jax.vmap(one, in_axes=(0 if personal else None, 0, 0))(params, train, inputs)

        batched = (state.starts_n, fleet.train, fleet.test.inputs)
        return map_clients(block, batched, state.params, mesh=mesh, chunk=chunk)

    def train_cohort(state, fleet, cohort_s, starts_s, round_number, run_key, hparams):
        keys_s = jax.vmap(lambda c: client_key(run_key, TRAIN, round_number, c))(cohort_s)
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

        batched = (starts_s, kept_s, _rows(fleet.train, cohort_s), keys_s)
        return map_clients(block, batched, hparams, mesh=mesh, chunk=chunk)

    def gradients(params, fleet):
        """Eq. (3): mean squared distance of the clients' gradients to the fleet's."""
        if not gradient_dissimilarity:
            return jnp.float32(jnp.nan), jnp.float32(jnp.nan)

        def block(samples, shared):
            return jax.vmap(lambda one: trainer.gradient(shared, one)[1])(samples)

        grads_n = map_clients(block, fleet.train, params, mesh=mesh, chunk=chunk)
        samples_n = jnp.sum(fleet.train.mask, axis=1)
        has_n = samples_n > 0
        mean = hk.average(grads_n, samples_n / jnp.sum(samples_n))
        apart_n = _squared_norms(jax.tree.map(jnp.subtract, grads_n, mean))
        total = jnp.sum(jnp.where(has_n, apart_n, 0)) / jnp.sum(has_n)
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(mean)))
        return total, norm

    def one_round(state, fleet, round_number, run_key, hparams):
        cohort_s = sample_cohort(run_key, round_number, num_clients, clients_per_round)
        starts_s = (
            _rows(state.starts_n, cohort_s)
            if personal
            else jax.tree.map(
                lambda x: jnp.broadcast_to(x, (clients_per_round, *x.shape)), state.params
            )
        )
        result = train_cohort(
            state, fleet, cohort_s, starts_s, round_number, run_key, hparams
        )
        samples_s = jnp.sum(fleet.train.mask, axis=1)[cohort_s]
        finite_s = _finite_rows(result.params) & jnp.isfinite(result.loss)
        present_s = finite_s & fleet.available_n[cohort_s] & (samples_s > 0)
        params_s = _where_rows(present_s, result.params, starts_s)

        opinions_s = opinions_of(params_s, starts_s, present_s)
        gram_ss = hk.gram_matrix(opinions_s, mask=present_s)
        key = client_key(run_key, PARTITION, round_number, 0)
        found, partition_state = partition.apply(
            state.partition, opinions_s, gram_ss, present_s, key, hparams
        )
        labels_s = found.labels_s
        weights_s, members_s = client_weights(
            labels_s,
            samples_s,
            within=rule.within,
            between=rule.between,
            min_coalition=min_coalition,
        )
        centers_s = _barycenters(params_s, labels_s, members_s)

        average = hk.average(params_s, weights_s)
        params, server_state = server.apply(
            state.server_opt, state.params, average, hparams.server_lr
        )
        anyone = jnp.any(present_s)
        keep = lambda new, old: jax.tree.map(  # noqa: E731
            lambda n, o: jnp.where(anyone, n, o), new, old
        )
        starts_n, opt_n = state.starts_n, state.opt_n
        if personal:
            starts_n = _scatter(starts_n, cohort_s, _where_rows(present_s, centers_s, starts_s))
        if keep_optimizer:
            old_s = _rows(opt_n, cohort_s)
            opt_n = _scatter(opt_n, cohort_s, _where_rows(present_s, result.opt_state, old_s))
        state = ServerState(
            keep(params, state.params),
            starts_n,
            opt_n,
            partition_state,
            keep(server_state, state.server_opt),
        )

        forecast_nw = judge(state, fleet, hparams)
        heterogeneity = gradients(state.params, fleet)
        apart_ss = hk.dissimilarity(gram_ss, partition.kind)
        if partition.kind == "ball":
            apart_ss = jnp.sqrt(apart_ss)
        num_present = jnp.maximum(jnp.sum(present_s), 1)
        uniform_s = jnp.where(present_s, 1 / num_present, 0)
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
            gram_ss=gram_ss,
            changes_nothing=jnp.max(jnp.abs(weights_s - uniform_s)) * num_present < 1e-5,
            dispersion=_dispersion(params_s, samples_s, present_s),
            dissimilarity=_within_dissimilarity(params_s, centers_s, present_s, partition.kind),
            gradient_dissimilarity=heterogeneity[0],
            gradient_norm=heterogeneity[1],
            dead_n=metrics.dead_clients(forecast_nw, fleet.test.mask),
            errors=metrics.client_errors(forecast_nw, fleet.test),
        )
        return state, info

    return Engine(init, one_round, judge, mesh)


def default_chunk() -> int:
    """Clients a device trains at once: few on a CPU, so that they stay in its cache."""
    return 5 if jax.default_backend() == "cpu" else 1024


def sample_cohort(run_key: Array, round_number: Array, num_clients: int, size: int) -> Array:
    """`[S]` distinct positions, uniform, ascending (FedHK paper, section 5.1).

    It depends on the seed and the round alone: who dropped out before changes nothing.
    """
    key = client_key(run_key, SELECT, round_number, 0)
    return jnp.sort(jax.random.permutation(key, num_clients)[:size])


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
    return jitted.lower(state, fleet, jnp.int32(0), run_key, hparams).compile()


def place(tree: Params, mesh: Mesh) -> Params:
    """Arrays on every device of the mesh, numbers as float32."""

    def put(x):
        x = np.float32(x) if isinstance(x, float) else x
        return jax.device_put(x, NamedSharding(mesh, P()))

    return jax.tree.map(put, tree)


def num_parameters(params: Params) -> int:
    """Parameters of one model."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def _rows(tree: Params, index_s: Array) -> Params:
    return jax.tree.map(lambda x: x[index_s], tree)


def _scatter(tree_n: Params, index_s: Array, rows_s: Params) -> Params:
    return jax.tree.map(lambda x, rows: x.at[index_s].set(rows), tree_n, rows_s)


def _where_rows(mask_s: Array, new_s: Params, old_s: Params) -> Params:
    def choose(new, old):
        return jnp.where(mask_s.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new_s, old_s)


def _finite_rows(tree_s: Params) -> Array:
    rows = [jnp.all(jnp.isfinite(x.reshape(x.shape[0], -1)), axis=1) for x in jax.tree.leaves(tree_s)]
    return jnp.all(jnp.stack(rows), axis=0)


def _squared_norms(tree_s: Params) -> Array:
    """`[S]` squared Euclidean norm of every client's row."""
    return sum(jnp.sum(x.reshape(x.shape[0], -1) ** 2, axis=1) for x in jax.tree.leaves(tree_s))


def _barycenters(params_s: Params, labels_s: Array, members_s: Array) -> Params:
    """Weighted barycenters: eq. (15) where members weigh the same."""
    size_s = jnp.sum(labels_s[:, None] == labels_s[None, :], axis=1)

    def scale(x):
        return x * (members_s * size_s).reshape((-1,) + (1,) * (x.ndim - 1))

    return hk.barycenters(jax.tree.map(scale, params_s), labels_s)


def _dispersion(params_s: Params, samples_s: Array, present_s: Array) -> Array:
    """Eq. (5) for this round's local models: `sum_i p_i |w_i - mean|^2`, p by samples."""
    share_s = jnp.where(present_s, samples_s, 0)
    share_s = share_s / jnp.maximum(jnp.sum(share_s), 1)
    mean = hk.average(params_s, share_s)
    apart_s = _squared_norms(jax.tree.map(jnp.subtract, params_s, mean))
    return jnp.sum(share_s * jnp.where(present_s, apart_s, 0))


def _within_dissimilarity(params_s, centers_s, present_s, kind: str) -> Array:
    """Eq. (8): sum of the distances, or of 1 - cos, to the own coalition's barycenter."""
    if kind == "ball":
        apart_s = jnp.sqrt(_squared_norms(jax.tree.map(jnp.subtract, params_s, centers_s)))
    else:
        # 1 - cos = |u - v|^2 / 2 for unit vectors: no digits are lost near 1.
        apart_s = 0.5 * _squared_norms(
            jax.tree.map(jnp.subtract, _unit_rows(params_s), _unit_rows(centers_s))
        )
    return jnp.sum(jnp.where(present_s, apart_s, 0))


def _unit_rows(tree_s: Params) -> Params:
    norm_s = jnp.sqrt(_squared_norms(tree_s))
    inverse_s = 1 / jnp.where(norm_s > 0, norm_s, 1)
    return jax.tree.map(lambda x: x * inverse_s.reshape((-1,) + (1,) * (x.ndim - 1)), tree_s)
