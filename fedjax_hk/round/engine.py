"""One round: select, train all at once, group, weigh, average, serve, judge.

A round is one compiled program. Everything it makes stays on the device; the caller reads
`RoundInfo` when it wants to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_hk import hk
from fedjax_hk.keys import FINETUNE, GROUPING, NOISE, SELECT, TRAIN, client_keys
from fedjax_hk.models.model import Model
from fedjax_hk.parallel import default_chunk, map_clients, repeat, rows, where_rows
from fedjax_hk.round import measures
from fedjax_hk.round.training import LocalResult, Trainer
from fedjax_hk.round.uplink import attacked, attackers, drops, work_shares
from fedjax_hk.rules import Rule
from fedjax_hk.rules.alignment import aligned, hidden_neurons
from fedjax_hk.rules.grouping import (
    Grouping,
    GroupingInfo,
    Members,
    pair_dissimilarity,
    pair_quantiles,
)
from fedjax_hk.rules.opinions import columns
from fedjax_hk.rules.selection import Cohort, Distances, no_distances, observed
from fedjax_hk.rules.server import ServerStep
from fedjax_hk.rules.weighting import (
    client_weights,
    distance_factor,
    equals_plain_mean,
    krum_factor,
)
from fedjax_hk.settings.choices import TABLES, implementation
from fedjax_hk.tasks import TASKS, Task
from fedjax_hk.types import Array, HParams, Params, Samples, Settings

QUANTILE_LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
CPU_LEVEL = 2  # of XLA: level 3 compiles a third longer and runs no faster (jax 0.10.2)


class FleetArrays(NamedTuple):
    """What a round reads.

    Attributes:
      train, test: windows of all clients.
      available_n: `[N]` bool, False for a client that does not answer.
      ids_n: `[N]` uint32, what a client's random numbers are derived from, so that they do
        not depend on its place in the fleet; see `stable_ids`.
      planted_n: `[N]` int32 planted groups, -1 for an outlier; () where none are known.
    """

    train: Samples
    test: Samples
    available_n: Array
    ids_n: Array
    planted_n: Array | tuple = ()


class ServerState(NamedTuple):
    """What the next round needs.

    Attributes:
      params: `[D]` the global model.
      starts_nd: `[N, D]` what each client starts from, with `serve=coalition`; else ().
      opt_n: `[N, ...]` the clients' optimizer states where they are kept; else ().
      grouping: state of the grouping.
      server_opt: state of the server step.
      distances: of the clients' models, where selection or weights ask for them; else ().
      controls_nd: `[N, D]` the clients' control variates (SCAFFOLD); their mean is the
        server's; else ().
      personal_np: `[N, P]` the parameters that stay at the clients; else ().
    """

    params: Array
    starts_nd: Array | tuple
    opt_n: Params
    grouping: Params
    server_opt: Params
    distances: Distances | tuple = ()
    controls_nd: Array | tuple = ()
    personal_np: Array | tuple = ()


class RoundInfo(NamedTuple):
    """What a reader wants to know of a round.

    Attributes:
      cohort_s: `[S]` positions of the sampled clients in the fleet, ascending (first those
        who are asked); -1 for all windows in one.
      present_s: `[S]` bool, took part: asked, available, has windows, and came back finite.
      finite_s: `[S]` bool, came back finite.
      labels_s: `[S]` int32 coalition, named by its smallest member; -1 if left out.
      weights_s: `[S]` weight of each client in the global model.
      loss_s: `[S]` mean training loss over the round's steps.
      num_coalitions, num_steps, converged, margin, residual: of the grouping, `[]`.
      limit: `[]` largest dissimilarity of neighbors, NaN without a threshold.
      dissimilarity_q: `[5]` dissimilarity of the pairs at `QUANTILE_LEVELS`.
      grams: inner products of the opinions in every opinion space (`OPINION` of
        `settings.choices`), for looking at other thresholds; see `hk.gram_matrix`.
      changes_nothing: `[]` bool, the weights equal those of the uniform mean.
      dispersion: `[]` weighted mean squared distance of the local models to their mean.
      within_spread: `[]` sum of the local models' distances to their coalition's barycenter.
      gradient_spread, gradient_norm: `[]`, eq. (3); NaN if not asked for.
      dead_n: `[N]` bool, what it is served has died (see the task's `dead`).
      errors: the task's record, each `[N]`, of what each client is served.
      outputs_nw: `[N, W_test]` what was judged: scaled forecasts, or `[N, W_test, C]` logits.
      sampled_s: `[S]` bool, asked to train; the others only fill the arrays.
      reported_s: `[S]` bool, sent something back, finite or not.
      attacker_s: `[S]` bool, sends something else than it trained.
      steps_s: `[S]` int32 local steps.
      finetuned_errors: as `errors`, after some local epochs more; () if not asked for.
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
    dissimilarity_q: Array
    grams: dict[str, Params]
    changes_nothing: Array
    dispersion: Array
    within_spread: Array
    gradient_spread: Array
    gradient_norm: Array
    dead_n: Array
    errors: NamedTuple
    outputs_nw: Array
    sampled_s: Array
    reported_s: Array
    attacker_s: Array
    steps_s: Array
    finetuned_errors: NamedTuple | tuple = ()


class Traffic(NamedTuple):
    """Bytes that a client receives when it is asked, and sends when it answers; 0 where nothing
    is federated."""

    down: int
    up: int


class Engine(NamedTuple):
    """Pure functions of a federated run.

    Attributes:
      init: `(params) -> ServerState`.
      round: `(state, fleet, round_number, run_key, hparams) -> (ServerState, RoundInfo)`.
      forecast: `(state, fleet, hparams) -> [N, W_test]` scaled test forecasts, or
        `[N, W_test, C]` logits.
      mesh: devices over which clients are spread.
      traffic: of one client and round.
    """

    init: Callable[..., ServerState]
    round: Callable[..., tuple[ServerState, RoundInfo]]
    forecast: Callable[..., Array]
    mesh: Mesh
    traffic: Traffic


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
      attack: what attackers send, one of `disturbances.ATTACKS`.
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
    settings = settings or Settings()
    mesh = mesh or Mesh(np.array(jax.devices()), ("clients",))
    own = columns(model.leaves, personal_layers, "personal_layers") if personal_layers else None
    compared = columns(model.leaves, opinion_leaves)
    if own is not None:  # the server never sees what stays at the client
        compared = np.setdiff1d(np.arange(model.num_parameters)[compared], own)
        if compared.size == 0:
            raise ValueError(
                f"--personal_layers={personal_layers}: the server sees nothing of what "
                "--opinion_leaves compares; let other layers stay at the client."
            )
    steps = _Round(
        model=model,
        trainer=trainer,
        rule=rule,
        task=task,
        grouping=implementation("grouping", rule.grouping)(settings),
        server=implementation("server_opt", rule.server_opt),
        settings=settings,
        num_clients=num_clients,
        size=1 if rule.select == "pooled" else clients_per_round,
        batch_size=batch_size,
        compared=compared,
        own=own,
        neurons=hidden_neurons(model) if rule.align == "neurons" else (),
        min_coalition=min_coalition,
        keep_optimizer=keep_optimizer,
        gradient_spread=gradient_spread,
        attack=attack,
        finetuner=finetuner,
        chunk=chunk or default_chunk(),
        mesh=mesh,
    )
    sent = 4 * (model.num_parameters - (0 if own is None else len(own)))
    sent += 4 * model.num_parameters if trainer.control else 0
    alone = rule.grouping == "singletons" and rule.serve == "coalition"
    if alone or rule.select == "pooled":
        sent = 0
    return Engine(steps.init, steps.run, steps.judge, mesh, Traffic(sent, sent))


class _Trained(NamedTuple):
    """What the server has after training; models of who took no part are their starts.

    Attributes:
      base_sd: `[S, D]` what the server sent out.
      sent_sd: `[S, D]` what came back.
      num_samples_s, effort_s: `[S]` training windows, and coefficient sum of the local steps.
      present_s, finite_s, reported_s, attacker_s: `[S]` bool, as in `RoundInfo`.
      result: what the clients hold.
    """

    base_sd: Array
    sent_sd: Array
    num_samples_s: Array
    effort_s: Array
    present_s: Array
    finite_s: Array
    reported_s: Array
    attacker_s: Array
    result: LocalResult


class _Grouped(NamedTuple):
    """Inner products by opinion space, grouping, its next state, weights, barycenters."""

    grams: dict[str, Params]
    found: GroupingInfo
    state: Params
    weights_s: Array
    centers_sd: Array


@dataclasses.dataclass(frozen=True, eq=False)
class _Round:
    """The steps of a round, and all that is fixed when it is compiled."""

    model: Model
    trainer: Trainer
    rule: Rule
    task: Task
    grouping: Grouping
    server: ServerStep
    settings: Settings
    num_clients: int
    size: int
    batch_size: int
    compared: Any
    own: np.ndarray | None
    neurons: tuple
    min_coalition: int
    keep_optimizer: bool
    gradient_spread: bool
    attack: str
    finetuner: Trainer | None
    chunk: int
    mesh: Mesh

    def init(self, params: Array) -> ServerState:
        rule, everyone = self.rule, self.num_clients
        measured = rule.select == "distance_decay" or rule.within == "distance"
        return ServerState(
            params,
            repeat(params, everyone) if rule.serve == "coalition" else (),
            repeat(self.trainer.init_optimizer(params), everyone) if self.keep_optimizer else (),
            self.grouping.init(repeat(params, self.size)[:, self.compared], everyone),
            self.server.init(params),
            no_distances(everyone) if measured else (),
            jnp.zeros((everyone, *params.shape)) if self.trainer.control else (),
            () if self.own is None else repeat(params[self.own], everyone),
        )

    def run(self, state, fleet, round_number, run_key, hparams):
        pool = _pooled(fleet) if self.rule.select == "pooled" else fleet

        def draw(purpose: int, ids_n: Array) -> Array:
            return client_keys(run_key, purpose, round_number, ids_n)

        cohort = implementation("select", self.rule.select)(
            state.distances, draw(SELECT, pool.ids_n), self.size, hparams
        )
        trained = self.train(state, pool, cohort, draw, run_key, hparams)
        grouped = self.group(state, pool, cohort, trained, draw, hparams)
        params, server_opt = self.step(state, trained, grouped, hparams)
        after = self.serve(state, fleet, cohort, trained, grouped, params, server_opt)
        outputs_nw = self.judge(after, fleet, hparams)
        tuned = ()
        if self.finetuner is not None:
            tuned_nw = self.judge_finetuned(after, fleet, draw(FINETUNE, fleet.ids_n), hparams)
            tuned = self.task.errors(tuned_nw, fleet.test)
        heterogeneity = self.gradients(after.params, fleet)
        info = self.describe(cohort, trained, grouped, heterogeneity)
        return after, info._replace(
            dead_n=self.task.dead(outputs_nw, fleet.test.mask),
            errors=self.task.errors(outputs_nw, fleet.test),
            outputs_nw=outputs_nw,
            finetuned_errors=tuned,
        )

    # Training

    def train(self, state, fleet, cohort, draw, run_key, hparams) -> _Trained:
        """What the cohort learns, and what of it reaches the server."""
        ids_s = fleet.ids_n[cohort.clients_s]
        base_sd = repeat(state.params, self.size)
        if self.rule.serve == "coalition":
            base_sd = state.starts_nd[cohort.clients_s]
        start_sd = self.with_own(base_sd, rows(state.personal_np, cohort.clients_s))
        shares_s = work_shares(draw, ids_s, hparams)
        result = self.train_cohort(state, fleet, cohort, start_sd, shares_s, draw, hparams)

        num_samples_s = jnp.sum(fleet.train.mask, axis=1)[cohort.clients_s]
        finite_s = jnp.all(jnp.isfinite(result.params), axis=1) & jnp.isfinite(result.loss)
        answers_s = cohort.sampled_s & fleet.available_n[cohort.clients_s] & (num_samples_s > 0)
        answers_s &= ~drops(draw, ids_s, hparams)
        present_s = answers_s & finite_s
        result = result._replace(params=jnp.where(present_s[:, None], result.params, start_sd))
        sent_sd = result.params
        if self.own is not None:
            sent_sd = sent_sd.at[:, self.own].set(base_sd[:, self.own])
        attacker_s = jnp.zeros(self.size, bool)
        if self.attack != "none":
            attacker_s = attackers(run_key, fleet.ids_n, hparams.attack_share)[cohort.clients_s]
            bad_sd = attacked(self.attack, sent_sd, base_sd, draw(NOISE, ids_s), hparams)
            sent_sd = jnp.where((attacker_s & present_s)[:, None], bad_sd, sent_sd)
        if self.neurons:
            share_s = jnp.where(present_s, num_samples_s, 0)
            share_s = share_s / jnp.maximum(jnp.sum(share_s), 1)
            sent_sd = aligned(sent_sd, state.params, share_s, self.neurons)
        return _Trained(
            base_sd, sent_sd, num_samples_s, self.effort(fleet, result.num_steps, hparams), present_s,
            finite_s, answers_s, attacker_s, result,
        )  # fmt: skip

    def train_cohort(self, state, fleet, cohort, start_sd, shares_s, draw, hparams):
        """`LocalResult` of every client; zeros for those who are not asked."""
        trainer, clients_s = self.trainer, cohort.clients_s
        correction_sd = ()
        if trainer.control:
            mean_d = jnp.mean(state.controls_nd, axis=0)
            correction_sd = mean_d[None, :] - state.controls_nd[clients_s]

        def block(batched, shared):
            starts, kept, samples, keys, shares, corrections = batched
            # Clients of a chunk step together, so the chunk's longest one sets the pace.
            num_batches = -(-jnp.max(jnp.sum(samples.mask, axis=1)) // self.batch_size)
            states = kept if self.keep_optimizer else jax.vmap(trainer.init_optimizer)(starts)
            result = jax.vmap(trainer.train, in_axes=(0, 0, 0, 0, None, None, 0, 0))(
                starts, states, samples, keys, num_batches, shared, shares, corrections
            )
            return result if self.keep_optimizer else result._replace(opt_state=())

        keys_s = draw(TRAIN, fleet.ids_n[clients_s])
        kept_s, samples = rows(state.opt_n, clients_s), rows(fleet.train, clients_s)
        batched = (start_sd, kept_s, samples, keys_s, shares_s, correction_sd)
        return self.map(block, batched, hparams, count=cohort.count)

    def effort(self, fleet, steps_s: Array, hparams) -> Array:
        """`[S]` with what coefficient sum the clients' gradients enter their models."""
        if self.rule.average != "nova":
            return jnp.zeros(self.size)
        most = self.trainer.epochs * -(-fleet.train.mask.shape[1] // self.batch_size)
        return self.trainer.coefficients(most, hparams)[steps_s]

    def with_own(self, shared_sd: Array, own_sp: Array | tuple) -> Array:
        """Models `[..., D]` with the parameters that stay at the client."""
        return shared_sd if self.own is None else shared_sd.at[..., self.own].set(own_sp)

    # At the server

    def group(self, state, fleet, cohort, trained: _Trained, draw, hparams) -> _Grouped:
        """Opinions, coalitions, weights, barycenters."""
        sent_sd, present_s = trained.sent_sd, trained.present_s
        opinions = {
            name: implementation("opinion", name)(sent_sd, trained.base_sd, present_s)[
                :, self.compared
            ]
            for name in TABLES["opinion"]
        }
        grams = {name: hk.gram_matrix(one, mask=present_s) for name, one in opinions.items()}
        opinions_sd, gram_ss = opinions[self.rule.opinion], grams[self.rule.opinion]
        members = Members(
            draw(GROUPING, fleet.ids_n[cohort.clients_s]), cohort.clients_s, fleet.planted_n
        )
        found, grouping_state = self.grouping.apply(
            state.grouping, opinions_sd, gram_ss, present_s, members, hparams
        )
        weights_s, members_s = client_weights(
            found.labels_s,
            trained.num_samples_s,
            within=self.rule.within,
            between=self.rule.between,
            min_coalition=self.min_coalition,
            factor_s=self.factor(state, trained, found.labels_s, hparams),
        )
        centers_sd = measures.barycenters(sent_sd, found.labels_s, members_s)
        return _Grouped(grams, found, grouping_state, weights_s, centers_sd)

    def factor(self, state, trained: _Trained, labels_s: Array, hparams) -> Array | None:
        """`[S]` what members weigh more or less, where the rule asks for it."""
        if self.rule.within == "krum":
            return krum_factor(trained.sent_sd, labels_s, hparams.trim)
        if self.rule.within == "distance":
            # There are no distances before the first round (spec 3.8).
            beta = jnp.where(state.distances.rounds > 0, hparams.beta, 0)
            apart_s, scale = self.gone(trained), self.settings.distance_scale
            return distance_factor(apart_s, labels_s, trained.num_samples_s, beta, scale=scale)
        return None

    def gone(self, trained: _Trained) -> Array:
        """`[S]` how far each model went from what the server sent out, eq. (4) of FedCW."""
        return jnp.linalg.norm(trained.sent_sd - trained.base_sd, axis=1)

    def step(self, state, trained: _Trained, grouped: _Grouped, hparams):
        """The next global model and server state; as before if nobody took part."""
        average = implementation("average", self.rule.average)(
            trained.sent_sd, trained.base_sd, grouped.weights_s, trained.effort_s, hparams.trim
        )
        params, server_opt = self.server.apply(
            state.server_opt, state.params, average, hparams.server_lr
        )
        anyone = jnp.any(trained.present_s)
        return jax.tree.map(
            lambda new, old: jnp.where(anyone, new, old),
            (params, server_opt),
            (state.params, state.server_opt),
        )

    def serve(self, state, fleet, cohort, trained, grouped, params, server_opt) -> ServerState:
        """What everybody holds after the round; who took no part holds what it held."""
        clients_s, present_s, result = cohort.clients_s, trained.present_s, trained.result

        def kept(held_n, new_s):
            new_s = where_rows(present_s, new_s, rows(held_n, clients_s))
            return jax.tree.map(lambda x, new: x.at[clients_s].set(new), held_n, new_s)

        starts_nd, distances = state.starts_nd, state.distances
        if self.rule.serve == "coalition":
            starts_nd = kept(starts_nd, grouped.centers_sd)
            if self.grouping.fleet is not None:
                group_n = self.grouping.fleet(grouped.state, fleet.planted_n)
                starts_nd = _served_alike(starts_nd, group_n, clients_s, present_s, grouped)
        if distances:
            distances = observed(
                distances, cohort, self.gone(trained), present_s, trained.reported_s
            )
        return ServerState(
            params,
            starts_nd,
            kept(state.opt_n, result.opt_state) if self.keep_optimizer else (),
            grouped.state,
            server_opt,
            distances,
            kept(state.controls_nd, result.control) if self.trainer.control else (),
            () if self.own is None else kept(state.personal_np, result.params[:, self.own]),
        )

    # Judging

    def judge(self, state: ServerState, fleet: FleetArrays, hparams: HParams) -> Array:
        """`[N, W, ...]` test outputs of what each client is served."""

        def one(params, train, inputs, key):
            return _apply(self.model, self.trainer.adapt(params, train, hparams), inputs)

        return self.forecasts(one, state, fleet, ())

    def judge_finetuned(self, state, fleet, keys_n: Array, hparams) -> Array:
        """`[N, W, ...]` test outputs after the fine-tuner's epochs at every client."""
        tuner = self.finetuner

        def one(params, train, inputs, key):
            num_batches = -(-train.mask.shape[0] // self.batch_size)
            result = tuner.train(
                params, tuner.init_optimizer(params), train, key, num_batches, hparams
            )
            return _apply(self.model, result.params, inputs)

        return self.forecasts(one, state, fleet, keys_n)

    def forecasts(self, one: Callable, state, fleet, keys_n) -> Array:
        """`one(params, train, inputs, key)` for every client, from the model it is served."""
        personal = self.rule.serve == "coalition"

        def block(batched, shared):
            starts, own, train, inputs, keys = batched
            params = starts if personal else shared
            axis = 0 if personal else None
            if self.own is not None:
                params = self.with_own(jnp.broadcast_to(params, (len(own), shared.size)), own)
                axis = 0
            return jax.vmap(one, in_axes=(axis, 0, 0, 0))(params, train, inputs, keys)

        batched = (state.starts_nd, state.personal_np, fleet.train, fleet.test.inputs, keys_n)
        return self.map(block, batched, state.params)

    def gradients(self, params, fleet):
        """Eq. (3): mean squared distance of the clients' gradients to the fleet's."""
        if not self.gradient_spread:
            return jnp.float32(jnp.nan), jnp.float32(jnp.nan)

        def block(samples, shared):
            return jax.vmap(lambda one: self.trainer.gradient(shared, one)[1])(samples)

        return measures.gradient_spread(self.map(block, fleet.train, params), fleet.train.mask)

    def map(self, block, batched, shared, count=None):
        return map_clients(block, batched, shared, mesh=self.mesh, chunk=self.chunk, count=count)

    def describe(self, cohort: Cohort, trained: _Trained, grouped: _Grouped, heterogeneity):
        """The round's figures; the errors are filled in by the caller."""
        found, present_s, sent_sd = grouped.found, trained.present_s, trained.sent_sd
        apart_ss = pair_dissimilarity(grouped.grams[self.rule.opinion], self.grouping.kind)
        return RoundInfo(
            cohort_s=cohort.clients_s,
            present_s=present_s,
            finite_s=trained.finite_s,
            labels_s=found.labels_s,
            weights_s=grouped.weights_s,
            loss_s=trained.result.loss,
            num_coalitions=jnp.sum(found.labels_s == jnp.arange(self.size)),
            num_steps=found.num_steps,
            converged=found.converged,
            margin=found.margin,
            residual=found.residual,
            limit=found.limit,
            dissimilarity_q=pair_quantiles(apart_ss, present_s, jnp.array(QUANTILE_LEVELS)),
            grams=grouped.grams,
            changes_nothing=equals_plain_mean(grouped.weights_s, present_s),
            dispersion=measures.dispersion(sent_sd, trained.num_samples_s, present_s),
            within_spread=measures.within_spread(
                sent_sd, grouped.centers_sd, present_s, self.grouping.kind
            ),
            gradient_spread=heterogeneity[0],
            gradient_norm=heterogeneity[1],
            dead_n=(),
            errors=(),
            outputs_nw=(),
            sampled_s=cohort.sampled_s,
            reported_s=trained.reported_s,
            attacker_s=trained.attacker_s,
            steps_s=trained.result.num_steps,
        )


def _apply(model: Model, params: Array, inputs: Array) -> Array:
    """Outputs for inputs `[W, ...]`, in blocks where layers of all of them at once would take
    the memory of many models: a client's test images, not its windows."""
    block = max(1, 2**18 // math.prod(inputs.shape[1:]))
    if inputs.shape[0] <= block:
        return model.apply(params, inputs, None)
    return jax.lax.map(lambda x: model.apply(params, x[None], None)[0], inputs, batch_size=block)


def _pooled(fleet: FleetArrays) -> FleetArrays:
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


def _served_alike(starts_nd, group_n, clients_s, present_s, grouped: _Grouped) -> Array:
    """Members of a lasting coalition hold its model, whether they took part or not."""
    group_s = jnp.where(present_s, group_n[clients_s], -1)
    same_ns = (group_n[:, None] == group_s[None, :]) & (group_s >= 0)[None, :]
    member_n = jnp.argmax(same_ns, axis=1)
    return jnp.where(jnp.any(same_ns, axis=1)[:, None], grouped.centers_sd[member_n], starts_nd)


def compile_round(
    engine: Engine, state: ServerState, fleet: FleetArrays, run_key: Array, hparams: HParams
) -> Callable:
    """The round, compiled ahead of time: it cannot compile again.

    The returned function takes `(state, fleet, round_number, run_key, hparams)` with arrays
    placed by `parallel.place`.
    """
    everywhere = NamedSharding(engine.mesh, P())
    jitted = jax.jit(engine.round, in_shardings=everywhere, out_shardings=everywhere)
    lowered = jitted.lower(state, fleet, jnp.int32(0), run_key, hparams)
    on_cpu = engine.mesh.devices.flat[0].platform == "cpu"
    return lowered.compile({"xla_backend_optimization_level": CPU_LEVEL} if on_cpu else None)
