"""Inner products of opinions, and the dissimilarities that follow from them.

S clients, D parameters. The Hegselmann-Krause interaction replaces opinions by averages
of opinions, so inner products are all it needs to see: the `[S, D]` opinions are read
once, here, and everything after works on `[S, S]`.

Models that were trained from one start are nearly parallel; 1 - cos of 1e-6 is common.
Float32 inner products cannot resolve that, so the `[S, S]` stage is float64 inside a
scope that callers need not know of. Back ends without float64 take the inner products of
unit vectors centered on their mean, in float32 at highest precision. That resolves
nearly parallel opinions to about 1e-4 of 1 - cos, but not a cohort whose directions
differ widely and hold nearly parallel pairs at the same time: there, 1 - cos is good to
about 1e-6 absolute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .precision import AnyArray, Array, has_float64, in_float64, matmul, rounding_level

PyTree = Any

# Columns converted to float64 at a time. 2,048 was the fastest of 1,024 to 4,096 for
# S = 50 on a CPU, and a block stays a small part of the opinions it is cut from.
_BLOCK_COLUMNS = 2048


class UnitGram(NamedTuple):
    """Inner products of the opinions' unit vectors `u_i = m + c_i`.

    In float64 nothing is centered (`m = 0`); see the module's docstring.

    Attributes:
      inner_ss: `[S, S]` inner products of the centered unit vectors, `<c_i, c_j>`.
      mean_dot_s: `[S]` `<m, c_i>`.
      mean_square: `[]` `<m, m>`.
      norms_s: `[S]` Euclidean norms of the opinions, 0 for a masked client.
    """

    inner_ss: Array
    mean_dot_s: Array
    mean_square: Array
    norms_s: Array


class Positions(NamedTuple):
    """Inner products of the clients' positions `z_i = a_i m + r_i`, m that of `UnitGram`.

    Attributes:
      scale_s: `[S]` a, not negative: what the coefficients over unit vectors sum to.
      inner_ss: `[S, S]` `<r_i, r_j>`, symmetric.
      mean_dot_s: `[S]` `<m, r_i>`.
      mean_square: `[]` `<m, m>`.
    """

    scale_s: Array
    inner_ss: Array
    mean_dot_s: Array
    mean_square: Array


def gram_matrix(
    opinions: PyTree,
    *,
    mask: AnyArray | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    use_float64: bool | None = None,
) -> Array | UnitGram:
    """Inner products of the clients' opinions, accumulated leaf by leaf in column blocks.

    Args:
      opinions: `[S, ...]` floating array, or a pytree of them; empty leaves are ignored.
      mask: `[S]` bool; a client that is False has no influence, whatever its row holds.
      axis_name: mesh axis, inside `shard_map`, over which the leaves' parameters are
        sharded; the inner products are summed over it.
      use_float64: whether to compute in float64; by default where the back end has it.

    Returns:
      `[S, S]` float64 (zero in masked rows and columns), to be handed to
      `interact_from_gram` or `dissimilarity`; a `UnitGram`, which both take as well, where
      float64 is not used. Gradients do not flow through it.

    Raises:
      ValueError: for leaves that are not floating, that differ in their leading axis, or
        of which none has an element; for a mask that is not `[S]` bool.
    """
    leaves = check_leaves(opinions)
    mask = check_mask(mask, leaves[0].shape[0])
    leaves = [lax.stop_gradient(leaf) for leaf in leaves]
    if has_float64() if use_float64 is None else use_float64:
        inner_ss = _float64_inner(leaves, mask)
        return inner_ss if axis_name is None else lax.psum(inner_ss, axis_name)
    return _centered_inner(leaves, mask, axis_name=axis_name)


def dissimilarity(gram: AnyArray | UnitGram, kind: str = "cosine") -> Array:
    """How far apart the opinions are, pair by pair.

    Args:
      gram: what `gram_matrix` returned.
      kind: `"cosine"` for 1 - cos, or `"ball"` for the squared Euclidean distance.

    Returns:
      `[S, S]` float32, symmetric, not negative, 0 on the diagonal. The cosine of a zero
      opinion with any other is 0.
    """
    if kind not in ("cosine", "ball"):
        raise ValueError(f'Expected kind "cosine" or "ball", got {kind!r}.')

    def pairs(gram):
        x_ss = pairwise(starting_positions(unit_gram(gram)), kind)
        return jnp.where(jnp.eye(x_ss.shape[0], dtype=bool), 0.0, x_ss).astype(jnp.float32)

    return in_gram_precision(pairs, gram)(lax.stop_gradient(gram))


def inner_products(gram: AnyArray | UnitGram) -> np.ndarray:
    """`[S, S]` float64 inner products of the opinions, to be kept outside of JAX.

    Args:
      gram: from `gram_matrix`, concrete.
    """
    if not isinstance(gram, UnitGram):
        return np.asarray(gram, np.float64)
    inner_ss, mean_dot_s, mean_square, norms_s = (np.asarray(x, np.float64) for x in gram)
    unit_ss = mean_square + mean_dot_s[:, None] + mean_dot_s[None, :] + inner_ss
    return norms_s[:, None] * norms_s[None, :] * unit_ss


def pairwise(positions: Positions, kind: str) -> Array:
    """Dissimilarities of positions.

    With `v_i = z_i / a_i`, differences are taken only between the `v`, which are averages
    of unit vectors: neither the opinions' norms nor their common part enters the rounding.

    Args:
      positions: inner products of the positions.
      kind: `"cosine"` or `"ball"`.

    Returns:
      `[S, S]` 1 - cos, or squared distances; exactly 0 where it is lost in rounding.
    """
    scale_s = positions.scale_s
    rounding = rounding_level(scale_s.dtype)
    inverse_s = reciprocal(scale_s)
    inner_ss = positions.inner_ss * inverse_s[:, None] * inverse_s[None, :]
    diagonal_s = jnp.diagonal(inner_ss)
    square_s = positions.mean_square + 2.0 * positions.mean_dot_s * inverse_s + diagonal_s
    square_s = jnp.where((scale_s > 0) & (square_s > rounding), square_s, 0.0)
    noise_ss = rounding * (diagonal_s[:, None] + diagonal_s[None, :])
    apart_ss = diagonal_s[:, None] + diagonal_s[None, :] - 2.0 * inner_ss

    if kind == "cosine":
        length_s = jnp.sqrt(square_s)
        angular_ss = apart_ss - jnp.square(length_s[:, None] - length_s[None, :])
        angular_ss = jnp.where(angular_ss > noise_ss, angular_ss, 0.0)
        lengths_ss = length_s[:, None] * length_s[None, :]
        ratio_ss = angular_ss * 0.5 * reciprocal(lengths_ss)
        return jnp.where(lengths_ss > 0, jnp.minimum(ratio_ss, 2.0), 1.0)

    # |a v - b w|^2 = a b |v - w|^2 + (a - b) (a |v|^2 - b |w|^2)
    apart_ss = jnp.where(apart_ss > noise_ss, apart_ss, 0.0)
    longer_ss = scale_s[:, None] - scale_s[None, :]
    total_ss = scale_s[:, None] + scale_s[None, :]
    longer_ss = jnp.where(jnp.abs(longer_ss) > rounding * total_ss, longer_ss, 0.0)
    weighted_s = scale_s * square_s
    distance_ss = scale_s[:, None] * scale_s[None, :] * apart_ss
    distance_ss += longer_ss * (weighted_s[:, None] - weighted_s[None, :])
    return jnp.maximum(distance_ss, 0.0)


def positions_at(unit: UnitGram, coefficients_ss: Array, product_ss: Array) -> Positions:
    """Positions `z_i = sum_j coefficients_ij u_j`, coefficients not negative.

    Args:
      unit: inner products of the unit vectors.
      coefficients_ss: `[S, S]`.
      product_ss: `[S, S]` `coefficients_ss @ unit.inner_ss`, which callers have at hand.
    """
    return Positions(
        jnp.sum(coefficients_ss, axis=1),
        symmetric(matmul(product_ss, coefficients_ss.T)),
        jnp.sum(coefficients_ss * unit.mean_dot_s[None, :], axis=1),
        unit.mean_square,
    )


def starting_positions(unit: UnitGram) -> Positions:
    """The opinions themselves, `z_i = norms_i u_i`."""
    norms_s = unit.norms_s
    inner_ss = norms_s[:, None] * norms_s[None, :] * unit.inner_ss
    return Positions(norms_s, inner_ss, norms_s * unit.mean_dot_s, unit.mean_square)


def symmetric(matrix: Array) -> Array:
    """Rounding made equal on both sides, so that relations of pairs are symmetric."""
    return 0.5 * (matrix + matrix.T)


def reciprocal(value: Array) -> Array:
    """`1 / value`, and 0 for 0."""
    return jnp.where(value > 0, 1.0 / jnp.where(value > 0, value, 1.0), 0.0)


def unit_gram(gram: Array | UnitGram, mask: Array | None = None) -> UnitGram:
    """The unit vectors' inner products; masked clients become zero vectors."""
    if isinstance(gram, UnitGram):
        if mask is None:
            return gram
        return UnitGram(
            jnp.where(mask[:, None] & mask[None, :], gram.inner_ss, 0.0),
            jnp.where(mask, gram.mean_dot_s, 0.0),
            gram.mean_square,
            jnp.where(mask, gram.norms_s, 0.0),
        )
    gram = gram.astype(jnp.result_type(float))
    if mask is not None:
        gram = jnp.where(mask[:, None] & mask[None, :], gram, 0.0)
    norms_s = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), 0.0))
    inverse_s = reciprocal(norms_s)
    inner_ss = gram * inverse_s[:, None] * inverse_s[None, :]
    return UnitGram(inner_ss, jnp.zeros_like(norms_s), jnp.zeros((), gram.dtype), norms_s)


