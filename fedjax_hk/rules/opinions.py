"""Opinion spaces: what of a trained model the partition compares."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_hk.types import Array, Params


def weights(params_s: Params, starts_s: Params, mask_s: Array) -> Params:
    """The local weights themselves, eq. (9) of the FedHK paper. Nearly parallel."""
    return params_s


def update(params_s: Params, starts_s: Params, mask_s: Array) -> Params:
    """What each client changed this round."""
    return jax.tree.map(jnp.subtract, params_s, starts_s)


def centered(params_s: Params, starts_s: Params, mask_s: Array) -> Params:
    """Weights minus the mean of those who take part."""

    def center(leaf_s):
        mask = mask_s.reshape((-1,) + (1,) * (leaf_s.ndim - 1))
        total = jnp.sum(jnp.where(mask, leaf_s, 0), axis=0, keepdims=True)
        return leaf_s - total / jnp.maximum(jnp.sum(mask_s), 1)

    return jax.tree.map(center, params_s)


OPINIONS: dict[str, Callable[[Params, Params, Array], Params]] = {
    "weights": weights,
    "update": update,
    "centered": centered,
}


def leaf_names(params: Params) -> list[str]:
    """Names such as `lstm_0/kernel`, in the order of the leaves."""
    return [
        "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    ]


def pick_leaves(opinions: Params, pattern: str) -> list[Array]:
    """The leaves whose name matches the regular expression anywhere; all for ''.

    Errors: ValueError if none matches; it lists the names.
    """
    names, leaves = leaf_names(opinions), jax.tree.leaves(opinions)
    picked = [x for name, x in zip(names, leaves, strict=True) if re.search(pattern, name)]
    if not picked:
        raise ValueError(
            f"Expected --opinion_leaves to match a parameter name, got {pattern!r}; "
            f"the names are {', '.join(names)}."
        )
    return picked
