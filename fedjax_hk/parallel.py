"""The client axis: in chunks that stay in a device's cache, spread over all devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_hk.types import AnyArray, Array, Params


def default_chunk() -> int:
    """Clients a device trains at once: few on a CPU, so that they stay in its cache."""
    return 5 if jax.default_backend() == "cpu" else 1024


def map_clients(
    function: Callable,
    batched: Params,
    shared: Params,
    *,
    mesh: Mesh,
    chunk: int,
    count: Array | None = None,
) -> Params:
    """Applies `function(chunk of batched, shared)` to chunks of clients, on all devices.

    Args:
      function: handles the leading axis itself, by `vmap`.
      batched: leaves `[S, ...]`, split over devices and then into chunks of at most `chunk`.
      shared: what every chunk sees.
      count: `[]` only the first `count` clients matter, which may differ from call to call
        of one program; None for all. Chunks without any of them are not computed.

    Returns:
      Leaves `[S, ...]`, the same on every device; zeros for those who do not matter.
    """
    size, num_devices = jax.tree.leaves(batched)[0].shape[0], mesh.size
    per_device = -(-size // num_devices)
    num_chunks = -(-per_device // chunk)
    width = -(-per_device // num_chunks)
    slots = num_chunks * width
    # Slot to client. The last chunks are filled up with clients from the front, whose results
    # are dropped. Where only the first clients count, they are dealt out to the devices.
    client = np.arange(num_devices * slots)
    if count is not None:
        client = client.reshape(slots, num_devices).T.ravel()
    slot = np.argsort(client)[:size]

    def on_device(batched, shared, count):
        chunks = jax.tree.map(lambda x: x.reshape(num_chunks, width, *x.shape[1:]), batched)

        def one_chunk(index):
            return function(jax.tree.map(lambda x: x[index], chunks), shared)

        if count is None:
            results = jax.lax.map(lambda one: function(one, shared), chunks)
        else:
            shapes = jax.eval_shape(one_chunk, 0)
            zeros = jax.tree.map(lambda x: jnp.zeros((num_chunks, *x.shape), x.dtype), shapes)
            needed = (count + num_devices * width - 1) // (num_devices * width)
            results = jax.lax.fori_loop(
                0,
                needed,
                lambda index, results: jax.tree.map(
                    lambda all_, new: all_.at[index].set(new), results, one_chunk(index)
                ),
                zeros,
            )
        return jax.tree.map(lambda x: x.reshape(slots, *x.shape[2:]), results)

    axis = mesh.axis_names[0]
    in_place = np.array_equal(client, np.arange(size))
    results = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(axis), P(), P()), out_specs=P(axis), check_vma=False
    )(batched if in_place else rows(batched, client % size), shared, count)
    everywhere = NamedSharding(mesh, P())
    results = jax.lax.with_sharding_constraint(results, everywhere)
    if count is None:
        return jax.tree.map(lambda x: x[:size], results)
    results = rows(results, slot)
    return where_rows(jnp.arange(size) < count, results, jax.tree.map(jnp.zeros_like, results))


def place(tree: Params, mesh: Mesh) -> Params:
    """Arrays on every device of the mesh, numbers as float32."""

    def put(x):
        x = np.float32(x) if isinstance(x, float) else x
        return jax.device_put(x, NamedSharding(mesh, P()))

    return jax.tree.map(put, tree)


def repeat(tree: Params, size: int) -> Params:
    """Leaves `[size, ...]` of equal rows."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *jnp.shape(x))), tree)


def rows(tree: Params, index_s: AnyArray) -> Params:
    """Rows `index_s` of every leaf."""
    return jax.tree.map(lambda x: x[index_s], tree)


def where_rows(mask_s: Array, new_s: Params, old_s: Params) -> Params:
    """Rows of `new_s` where the mask holds, else of `old_s`."""

    def choose(new, old):
        return jnp.where(mask_s.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new_s, old_s)
