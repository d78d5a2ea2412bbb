"""The Hegselmann-Krause interaction: who listens to whom, until nobody moves.

S clients. `z(s+1) = A(s) z(s)`, all clients at once, with A(s) the row-normalized graph of
neighborhoods and everyone a neighbor of itself. `z(s) = T(s) z(0)` for an influence matrix
T, so the run carries T and sees the opinions only through their inner products.

Nothing here is differentiated: T and the weights are constants of the outcome, and what
is averaged with them is linear in the opinions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .affinity import (
    Positions,
    PyTree,
    UnitGram,
    check_mask,
    gram_matrix,
    in_gram_precision,
    pairwise,
    positions_at,
    starting_positions,
    symmetric,
    unit_gram,
)
from .coalitions import client_weights, coalition_sizes, components
from .neighborhood import Neighborhood, check_range, compare
from .precision import AnyArray, Array, matmul, rounding_level

_STATE_NORMS = ("none", "init", "every_step")


class HKResult(NamedTuple):
    """Where the opinions came to rest. No entry is differentiable.

    Attributes:
      labels_s: `[S]` int32, smallest member of the client's coalition; -1 if masked.
      num_coalitions: `[]` int32.
      sizes_s: `[S]` int32, members of the coalition that is named s; 0 if none is.
      weights_s: `[S]` float32 client weights `1 / (K |C(i)|)`; 0 if masked.
      influence_ss: `[S, S]` float32; `influence_ss @ opinions` are the final positions. Row
        i says whom client i listened to; rows sum to 1 with `state_norm="none"`, otherwise
        they hold the scaling too, and on the sphere they grow large where positions
        cancel. Zero in masked rows and columns.
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
    mask: AnyArray | None = None,
    max_steps: ArrayLike = 50,
    tol: ArrayLike = 1e-6,
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
    gram: AnyArray | UnitGram,
    neighborhood: Neighborhood,
    *,
    mask: AnyArray | None = None,
    max_steps: ArrayLike = 50,
    tol: ArrayLike = 1e-6,
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
    check_range("max_steps", max_steps, 1, np.inf)
    check_range("tol", tol, 0.0, np.inf)
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
      product_ss: `[S, S]` T diag(norms) <u, u>, kept up to date to save a product a pass;
        on the sphere, coordinates of the positions.
      positions: inner products of the positions.
      links_ss: `[S, S]` bool, pairs of one coalition, were this the last pass.
      num_steps, residual, margin: as in `HKResult`.
      resting: `[]` bool, this was the last pass.
      trajectory: `[trajectory_steps + 1, S, S]` T after each move so far, or None.
    """

    influence_ss: Array
    product_ss: Array
    positions: Positions
    links_ss: Array
    num_steps: Array
    residual: Array
    margin: Array
    resting: Array
    trajectory: Array | None


class _Move(NamedTuple):
    """Where a move leads: `influence_ss`, `product_ss` and `positions` as in `_State`.

    Attributes:
      length_s: `[S]` length of each client's move.
      noise_s: `[S]` length that rounding alone can cause.
    """

    influence_ss: Array
    product_ss: Array
    positions: Positions
    length_s: Array
    noise_s: Array


def _run(unit, mask, neighborhood, max_steps, tol, *, normalize, trajectory_steps) -> _State:
    """Passes until one finds nothing to move, or finds no move left.

    Each pass looks at the neighborhoods of the present positions, so the last pass, which
    does not move, leaves the graph of the final positions.
    """
    dtype = unit.inner_ss.dtype
    start = _start(unit, mask, (neighborhood, max_steps, tol), normalize, trajectory_steps)
    spread = _spread(pairwise(start.positions, "ball"), mask)
    pairs_ss = mask[:, None] & mask[None, :] & ~jnp.eye(mask.shape[0], dtype=bool)

    def one_pass(state: _State) -> _State:
        x_ss = pairwise(state.positions, neighborhood.kind)
        near_ss, links_ss, margin_ss = compare(x_ss, neighborhood)
        neighbors_ss = (near_ss & pairs_ss) | jnp.diag(mask)
        average_ss = neighbors_ss.astype(dtype)
        average_ss /= jnp.maximum(jnp.sum(average_ss, axis=1), 1.0)[:, None]

        move = _move_on_sphere(state, average_ss) if normalize else _move(unit, state, average_ss)
        relative_s = jnp.where(move.length_s <= move.noise_s, 0.0, move.length_s / spread)
        residual = jnp.max(relative_s).astype(jnp.float32)
        resting = (residual <= tol) | (state.num_steps >= max_steps)
        num_steps = state.num_steps + (~resting).astype(jnp.int32)

        def stay_or(old: Array, new: Array) -> Array:
            return jnp.where(resting, old, new)

        trajectory = state.trajectory
        if trajectory is not None:
            # The index is out of range, and nothing is written, once the buffer is full.
            index = jnp.where(resting, trajectory.shape[0], num_steps)
            trajectory = trajectory.at[index].set(move.influence_ss, mode="drop")
        return _State(
            influence_ss=stay_or(state.influence_ss, move.influence_ss),
            product_ss=stay_or(state.product_ss, move.product_ss),
            positions=jax.tree.map(stay_or, state.positions, move.positions),
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


def _start(
    unit: UnitGram, mask: Array, varying: PyTree, normalize: bool, trajectory_steps: int | None
) -> _State:
    """Everyone where it is, nothing known yet.

    Inside `shard_map` a loop's initial value must vary over the mesh axes that its body
    varies over; `origin` is a 0 that varies as all inputs together do. (Asking the inputs for
    their axes does not work: batching hides them.)
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
    positions = starting_positions(unit)
    product_ss = unit.norms_s[:, None] * unit.inner_ss
    return _State(
        influence_ss=influence_ss,
        product_ss=zero + (_coordinates(positions.inner_ss) if normalize else product_ss),
        positions=jax.tree.map(lambda leaf: leaf + zero, positions),
        links_ss=jnp.zeros(influence_ss.shape, bool) | (origin > 0),
        num_steps=origin,
        residual=jnp.float32(jnp.inf) + zero.astype(jnp.float32),
        margin=jnp.float32(jnp.inf) + zero.astype(jnp.float32),
        resting=origin > 0,
        trajectory=trajectory,
    )


