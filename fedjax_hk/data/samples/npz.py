"""The user's own samples and classes: an .npz file or a folder of .npy files, left on disk."""

from __future__ import annotations

import hashlib
import pathlib
import struct
import zipfile
from typing import Literal

import numpy as np

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.samples.labelled import Labelled, Rows

NAMES = ("x_train", "y_train", "x_test", "y_test")


def read_npz(
    path: str,
    *,
    image_shape: tuple[int, ...] = (),
    max_samples: int | None = None,
    seed: int = 0,
) -> Labelled:
    """Reads `x_train`, `y_train`, `x_test`, `y_test`.

    Samples of an .npz that is not compressed (`np.savez`), or of .npy files in a folder, stay
    in the file until a client's are picked out, so the file may be larger than memory.

    Args:
      path: the file or folder.
      image_shape: shape of a sample whose numbers come flat, such as (28, 28).
      max_samples: at most that many training and that many test samples, drawn at random.
      seed: of that draw.

    Returns:
      Images `[M, height, width, channels]`, or flat samples `[M, features]`; labels may be any
      whole numbers, the classes are those of `y_train`.

    Raises:
      DataError: names the file, the array and the fix.
    """
    arrays, digest = _open(path)
    x_train, x_test = (_shaped(arrays[n], n, path, image_shape) for n in ("x_train", "x_test"))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(
            f"{path}: samples of x_train have shape {x_train.shape[1:]}, those of x_test "
            f"{x_test.shape[1:]}; give both the same."
        )
    y_train, y_test = (
        _labels(arrays[n], n, path, len(x)) for n, x in (("y_train", x_train), ("y_test", x_test))
    )
    values, y_train = np.unique(y_train, return_inverse=True)
    if len(values) < 2:
        raise DataError(f"{path}: y_train has the one class {values[0]}; give two or more.")
    unknown = np.setdiff1d(y_test, values)
    if len(unknown):
        raise DataError(
            f"{path}: y_test has class {unknown[0]}, y_train has none of it; leave these samples "
            "out, or give training samples of the class."
        )
    y_test = np.searchsorted(values, y_test)
    if max_samples:
        x_train, y_train = _some(x_train, y_train, max_samples, np.random.default_rng([seed, 2]))
        x_test, y_test = _some(x_test, y_test, max_samples, np.random.default_rng([seed, 3]))
    source = f"{path}: {len(y_train)} training and {len(y_test)} test samples"
    classes = tuple(str(value) for value in values)
    return Labelled(x_train, y_train, x_test, y_test, classes, source, digest)


def _some(x, y, most: int, rng):
    if len(y) <= most:
        return x, y
    rows = np.sort(rng.choice(len(y), most, replace=False))
    return Rows(x, rows), y[rows]


def _open(path: str) -> tuple[dict[str, np.ndarray], str]:
    """The four arrays, in the file where that can be, and the digest of the content."""
    if not path:
        raise DataError("--samples=npz: --data=FILE.npz is missing; give the file of samples.")
    place = pathlib.Path(path)
    try:
        if place.is_dir():
            files = {file.stem: file for file in place.glob("*.npy")}
            found = set(files)
            arrays = {n: np.load(files[n], mmap_mode="r") for n in NAMES if n in files}
            digest = _digest(files[n] for n in NAMES if n in files)
        else:
            with zipfile.ZipFile(place) as archive:
                members = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
                found = set(members)
                arrays = {n: _member(place, archive, members[n]) for n in NAMES if n in members}
            digest = _digest([place])
    except FileNotFoundError:
        raise DataError(f"--data={path}: there is no such file; give an .npz file.") from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"--data={path}: cannot be read as an .npz file or a folder of .npy files ({error}); "
            "save it with np.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)."
        ) from error
    missing = [n for n in NAMES if n not in arrays]
    if missing:
        raise DataError(
            f"--data={path}: {', '.join(missing)} not in it (found: "
            f"{', '.join(sorted(found)) or 'nothing'}); save it with np.savez(path, x_train=..., "
            "y_train=..., x_test=..., y_test=...)."
        )
    return arrays, digest


def _member(path: pathlib.Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """An array of the archive: its place in the file where it is stored as it is, else read.

    np.load never maps a member, so its place is looked up in the member's own header: 30
    bytes, of which the last four say how long name and extra field are (PKWARE APPNOTE 4.3.7).
    """
    read_header = {(1, 0): np.lib.format.read_array_header_1_0,
                   (2, 0): np.lib.format.read_array_header_2_0}  # fmt: skip
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        name_length, extra_length = struct.unpack("<26xHH", file.read(30))
        file.seek(name_length + extra_length, 1)
        if info.compress_type == zipfile.ZIP_STORED:
            version = np.lib.format.read_magic(file)
            if version in read_header:
                shape, fortran, dtype = read_header[version](file)
                if 0 not in shape and not dtype.hasobject:
                    order: Literal["F", "C"] = "F" if fortran else "C"
                    return np.memmap(path, dtype, "r", file.tell(), shape, order)
    with archive.open(info) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _digest(files) -> str:
    digests = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            digests.update(hashlib.file_digest(opened, "sha256").digest())
    return digests.hexdigest()


def _shaped(x: np.ndarray, name: str, path: str, image_shape: tuple[int, ...]) -> np.ndarray:
    """`[M, features]` or `[M, height, width, channels]`."""
    if x.ndim < 2 or x.ndim > 4 or 0 in x.shape:
        raise DataError(
            f"{path}: {name} has shape {x.shape}; give [samples, features], [samples, height, "
            "width] or [samples, height, width, channels], none of them 0."
        )
    return as_images(x, image_shape, f"{path}: {name}")


def as_images(x: np.ndarray, image_shape: tuple[int, ...], where: str) -> np.ndarray:
    """Flat samples in the shape that is asked for; an image without channels gets one."""
    if image_shape:
        if np.prod(image_shape) != np.prod(x.shape[1:]):
            shape = ",".join(map(str, image_shape))
            raise DataError(
                f"--image_shape={shape}: {where} has samples of shape {x.shape[1:]}, which is "
                f"{np.prod(x.shape[1:])} numbers and not {np.prod(image_shape)}; mend the shape."
            )
        x = x.reshape(len(x), *image_shape)
    return x[..., None] if x.ndim == 3 else x


def _labels(y: np.ndarray, name: str, path: str, num: int) -> np.ndarray:
    """`[M]` int64."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.shape != (num,):
        fix = "give the class's number, as np.argmax(y, axis=1)" if y.ndim == 2 else "repair it"
        raise DataError(
            f"{path}: {name} has shape {y.shape} for {num} samples of {name.replace('y', 'x')}; "
            f"{fix}."
        )
    return whole_numbers(np.asarray(y), f"{path}: {name}")


def whole_numbers(y: np.ndarray, where: str) -> np.ndarray:
    """Labels as int64.

    Raises:
      DataError: one of them is no whole number.
    """
    if y.dtype.kind in "iu":
        return y.astype(np.int64)
    if y.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(y) | (y != np.floor(y)))
        if not len(wrong):
            return y.astype(np.int64)
        raise DataError(
            f"{where}: the label of sample {wrong[0]} is {y[wrong[0]]}; give whole numbers."
        )
    raise DataError(
        f"{where} holds labels of type {y.dtype}, such as {y[0]!r}; give whole numbers."
    )
