"""What one client does in a round; the engine adds the client axis with `vmap`.

Models are vectors of D parameters (see `models.Model`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_hk.models import Model
from fedjax_hk.rules.local import Objective
from fedjax_hk.settings.choices import implementation
from fedjax_hk.tasks import FORECAST, Loss
from fedjax_hk.types import Array, HParams, Params, Samples

ADAM_EPSILON = 1e-7  # Keras' value; the paper trains with Keras defaults


class Batch(NamedTuple):
    """`inputs` `[B, L, F]`, `targets` `[B]`, `mask` `[B]`; False entries count nothing."""

    inputs: Array
    targets: Array
    mask: Array


class LocalResult(NamedTuple):
    """What a client returns: its model, mean loss, optimizer state, number of steps, and its
    next control variate `[D]` (() for objectives without one)."""

    params: Array
    loss: Array
    opt_state: optax.OptState
    num_steps: Array
    control: Array | tuple[()] = ()


def adam(learning_rate: Array | float) -> optax.GradientTransformation:
    """The clients' optimizer (paper, Table 3)."""
    return optax.adam(learning_rate, b1=0.9, b2=0.999, eps=ADAM_EPSILON)


class _Progress(NamedTuple):
    """A client in the middle of its steps; `seen` sums gradients for a control variate."""

    params: Array
    opt_state: optax.OptState
    total_loss: Array
    num_steps: Array
    seen: Array | tuple[()]


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """One client's part of a round, as pure functions for one client; see `make_trainer`.

    Samples hold `[W, ...]`, models are `[D]`.

    Attributes:
      model: the network.
      objective: how batches become a descent direction.
      loss: of a batch, one of the task's `judge.losses`.
      epochs: local epochs.
      batch_size: windows a batch.
      optimizer: `learning_rate -> optax transformation`.
    """

    model: Model
    objective: Objective
    loss: Loss
    epochs: int
    batch_size: int
    optimizer: Callable[[Array | float], optax.GradientTransformation]

    @property
    def control(self) -> str:
        """How the client finds its next control variate; empty for objectives without one."""
        return self.objective.control

    def init_optimizer(self, params: Array) -> optax.OptState:
        return self.optimizer(0.0).init(params)

    def train(
        self,
        params: Array,
        opt_state: optax.OptState,
        samples: Samples,
        key: Array,
        num_batches: Array,
        hparams: HParams,
        share: Array | float = 1.0,
        correction: Array | float = 0.0,
    ) -> LocalResult:
        """The client's epochs.

        Args:
          num_batches: how many batches an epoch runs through, at least those that hold a window
            of this client (more change nothing).
          share: of its steps that are done, at least one.
          correction: `[D]`, added to every direction (SCAFFOLD's c - c_i).
        """
        start, per_step = params, self.objective.batches
        filled = -(-jnp.sum(samples.mask) // self.batch_size)  # batches that hold a window
        allowed = jnp.ceil(share * (self.epochs * -(-filled // per_step)))

        def epoch(progress: _Progress, epoch_key: Array):
            shuffled = _shuffle(samples, epoch_key, self.batch_size)

            def step(index, progress: _Progress) -> _Progress:
                # Objectives that take several batches wrap around at the end of the epoch, so
                # that none of them is empty.
                first = index * per_step
                batches = [
                    _batch(shuffled, (first + more) % jnp.maximum(filled, 1), self.batch_size)
                    for more in range(per_step)
                ]
                keys = jax.random.split(jax.random.fold_in(epoch_key, index), per_step)
                value, direction = self._direction(progress.params, start, batches, keys, hparams)
                used = (first < filled) & (progress.num_steps < allowed)
                return self._moved(progress, value, direction, used, correction, hparams)

            return jax.lax.fori_loop(0, -(-num_batches // per_step), step, progress), None

        zero = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
        unseen = jnp.zeros_like(start) if self.control == "mean" else ()
        end, _ = jax.lax.scan(
            epoch,
            _Progress(params, opt_state, *zero, unseen),
            jax.random.split(key, self.epochs),
        )
        steps = jnp.maximum(end.num_steps, 1)
        control = () if isinstance(end.seen, tuple) else end.seen / steps
        if self.control == "start":
            control = self.gradient(start, samples, hparams.quantile)[1]
        return LocalResult(
            end.params, end.total_loss / steps, end.opt_state, end.num_steps, control
        )

    def _direction(self, params, start, batches, keys, hparams) -> tuple[Array, Array]:
        """Loss, and what the optimizer takes for a gradient."""

        def loss_and_grad(y, batch, step_key):
            return jax.value_and_grad(self._batch_loss)(y, batch, step_key, hparams.quantile)

        return self.objective.direction(loss_and_grad, params, start, batches, keys, hparams)

    def _moved(self, progress, value, direction, used, correction, hparams) -> _Progress:
        """After one step; as before where the step is not used."""
        params, opt_state, total_loss, num_steps, seen = progress
        if self.control == "mean":
            seen = seen + jnp.where(used, direction, 0)
        if self.control:
            direction = direction + correction
        updates, next_state = self.optimizer(hparams.learning_rate).update(
            direction, opt_state, params
        )
        params = _where(used, optax.apply_updates(params, updates), params)
        opt_state = _where(used, next_state, opt_state)
        total_loss = total_loss + jnp.where(used, value, 0)
        return _Progress(params, opt_state, total_loss, num_steps + used, seen)

    def _batch_loss(
        self, params: Array, batch: Batch, key: Array | None, quantile: Array | float
    ) -> Array:
        outputs = self.model.apply(params, batch.inputs, key)
        total = jnp.sum(jnp.where(batch.mask, self.loss(batch.targets, outputs, quantile), 0))
        return total / jnp.maximum(jnp.sum(batch.mask), 1)

    def gradient(
        self, params: Array, samples: Samples, quantile: Array | float = 0.5
    ) -> tuple[Array, Array]:
        """Loss and gradient `[D]` on all of the client's windows."""
        # Batch by batch: all windows at once would leave the cache, at five times the cost.
        padding = -samples.mask.shape[0] % self.batch_size

        def batches(x):
            padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
            return padded.reshape(-1, self.batch_size, *x.shape[1:])

        def add(total, batch):
            count = jnp.sum(batch.mask)
            part = jax.value_and_grad(self._batch_loss)(params, batch, None, quantile)
            return jax.tree.map(lambda t, p: t + count * p, total, part), None

        zero = (jnp.zeros((), jnp.float32), jnp.zeros_like(params))
        batch = Batch(samples.inputs, samples.targets, samples.mask)
        total, _ = jax.lax.scan(add, zero, jax.tree.map(batches, batch))
        return jax.tree.map(lambda t: t / jnp.maximum(jnp.sum(samples.mask), 1), total)

    def adapt(self, params: Array, samples: Samples, hparams: HParams) -> Array:
        """`[D]` that the client is judged with: after one step of its own where the objective
        looks for a model that adapts."""
        if not self.objective.adapts:
            return params
        _, grad = self.gradient(params, samples, hparams.quantile)
        return params - hparams.alpha * grad

    def coefficients(self, max_steps: int, hparams: HParams) -> Array:
        """`[max_steps + 1]` sum of the coefficients with which the gradients of so many steps
        enter the model, over the learning rate.

        The optimizer is probed with the gradient 1, the objective's own terms included: it gives
        the closed forms of plain, proximal and momentum steps (spec 3.6).
        """
        start, update = jnp.zeros(1), self.optimizer(hparams.learning_rate).update
        nothing = (None,) * self.objective.batches

        def one(y, batch, key):
            return jnp.float32(0), jnp.ones_like(y)

        def step(carry, _):
            params, opt_state = carry
            _, direction = self.objective.direction(one, params, start, nothing, nothing, hparams)
            updates, opt_state = update(direction, opt_state, params)
            params = optax.apply_updates(params, updates)
            return (params, opt_state), -params[0] / hparams.learning_rate

        _, gone = jax.lax.scan(step, (start, self.init_optimizer(start)), None, length=max_steps)
        return jnp.concatenate([jnp.zeros(1), gone])


def make_trainer(
    model: Model,
    *,
    objective: str = "plain",
    loss: Loss = FORECAST.judge.losses["mse"],
    epochs: int = 5,
    batch_size: int = 32,
    optimizer: Callable[[Array | float], optax.GradientTransformation] = adam,
) -> Trainer:
    """Local training as the paper does it: `epochs` passes of shuffled minibatches.

    The last batch of an epoch may be partial. Windows that are masked are never used: each
    epoch orders the valid ones at random and puts the others last, so a client's result
    depends neither on the padding nor on the fleet's longest client.

    Args:
      objective: a value of `--local`.

    Source: FedHK paper, eq. (1) and section 5.3; spec A25.
    """
    return Trainer(model, implementation("local", objective), loss, epochs, batch_size, optimizer)


def _where(condition: Array, new: Params, old: Params) -> Params:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _shuffle(samples, key: Array, batch_size: int) -> Batch:
    """Valid windows first and in random order, padded to whole batches."""
    num_windows = samples.mask.shape[0]
    rank = jax.random.uniform(key, (num_windows,))  # entry i does not depend on the length
    order = jnp.argsort(jnp.where(samples.mask, rank, jnp.inf))
    padding = -num_windows % batch_size

    def take(x):
        return jnp.pad(x[order], [(0, padding)] + [(0, 0)] * (x.ndim - 1))

    return Batch(take(samples.inputs), take(samples.targets), take(samples.mask))


def _batch(shuffled: Batch, index: Array, size: int) -> Batch:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size), shuffled)
