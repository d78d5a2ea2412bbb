"""A `Model` is a few pure functions; any Flax module becomes one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_hk.types import AnyArray, Array, Params


class Model(NamedTuple):
    """A network without state, as a function of one parameter vector.

    A round compares, averages and moves models, for which they are vectors of D numbers;
    only the network itself knows that they have layers.

    Attributes:
      init: `key -> [D]` parameters.
      apply: `(params, inputs, dropout_key) -> outputs`, with params `[D]`, inputs
        `[B, ...]` and outputs `[B, ...]`, where what follows B is the task's output shape (see
        `tasks.Judge`); `dropout_key` is None when the model is judged.
      restore: `[D] -> ` the layers' parameters, as Flax has them.
      leaves: name and size of each of the layers' arrays, in the vector's order.
      layers: name and kind of the layers in forward order, None if unknown. Kinds: `lstm` and
        `dense` of `lstm.py`, `linen_dense` and `conv` of Flax; the last one is the output.
    """

    init: Callable[[Array], Array]
    apply: Callable[[Array, Array, Array | None], Array]
    restore: Callable[[Array], Params]
    leaves: tuple[tuple[str, int], ...]
    layers: tuple[tuple[str, str], ...] | None = None

    @property
    def num_parameters(self) -> int:
        """D."""
        return sum(size for _, size in self.leaves)


def from_flax(
    module: nn.Module, example_inputs: AnyArray, output_shape: tuple[int, ...] = ()
) -> Model:
    """Wraps a Flax (linen) module that maps inputs `[B, ...]` to outputs `[B, *output_shape]`.

    Bytes (uint8), such as the pixels of an image, reach the module as floats from 0 to 1. A
    module whose `__call__` takes `train` or `deterministic` is told whether it is being
    trained; its random numbers come from the stream `dropout`. An attribute
    `forward_layers` becomes `Model.layers`. Axes of length one do not count: a module with one
    output may give `[B, 1]`.

    Args:
      module: the network; it may hold parameters and nothing else.
      example_inputs: `[B, ...]`, one batch of inputs, for shapes only.
      output_shape: of one input: () for one number, (C,) for the logits of C classes; what a
        task expects is its `judge.output_shape`.

    Errors: ValueError for a module with other collections than `params` (such as batch
      statistics), or whose output has another shape.

    Examples:
      >>> import flax.linen as nn
      >>> import numpy as np
      >>> readings = np.zeros((2, 12))
      >>> from_flax(nn.Dense(1), readings).num_parameters
      13
      >>> from_flax(nn.Dense(4), readings, output_shape=(4,)).leaves
      (('bias', 4), ('kernel', 48))
    """
    arguments = inspect.signature(type(module).__call__).parameters
    output_shape = tuple(output_shape)

    def mode(train: bool) -> dict[str, Any]:
        if "train" in arguments:
            return {"train": train}
        return {"deterministic": not train} if "deterministic" in arguments else {}

    def layers(key: Array) -> Params:
        variables = module.init(key, _as_floats(example_inputs), **mode(False))
        if set(variables) != {"params"}:
            raise ValueError(
                f"Expected a module with the collection 'params' alone, got {sorted(variables)}; "
                "use layers without running statistics (LayerNorm, GroupNorm)."
            )
        return variables["params"]

    shapes = jax.eval_shape(layers, jax.random.key(0))
    _, restore = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

    def apply(params: Array, inputs: Array, dropout_key: Array | None) -> Array:
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        variables = {"params": restore(params)}
        outputs = module.apply(
            variables, _as_floats(inputs), **mode(dropout_key is not None), rngs=rngs
        )
        return _shaped(outputs, inputs.shape[0], output_shape)

    def initial(key: Array) -> Array:
        return ravel_pytree(layers(key))[0]

    # A wrong output is told here, not in the middle of compiling a round.
    jax.eval_shape(lambda x: apply(initial(jax.random.key(0)), x, None), example_inputs)
    leaves = tuple(
        ("/".join(entry.key for entry in path), math.prod(leaf.shape))
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]
    )
    return Model(initial, apply, restore, leaves, getattr(module, "forward_layers", None))


def _shaped(outputs: Any, batch: int, output_shape: tuple[int, ...]) -> Array:
    """`[batch, *output_shape]`, if the outputs have that shape but for axes of length one."""

    def long_axes(shape):
        return tuple(length for length in shape if length != 1)

    expected = (batch, *output_shape)
    if outputs.shape[:1] != (batch,) or long_axes(outputs.shape[1:]) != long_axes(output_shape):
        kind = f"outputs of shape {output_shape}" if output_shape else "one output"
        raise ValueError(
            f"Expected {kind} an input, shape {expected}, got {outputs.shape}; change the module's "
            "last layer or output_shape."
        )
    return outputs.reshape(expected)


def _as_floats(inputs: AnyArray) -> AnyArray:
    return inputs / jnp.float32(255) if inputs.dtype == jnp.uint8 else inputs


ALIVE_DRAWS = 64  # about half of the draws are alive with the paper's ReLU output


def alive_params(model: Model, key: Array, inputs: AnyArray) -> Array:
    """The first of `ALIVE_DRAWS` initial draws whose output is not zero almost everywhere.

    A ReLU output that starts below zero on the data has no gradient: the whole fleet would
    stay at zero for the whole run. Drawing again keeps the initializers as they are.

    Args:
      key: of the run; draw k uses `fold_in(key, k)`.
      inputs: `[M, ...]` windows to probe with.

    Returns:
      `[D]`.

    Errors: ValueError if no draw is alive.
    """

    def draw(index, inputs):  # inputs as a constant would be folded while compiling
        params = model.init(jax.random.fold_in(key, index))
        return params, jnp.mean(model.apply(params, inputs, None) != 0)

    attempt = jax.jit(draw)
    for index in range(ALIVE_DRAWS):
        params, alive = attempt(index, inputs)
        if alive > 0.9:
            return params
    raise ValueError(
        f"Expected a model that starts alive, got {ALIVE_DRAWS} draws whose output is zero on "
        "the data; use --activation=softplus or another model."
    )
