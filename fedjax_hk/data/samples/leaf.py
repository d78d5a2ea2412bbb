"""Folders as LEAF writes them (Caldas et al. 2018), with the clients that they have."""

from __future__ import annotations

import hashlib
import json
import pathlib

import numpy as np

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.samples.labelled import Labelled
from fedjax_hk.data.samples.npz import as_images, whole_numbers
from fedjax_hk.types import Excluded


def read_leaf(folder: str, *, image_shape: tuple[int, ...] = ()) -> Labelled:
    """Reads `train/*.json` and `test/*.json`, each with `users`, `num_samples`, `user_data`.

    Args:
      folder: holds the folders `train` and `test`, such as LEAF's `data/femnist/data`.
      image_shape: shape of a sample, which LEAF writes flat, such as (28, 28).

    Returns:
      The samples with their clients, in the order of the files. A user without training or
      without test samples is left out, as LEAF's `-t user` makes them.

    Raises:
      DataError: names the file, the user and the fix.
    """
    if not folder:
        raise DataError("--samples=leaf: --data=FOLDER is missing; give LEAF's folder of data.")
    digest = hashlib.sha256()
    train, test = (_read_part(pathlib.Path(folder) / p, digest) for p in ("train", "test"))
    names, excluded = [], []
    for user in dict.fromkeys((*train, *test)):
        num_train, num_test = (len(part[user][1]) if user in part else 0 for part in (train, test))
        if num_train and num_test:
            names.append(user)
        else:
            reason = f"{num_train} training and {num_test} test samples (at least 1 of each needed)"
            excluded.append(Excluded(user, reason))
    if not names:
        raise DataError(
            f"{folder}: none of {len(excluded)} users has training and test samples; split the "
            "samples of each user (LEAF's preprocess.sh with -t sample)."
        )
    (x_train, y_train, owners), (x_test, y_test, test_owners) = (
        _joined(part, names) for part in (train, test)
    )
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(
            f"{folder}: training samples have {x_train.shape[1]} numbers, test samples "
            f"{x_test.shape[1]}; give both as many."
        )
    values = np.unique(np.concatenate([y_train, y_test]))
    if len(values) < 2:
        raise DataError(f"{folder}: all samples are of class {values[0]}; give two or more.")
    return Labelled(
        as_images(x_train, image_shape, folder),
        np.searchsorted(values, y_train),
        as_images(x_test, image_shape, folder),
        np.searchsorted(values, y_test),
        tuple(str(value) for value in values),
        f"{folder}: {len(y_train)} training and {len(y_test)} test samples (LEAF)",
        digest.hexdigest(),
        tuple(names),
        (owners, test_owners),
        tuple(excluded),
    )


def _joined(part: dict, names: list[str]):
    """Samples of the users in a row, and whose they are."""
    x = np.concatenate([part[user][0] for user in names])
    y = np.concatenate([part[user][1] for user in names])
    owners = np.repeat(np.arange(len(names), dtype=np.int32), [len(part[u][1]) for u in names])
    return x, y, owners


def _read_part(folder: pathlib.Path, digest) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Samples `[n, features]` and labels `[n]` of each user."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"--data: {folder} holds no .json file; give LEAF's folder of data.")
    users: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    features: tuple[int, ...] | None = None
    for file in files:
        content = file.read_bytes()
        digest.update(content)
        try:
            found = json.loads(content)
            data = {user: found["user_data"][user] for user in found["users"]}
            counts = dict(zip(found["users"], found["num_samples"], strict=True))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{file}: not as LEAF writes it ({type(error).__name__}: {error}); it needs "
                "'users', 'num_samples' and 'user_data', one entry a user in each."
            ) from error
        for user, samples in data.items():
            where = f"{file}, user {user!r}"
            if user in users:
                raise DataError(f"{where}: another file has this user too; leave one out.")
            x, y = _of_user(samples, where)
            if len(y) != counts[user]:
                raise DataError(
                    f"{where}: num_samples is {counts[user]}, there are {len(y)}; mend the file."
                )
            features = features or (x.shape[1:] if len(y) else None)
            if len(y) and features and x.shape[1:] != features:
                raise DataError(
                    f"{where}: samples of {x.shape[1]} numbers, others have {features[0]}."
                )
            users[user] = x, y
    return users


def _of_user(samples: dict, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        x, y = np.array(samples["x"]), np.array(samples["y"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: needs 'x', lists of numbers of one length, and 'y', labels ({error})."
        ) from error
    if not len(y) and not len(x):
        return np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
    if x.ndim != 2 or x.dtype.kind not in "iuf" or y.shape != (len(x),):
        raise DataError(
            f"{where}: x has shape {x.shape} of {x.dtype}, y {y.shape}; only samples that are "
            "lists of numbers can be read (LEAF's femnist and synthetic), one label each."
        )
    return x.astype(np.float32), whole_numbers(y, f"{where}, y")
