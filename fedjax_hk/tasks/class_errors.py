"""How well each client's samples are told apart, by a model and by guesses without one."""

from __future__ import annotations

from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_hk.types import A, Array, Fleet, Samples


class ClassErrors(NamedTuple, Generic[A]):
    """How well each client's own samples are told apart; NaN for a client without samples.

    Attributes:
      loss: `[N]` mean cross-entropy, in nats.
      accuracy: `[N]` share of the samples whose class has the largest output.
      balanced_accuracy: `[N]` that share in each class of which the client has samples,
        averaged over these classes.
      num_samples: `[N]` int32 samples that were judged.
    """

    loss: A
    accuracy: A
    balanced_accuracy: A
    num_samples: A


def class_errors(logits_nwc: Array, samples: Samples) -> ClassErrors[Array]:
    """How well each client's samples are told apart; usable inside jit.

    Args:
      logits_nwc: `[N, W, C]`; anything, NaN included, where masked.
      samples: with classes `[N, W]` for targets; inputs are not read.

    Returns:
      Errors, each `[N]`; NaN where an output for a real sample is not finite.

    Raises:
      ValueError: the shapes do not fit.
    """
    targets_nw, mask_nw = samples.targets, samples.mask
    if logits_nwc.shape[:-1] != targets_nw.shape:
        raise ValueError(
            f"Expected logits of shape [N, W, C] for {targets_nw.shape} samples, "
            f"got {logits_nwc.shape}."
        )
    logits_nwc = jnp.where(mask_nw[..., None], logits_nwc, 0)
    finite_n = jnp.all(jnp.isfinite(logits_nwc), axis=(1, 2))
    log_share_nwc = jax.nn.log_softmax(logits_nwc, axis=-1)
    log_share_nw = jnp.take_along_axis(log_share_nwc, targets_nw[..., None], axis=-1)[..., 0]
    right_nw = mask_nw & (jnp.argmax(logits_nwc, axis=-1) == targets_nw)
    num_nc, right_nc = (
        jax.vmap(lambda targets_w, counts_w: _count(targets_w, counts_w, logits_nwc.shape[-1]))(
            targets_nw, counted_nw
        )
        for counted_nw in (mask_nw, right_nw)
    )
    num_n = jnp.sum(mask_nw, axis=1)

    def mean(total_n, by_n):
        known_n = finite_n & (by_n > 0)
        return jnp.where(known_n, total_n / jnp.maximum(by_n, 1), jnp.nan)

    recall_nc = right_nc / jnp.maximum(num_nc, 1)
    return ClassErrors(
        loss=mean(-jnp.sum(jnp.where(mask_nw, log_share_nw, 0), axis=1), num_n),
        accuracy=mean(jnp.sum(right_nw, axis=1), num_n),
        balanced_accuracy=mean(jnp.sum(recall_nc, axis=1), jnp.sum(num_nc > 0, axis=1)),
        num_samples=num_n.astype(jnp.int32),
    )


def _count(targets_w: Array, counted_w: Array, num_classes: int) -> Array:
    """`[C]` samples of each class among those that count."""
    return jnp.zeros(num_classes, jnp.int32).at[targets_w].add(counted_w.astype(jnp.int32))


def naive_class_errors(fleet: Fleet) -> dict[str, ClassErrors[np.ndarray]]:
    """`class_errors` of guesses that need no model (no loss: they have no probabilities)."""
    test, errors = fleet.test, {}
    for name, guess_nw in fleet.naive.items():
        known_nw = test.mask & np.isfinite(guess_nw)
        guessed_nw = np.where(known_nw, guess_nw, 0).astype(np.int32)
        logits_nwc = guessed_nw[..., None] == np.arange(len(fleet.classes))
        found = class_errors(jnp.asarray(logits_nwc, jnp.float32), test._replace(mask=known_nw))
        on_host = ClassErrors(*map(np.asarray, found))
        errors[name] = on_host._replace(loss=np.full_like(on_host.loss, np.nan))
    return errors


def constant_clients(outputs_nwc: Array, mask_nw: Array) -> Array:
    """Whether all of a client's samples, two or more, get one output, `[N]` bool; for jit.

    That is a dead network: no ReLU of its last hidden layer answers to any sample.
    """
    first_n = jnp.argmax(mask_nw, axis=1)
    first_n1c = jnp.take_along_axis(outputs_nwc, first_n[:, None, None], axis=1)
    same_nw = jnp.all(outputs_nwc == first_n1c, axis=-1)
    return jnp.all(same_nw | ~mask_nw, axis=1) & (jnp.sum(mask_nw, axis=1) > 1)
