"""Whom a client listens to: the neighborhoods of the Hegselmann-Krause interaction."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .precision import Array

# Relative width within which a pair counts as on the near side of a threshold, so that
# symmetric configurations do not depend on rounding.
_SLACK = 1e-6


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["limit", "floor"], meta_fields=["kind"]
)
@dataclasses.dataclass(frozen=True)
class Neighborhood:
    """Whom a client listens to: those whose dissimilarity lies in `[floor, limit]`.

    Thresholds are array leaves: a sweep is a `vmap` over a neighborhood of `[T]` leaves.
    They are dissimilarities, since near 1 a float32 cosine has no digits left.

    Attributes:
      kind: `"cosine"`, where thresholds are 1 - cos, or `"ball"`, where they are distances.
      limit: largest dissimilarity of a neighbor.
      floor: smallest dissimilarity of a neighbor; 0 for all but the band.
    """

    kind: str
    limit: ArrayLike
    floor: ArrayLike


def ball(epsilon: ArrayLike) -> Neighborhood:
    """Opinions within the Euclidean distance `epsilon`, eq. (12) of the FedHK paper.

    Raises:
      ValueError: if a concrete `epsilon` is negative or NaN.
    """
    check_range("epsilon", epsilon, 0.0, np.inf)
    return _neighborhood("ball", _number(epsilon))


def unit_ball(tau: ArrayLike) -> Neighborhood:
    """Eq. (12) on opinions scaled to unit norm, as in the paper's experiments.

    The distance of unit vectors is `sqrt(2 (1 - cos))`, so this is `cosine(1 - tau**2 / 2)`.

    Raises:
      ValueError: if a concrete `tau` is outside `[0, 2]` or NaN.
    """
    check_range("tau", tau, 0.0, 2.0)
    tau = _number(tau)
    return _neighborhood("cosine", 0.5 * tau * tau)


def cosine(tau: ArrayLike) -> Neighborhood:
    """Opinions whose cosine is at least `tau`, eq. (13) of the FedHK paper.

    Raises:
      ValueError: if a concrete `tau` is outside `[-1, 1]` or NaN.
    """
    check_range("tau", tau, -1.0, 1.0)
    return _neighborhood("cosine", 1.0 - _number(tau))


def band(eps_lower: ArrayLike, eps_upper: ArrayLike) -> Neighborhood:
    """Opinions whose cosine is in `[eps_lower, eps_upper]`, and the client itself.

    Source: eq. (14) of the FedHK paper; itself is added, since without it two clients
    swap for ever. `band(tau, 1)` is `cosine(tau)`.

    Raises:
      ValueError: if concrete bounds are outside `[-1, 1]`, NaN, or in the wrong order.
    """
    check_range("eps_lower", eps_lower, -1.0, 1.0)
    check_range("eps_upper", eps_upper, -1.0, 1.0)
    concrete = _is_concrete(eps_lower) and _is_concrete(eps_upper)
    if concrete and np.any(np.asarray(eps_lower) > np.asarray(eps_upper)):
        raise ValueError(f"Expected eps_lower <= eps_upper, got {eps_lower} and {eps_upper}.")
    return _neighborhood("cosine", 1.0 - _number(eps_lower), 1.0 - _number(eps_upper))


def compare(x_ss: Array, neighborhood: Neighborhood) -> tuple[Array, Array, Array]:
    """Which pairs are neighbors, which belong together at rest, and how narrowly.

    At rest, linked clients of a ball or a threshold coincide, so links are neighbors.
    Inside a band nobody rests but who is alone or has come closer than the band
    (`merge="upper"`): those are the links.
    """
    limit = jnp.asarray(neighborhood.limit).astype(x_ss.dtype)
    floor = jnp.asarray(neighborhood.floor).astype(x_ss.dtype)
    if neighborhood.kind == "ball":
        limit, floor = limit * limit, floor * floor
    within_ss = x_ss <= limit * (1.0 + _SLACK)
    too_close_ss = x_ss < floor * (1.0 - _SLACK)
    links_ss = jnp.where(floor > 0, too_close_ss, within_ss)

    def margin_of(threshold):
        relative_ss = jnp.abs(x_ss / jnp.where(threshold > 0, threshold, 1.0) - 1.0)
        return jnp.where(threshold > 0, relative_ss, jnp.inf)

    return within_ss & ~too_close_ss, links_ss, jnp.minimum(margin_of(limit), margin_of(floor))


def _neighborhood(kind: str, limit: ArrayLike, floor: ArrayLike = 0.0) -> Neighborhood:
    """Both thresholds in float32 (wider where the caller's are) and of one shape."""
    concrete = _is_concrete(limit) and _is_concrete(floor)
    shape = jnp.broadcast_shapes(jnp.shape(limit), jnp.shape(floor))
    if concrete:
        limit, floor = (
            np.broadcast_to(np.asarray(x, np.float32), shape).copy() for x in (limit, floor)
        )
        return Neighborhood(kind, limit, floor)
    dtype = jnp.promote_types(jnp.result_type(limit, floor), jnp.float32)
    limit, floor = (jnp.broadcast_to(jnp.asarray(x, dtype), shape) for x in (limit, floor))
    return Neighborhood(kind, limit, floor)


def _is_concrete(value: Any) -> bool:
    return isinstance(value, numbers.Number | np.ndarray | np.generic)


def _number(value: Any) -> Any:
    """A concrete number in float64, so that 1 - tau keeps its digits; else unchanged."""
    return np.asarray(value, np.float64) if _is_concrete(value) else value


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Refuse concrete numbers outside `[low, high]` or NaN; traced ones cannot be seen."""
    if not _is_concrete(value):
        return
    array = np.asarray(value, np.float64)
    if not np.all((array >= low) & (array <= high)):  # False for NaN
        raise ValueError(f"Expected {low} <= {name} <= {high}, got {value}.")
