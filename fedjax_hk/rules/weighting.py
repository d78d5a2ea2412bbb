"""From a partition to the weight of every client."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_hk.types import Array


def client_weights(
    labels_s: Array,
    samples_s: Array,
    *,
    within: str,
    between: str,
    min_coalition: int = 1,
) -> tuple[Array, Array]:
    """Every linear rule ends here: weights of the clients, and of members in coalitions.

    `within=uniform, between=equal` is eqs. (15) and (16) of the FedHK paper,
    `w_i = 1 / (K |C(i)|)`; `samples, samples` is FedAvg, eq. (2), whatever the partition;
    `uniform, size` is the uniform mean, whatever the partition.

    Args:
      labels_s: `[S]` int32 smallest member of the client's coalition, -1 if left out.
      samples_s: `[S]` training windows of each client.
      within: `uniform` or `samples`.
      between: `equal`, `size` or `samples`.
      min_coalition: coalitions with fewer members weigh nothing, unless all have fewer.

    Returns:
      `weights_s` `[S]`, non-negative, sum 1 (all 0 if everybody is left out), and
      `members_s` `[S]`, which sum to 1 in each coalition.
    """
    mask_s = labels_s >= 0
    same_ss = (labels_s[:, None] == labels_s[None, :]) & mask_s[:, None]
    size_s = jnp.sum(same_ss, axis=1)
    samples_s = jnp.where(mask_s, samples_s, 0).astype(jnp.float32)
    total_s = jnp.sum(jnp.where(same_ss, samples_s[None, :], 0), axis=1)
    members_s = samples_s / jnp.maximum(total_s, 1) if within == "samples" else 1 / size_s
    members_s = jnp.where(mask_s, members_s, 0)

    coalition_s = {"equal": jnp.ones_like(total_s), "size": size_s, "samples": total_s}[between]
    large_s = mask_s & (size_s >= min_coalition)
    counted_s = jnp.where(jnp.any(large_s), large_s, mask_s)
    weights_s = jnp.where(counted_s, coalition_s * members_s, 0)
    total = jnp.sum(weights_s)
    return weights_s / jnp.where(total > 0, total, 1), members_s


def equals_plain_mean(weights_s: Array, mask_s: Array) -> Array:
    """`[]` bool, whether all clients that take part weigh the same, to 1e-5 relative."""
    num_present = jnp.maximum(jnp.sum(mask_s), 1)
    uniform_s = jnp.where(mask_s, 1 / num_present, 0)
    return jnp.max(jnp.abs(weights_s - uniform_s)) * num_present <= 1e-5
