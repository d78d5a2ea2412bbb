"""The folder of one run: configuration, tables, log, and the lock of the running process.

    config.json   all flags, versions, device, data fingerprint; written before round one
    <table>.csv   tables that pandas reads back, appended while the run goes on
    log.txt       what was said, with time stamps
    run.lock      held (flock) by the process that runs; holds its process id

Whole files are replaced, never rewritten in place, so a kill at any moment leaves the
old or the new one. Tables grow by whole rows; a last row torn by a kill is removed by
`Tables.truncate_after` before the run goes on.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_hk.store.files import RunFolderError, replace
from fedjax_hk.store.tables import Tables

_LOCK = "run.lock"
_CONFIG = "config.json"
_PACKAGES = (
    "fedjax-hk",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "pandas",
    "orbax-checkpoint",
    "absl-py",
)


def create_folder(
    path: str | os.PathLike = "", base: str | os.PathLike = "runs", name: str = ""
) -> RunFolder:
    """A new, empty, locked run folder.

    Args:
      path: the folder; must not exist yet or be empty. Empty: a folder in `base`, named
        by the time of day and `name`; runs started in the same second get -2, -3, ...
      base: where folders are made when no path is given.
      name: what the run is, such as the rule; kept to letters, digits and `._=-`.

    Raises:
      RunFolderError: the path is a file, not empty, or cannot be written.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as base:
      ...     with create_folder(base=base, name="hk_cosine") as folder:
      ...         folder.write_config({"flags": {"seed": 3}})
      ...     open_folder(folder.path, lock=False).read_config()["flags"]
      {'seed': 3}
    """
    try:
        if path:
            folder = pathlib.Path(path)
            made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if found := sorted(entry.name for entry in folder.iterdir()):
                raise _not_empty(folder, found)
        else:
            folder, made = _make_unique(pathlib.Path(base), name), True
        # Exclusive, so that of two runs given the same empty folder only one gets it.
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError as error:
        asked = pathlib.Path(path or base)
        if asked.is_dir():
            raise _not_empty(asked, [_LOCK]) from error
        raise RunFolderError(
            f"flag --output: {asked} is a file; give a folder that is new or empty"
        ) from error
    except OSError as error:
        raise RunFolderError(
            f"flag --output: cannot write {path or base} ({error.strerror}); "
            "give --output a folder that you may write"
        ) from error
    return RunFolder(folder, _hold(lock, folder, "--output"), made)


def open_folder(path: str | os.PathLike, lock: bool = True, flag: str = "--resume") -> RunFolder:
    """The folder of an earlier run, locked for this process.

    Args:
      path: the folder.
      flag: that named the folder, for messages.
      lock: False to look only, such as at a run that is going on; nothing may be written.

    Raises:
      RunFolderError: no such folder, no configuration in it, or another process runs there.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise RunFolderError(f"flag {flag}: {path} {found}; give the folder of an earlier run")
    if not (folder / _CONFIG).is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise RunFolderError(
            f"flag {flag}: {path} holds no {_CONFIG} (found: {found}); give the folder of a "
            "run that started its first round, or start anew without --resume"
        )
    if not lock:
        return RunFolder(folder, None)
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFolderError(
            f"flag {flag}: cannot write {path} ({error.strerror}); make the folder writable"
        ) from error
    run_folder = RunFolder(folder, _hold(handle, folder, flag))
    for left in folder.glob(".*.tmp"):  # of a process killed while it wrote
        left.unlink()
    return run_folder


class RunFolder(Tables):
    """One run's folder; made by `create_folder` or `open_folder`, released by `close`.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: pathlib.Path, lock: int | None, made: bool = False):
        super().__init__(path)
        self._lock = lock
        self._made = made

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock; the end of the process, however it comes, does so too."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Removes what a run that could not start left; the folder too unless it was given."""
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if self._made:
            self.path.rmdir()

    def write_text(self, name: str, text: str) -> None:
        """Replaces a file by `text`, all or nothing."""
        replace(self.path / name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replaces a file by `content`, all or nothing; makes the folder it is to lie in."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        replace(path, content)

    def write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces an .npz file, all or nothing; `np.load` reads it."""
        buffer = io.BytesIO()
        named: dict[str, Any] = dict(arrays)  # no option of savez_compressed is among the names
        np.savez_compressed(buffer, **named)
        self.write_bytes(name, buffer.getvalue())

    def write_json(self, name: str, value: Any) -> None:
        """Replaces a JSON file, all or nothing.

        NumPy scalars and arrays and paths are taken. NaN and infinities are written as
        Python's json does (`NaN`, `Infinity`), so that they read back as they were.
        """
        self.write_text(name, json.dumps(value, indent=2, default=_to_json) + "\n")

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote.

        Raises:
          RunFolderError: there is no such file, or it is not JSON.
        """
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError as error:
            raise RunFolderError(f"{self.path} holds no {name}") from error
        except json.JSONDecodeError as error:
            raise RunFolderError(f"{self.path / name} is not JSON: {error}") from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes config.json; call it before round one, `open_folder` asks for it."""
        self.write_json(_CONFIG, config)

    def read_config(self) -> dict[str, Any]:
        """What `write_config` wrote; errors as `read_json`."""
        return self.read_json(_CONFIG)

    def log(self, text: str) -> None:
        """Adds lines to log.txt, each with the local time."""
        stamp = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        lines = "".join(f"{stamp} {line}\n" for line in text.splitlines() or [""])
        with open(self.path / "log.txt", "ab") as file:
            file.write(lines.encode())


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that make the numbers; None: not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _make_unique(base: pathlib.Path, name: str) -> pathlib.Path:
    """A folder that nobody else has: mkdir fails where another process was faster."""
    base.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    stem = "-".join(filter(None, [stamp, re.sub(r"[^\w.=-]+", "_", name, flags=re.ASCII)]))
    for attempt in range(1, 10_000):
        folder = base / (stem if attempt == 1 else f"{stem}-{attempt}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise RunFolderError(f"flag --output: {base} has 10,000 runs of this second; give a folder")


def _not_empty(folder: pathlib.Path, found: list[str]) -> RunFolderError:
    return RunFolderError(
        f"flag --output: {folder} is not empty (found: {', '.join(found[:5])}); give a folder "
        f"that is new or empty, or --resume={folder} to go on with the run in it"
    )


def _hold(lock: int, folder: pathlib.Path, flag: str) -> int:
    """Takes the lock for this process; flock ends with the process, so it never goes stale."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 20, 0).decode() or "unknown"
        os.close(lock)
        raise RunFolderError(
            f"flag {flag}: process {holder} is running in {folder}; wait for it or end it first"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _to_json(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _same(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)  # NaN is NaN
