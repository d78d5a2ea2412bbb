"""The records of a round: what it reads, what travels, what the next one needs, what is told.

RoundState, FleetArrays -> clients' half -> Upload -> stages -> server's half -> Aggregate
-> the next RoundState, RoundInfo (small) and Snapshot (stays on the device)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

import jax.numpy as jnp

from fedjax_hk.rules.grouping import GroupingInfo
from fedjax_hk.rules.selection import Distances
from fedjax_hk.types import A, AnyArray, Array, Params, Samples


class FleetArrays(NamedTuple):
    """What a round reads.

    Attributes:
      train, test: windows of all clients.
      available_n: `[N]` bool, False for a client that does not report.
      ids_n: `[N]` uint32, what a client's random numbers are derived from, so that they do
        not depend on its place in the fleet; see `keys.stable_ids`.
      planted_n: `[N]` int32 planted groups, -1 for an outlier; () where none are known.
    """

    train: Samples[Array]
    test: Samples[Array]
    available_n: Array
    ids_n: Array
    planted_n: Array | tuple[()] = ()


class ServerState(NamedTuple):
    """What the server needs for its next step.

    Attributes:
      params: `[D]` the global model.
      grouping: state of the grouping.
      server_opt: state of the server step.
      distances: of the clients' models, where selection or weights ask for them; else ().
    """

    params: Array
    grouping: Params
    server_opt: Params
    distances: Distances | tuple[()] = ()


class RoundState(NamedTuple):
    """What the next round needs.

    Attributes:
      server: of the server.
      memory_n: what clients keep from round to round, name to a pytree of leaves `[N, ...]`;
        only what the run needs is there: `start` (with `serve=coalition`), `optimizer` (where
        it is kept), `control` (SCAFFOLD's control variates, whose mean is the server's) and
        `personal` (parameters that stay at the client, `[N, P]`).
    """

    server: ServerState
    memory_n: dict[str, Params]

    @property
    def params(self) -> Array:
        """`[D]` the global model."""
        return self.server.params

    def with_params(self, params: Array) -> RoundState:
        """The same with another global model."""
        return self._replace(server=self.server._replace(params=params))


class Upload(NamedTuple):
    """What reaches the server in a round. Models of who takes no part are what it had sent out.

    Attributes:
      clients_s: `[S]` positions in the fleet.
      sampled_s: `[S]` bool, asked to train; the others only fill the arrays.
      base_sd: `[S, D]` what the server sent out.
      sent_sd: `[S, D]` what came back.
      num_samples_s: `[S]` training windows.
      effort_s: `[S]` coefficient sum of the local steps (FedNova), zeros if nobody reads it.
      reported_s: `[S]` bool, sent something back, finite or not.
      finite_s: `[S]` bool, came back finite.
      present_s: `[S]` bool, takes part: sampled, available, has windows, reported, and finite.
      attacker_s: `[S]` bool, sends something else than it trained.
    """

    clients_s: Array
    sampled_s: Array
    base_sd: Array
    sent_sd: Array
    num_samples_s: Array
    effort_s: Array
    reported_s: Array
    finite_s: Array
    present_s: Array
    attacker_s: Array


def upload(
    models_sd: AnyArray,
    num_samples_s: AnyArray | Sequence[float],
    mask_s: AnyArray | Sequence[bool] | None = None,
    base_sd: AnyArray | None = None,
) -> Upload:
    """An `Upload` of models that were trained elsewhere, for the server's half alone.

    Args:
      models_sd: `[S, D]`; client i of the fleet is row i.
      num_samples_s: `[S]` training samples.
      mask_s: `[S]` bool, who reported; None for all. Who is not finite takes no part.
      base_sd: `[S, D]` or `[D]`, what they started from; None for zeros, which is right where
        the rule compares and averages weights alone.
    """
    models_sd = jnp.asarray(models_sd, jnp.float32)
    everybody = jnp.ones(models_sd.shape[0], bool)
    reported_s = everybody if mask_s is None else jnp.asarray(mask_s, bool)
    base_sd = jnp.zeros_like(models_sd) if base_sd is None else jnp.asarray(base_sd, jnp.float32)
    base_sd = jnp.broadcast_to(base_sd, models_sd.shape)
    finite_s = jnp.all(jnp.isfinite(models_sd), axis=1)
    present_s = reported_s & finite_s
    return Upload(
        clients_s=jnp.arange(models_sd.shape[0]),
        sampled_s=everybody,
        base_sd=base_sd,
        sent_sd=jnp.where(present_s[:, None], models_sd, base_sd),
        num_samples_s=jnp.asarray(num_samples_s),
        effort_s=jnp.ones(models_sd.shape[0]),
        reported_s=reported_s,
        finite_s=finite_s,
        present_s=present_s,
        attacker_s=~everybody,
    )


class Aggregate(NamedTuple):
    """What the server's half found besides its next state.

    Attributes:
      found: the grouping of the round.
      gram: inner products of the opinions that were grouped, see `hk.gram_matrix`.
      weights_s: `[S]` weight of each client in the global model.
      centers_sd: `[S, D]` barycenter of each client's own coalition.
      group_n: `[N]` int32 lasting group of every client of the fleet, -1 if unknown; () for a
        grouping that is made anew each round.
    """

    found: GroupingInfo
    gram: Params
    weights_s: Array
    centers_sd: Array
    group_n: Array | tuple[()] = ()


class RoundInfo(NamedTuple, Generic[A]):
    """What a reader wants to know of a round; small, whatever the model's size.

    Attributes:
      cohort_s: `[S]` positions of the sampled clients in the fleet, ascending (first those
        who are asked); -1 for all windows in one.
      present_s, finite_s, sampled_s, reported_s, attacker_s: `[S]` bool, as in `Upload`.
      labels_s: `[S]` int32 coalition, named by its smallest member; -1 if left out.
      weights_s: `[S]` weight of each client in the global model.
      loss_s: `[S]` mean training loss over the round's steps.
      steps_s: `[S]` int32 local steps.
      num_coalitions, num_steps, converged, margin, residual: of the grouping, `[]`.
      limit: `[]` largest dissimilarity of neighbors, NaN without a threshold.
      dissimilarity_q: `[5]` dissimilarity of the pairs at `measures.QUANTILE_LEVELS`.
      changes_nothing: `[]` bool, the weights equal those of the uniform mean.
      dispersion: `[]` weighted mean squared distance of the local models to their mean.
      within_spread: `[]` sum of the local models' distances to their coalition's barycenter.
      gradient_spread, gradient_norm: `[]`, eq. (3); NaN if not asked for.
      dead_n: `[N]` bool, what it is served has died (see the task's `dead`).
      errors: the task's record, each `[N]`, of what each client is served.
      finetuned_errors: as `errors`, after some local epochs more; () if not asked for.
    """

    cohort_s: A
    present_s: A
    finite_s: A
    sampled_s: A
    reported_s: A
    attacker_s: A
    labels_s: A
    weights_s: A
    loss_s: A
    steps_s: A
    num_coalitions: A
    num_steps: A
    converged: A
    margin: A
    residual: A
    limit: A
    dissimilarity_q: A
    changes_nothing: A
    dispersion: A
    within_spread: A
    gradient_spread: A
    gradient_norm: A
    dead_n: A
    errors: NamedTuple
    finetuned_errors: NamedTuple | tuple[()] = ()


class Snapshot(NamedTuple):
    """The models of the last round; stay on the device for whoever asks (`Engine.gram`).

    Attributes:
      base_sd, sent_sd, present_s: as in `Upload`, after all stages.
    """

    base_sd: Array
    sent_sd: Array
    present_s: Array


class Traffic(NamedTuple):
    """Bytes that a client receives when it is asked, and sends when it reports; 0 where nothing
    is federated."""

    down: int
    up: int
