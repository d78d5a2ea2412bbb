"""The Hegselmann-Krause interaction: who listens to whom, until nobody moves.

S clients. `z(s+1) = A(s) z(s)`, all clients at once, with A(s) the row-normalized graph of
neighborhoods and everyone a neighbor of itself. `z(s) = T(s) z(0)` for an influence matrix
T, so the run carries T and sees the opinions only through their inner products.

Nothing here is differentiated: T and the weights are constants of the outcome, and what
is averaged with them is linear in the opinions.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .affinity import (
    Array,
    PyTree,
    UnitGram,
    check_mask,
    gram_matrix,
    in_gram_precision,
    matmul,
    pairwise,
    rounding_level,
    squared_lengths,
    unit_gram,
)
from .coalitions import client_weights, coalition_sizes, components

# Relative width within which a pair counts as on the near side of a threshold, so that
# symmetric configurations do not depend on rounding.
_SLACK = 1e-6

_STATE_NORMS = ("none", "init", "every_step")


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
    limit: Array
    floor: Array


def ball(epsilon: Array) -> Neighborhood:
    """Opinions within the Euclidean distance `epsilon`, eq. (12) of the FedHK paper.

    Raises:
      ValueError: if a concrete `epsilon` is negative or NaN.
    """
    _check_range("epsilon", epsilon, 0.0, np.inf)
    return _neighborhood("ball", _number(epsilon))


def unit_ball(tau: Array) -> Neighborhood:
    """Eq. (12) on opinions scaled to unit norm, as in the paper's experiments.

    The distance of unit vectors is `sqrt(2 (1 - cos))`, so this is `cosine(1 - tau**2 / 2)`.

    Raises:
      ValueError: if a concrete `tau` is outside `[0, 2]` or NaN.
    """
    _check_range("tau", tau, 0.0, 2.0)
    tau = _number(tau)
    return _neighborhood("cosine", 0.5 * tau * tau)


def cosine(tau: Array) -> Neighborhood:
    """Opinions whose cosine is at least `tau`, eq. (13) of the FedHK paper.

    Raises:
      ValueError: if a concrete `tau` is outside `[-1, 1]` or NaN.
    """
    _check_range("tau", tau, -1.0, 1.0)
    return _neighborhood("cosine", 1.0 - _number(tau))


def band(eps_lower: Array, eps_upper: Array) -> Neighborhood:
    """Opinions whose cosine is in `[eps_lower, eps_upper]`, and the client itself.

    Source: eq. (14) of the FedHK paper; itself is added, since without it two clients
    swap for ever. `band(tau, 1)` is `cosine(tau)`.

    Raises:
      ValueError: if concrete bounds are outside `[-1, 1]`, NaN, or in the wrong order.
    """
    _check_range("eps_lower", eps_lower, -1.0, 1.0)
    _check_range("eps_upper", eps_upper, -1.0, 1.0)
    concrete = _is_concrete(eps_lower) and _is_concrete(eps_upper)
    if concrete and np.any(np.asarray(eps_lower) > np.asarray(eps_upper)):
        raise ValueError(f"Expected eps_lower <= eps_upper, got {eps_lower} and {eps_upper}.")
    return _neighborhood("cosine", 1.0 - _number(eps_lower), 1.0 - _number(eps_upper))


class HKResult(NamedTuple):
    """Where the opinions came to rest. No entry is differentiable.

    Attributes:
      labels_s: `[S]` int32, smallest member of the client's coalition; -1 if masked.
      num_coalitions: `[]` int32.
      sizes_s: `[S]` int32, members of the coalition that is named s; 0 if none is.
      weights_s: `[S]` float32 client weights `1 / (K |C(i)|)`; 0 if masked.
      influence_ss: `[S, S]` float32; `influence_ss @ opinions` are the final positions. Row
        i says whom client i listened to; rows sum to 1 with `state_norm="none"`, otherwise
        they hold the scaling too. Zero in masked rows and columns.
      num_steps: `[]` int32, moves made.
      converged: `[]` bool, False when `max_steps` came first.
      residual: `[]` float32, largest next move of an opinion, relative to the spread of the
        opinions (the median distance to the most central one).
      margin: `[]` float32, smallest `|x / threshold - 1|` over pairs and steps, x being
        1 - cos or the squared distance; inf where there is no pair. A small margin says
        that rounding may decide.
      trajectory: None, or `[trajectory_steps + 1, S, S]` float32, `influence_ss` after each
        move, the last one repeated.
    """

    labels_s: Array
    num_coalitions: Array
    sizes_s: Array
    weights_s: Array
    influence_ss: Array
    num_steps: Array
    converged: Array
    residual: Array
    margin: Array
    trajectory: Array | None


def interact(
    opinions: PyTree,
    neighborhood: Neighborhood,
    *,
    mask: Array | None = None,
    max_steps: Array = 50,
    tol: Array = 1e-6,
    state_norm: str = "none",
    axis_name: str | tuple[str, ...] | None = None,
    trajectory_steps: int | None = None,
    use_float64: bool | None = None,
) -> HKResult:
    """Let the opinions of S clients interact until they rest, and name the coalitions.

    Args:
      opinions: `[S, ...]` floating array or a pytree of them; empty leaves are ignored.
      neighborhood: from `ball`, `unit_ball`, `cosine` or `band`.
      mask: `[S]` bool; a client that is False has no influence, whatever its row holds.
      max_steps: most moves to make. Bands can cycle for ever.
      tol: rest means that no opinion would move by more than `tol` times the spread.
      state_norm: `"none"` averages the opinions as they are (the paper), `"init"` scales
        each to unit norm once, `"every_step"` also after each move.
      axis_name: mesh axis, inside `shard_map`, over which parameters are sharded.
      trajectory_steps: length of `HKResult.trajectory`; None for no trajectory.
      use_float64: whether to compute in float64; by default where the back end has it.

    Returns:
      An `HKResult`. Not to have come to rest is a value in it, not an error.

    Raises:
      ValueError: for opinions or a mask as in `gram_matrix`, an unknown `state_norm`, and
        `max_steps`, `tol` or `trajectory_steps` that are concrete and out of range.

    Source: section 4 and Algorithm 1 of the FedHK paper.
    """
    gram = gram_matrix(opinions, mask=mask, axis_name=axis_name, use_float64=use_float64)
    return interact_from_gram(
        gram,
        neighborhood,
        mask=mask,
        max_steps=max_steps,
        tol=tol,
        state_norm=state_norm,
        trajectory_steps=trajectory_steps,
    )


def interact_from_gram(
    gram: Array | UnitGram,
    neighborhood: Neighborhood,
    *,
    mask: Array | None = None,
    max_steps: Array = 50,
    tol: Array = 1e-6,
    state_norm: str = "none",
    trajectory_steps: int | None = None,
) -> HKResult:
    """`interact` on inner products, which many thresholds can share.

        gram = hk.gram_matrix(opinions)
        sweep = jax.vmap(hk.interact_from_gram, in_axes=(None, 0))
        results = sweep(gram, hk.cosine(taus))

    Args:
      gram: `[S, S]` inner products of the opinions, or what `gram_matrix` returned.

    Other arguments, result and errors are those of `interact`; a `gram` that is not square
    or not floating is refused too.
    """
    inner_ss = gram.inner_ss if isinstance(gram, UnitGram) else gram
    if jnp.ndim(inner_ss) != 2 or inner_ss.shape[0] != inner_ss.shape[1] or not inner_ss.size:
        raise ValueError(f"Expected a square Gram matrix [S, S], got shape {jnp.shape(inner_ss)}.")
    if not jnp.issubdtype(inner_ss.dtype, jnp.floating):
        raise ValueError(f"Expected a floating Gram matrix, got {inner_ss.dtype}.")
    if not isinstance(neighborhood, Neighborhood):
        raise ValueError(
            f"Expected a Neighborhood such as hk.cosine(0.9), got {type(neighborhood).__name__}."
        )
    if state_norm not in _STATE_NORMS:
        raise ValueError(f"Expected state_norm in {_STATE_NORMS}, got {state_norm!r}.")
    _check_range("max_steps", max_steps, 1, np.inf)
    _check_range("tol", tol, 0.0, np.inf)
    if trajectory_steps is not None and trajectory_steps < 0:
        raise ValueError(f"Expected trajectory_steps >= 0, got {trajectory_steps}.")
    mask = check_mask(mask, inner_ss.shape[0])
    numbers_in = (neighborhood, jnp.asarray(max_steps, jnp.int32), jnp.asarray(tol, jnp.float32))
    return _interact(
        *lax.stop_gradient((gram, mask, *numbers_in)),
        state_norm=state_norm,
        trajectory_steps=trajectory_steps,
    )


@functools.partial(jax.jit, static_argnames=("state_norm", "trajectory_steps"))
def _interact(gram, mask, neighborhood, max_steps, tol, *, state_norm, trajectory_steps):
    """`interact_from_gram` after the checks; compiled once for plain calls."""

    def run(gram, mask, neighborhood, max_steps, tol):
        unit = unit_gram(gram, mask)
        rescale_s = jnp.ones_like(unit.norms_s)
        if state_norm != "none":
            rescale_s = 1.0 / jnp.where(unit.norms_s > 0, unit.norms_s, 1.0)
            unit = unit._replace(norms_s=mask.astype(unit.norms_s.dtype))
        rest = _run(
            unit,
            mask,
            neighborhood,
            max_steps,
            tol,
            normalize=state_norm == "every_step",
            trajectory_steps=trajectory_steps,
        )
        labels_s = components(rest.links_ss, mask)
        sizes_s = coalition_sizes(labels_s)
        return HKResult(
            labels_s=labels_s,
            num_coalitions=jnp.sum(sizes_s > 0, dtype=jnp.int32),
            sizes_s=sizes_s,
            weights_s=client_weights(labels_s),
            influence_ss=(rest.influence_ss * rescale_s[None, :]).astype(jnp.float32),
            num_steps=rest.num_steps,
            converged=rest.residual <= tol,
            residual=rest.residual,
            margin=rest.margin,
            trajectory=_pad_trajectory(rest, rescale_s),
        )

    return in_gram_precision(run, gram)(gram, mask, neighborhood, max_steps, tol)


class _State(NamedTuple):
    """What the next pass needs, and what the last one found.

    Attributes:
      influence_ss: `[S, S]` T.
      product_ss: `[S, S]` T diag(norms) <u, u>, kept up to date to save a product a pass.
      links_ss: `[S, S]` bool, pairs of one coalition, were this the last pass.
      num_steps, residual, margin: as in `HKResult`.
      resting: `[]` bool, this was the last pass.
      trajectory: `[trajectory_steps + 1, S, S]` T after each move so far, or None.
    """

    influence_ss: Array
    product_ss: Array
    links_ss: Array
    num_steps: Array
    residual: Array
    margin: Array
    resting: Array
    trajectory: Array | None


def _run(unit, mask, neighborhood, max_steps, tol, *, normalize, trajectory_steps) -> _State:
    """Passes until one finds nothing to move, or finds no move left.

    Each pass looks at the neighborhoods of the present positions, so the last pass, which
    does not move, leaves the graph of the final positions.
    """
    dtype = unit.inner_ss.dtype
    start = _start(unit, mask, (neighborhood, max_steps, tol), trajectory_steps)
    start_ss = _dissimilarities(unit, start.influence_ss, start.product_ss, "ball")
    spread = _spread(start_ss, mask)
    pairs_ss = mask[:, None] & mask[None, :] & ~jnp.eye(mask.shape[0], dtype=bool)

    def one_pass(state: _State) -> _State:
        x_ss = _dissimilarities(unit, state.influence_ss, state.product_ss, neighborhood.kind)
        near_ss, links_ss, margin_ss = _compare(x_ss, neighborhood)
        neighbors_ss = (near_ss & pairs_ss) | jnp.diag(mask)
        average_ss = neighbors_ss.astype(dtype)
        average_ss /= jnp.maximum(jnp.sum(average_ss, axis=1), 1.0)[:, None]

        influence_ss, product_ss, move_s, noise_s = _moved(unit, state, average_ss, normalize)
        relative_s = jnp.where(move_s > 0, move_s / spread, 0.0)
        residual = jnp.max(jnp.where(move_s <= noise_s, 0.0, relative_s)).astype(jnp.float32)
        resting = (residual <= tol) | (state.num_steps >= max_steps)
        num_steps = state.num_steps + (~resting).astype(jnp.int32)
        trajectory = state.trajectory
        if trajectory is not None:
            # The index is out of range, and nothing is written, once the buffer is full.
            index = jnp.where(resting, trajectory.shape[0], num_steps)
            trajectory = trajectory.at[index].set(influence_ss, mode="drop")
        return _State(
            influence_ss=jnp.where(resting, state.influence_ss, influence_ss),
            product_ss=jnp.where(resting, state.product_ss, product_ss),
            links_ss=links_ss & pairs_ss,
            num_steps=num_steps,
            residual=residual,
            margin=jnp.minimum(
                state.margin, jnp.min(jnp.where(pairs_ss, margin_ss, jnp.inf)).astype(jnp.float32)
            ),
            resting=resting,
            trajectory=trajectory,
        )

    return lax.while_loop(lambda state: ~state.resting, one_pass, start)


def _start(unit: UnitGram, mask: Array, varying: PyTree, trajectory_steps: int | None) -> _State:
    """Everyone where it is, nothing known yet.

    Inside `shard_map` a loop's initial value must vary over the mesh axes that its body
    varies over; `origin` is a 0 that varies as all inputs together do.
    """
    origin = jnp.zeros((), jnp.int32)
    for leaf in jax.tree.leaves((unit, mask, varying)):
        origin += jnp.where(jnp.isnan(leaf), 0, 0).sum(dtype=jnp.int32)
    zero = origin.astype(unit.inner_ss.dtype)
    influence_ss = jnp.diag(mask.astype(zero.dtype)) + zero
    trajectory = None
    if trajectory_steps is not None:
        trajectory = jnp.zeros((trajectory_steps + 1, *influence_ss.shape), zero.dtype) + zero
        trajectory = trajectory.at[0].set(influence_ss)
    return _State(
        influence_ss=influence_ss,
        product_ss=unit.norms_s[:, None] * unit.inner_ss + zero,
        links_ss=jnp.zeros(influence_ss.shape, bool) | (origin > 0),
        num_steps=origin,
        residual=jnp.float32(jnp.inf) + zero.astype(jnp.float32),
        margin=jnp.float32(jnp.inf) + zero.astype(jnp.float32),
        resting=origin > 0,
        trajectory=trajectory,
    )


def _moved(unit: UnitGram, state: _State, average_ss: Array, normalize: bool):
    """One synchronous move.

    The length of a move comes from the difference of the influences, never from the
    difference of two large inner products.

    Returns:
      The new influence and product, and per client the length of its move and the length
      that rounding alone can cause.
    """
    norms = unit.norms_s[None, :]
    influence_ss = matmul(average_ss, state.influence_ss)
    change_ss = influence_ss - state.influence_ss
    change_product_ss = matmul(change_ss * norms, unit.inner_ss)
    product_ss = state.product_ss + change_product_ss
    if normalize:
        length_s = jnp.sqrt(squared_lengths(unit, influence_ss * norms, product_ss))
        inverse = (1.0 / jnp.where(length_s > 0, length_s, 1.0))[:, None]
        influence_ss, product_ss = influence_ss * inverse, product_ss * inverse
        change_ss = influence_ss - state.influence_ss
        change_product_ss = product_ss - state.product_ss
    move_s = jnp.sqrt(squared_lengths(unit, change_ss * norms, change_product_ss))
    scale_s = jnp.sum(influence_ss * norms, axis=1)
    size = jnp.sqrt(jnp.max(jnp.diagonal(unit.inner_ss)))
    return influence_ss, product_ss, move_s, rounding_level(size.dtype) * size * scale_s


def _dissimilarities(unit: UnitGram, influence_ss: Array, product_ss: Array, kind: str) -> Array:
    """`[S, S]` 1 - cos or squared distances of the positions `influence_ss @ opinions`."""
    return pairwise(unit, influence_ss * unit.norms_s[None, :], product_ss, kind)


def _compare(x_ss: Array, neighborhood: Neighborhood) -> tuple[Array, Array, Array]:
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


def _spread(square_ss: Array, mask: Array) -> Array:
    """`[]` median distance to the most central opinion, their mean if the median is 0.

    A few wild clients do not change it, as they would change a diameter or a variance:
    then all others would count as at rest before they are.
    """
    distance_ss = jnp.where(mask[:, None] & mask[None, :], jnp.sqrt(square_ss), 0.0)
    total_s = jnp.where(mask, jnp.sum(distance_ss, axis=1), jnp.inf)
    # Not argmin: its lowering happens after the scope of float64 and fails (jax 0.10.2).
    ids_s = jnp.arange(mask.shape[0], dtype=jnp.int32)
    center = jnp.min(jnp.where(total_s <= jnp.min(total_s), ids_s, mask.shape[0] - 1))
    from_center_s = distance_ss[center]
    count = jnp.sum(mask, dtype=jnp.int32)
    middle = jnp.sort(jnp.where(mask, from_center_s, jnp.inf))[count // 2]
    mean = jnp.sum(from_center_s) / jnp.maximum(count, 1).astype(from_center_s.dtype)
    return jnp.where((middle > 0) & (count > 0), middle, mean)


def _pad_trajectory(rest: _State, rescale_s: Array) -> Array | None:
    """The trajectory with its unused end filled by where the opinions came to rest."""
    if rest.trajectory is None:
        return None
    made = jnp.arange(rest.trajectory.shape[0], dtype=jnp.int32) <= rest.num_steps
    filled = jnp.where(made[:, None, None], rest.trajectory, rest.influence_ss[None, :, :])
    return (filled * rescale_s[None, None, :]).astype(jnp.float32)


def _neighborhood(kind: str, limit: Array, floor: Array = 0.0) -> Neighborhood:
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


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    """Refuse concrete numbers outside `[low, high]` or NaN; traced ones cannot be seen."""
    if not _is_concrete(value):
        return
    array = np.asarray(value, np.float64)
    if not np.all((array >= low) & (array <= high)):  # False for NaN
        raise ValueError(f"Expected {low} <= {name} <= {high}, got {value}.")
