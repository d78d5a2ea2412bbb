"""Deals labeled samples out to clients, evenly or not: every sample to exactly one of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_hk.data.errors import DataError

TRIES = 100  # draws until every client has enough; other simulators draw for ever


class Partition(NamedTuple):
    """How samples are dealt out.

    Attributes:
      kind: "dirichlet": each class is split by its own draw from Dirichlet(alpha) over
        the clients (Hsu et al. 2019; the FedCW paper's setting); "quantity": the clients'
        sizes are such a draw, their classes are mixed; "shards": samples sorted by class,
        cut into equal shards, some for each client (McMahan et al. 2017); "iid".
      num_clients: N.
      alpha: of the Dirichlet distribution, above 0; the smaller, the more uneven.
      shards_per_client: shards that a client gets.
      min_samples: fewest training samples of a client.
      seed: the same seed deals out the same.
    """

    kind: str = "dirichlet"
    num_clients: int = 20
    alpha: float = 0.5
    shards_per_client: int = 2
    min_samples: int = 10
    seed: int = 0


def deal(labels_m: np.ndarray, partition: Partition) -> np.ndarray:
    """The client of each sample.

    Args:
      labels_m: `[M]` whole numbers from 0, the classes.

    Returns:
      `[M]` int32, from 0 to N - 1; every client has at least `min_samples`.

    Raises:
      DataError: there are too few samples, or none of `TRIES` draws gives every client
        enough; the message says what to change.
    """
    num, num_clients, least = len(labels_m), partition.num_clients, partition.min_samples
    needed = num_clients * max(least, 1)
    if needed > num:
        raise DataError(
            f"--num_clients={num_clients}: with --min_samples={least} they need {needed} training "
            f"samples, there are {num}; lower one of them."
        )
    rng, fewest = np.random.default_rng([partition.seed, 0]), 0
    for _ in range(TRIES):
        owners_m = PARTITIONERS[partition.kind](labels_m, partition, rng)
        smallest = int(np.bincount(owners_m, minlength=num_clients).min())
        if smallest >= least:
            return owners_m
        fewest = max(fewest, smallest)
    raise DataError(
        f"--partition={partition.kind}: {TRIES} draws for {num_clients} clients and {num} "
        f"training samples left some client with fewer than --min_samples={least}, at best with "
        f"{fewest}. {_ADVICE[partition.kind].format(**partition._asdict())}, or lower "
        "--num_clients or --min_samples."
    )


def deal_alike(
    labels_m: np.ndarray, train_labels: np.ndarray, train_owners: np.ndarray, partition: Partition
) -> np.ndarray:
    """Test samples, dealt out so that each class is shared as its training samples are.

    A client is so judged on the mixture of classes that it trains on, as far as whole samples
    allow; a small client may get none. A class that nobody trains on is shared by sizes.

    Args:
      labels_m: `[M_test]` classes.
      train_labels, train_owners: `[M]` classes and clients of the training samples.

    Returns:
      `[M_test]` int32.
    """
    rng = np.random.default_rng([partition.seed, 1])
    owners_m = np.empty(len(labels_m), np.int32)
    for label in np.unique(labels_m):
        owners = train_owners[train_labels == label]
        owners = owners if len(owners) else train_owners
        held_n = np.bincount(owners, minlength=partition.num_clients)
        _share_out(owners_m, np.flatnonzero(labels_m == label), held_n, rng)
    return owners_m


def _dirichlet(labels_m, partition: Partition, rng) -> np.ndarray:
    owners_m = np.empty(len(labels_m), np.int32)
    for label in np.unique(labels_m):
        shares_n = rng.dirichlet(np.full(partition.num_clients, partition.alpha))
        _share_out(owners_m, np.flatnonzero(labels_m == label), shares_n, rng)
    return owners_m


def _quantity(labels_m, partition: Partition, rng) -> np.ndarray:
    owners_m = np.empty(len(labels_m), np.int32)
    shares_n = rng.dirichlet(np.full(partition.num_clients, partition.alpha))
    _share_out(owners_m, np.arange(len(labels_m)), shares_n, rng)
    return owners_m


def _iid(labels_m, partition: Partition, rng) -> np.ndarray:
    return rng.permutation(np.arange(len(labels_m), dtype=np.int32) % partition.num_clients)


def _shards(labels_m, partition: Partition, rng) -> np.ndarray:
    num_shards = partition.num_clients * partition.shards_per_client
    shuffled_m = rng.permutation(len(labels_m))
    by_label_m = shuffled_m[np.argsort(labels_m[shuffled_m], kind="stable")]
    owner_of_shard = rng.permutation(num_shards) % partition.num_clients
    owners_m = np.empty(len(labels_m), np.int32)
    for shard, samples in enumerate(np.array_split(by_label_m, num_shards)):
        owners_m[samples] = owner_of_shard[shard]
    return owners_m


PARTITIONERS = {
    "dirichlet": _dirichlet,
    "shards": _shards,
    "iid": _iid,
    "quantity": _quantity,
}


_ADVICE = {
    "dirichlet": "Raise --alpha_dirichlet={alpha:g}",
    "quantity": "Raise --alpha_dirichlet={alpha:g}",
    "shards": "Lower --shards_per_client={shards_per_client}",
    "iid": "Give more samples",
}


def _share_out(owners_m, members, shares_n, rng) -> None:
    """Gives `members`, in random order, to the clients by their shares."""
    counts_n = apportion(len(members), shares_n)
    owners_m[rng.permutation(members)] = np.repeat(np.arange(len(shares_n)), counts_n)


def apportion(total: int, shares_n: np.ndarray) -> np.ndarray:
    """Whole numbers that add up to `total`, each less than 1 off its share of it (the method
    of largest remainders; of equal ones, the first)."""
    exact_n = total * shares_n / shares_n.sum()
    counts_n = np.floor(exact_n).astype(np.int64)
    left = total - int(counts_n.sum())
    counts_n[np.argsort(counts_n - exact_n, kind="stable")[:left]] += 1
    return counts_n