def _move(unit: UnitGram, state: _State, average_ss: Array) -> _Move:
    """One synchronous move, `z <- average_ss z`.

    The length of a move comes from the difference of the influences, never from the
    difference of two large inner products.
    """
    norms = unit.norms_s[None, :]
    influence_ss = matmul(average_ss, state.influence_ss)
    change_ss = (influence_ss - state.influence_ss) * norms
    change_product_ss = matmul(change_ss, unit.inner_ss)
    product_ss = state.product_ss + change_product_ss
    positions = positions_at(unit, influence_ss * norms, product_ss)
    along_s = jnp.sum(change_ss, axis=1)
    mean_dot_s = jnp.sum(change_ss * unit.mean_dot_s[None, :], axis=1)
    square_s = along_s * (along_s * unit.mean_square + 2.0 * mean_dot_s)
    square_s += jnp.sum(change_ss * change_product_ss, axis=1)
    size = jnp.sqrt(jnp.max(jnp.diagonal(unit.inner_ss)))
    noise_s = rounding_level(size.dtype) * size * positions.scale_s
    return _Move(influence_ss, product_ss, positions, _root(square_s), noise_s)


def _move_on_sphere(state: _State, average_ss: Array) -> _Move:
    """One synchronous move, then every position is scaled to unit norm.

    Scaling blows up what cancels in the positions: in a cycle of 7 clients in the plane the
    influence doubles with every move, and inner products taken from it would be noise after
    50. So here the positions' own coordinates move, in the place of `product_ss`.
    """
    old = state.positions
    coordinates_ss = matmul(average_ss, state.product_ss)
    scale_s = jnp.sum(average_ss * old.scale_s[None, :], axis=1)
    mean_dot_s = jnp.sum(average_ss * old.mean_dot_s[None, :], axis=1)

    def length(scale_s, mean_dot_s, coordinates_ss):
        square_s = scale_s * (scale_s * old.mean_square + 2.0 * mean_dot_s)
        square_s += jnp.sum(jnp.square(coordinates_ss), axis=1)
        # A position at zero is what is left of `a m + r`: rounding, which must not be scaled.
        noise_s = rounding_level(square_s.dtype) * scale_s * scale_s * old.mean_square
        return _root(jnp.where(square_s > noise_s, square_s, 0.0))

    length_s = length(scale_s, mean_dot_s, coordinates_ss)
    inverse_s = 1.0 / jnp.where(length_s > 0, length_s, 1.0)
    coordinates_ss = coordinates_ss * inverse_s[:, None]
    # With m = 0 the scale is free; where much cancels it would grow until positions of
    # length 1 look like rounding beside it.
    scale_s = jnp.where(old.mean_square > 0, scale_s * inverse_s, 1.0)
    positions = Positions(
        scale_s,
        symmetric(matmul(coordinates_ss, coordinates_ss.T)),
        mean_dot_s * inverse_s,
        old.mean_square,
    )
    move_s = length(
        positions.scale_s - old.scale_s,
        positions.mean_dot_s - old.mean_dot_s,
        coordinates_ss - state.product_ss,
    )
    noise_s = rounding_level(move_s.dtype) * _root(jnp.diagonal(positions.inner_ss))
    influence_ss = matmul(average_ss, state.influence_ss) * inverse_s[:, None]
    return _Move(influence_ss, coordinates_ss, positions, move_s, noise_s)


def _coordinates(inner_ss: Array) -> Array:
    """`[S, S]` rows with the inner products `inner_ss`, in the directions of its eigenvectors.

    Directions within rounding are left out, or their errors would come to life.
    """
    values, vectors_ss = jnp.linalg.eigh(inner_ss)
    kept = values > rounding_level(values.dtype) * jnp.max(values)
    return vectors_ss * jnp.sqrt(jnp.where(kept, values, 0.0))[None, :]


def _root(square: Array) -> Array:
    """Square root of what rounding may have left below 0."""
    return jnp.sqrt(jnp.maximum(square, 0.0))


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
