"""What one client does in a round; the engine adds the client axis with `vmap`.

Models are vectors of D parameters (see `models.Model`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_hk.models import Model
from fedjax_hk.rules.local import OBJECTIVES
from fedjax_hk.types import Array, HParams, Params

ADAM_EPSILON = 1e-7  # Keras' value; the paper trains with Keras defaults

# Of targets `[B]`, outputs `[B]` (of classes, logits `[B, C]`) and the level; each `[B]`.
LOSSES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "mse": lambda y, outputs, q: (y - outputs) ** 2,
    "mae": lambda y, outputs, q: jnp.abs(y - outputs),
    "huber": lambda y, outputs, q: optax.losses.huber_loss(y - outputs, delta=0.1),
    "quantile": lambda y, outputs, q: jnp.maximum(q * (y - outputs), (q - 1) * (y - outputs)),
    "cross_entropy": lambda y, outputs, q: optax.losses.softmax_cross_entropy_with_integer_labels(
        outputs, y
    ),
}


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
    control: Array | tuple = ()


class Trainer(NamedTuple):
    """One client's part of a round, as pure functions for one client.

    Attributes:
      init_optimizer: `params -> opt_state`.
      train: `(params, opt_state, samples, key, num_batches, hparams, share=1, correction=0)
        -> LocalResult`; samples hold `[W, ...]`; `num_batches` is how many batches an epoch
        runs through, at least those that hold a window of this client (more change nothing);
        `share` of its steps are done, at least one; `correction` `[D]` is added to every
        direction (SCAFFOLD's c - c_i).
      adapt: `(params, samples, hparams) -> params` that the client is judged with.
      gradient: `(params, samples) -> (loss, grad)` on all of the client's windows.
      coefficients: `(max_steps, hparams) -> [max_steps + 1]` sum of the coefficients with
        which the gradients of so many steps enter the model, over the learning rate.
      epochs: local epochs.
      batch_size: windows a batch.
      control: of the objective.
    """

    init_optimizer: Callable
    train: Callable[..., LocalResult]
    adapt: Callable[..., Array]
    gradient: Callable[..., tuple[Array, Array]]
    coefficients: Callable[[int, HParams], Array]
    epochs: int
    batch_size: int
    control: str = ""


def adam(learning_rate: Array) -> optax.GradientTransformation:
    """The clients' optimizer (paper, Table 3)."""
    return optax.adam(learning_rate, b1=0.9, b2=0.999, eps=ADAM_EPSILON)


def make_trainer(
    model: Model,
    *,
    objective: str = "plain",
    loss: str = "mse",
    epochs: int = 5,
    batch_size: int = 32,
    optimizer: Callable[[Array], optax.GradientTransformation] = adam,
) -> Trainer:
    """Local training as the paper does it: `epochs` passes of shuffled minibatches.

    The last batch of an epoch may be partial. Windows that are masked are never used: each
    epoch orders the valid ones at random and puts the others last, so a client's result
    depends neither on the padding nor on the fleet's longest client.

    Args:
      optimizer: `learning_rate -> optax transformation`.

    Source: FedHK paper, eq. (1) and section 5.3; spec A25.
    """
    chosen, penalty = OBJECTIVES[objective], LOSSES[loss]

    def batch_loss(params: Array, batch: Batch, key: Array | None, quantile: Array) -> Array:
        outputs = model.apply(params, batch.inputs, key)
        total = jnp.sum(jnp.where(batch.mask, penalty(batch.targets, outputs, quantile), 0))
        return total / jnp.maximum(jnp.sum(batch.mask), 1)

    def train(
        params, opt_state, samples, key, num_batches, hparams, share=1.0, correction=0.0
    ) -> LocalResult:
        start, update = params, optimizer(hparams.learning_rate).update

        def loss_and_grad(y, batch, step_key):
            return jax.value_and_grad(batch_loss)(y, batch, step_key, hparams.quantile)

        filled = -(-jnp.sum(samples.mask) // batch_size)  # batches that hold a window
        allowed = jnp.ceil(share * (epochs * -(-filled // chosen.batches)))

        def step(index, carry, epoch_key, shuffled):
            params, opt_state, total, count, seen = carry
            # Objectives that take several batches wrap around at the end of the epoch, so
            # that none of them is empty.
            first = index * chosen.batches
            batches = [
                _batch(shuffled, (first + offset) % jnp.maximum(filled, 1), batch_size)
                for offset in range(chosen.batches)
            ]
            keys = jax.random.split(jax.random.fold_in(epoch_key, index), chosen.batches)
            value, direction = chosen.direction(
                loss_and_grad, params, start, batches, keys, hparams
            )
            used = (first < filled) & (count < allowed)
            if chosen.control == "mean":
                seen = seen + jnp.where(used, direction, 0)
            if chosen.control:
                direction = direction + correction
            updates, next_state = update(direction, opt_state, params)
            params = _where(used, optax.apply_updates(params, updates), params)
            opt_state = _where(used, next_state, opt_state)
            return params, opt_state, total + jnp.where(used, value, 0), count + used, seen

        def epoch(carry, epoch_key):
            shuffled = _shuffle(samples, epoch_key, batch_size)
            steps = -(-num_batches // chosen.batches)
            return jax.lax.fori_loop(
                0, steps, lambda index, carry: step(index, carry, epoch_key, shuffled), carry
            ), None

        zero = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
        unseen = jnp.zeros_like(start) if chosen.control == "mean" else ()
        (params, opt_state, total, count, seen), _ = jax.lax.scan(
            epoch, (params, opt_state, *zero, unseen), jax.random.split(key, epochs)
        )
        control = ()
        if chosen.control == "mean":
            control = seen / jnp.maximum(count, 1)
        if chosen.control == "start":
            control = gradient(start, samples, hparams.quantile)[1]
        return LocalResult(params, total / jnp.maximum(count, 1), opt_state, count, control)

    def gradient(params, samples, quantile=0.5):
        # Batch by batch: all windows at once would leave the cache, at five times the cost.
        padding = -samples.mask.shape[0] % batch_size

        def batches(x):
            padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
            return padded.reshape(-1, batch_size, *x.shape[1:])

        def add(total, batch):
            count = jnp.sum(batch.mask)
            part = jax.value_and_grad(batch_loss)(params, batch, None, quantile)
            return jax.tree.map(lambda t, p: t + count * p, total, part), None

        zero = (jnp.zeros((), jnp.float32), jnp.zeros_like(params))
        batch = Batch(samples.inputs, samples.targets, samples.mask)
        total, _ = jax.lax.scan(add, zero, jax.tree.map(batches, batch))
        return jax.tree.map(lambda t: t / jnp.maximum(jnp.sum(samples.mask), 1), total)

    def adapt(params, samples, hparams):
        if not chosen.adapts:
            return params
        _, grad = gradient(params, samples, hparams.quantile)
        return params - hparams.alpha * grad

    def coefficients(max_steps, hparams):
        # The optimizer is probed with the gradient 1, the objective's own terms included: it
        # gives the closed forms of plain, proximal and momentum steps (spec 3.6).
        start, update = jnp.zeros(1), optimizer(hparams.learning_rate).update

        def step(carry, _):
            params, opt_state = carry
            _, direction = chosen.direction(
                lambda y, batch, key: (jnp.float32(0), jnp.ones_like(y)),
                params, start, (None,) * chosen.batches, (None,) * chosen.batches, hparams,
            )  # fmt: skip
            updates, opt_state = update(direction, opt_state, params)
            params = optax.apply_updates(params, updates)
            return (params, opt_state), -params[0] / hparams.learning_rate

        first = (start, optimizer(0.0).init(start))
        _, gone = jax.lax.scan(step, first, None, length=max_steps)
        return jnp.concatenate([jnp.zeros(1), gone])

    def init_optimizer(params):
        return optimizer(0.0).init(params)

    return Trainer(
        init_optimizer, train, adapt, gradient, coefficients, epochs, batch_size, chosen.control
    )


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
