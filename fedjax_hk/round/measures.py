"""Measures of a round that the papers define, beside the errors."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.types import Array

QUANTILE_LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)  # at which dissimilarities of pairs are told


def dispersion(params_sd: Array, num_samples_s: Array, present_s: Array) -> Array:
    """Eq. (5) for this round's local models: `sum_i p_i |w_i - mean|^2`, p by samples."""
    share_s = jnp.where(present_s, num_samples_s, 0)
    share_s = share_s / jnp.maximum(jnp.sum(share_s), 1)
    apart_sd = params_sd - hk.average(params_sd, share_s)[None, :]
    return jnp.sum(share_s * jnp.sum(apart_sd**2, axis=1))


def within_spread(params_sd: Array, centers_sd: Array, present_s: Array, kind: str) -> Array:
    """Eq. (8): sum of the distances, or of 1 - cos, to the own coalition's barycenter."""
    if kind == "ball":
        apart_s = jnp.sqrt(jnp.sum((params_sd - centers_sd) ** 2, axis=1))
    else:
        # 1 - cos = |u - v|^2 / 2 for unit vectors: no digits are lost near 1.
        apart_sd = _unit_rows(params_sd) - _unit_rows(centers_sd)
        apart_s = 0.5 * jnp.sum(apart_sd**2, axis=1)
    return jnp.sum(jnp.where(present_s, apart_s, 0))


def gradient_spread(grads_nd: Array, mask_nw: Array) -> tuple[Array, Array]:
    """Eq. (3): mean squared distance of the gradients to the fleet's, and that one's norm."""
    # A client whose data is not finite is left out, as it is of the round.
    finite_n = jnp.all(jnp.isfinite(grads_nd), axis=1)
    samples_n = jnp.where(finite_n, jnp.sum(mask_nw, axis=1), 0)
    has_n = samples_n > 0
    mean_d = hk.average(grads_nd, samples_n / jnp.sum(samples_n))
    apart_n = jnp.sum((grads_nd - mean_d[None, :]) ** 2, axis=1)
    total = jnp.sum(jnp.where(has_n, apart_n, 0)) / jnp.sum(has_n)
    return total, jnp.linalg.norm(mean_d)


def _unit_rows(rows_sd: Array) -> Array:
    norm_s = jnp.linalg.norm(rows_sd, axis=1, keepdims=True)
    return rows_sd / jnp.where(norm_s > 0, norm_s, 1)
