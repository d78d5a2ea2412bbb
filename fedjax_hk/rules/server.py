"""Server steps: what becomes of the weighted average of the clients' models.

Reddi et al. 2021 (FedOpt), Algorithm 2: no bias correction, v starts at `FLOOR ** 2`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_hk.types import Array, Params

BETA_1, BETA_2, FLOOR = 0.9, 0.99, 1e-3  # the values of the FedOpt paper (spec 3.5)


class ServerStep(NamedTuple):
    """`init: params -> state`; `apply: (state, params, average, learning_rate) -> (params, state)`."""

    init: Callable[[Params], Params]
    apply: Callable[[Params, Params, Params, Array], tuple[Params, Params]]


def _mean(state, params, average, learning_rate):
    return average, state


def _sgd(state, params, average, learning_rate):
    return jax.tree.map(lambda x, a: x + learning_rate * (a - x), params, average), state


def _adaptive(beta_1: float, second_moment: Callable[[Array, Array], Array]) -> ServerStep:
    """`x + lr * m / (sqrt(v) + FLOOR)`; `second_moment(v, delta ** 2)` is the next v."""

    def init(params):
        return (
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(lambda x: jnp.full_like(x, FLOOR**2), params),
        )

    def apply(state, params, average, learning_rate):
        delta = jax.tree.map(jnp.subtract, average, params)
        m = jax.tree.map(lambda m, d: beta_1 * m + (1 - beta_1) * d, state[0], delta)
        v = jax.tree.map(lambda v, d: second_moment(v, d**2), state[1], delta)
        params = jax.tree.map(
            lambda x, m, v: x + learning_rate * m / (jnp.sqrt(v) + FLOOR), params, m, v
        )
        return params, (m, v)

    return ServerStep(init, apply)


SERVER_STEPS: dict[str, ServerStep] = {
    "mean": ServerStep(lambda params: (), _mean),
    "sgd": ServerStep(lambda params: (), _sgd),
    "adam": _adaptive(BETA_1, lambda v, d2: BETA_2 * v + (1 - BETA_2) * d2),
    "yogi": _adaptive(BETA_1, lambda v, d2: v - (1 - BETA_2) * d2 * jnp.sign(v - d2)),
    "adagrad": _adaptive(0.0, lambda v, d2: v + d2),
}
