"""The folder of one run: configuration, tables, log, and the lock of the running process.

    config.json   all flags, versions, device, data fingerprint; written before round one
    <table>.csv   tables that pandas reads back, appended while the run goes on
    log.txt       what was said, with time stamps
    run.lock      held (flock) by the process that runs; holds its process id

Whole files are replaced, never rewritten in place, so a kill at any moment leaves the
old or the new one. Tables grow by whole rows; a last row torn by a kill is removed by
`RunFolder.truncate_after` before the run goes on.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import fcntl
import importlib.metadata
import io
import json
import numbers
import os
import pathlib
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

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
_INTEGER = re.compile(r"-?\d+")
# What repr(float) writes, and nothing more: float() would also take "1_000" or " 5".
_FLOAT = re.compile(r"-?(\d+(\.\d+)?(e[+-]?\d+)?|inf)|nan")


class RunFolderError(ValueError):
    """A run folder that cannot be used as asked; the message names the path and the fix."""


def create(
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


def open_existing(path: str | os.PathLike, lock: bool = True, flag: str = "--resume") -> RunFolder:
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


class RunFolder:
    """One run's folder; made by `create` or `open_existing`, released by `close`.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: pathlib.Path, lock: int | None, made: bool = False):
        self.path = path
        self._lock = lock
        self._made = made
        self._columns: dict[str, list[str]] = {}

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
        _replace(self.path / name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replaces a file by `content`, all or nothing; makes the folder it is to lie in."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        _replace(path, content)

    def write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces an .npz file, all or nothing; `np.load` reads it."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
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
        """Writes config.json; call it before round one, `open_existing` asks for it."""
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

    def append_rows(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows to `<table>.csv`; on the disk when it returns.

        The first row ever written sets the columns. None is an empty cell, floats are
        written so that they read back bit-equal.

        Raises:
          RunFolderError: a row has other columns than the table, or the file ends in a
            torn row (call `truncate_after` first).
        """
        if not rows:
            return
        file_path = self._file(table)
        columns = self._columns.get(table) or _read_header(file_path)
        new = not columns
        columns = columns or list(rows[0])
        _check_columns(file_path, columns, rows)
        text = _csv_text(columns, rows, header=new)
        with open(file_path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self._columns[table] = columns

    def write_table(self, table: str, frame: pd.DataFrame) -> None:
        """Replaces `<table>.csv` by the frame (without its index), all or nothing.

        What is missing is an empty cell, but NaN where the column is of floats.
        """
        columns = [str(column) for column in frame.columns]
        cells = [_objects(frame.iloc[:, i]) for i in range(len(columns))]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*cells, strict=True))
        _replace(self._file(table), _csv_text(columns, rows, header=True).encode())
        self._columns[table] = columns

    def read_table(self, table: str, text: Sequence[str] = ()) -> pd.DataFrame:
        """`<table>.csv` as a frame, values as they were written; a torn last row is left out.

        A column is bool, integer or float if all its cells are; an empty cell is NaN
        among numbers and None elsewhere.

        Args:
          table: its name.
          text: columns to leave as text whatever they look like, such as client names.

        Raises:
          RunFolderError: no such table.
        """
        if not self._file(table).is_file():
            raise RunFolderError(f"{self.path} holds no table {table}.csv")
        content = self._file(table).read_bytes()
        if not content.endswith(b"\n"):  # torn by a kill, or being written right now
            content = b"".join(_split_records(content)[0])
        if not content:
            raise RunFolderError(f"{self._file(table)} is empty")
        cells = pd.read_csv(io.BytesIO(content), dtype=str, na_filter=False)
        return pd.DataFrame(
            {name: _typed(cells[name].tolist(), name in text) for name in cells.columns},
            columns=list(cells.columns),
        )

    def truncate_after(self, table: str, column: str, value: float) -> int:
        """Drops the rows whose `column` exceeds `value`, and a last row torn by a kill.

        The rows that stay are left byte for byte; a table that has not even a whole
        header is removed. A table that is not there is left so.

        Returns:
          Rows dropped, the torn one counted.

        Raises:
          RunFolderError: no such column, or a cell of it is not a number (row named).
        """
        file_path = self._file(table)
        if not file_path.is_file():
            return 0
        records, torn = _split_records(file_path.read_bytes())
        if not records:
            file_path.unlink()
            return int(torn)
        columns = _parse_record(records[0])
        if column not in columns:
            raise RunFolderError(
                f"{file_path} has no column {column!r}; it has {', '.join(columns)}"
            )
        kept = [records[0]]
        for row, record in enumerate(records[1:], start=1):
            cells = _parse_record(record)
            at = cells[columns.index(column)] if len(cells) == len(columns) else ""
            if not _FLOAT.fullmatch(at):
                raise RunFolderError(
                    f"{file_path} row {row}: expected {len(columns)} cells with a number in "
                    f"{column!r}, got {record.decode(errors='replace').rstrip()!r}"
                )
            if float(at) <= value:
                kept.append(record)
        dropped = len(records) - len(kept) + torn
        if dropped:
            _replace(file_path, b"".join(kept))
        return dropped

    def _file(self, table: str) -> pathlib.Path:
        return self.path / f"{table}.csv"


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


def _replace(path: pathlib.Path, content: bytes) -> None:
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


def _to_json(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _cell(value: Any) -> str:
    """One CSV cell. csv.writer is not used: it rounds NumPy floats and, before Python 3.13,
    leaves a bare carriage return unquoted."""
    if value is None or value is pd.NaT or value is pd.NA:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()  # 0-d arrays and NumPy scalars, exactly
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))
    text = str(value)
    if any(character in text for character in ',"\r\n'):
        text = '"' + text.replace('"', '""') + '"'
    return text


def _csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], header: bool) -> str:
    lines = [",".join(map(_cell, columns))] if header else []
    lines += [",".join(_cell(row[column]) for column in columns) for row in rows]
    return "".join(line + "\n" for line in lines)


def _objects(column: pd.Series) -> pd.Series:
    values = column.astype(object)
    return values if column.dtype.kind == "f" else values.where(column.notna(), None)


def _typed(cells: list[str], text: bool) -> Any:
    """Cells of one column as numbers or truth values if all (but empty ones) are."""
    present = [cell for cell in cells if cell]
    missing = len(present) < len(cells)
    if present and not text:
        if all(cell in ("True", "False") for cell in present):
            values = [None if not cell else cell == "True" for cell in cells]
            return pd.Series(values, dtype=object if missing else bool)
        if not missing and all(map(_INTEGER.fullmatch, present)):
            return [int(cell) for cell in cells]
        if all(map(_FLOAT.fullmatch, present)):
            return np.array([float(cell or "nan") for cell in cells])
    return pd.Series([cell or None for cell in cells], dtype=object)


def _check_columns(
    file_path: pathlib.Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    for row in rows:
        if set(row) != set(columns):
            missing = [column for column in columns if column not in row]
            extra = [column for column in row if column not in columns]
            raise RunFolderError(
                f"{file_path}: expected columns {', '.join(columns)}; "
                f"got none for {missing}, and unknown {extra}"
            )


def _read_header(file_path: pathlib.Path) -> list[str]:
    """The columns of a table, none if there is no table yet."""
    if not file_path.is_file() or not file_path.stat().st_size:
        return []
    records, torn = _split_records(file_path.read_bytes())
    if torn:
        raise RunFolderError(f"{file_path} ends in a torn row; call truncate_after first")
    return _parse_record(records[0])


def _split_records(content: bytes) -> tuple[list[bytes], bool]:
    """The whole rows of a CSV file, each with its line end; and whether a torn one follows.

    A line end inside quotes belongs to the row: it ends where the quotes are even.
    """
    records, open_record = [], b""
    for line in _lines(content):
        open_record += line
        if line.endswith(b"\n") and open_record.count(b'"') % 2 == 0:
            records.append(open_record)
            open_record = b""
    return records, bool(open_record)


def _lines(content: bytes) -> Iterator[bytes]:
    return iter(io.BytesIO(content))  # split at \n only; bytes.splitlines splits at \r too


def _parse_record(record: bytes) -> list[str]:
    return next(csv.reader(io.StringIO(record.decode(), newline="")))
