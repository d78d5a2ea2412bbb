"""Random numbers of clients: derived from names, never carried from place to place."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax
import numpy as np

from fedjax_hk.types import AnyArray, Array

# What numbers are drawn for; one purpose never shifts the numbers of another.
SELECT, TRAIN, GROUPING, INIT, DROP, STRAGGLE, ATTACK, NOISE, FINETUNE = range(9)


def client_key(
    run_key: Array, purpose: int, round_number: Array | int, client_id: Array | int
) -> Array:
    """Same (run, purpose, round, client): same numbers, whatever the order."""
    key = jax.random.fold_in(jax.random.fold_in(run_key, purpose), round_number)
    return jax.random.fold_in(key, client_id)


def client_keys(run_key: Array, purpose: int, round_number: Array | int, ids_n: AnyArray) -> Array:
    """`[N]` keys, `client_key` of each client."""
    return jax.vmap(lambda one: client_key(run_key, purpose, round_number, one))(ids_n)


def stable_ids(client_ids: Sequence[str]) -> np.ndarray:
    """`[N]` uint32 from the clients' names alone (CRC-32)."""
    return np.array([zlib.crc32(name.encode()) for name in client_ids], np.uint32)
