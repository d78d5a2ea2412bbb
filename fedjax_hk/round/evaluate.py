"""What everybody's model says of its test samples, and how the clients' gradients differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_hk.models import Model
from fedjax_hk.round import measures
from fedjax_hk.round.clients import Mapper, with_personal
from fedjax_hk.round.state import FleetArrays, RoundState
from fedjax_hk.round.training import Trainer
from fedjax_hk.types import Array, HParams


class Evaluator(NamedTuple):
    """Outputs of the whole fleet; fixed when the round is compiled.

    Attributes:
      model, trainer: of the run.
      personal: `[P]` columns of the parameters that stay at the client, None for none.
      map: over chunks of clients.
    """

    model: Model
    trainer: Trainer
    personal: np.ndarray | None
    map: Mapper

    def outputs(self, state: RoundState, fleet: FleetArrays, hparams: HParams) -> Array:
        """`[N, W, ...]` test outputs of what each client is served."""

        def one(params, train, inputs, key):
            return _apply(self.model, self.trainer.adapt(params, train, hparams), inputs)

        return self.served(one, state, fleet, ())

    def finetuned(
        self,
        tuner: Trainer,
        state: RoundState,
        fleet: FleetArrays,
        keys_n: Array,
        hparams: HParams,
    ) -> Array:
        """`[N, W, ...]` test outputs after the tuner's epochs at every client."""

        def one(params, train, inputs, key):
            num_batches = -(-train.mask.shape[0] // tuner.batch_size)
            result = tuner.train(
                params, tuner.init_optimizer(params), train, key, num_batches, hparams
            )
            return _apply(self.model, result.params, inputs)

        return self.served(one, state, fleet, keys_n)

    def served(
        self, one: Callable, state: RoundState, fleet: FleetArrays, keys_n: Array | tuple
    ) -> Array:
        """`one(params, train, inputs, key)` for every client, from the model it is served."""
        start_nd, personal_np = (state.memory_n.get(name, ()) for name in ("start", "personal"))
        has_start = "start" in state.memory_n

        def block(batched, shared):
            starts, own, train, inputs, keys = batched
            params = starts if has_start else shared
            axis = 0 if has_start else None
            if self.personal is not None:
                everyone = jnp.broadcast_to(params, (len(own), shared.size))
                params, axis = with_personal(everyone, own, self.personal), 0
            return jax.vmap(one, in_axes=(axis, 0, 0, 0))(params, train, inputs, keys)

        batched = (start_nd, personal_np, fleet.train, fleet.test.inputs, keys_n)
        return self.map(block, batched, state.params)

    def gradient_spread(self, params: Array, fleet: FleetArrays) -> tuple[Array, Array]:
        """Eq. (3): mean squared distance of the clients' gradients to the fleet's, and its norm."""

        def block(samples, shared):
            return jax.vmap(lambda one: self.trainer.gradient(shared, one)[1])(samples)

        return measures.gradient_spread(self.map(block, fleet.train, params), fleet.train.mask)


def _apply(model: Model, params: Array, inputs: Array) -> Array:
    """Outputs for inputs `[W, ...]`, in blocks where layers of all of them at once would take
    the memory of many models: a client's test images, not its windows."""
    block = max(1, 2**18 // math.prod(inputs.shape[1:]))
    if inputs.shape[0] <= block:
        return model.apply(params, inputs, None)
    return jax.lax.map(lambda x: model.apply(params, x[None], None)[0], inputs, batch_size=block)
