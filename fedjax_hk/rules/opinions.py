"""Opinion spaces: what of a trained model the grouping compares. All are `[S, D]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_hk.types import Array


def weights(params_sd: Array, start_sd: Array, mask_s: Array) -> Array:
    """The local weights themselves, eq. (9) of the FedHK paper. Nearly parallel."""
    return params_sd


def update(params_sd: Array, start_sd: Array, mask_s: Array) -> Array:
    """What each client changed this round."""
    return params_sd - start_sd


def centered(params_sd: Array, start_sd: Array, mask_s: Array) -> Array:
    """Weights minus the mean of those who take part."""
    total_d = jnp.sum(jnp.where(mask_s[:, None], params_sd, 0), axis=0)
    return params_sd - (total_d / jnp.maximum(jnp.sum(mask_s), 1))[None, :]


def columns(
    leaves: Sequence[tuple[str, int]], pattern: str, flag: str = "opinion_leaves"
) -> np.ndarray | slice:
    """Columns of the parameters whose name matches the regular expression anywhere.

    Args:
      leaves: names and sizes, as in `Model.leaves`.
      pattern: empty for all.
      flag: where the pattern comes from, for errors.

    Errors: ValueError if none matches (it lists the names), or for a bad expression.
    """
    if not pattern:
        return slice(None)
    names = ", ".join(name for name, _ in leaves)
    try:
        picked = [bool(re.search(pattern, name)) for name, _ in leaves]
    except re.error as error:
        raise ValueError(
            f"--{flag}={pattern}: not a regular expression ({error}); the parameters are {names}."
        ) from None
    if not any(picked):
        raise ValueError(f"--{flag}={pattern}: matches no parameter; the parameters are {names}.")
    return np.flatnonzero(np.repeat(picked, [size for _, size in leaves]))
