"""Whole files, and the error of a folder that holds something else."""

from __future__ import annotations

import os
import pathlib


class RunFolderError(ValueError):
    """A run folder that cannot be used as asked; the message names the path and the fix."""


def replace(path: pathlib.Path, content: bytes) -> None:
    """Puts a whole new file in place of an old one, on the disk when it returns."""
    temporary = path.with_name(f".{path.name}.tmp")  # one writer: the lock's holder
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name is on the disk after this
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
