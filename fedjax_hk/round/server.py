"""The server's half of a round: group, weigh, average, step. Needs neither models nor trainers.

server = make_server(RULES["hk_cosine"], num_clients=5)
state = server.init(params_d, 5)
state, aggregate = server.step(state, upload(models_sd, num_samples_s, mask_s), keys_s, hparams)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.parallel import repeat
from fedjax_hk.round.state import Aggregate, ServerState, Upload
from fedjax_hk.rules import Rule
from fedjax_hk.rules.grouping import Members
from fedjax_hk.rules.selection import no_distances, observed
from fedjax_hk.rules.weighting import barycenters, client_weights, distance_factor, krum_factor
from fedjax_hk.settings.choices import implementation
from fedjax_hk.types import Array, HParams, Settings


class Server(NamedTuple):
    """Pure functions; models are `[D]`.

    Attributes:
      init: `(params, size) -> ServerState`, for cohorts of `size` clients.
      step: `(state, upload, keys_s, hparams, planted_n=()) -> (ServerState, Aggregate)`, with
        random numbers `keys_s` `[S]` of the clients, and the fleet's planted groups where the
        rule asks for them.
      opinions: `(space, base_sd, sent_sd, present_s) -> [S, C]` what a grouping compares.
      measure: the grouping's dissimilarity, `cosine` (1 - cos) or `ball` (distance).
    """

    init: Callable[[Array, int], ServerState]
    step: Callable[..., tuple[ServerState, Aggregate]]
    opinions: Callable[[str, Array, Array, Array], Array]
    measure: str


def make_server(
    rule: Rule,
    *,
    num_clients: int,
    settings: Settings | None = None,
    min_coalition: int = 1,
    compared: Any = slice(None),
) -> Server:
    """The server's half of a rule.

    Args:
      rule: see `fedjax_hk.rules`.
      num_clients: of the fleet, for what is remembered of each client.
      settings: of the grouping and the weights.
      min_coalition: coalitions with fewer members weigh nothing.
      compared: columns of the parameters that are opinions, from `opinions.columns`.

    Examples:
      >>> from fedjax_hk.round.state import upload
      >>> from fedjax_hk.rules import RULES
      >>> server = make_server(RULES["fedavg"], num_clients=2)
      >>> sent = upload([[1.0, 0.0], [3.0, 2.0]], [30, 10])  # models, and training samples
      >>> keys_s = jax.random.split(jax.random.key(0), 2)
      >>> state = server.init(jnp.zeros(2), 2)
      >>> state, aggregate = server.step(state, sent, keys_s, HParams())
      >>> state.params.tolist()
      [1.5, 0.5]
    """
    settings = settings or Settings()
    grouping = implementation("grouping", rule.grouping)(settings)
    average = implementation("average", rule.average)
    server_step = implementation("server_opt", rule.server_opt)
    measured = rule.select == "distance_decay" or rule.within == "distance"

    def opinions(space: str, base_sd: Array, sent_sd: Array, present_s: Array) -> Array:
        return implementation("opinion", space)(sent_sd, base_sd, present_s)[:, compared]

    def init(params: Array, size: int) -> ServerState:
        return ServerState(
            params,
            grouping.init(repeat(params, size)[:, compared], num_clients),
            server_step.init(params),
            no_distances(num_clients) if measured else (),
        )

    def moved(upload: Upload) -> Array:
        """`[S]` how far each model went from what the server sent out, eq. (4) of FedCW."""
        return jnp.linalg.norm(upload.sent_sd - upload.base_sd, axis=1)

    def factor(state: ServerState, upload: Upload, labels_s: Array, hparams) -> Array | None:
        """`[S]` what members weigh more or less, where the rule asks for it."""
        if rule.within == "krum":
            return krum_factor(upload.sent_sd, labels_s, hparams.trim)
        if rule.within == "distance" and state.distances:  # kept where they are read, see `init`
            # There are no distances before the first round (spec 3.8).
            beta = jnp.where(state.distances.rounds > 0, hparams.beta, 0)
            return distance_factor(
                moved(upload), labels_s, upload.num_samples_s, beta, scale=settings.distance_scale
            )
        return None

    def step(
        state: ServerState,
        upload: Upload,
        keys_s: Array,
        hparams: HParams,
        planted_n: Array | tuple[()] = (),
    ) -> tuple[ServerState, Aggregate]:
        present_s = upload.present_s
        opinions_sd = opinions(rule.opinion, upload.base_sd, upload.sent_sd, present_s)
        gram = hk.gram_matrix(opinions_sd, mask=present_s)
        members = Members(keys_s, upload.clients_s, planted_n)
        found, grouping_state = grouping.apply(
            state.grouping, opinions_sd, gram, present_s, members, hparams
        )
        weights_s, members_s = client_weights(
            found.labels_s,
            upload.num_samples_s,
            within=rule.within,
            between=rule.between,
            min_coalition=min_coalition,
            factor_s=factor(state, upload, found.labels_s, hparams),
        )
        params, server_opt = server_step.apply(
            state.server_opt,
            state.params,
            average(upload.sent_sd, upload.base_sd, weights_s, upload.effort_s, hparams.trim),
            hparams.server_lr,
        )
        anyone = jnp.any(present_s)  # otherwise all is as before
        params, server_opt = jax.tree.map(
            lambda new, old: jnp.where(anyone, new, old),
            (params, server_opt),
            (state.params, state.server_opt),
        )
        distances = state.distances
        if distances:
            distances = observed(
                distances, upload.clients_s, upload.sampled_s, moved(upload), present_s,
                upload.reported_s,
            )  # fmt: skip
        centers_sd = barycenters(upload.sent_sd, found.labels_s, members_s)
        group_n = () if grouping.fleet is None else grouping.fleet(grouping_state, planted_n)
        return (
            ServerState(params, grouping_state, server_opt, distances),
            Aggregate(found, gram, weights_s, centers_sd, group_n),
        )

    return Server(init, step, opinions, grouping.kind)
