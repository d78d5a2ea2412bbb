"""Server steps: what becomes of the weighted average of the clients' models.

Reddi et al. 2021 (FedOpt), Algorithm 2: no bias correction, v starts at `FLOOR ** 2`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_hk.types import Array, Params

BETA_1, BETA_2, FLOOR = 0.9, 0.99, 1e-3  # the values of the FedOpt paper (spec 3.5)


class ServerStep(NamedTuple):
    """Models are `[D]`.

    Attributes:
      init: `params -> state`.
      apply: `(state, params, average, learning_rate) -> (params, state)`.
    """

    init: Callable[[Array], Params]
    apply: Callable[[Params, Array, Array, Array], tuple[Array, Params]]


def _mean(state, params, average, learning_rate):
    return average, state


def _sgd(state, params, average, learning_rate):
    return params + learning_rate * (average - params), state


def _adaptive(beta_1: float, second_moment: Callable[[Array, Array], Array]) -> ServerStep:
    """`x + lr * m / (sqrt(v) + FLOOR)`; `second_moment(v, delta ** 2)` is the next v."""

    def init(params):
        return jnp.zeros_like(params), jnp.full_like(params, FLOOR**2)

    def apply(state, params, average, learning_rate):
        delta = average - params
        m = beta_1 * state[0] + (1 - beta_1) * delta
        v = second_moment(state[1], delta**2)
        return params + learning_rate * m / (jnp.sqrt(v) + FLOOR), (m, v)

    return ServerStep(init, apply)


mean = ServerStep(lambda params: (), _mean)
sgd = ServerStep(lambda params: (), _sgd)
adam = _adaptive(BETA_1, lambda v, d2: BETA_2 * v + (1 - BETA_2) * d2)
yogi = _adaptive(BETA_1, lambda v, d2: v - (1 - BETA_2) * d2 * jnp.sign(v - d2))
adagrad = _adaptive(0.0, lambda v, d2: v + d2)
