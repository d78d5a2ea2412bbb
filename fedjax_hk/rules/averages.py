"""Averages: what the server makes of the clients' models and their weights."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.types import Array

# All take `(models_sd, start_sd, weights_s, effort_s, trim)`:
#   models_sd `[S, D]`, start_sd `[S, D]` where they started, weights_s `[S]` sum 1 and 0 for
#   who takes no part, effort_s `[S]` coefficient sum of each client's steps, trim `[]`.
# A client whose weight is 0 has no influence, even if it holds NaN.


def mean(models_sd, start_sd, weights_s, effort_s, trim) -> Array:
    """`sum_i w_i y_i`: eqs. (2) and (16) of the FedHK paper, (9) of FedCW."""
    return hk.average(models_sd, weights_s)


def nova(models_sd, start_sd, weights_s, effort_s, trim) -> Array:
    """FedNova: every client counts for the direction it went, not for how long.

    `x + tau_eff sum_i p_i (y_i - x) / a_i` with `tau_eff = sum_i p_i a_i` (Wang et al. 2020).
    """
    effective = jnp.sum(jnp.where(weights_s > 0, weights_s * effort_s, 0))
    ratio_s = effective / jnp.where(effort_s > 0, effort_s, 1)
    return hk.average(start_sd + ratio_s[:, None] * (models_sd - start_sd), weights_s)


def median(models_sd, start_sd, weights_s, effort_s, trim) -> Array:
    """Weighted median, parameter by parameter (Yin et al. 2018).

    Midway between the two middle values where the weights allow both.
    """
    sorted_sd, below_sd, upto_sd = _ordered(models_sd, weights_s)
    # Half the weight lies below or above, but for rounding.
    middle_sd = (upto_sd >= 0.5 - 1e-5) & (below_sd <= 0.5 + 1e-5) & (upto_sd > below_sd)
    lowest_d = jnp.min(jnp.where(middle_sd, sorted_sd, jnp.inf), axis=0)
    highest_d = jnp.max(jnp.where(middle_sd, sorted_sd, -jnp.inf), axis=0)
    return jnp.where(jnp.any(middle_sd, axis=0), (lowest_d + highest_d) / 2, 0)


def trimmed_mean(models_sd, start_sd, weights_s, effort_s, trim) -> Array:
    """Weighted mean without the weight at both ends, parameter by parameter (Yin et al. 2018).

    With n clients of equal weight, floor(trim n) of them are cut off at each end.
    """
    num = jnp.maximum(jnp.sum(weights_s > 0), 1)
    cut = jnp.floor(trim * num * (1 + 1e-6)) / num
    sorted_sd, below_sd, upto_sd = _ordered(models_sd, weights_s)
    kept_sd = jnp.clip(upto_sd, cut, 1 - cut) - jnp.clip(below_sd, cut, 1 - cut)
    total_d = jnp.sum(jnp.where(kept_sd > 0, kept_sd * sorted_sd, 0), axis=0)
    return total_d / jnp.maximum(jnp.sum(kept_sd, axis=0), jnp.finfo(jnp.float32).tiny)


def _ordered(models_sd: Array, weights_s: Array) -> tuple[Array, Array, Array]:
    """Each column ascending (weightless clients last), and the weight before and up to it."""
    order_sd = jnp.argsort(jnp.where(weights_s[:, None] > 0, models_sd, jnp.inf), axis=0)
    sorted_sd = jnp.take_along_axis(models_sd, order_sd, axis=0)
    upto_sd = jnp.cumsum(weights_s[order_sd], axis=0)
    return sorted_sd, upto_sd - weights_s[order_sd], upto_sd