def in_gram_precision(function: Callable, gram: AnyArray | UnitGram) -> Callable:
    """`function`, in float64 unless the Gram matrix says that there is none."""
    return function if isinstance(gram, UnitGram) or not has_float64() else in_float64(function)


def check_leaves(tree: PyTree, what: str = "opinions") -> list[Array]:
    """The non-empty leaves of a pytree with a leading client axis, as arrays."""
    leaves: list[Array] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = what + jax.tree_util.keystr(path)
        if not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"Expected floating leaves in {what}, got {leaf.dtype} at {name}; leave it out, "
                "or convert it if averaging it makes sense."
            )
        if leaf.size == 0:
            continue
        if leaf.ndim == 0:
            raise ValueError(f"Expected a leading client axis, got a scalar at {name}.")
        if leaves and leaf.shape[0] != leaves[0].shape[0]:
            raise ValueError(
                f"Expected {leaves[0].shape[0]} clients on the leading axis as in the leaves "
                f"before, got shape {leaf.shape} at {name}."
            )
        leaves.append(leaf)
    if not leaves:
        raise ValueError(f"Expected at least one leaf with elements in {what}, got none.")
    return leaves


def check_mask(mask: AnyArray | None, num_clients: int) -> Array:
    """`[S]` bool, all True where no mask was given."""
    if mask is None:
        return jnp.ones((num_clients,), bool)
    mask = jnp.asarray(mask)
    if mask.shape != (num_clients,) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"Expected mask of shape ({num_clients},) and dtype bool, "
            f"got {mask.shape} {mask.dtype}."
        )
    return mask


