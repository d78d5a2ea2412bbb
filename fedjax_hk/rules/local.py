"""Local objectives: what a client descends in its steps. Models are `[D]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_hk.types import Array


class Objective(NamedTuple):
    """How a client turns batches into a descent direction.

    Attributes:
      batches: independent batches that one step consumes.
      direction: `(loss_and_grad, params, start, batches, keys, hparams) -> (loss, direction)`,
        where `loss_and_grad(params, batch, key)` is the plain one; the direction `[D]` is what
        the optimizer takes for a gradient.
      adapts: the client is judged after one step of size `alpha` on its training data.
      control: how the client finds its next control variate, as the `mean` of the gradients
        it saw or as its gradient at the `start`; empty for objectives without one.
    """

    batches: int
    direction: Callable[..., tuple[Array, Array]]
    adapts: bool = False
    control: str = ""


def _plain(loss_and_grad, params, start, batches, keys, hparams):
    return loss_and_grad(params, batches[0], keys[0])


def _prox(loss_and_grad, params, start, batches, keys, hparams):
    loss, grad = loss_and_grad(params, batches[0], keys[0])
    return loss, grad + hparams.mu * (params - start)


def _inner_step(loss_and_grad, params, batch, key, alpha):
    _, grad = loss_and_grad(params, batch, key)
    return params - alpha * grad


def _perfedavg_fo(loss_and_grad, params, start, batches, keys, hparams):
    adapted = _inner_step(loss_and_grad, params, batches[0], keys[0], hparams.alpha)
    return loss_and_grad(adapted, batches[1], keys[1])


def _perfedavg_hf(loss_and_grad, params, start, batches, keys, hparams):
    loss, outer = _perfedavg_fo(loss_and_grad, params, start, batches, keys, hparams)

    def slope(y: Array) -> Array:
        """Directional derivative along `outer`; its gradient is the Hessian times `outer`."""
        _, grad = loss_and_grad(y, batches[2], keys[2])
        return jnp.vdot(grad, jax.lax.stop_gradient(outer))

    curvature = jax.grad(slope)(params)
    return loss, outer - hparams.alpha * curvature


plain = Objective(1, _plain)
# Li et al. 2020: the term is part of the loss, so Adam sees it (spec 3.2).
prox = Objective(1, _prox)
# Fallah et al. 2020: 2 or 3 batches a step, so that a pass over the data costs as much
# as in FedAvg. The Hessian enters exactly, not by finite differences.
perfedavg_fo = Objective(2, _perfedavg_fo, adapts=True)
perfedavg_hf = Objective(3, _perfedavg_hf, adapts=True)
# Karimireddy et al. 2020, options II and I. Option II of the paper divides the way gone
# by the learning rate, which is a mean gradient under SGD only; the mean itself is the
# same there and holds under Adam (spec 3.4).
scaffold = Objective(1, _plain, control="mean")
scaffold_start = Objective(1, _plain, control="start")
