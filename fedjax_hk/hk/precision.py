"""Float64 for a part of a program whose caller runs in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

Array = jax.Array
AnyArray = jax.Array | np.ndarray  # where either will do

# Multiples of the machine epsilon below which a difference of inner products is rounding.
_ROUNDING = 64.0


def rounding_level(dtype: Any) -> float:
    """Relative size below which a difference of inner products is rounding."""
    return _ROUNDING * float(jnp.finfo(dtype).eps)


def matmul(left: Array, right: Array) -> Array:
    """Product at highest precision: TF32 or bfloat16 passes would move borders."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def has_float64() -> bool:
    """Whether the default back end computes in float64 (TPUs do not)."""
    return jax.default_backend() in ("cpu", "gpu", "cuda", "rocm")


def in_float64(function: Callable) -> Callable:
    """`function`, traced where float64 exists, under every transformation.

    A scope around the call alone is not enough: `vmap(jit(f))` batches the traced
    operations later, outside the scope, where the rule of the matrix product does not
    know float64. So batching is ours: it re-enters the scope and maps the function, and
    the mapped function is again one of these.

    `function` takes its arrays as arguments (no tracers from around it). It is lowered
    outside the scope too: operations whose lowering looks at the flag, such as argmin, fail.
    """

    @custom_vmap
    def call(*args):
        with jax.enable_x64(True):
            return function(*args)

    @call.def_vmap
    def batched(axis_size, is_batched, *args):
        in_axes = jax.tree.map(lambda flag: 0 if flag else None, tuple(is_batched))
        mapped = jax.vmap(function, in_axes=in_axes, axis_size=axis_size)
        out = in_float64(mapped)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return call