@jax.jit
def _float64_inner(leaves: list[Array], mask: Array) -> Array:
    """`[S, S]` float64 inner products of the rows, over all leaves."""

    def inner(leaves, mask):
        def term(block):
            # Clients last: XLA's CPU product (jax 0.10.2) runs on one thread and spends much of
            # it on arranging rows of clients, while converting into this order takes all.
            columns = jnp.where(mask[None, :], block.T, 0.0).astype(jnp.float64)
            columns = lax.optimization_barrier(columns)
            return matmul(columns.T, columns)

        inner_ss = _sum_over_blocks(term, leaves)
        return symmetric(inner_ss)

    return in_float64(inner)(leaves, mask)


@functools.partial(jax.jit, static_argnames="axis_name")
def _centered_inner(
    leaves: list[Array], mask: Array, *, axis_name: str | tuple[str, ...] | None
) -> UnitGram:
    """Float32 inner products of the unit vectors, centered on the mean of the unmasked."""

    def total(value):
        return value if axis_name is None else lax.psum(value, axis_name)

    def rows(block):
        return jnp.where(mask[:, None], block, 0.0).astype(jnp.float32)

    norms_s = jnp.sqrt(
        total(_sum_over_blocks(lambda b: jnp.sum(jnp.square(rows(b)), axis=1), leaves))
    )
    inverse_s = reciprocal(norms_s)
    num_clients = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

    def term(block):
        units = rows(block) * inverse_s[:, None]
        mean = jnp.sum(units, axis=0) / num_clients
        centered = jnp.where(mask[:, None], units - mean[None, :], 0.0)
        return matmul(centered, centered.T), matmul(centered, mean), jnp.sum(mean * mean)

    inner_ss, mean_dot_s, mean_square = total(_sum_over_blocks(term, leaves))
    return UnitGram(symmetric(inner_ss), mean_dot_s, mean_square, norms_s)


def _sum_over_blocks(term: Callable, leaves: list[Array]) -> Any:
    """Sum of `term(block)` over column blocks `[S, at most _BLOCK_COLUMNS]` of all leaves.

    The first block of a leaf starts the sum, also because a loop inside `shard_map` wants
    its initial value to vary over the same mesh axes as the leaf.
    """
    total = None
    for leaf in leaves:
        matrix = leaf.reshape(leaf.shape[0], -1)
        num_columns = matrix.shape[1]
        first = num_columns % _BLOCK_COLUMNS or _BLOCK_COLUMNS
        part = term(matrix[:, :first])
        if num_columns > _BLOCK_COLUMNS:

            def add(i, part, matrix=matrix, first=first):
                start = first + i * _BLOCK_COLUMNS
                block = lax.dynamic_slice_in_dim(matrix, start, _BLOCK_COLUMNS, axis=1)
                return jax.tree.map(jnp.add, part, term(block))

            part = lax.fori_loop(0, (num_columns - first) // _BLOCK_COLUMNS, add, part)
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    return total
