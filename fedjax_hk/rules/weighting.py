"""From a grouping to the weight of every client, and to barycenters."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_hk import hk
from fedjax_hk.types import Array


def client_weights(
    labels_s: Array,
    num_samples_s: Array,
    *,
    within: str,
    between: str,
    min_coalition: int = 1,
    factor_s: Array | None = None,
) -> tuple[Array, Array]:
    """Every linear rule ends here: weights of the clients, and of members in coalitions.

    `within=uniform, between=equal` is eqs. (15) and (16) of the FedHK paper,
    `w_i = 1 / (K |C(i)|)`; `samples, samples` is FedAvg, eq. (2), whatever the grouping;
    `uniform, size` is the uniform mean, whatever the grouping.

    Args:
      labels_s: `[S]` int32 smallest member of the client's coalition, -1 if left out.
      num_samples_s: `[S]` training windows of each client.
      within: `uniform`, `samples`; `distance` and `krum` are the one and the other times
        `factor_s`.
      between: `equal`, `size` or `samples`.
      min_coalition: coalitions with fewer members weigh nothing, unless all have fewer.
      factor_s: `[S]` what a member weighs more or less, not negative, and above 0 for
        somebody in each coalition; from `distance_factor` or `krum_factor`.

    Returns:
      `weights_s` `[S]`, non-negative, sum 1 (all 0 if everybody is left out), and
      `members_s` `[S]`, which sum to 1 in each coalition.
    """
    mask_s = labels_s >= 0
    same_ss = (labels_s[:, None] == labels_s[None, :]) & mask_s[:, None]
    size_s = jnp.sum(same_ss, axis=1)
    num_samples_s = jnp.where(mask_s, num_samples_s, 0).astype(jnp.float32)
    total_s = jnp.sum(jnp.where(same_ss, num_samples_s[None, :], 0), axis=1)
    if factor_s is not None:
        mass_s = factor_s * (num_samples_s if within == "distance" else 1)
        mass_ss = jnp.where(same_ss, mass_s[None, :], 0)
        members_s = mass_s / jnp.maximum(jnp.sum(mass_ss, axis=1), jnp.finfo(mass_s.dtype).tiny)
    elif within == "samples":
        members_s = num_samples_s / jnp.maximum(total_s, 1)
    else:
        members_s = 1 / size_s
    members_s = jnp.where(mask_s, members_s, 0)

    coalition_s = {"equal": jnp.ones_like(total_s), "size": size_s, "samples": total_s}[between]
    large_s = mask_s & (size_s >= min_coalition)
    counted_s = jnp.where(jnp.any(large_s), large_s, mask_s)
    weights_s = jnp.where(counted_s, coalition_s * members_s, 0)
    total = jnp.sum(weights_s)
    return weights_s / jnp.where(total > 0, total, 1), members_s


def barycenters(params_sd: Array, labels_s: Array, members_s: Array) -> Array:
    """Weighted barycenters: eq. (15) of the FedHK paper where members weigh the same."""
    size_s = jnp.sum(labels_s[:, None] == labels_s[None, :], axis=1)
    return hk.barycenters(params_sd * (members_s * size_s)[:, None], labels_s)


def equals_plain_mean(weights_s: Array, mask_s: Array) -> Array:
    """`[]` bool, whether all clients that take part weigh the same, to 1e-5 relative."""
    num_present = jnp.maximum(jnp.sum(mask_s), 1)
    uniform_s = jnp.where(mask_s, 1 / num_present, 0)
    return jnp.max(jnp.abs(weights_s - uniform_s)) * num_present <= 1e-5


def distance_factor(
    apart_s: Array, labels_s: Array, num_samples_s: Array, beta: Array, *, scale: str
) -> Array:
    """`exp(beta d)` of FedCW, eq. (8), over the largest of each coalition.

    Without that, exp overflows float32 at beta d of 89 (spec C6).

    Args:
      apart_s: `[S]` distance of each client's model from where it started.
      labels_s: `[S]` coalitions, -1 if left out.
      num_samples_s: `[S]`; clients without windows weigh nothing and scale nothing.
      beta: `[]`; below 0, distant models weigh less.
      scale: `mean`, distances over their mean, so that beta does not depend on the model's
        size; or `raw`, as the paper prints it.

    Returns:
      `[S]` in 0 to 1; 0 where left out.
    """
    mask_s = (labels_s >= 0) & (num_samples_s > 0)
    if scale == "mean":
        mean = jnp.sum(jnp.where(mask_s, apart_s, 0)) / jnp.maximum(jnp.sum(mask_s), 1)
        apart_s = apart_s / jnp.where(mean > 0, mean, 1)
    exponent_s = jnp.where(mask_s, beta * apart_s, -jnp.inf)
    same_ss = labels_s[:, None] == labels_s[None, :]
    top_s = jnp.max(jnp.where(same_ss, exponent_s[None, :], -jnp.inf), axis=1)
    return jnp.where(mask_s, jnp.exp(exponent_s - jnp.where(mask_s, top_s, 0)), 0)


def krum_factor(models_sd: Array, labels_s: Array, trim: Array) -> Array:
    """1 for the members of each coalition that multi-Krum keeps, else 0.

    Of n members, f = floor(trim n) are not trusted. A model's score is the sum of squared
    distances to its n - f - 2 nearest (at least one); the n - f lowest scores stay.

    Args:
      models_sd: `[S, D]`.
      labels_s: `[S]` coalitions, -1 if left out.

    Source: Blanchard et al. 2017.
    """
    mask_s, size = labels_s >= 0, labels_s.shape[0]
    same_ss = (labels_s[:, None] == labels_s[None, :]) & mask_s[:, None]
    num_s = jnp.sum(same_ss, axis=1)
    untrusted_s = jnp.floor(trim * num_s * (1 + 1e-6)).astype(jnp.int32)
    apart_ss = hk.dissimilarity(hk.gram_matrix(models_sd, mask=mask_s), "ball")
    others_ss = same_ss & ~jnp.eye(size, dtype=bool)
    nearest_ss = jnp.sort(jnp.where(others_ss, apart_ss, jnp.inf), axis=1)
    counted_s = jnp.clip(num_s - untrusted_s - 2, jnp.minimum(1, num_s - 1), None)
    counted_ss = jnp.arange(size)[None, :] < counted_s[:, None]
    score_s = jnp.sum(jnp.where(counted_ss, nearest_ss, 0), axis=1)
    ahead_ss = (score_s[None, :] < score_s[:, None]) | (
        (score_s[None, :] == score_s[:, None])
        & (jnp.arange(size)[None, :] < jnp.arange(size)[:, None])
    )
    rank_s = jnp.sum(same_ss & ahead_ss, axis=1)
    return jnp.where(mask_s & (rank_s < num_s - untrusted_s), 1.0, 0.0)
