"""The one way in: files of readings of any format become a `Table`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters import cache as cache_lib
from fedjax_hk.data.meters import daiad, daiad_rows, reshape
from fedjax_hk.data.meters.clock import step_in_words
from fedjax_hk.data.meters.columns import select_clients
from fedjax_hk.data.meters.files import PARQUET, File, examine, unpacked
from fedjax_hk.data.meters.long import Long, find_columns
from fedjax_hk.data.meters.reader import Reader
from fedjax_hk.data.meters.sheet import parse
from fedjax_hk.data.meters.wide import Wide
from fedjax_hk.data.table import Table

FORMATS = ("auto", "daiad", "wide", "long")
RESAMPLES = ("", "hourly", "daily", "weekly")
_LOOKED_AT = 1 << 16  # bytes that tell a format
_WORTH_KEEPING = 1 << 20  # bytes of files; smaller ones are parsed in no time


def read(
    paths: str | Path | Sequence[str | Path],
    *,
    data_format: str = "auto",
    clients: str = "",
    unit: str = "",
    resample: str = "",
    timezone: str = "",
    cache: bool = True,
) -> Table:
    """Reads meters from CSV or Parquet files, plain, .gz, .xz, .bz2 or .zip.

    Args:
      paths: one file, several with commas between, or a sequence of them. A client that is
        in several files gets the readings of all.
      data_format: "daiad" (raw registers of DAIAD water meters, see `daiad_rows.py`), "wide"
        (time, then one column a client), "long" (client, time, value) or "auto", which
        looks at each file.
      clients: whom to read; see `columns.select_clients`.
      unit: label of the readings; "" is the format's own ("L" for daiad).
      resample: "hourly", "daily" or "weekly"; "" is daily for daiad and the file's own step
        for tables. Tables hold amounts for each step, which are added up.
      timezone: whose calendar days and weeks are, such as "Europe/Madrid"; "" is that of
        Alicante for daiad, and the times as they are written for tables.
      cache: whether a parsed table may be kept in the user's cache folder and taken from
        there, if the files' content, these arguments and this version are the same.

    Returns:
      The table. Clients that cannot be used are in `excluded`, with the reason; so are those
      that are the same meter as another one.

    Raises:
      DataError: names file, row, column, client and value of what cannot be read.
    """
    for name, value, allowed in (
        ("data_format", data_format, FORMATS),
        ("resample", resample, RESAMPLES),
    ):
        if value not in allowed:
            raise ValueError(f"Expected {name} to be one of {', '.join(allowed)}, got {value!r}.")
    files = [examine(path) for path in split_paths(paths)]
    key = ""
    if cache and sum(file.num_bytes for file in files) >= _WORTH_KEEPING:
        listed = examine(clients).digest if os.path.isfile(clients) else ""
        named = [(file.path.name, file.digest) for file in files]
        key = cache_lib.key(named, data_format, clients, listed, unit, resample, timezone)
        if kept := cache_lib.load(key):
            return kept
    table = _read(files, data_format, clients, unit, resample, timezone)
    if key:
        cache_lib.store(key, table)
    return table


def read_wide(path: str | Path, *, clients: str = "", unit: str = "") -> Table:
    """`read` of one wide table."""
    return read([path], data_format="wide", clients=clients, unit=unit, cache=False)


def split_paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that are meant, each once.

    Errors: DataError if none or one twice is named.
    """
    if isinstance(paths, str) and not os.path.exists(paths):
        paths = [part.strip() for part in paths.split(",") if part.strip()]
    elif isinstance(paths, str | Path):
        paths = [paths]
    found = [Path(path) for path in paths]
    if not found:
        raise DataError("No file of readings is named. Name one, or several with commas between.")
    for path in found:
        if found.count(path) > 1:
            raise DataError(f"{path} is named twice. Name each file once.")
    return found


def _read(files, data_format, clients, unit, resample, timezone) -> Table:
    parts, names = _parsed(files, data_format)
    every_id = list(dict.fromkeys(client for part in parts for client in part.client_ids))
    shown = " and ".join(file.path.name for file in files)
    wanted, excluded = select_clients(clients, every_id, shown)
    tables, table_names = [], []
    for part, name in zip(parts, names, strict=True):
        here = set(part.client_ids)
        own = [client for client in wanted if client in here]
        if own:
            tables.append(part.to_table(own, resample, timezone))
            table_names.append(name)
    unit = unit or next((table.unit for table in tables if table.unit), "")
    table = reshape.joined(tables, table_names)
    order = {client: i for i, client in enumerate(table.client_ids)}
    table = _in_order(table, [order[client] for client in wanted if client in order])
    table = reshape.without_twins(table)
    first, last = np.datetime_as_string(table.times[[0, -1]], unit="auto")
    step = step_in_words(table.times[1] - table.times[0])
    described = (
        f"{shown}: {len(table.times)} steps of {step} from {first} to {last}, "
        f"{len(table.client_ids)} of {len(every_id)} clients"
    )
    digests = [file.digest for file in files]
    joint = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return table._replace(
        unit=unit,
        source="; ".join(part for part in (described, table.source, *_constant(table)) if part),
        fingerprint=digests[0] if len(digests) == 1 else joint,
        excluded=(*excluded, *table.excluded),
    )


def _constant(table: Table) -> list[str]:
    """A note on the clients whose readings never change; they are kept (spec 5.1)."""
    known_tn = np.isfinite(table.values_tn)
    low_n = np.where(known_tn, table.values_tn, np.inf).min(axis=0)
    high_n = np.where(known_tn, table.values_tn, -np.inf).max(axis=0)
    same = np.flatnonzero((low_n == high_n) & (known_tn.sum(axis=0) > 1))
    shown = ", ".join(f"{table.client_ids[i]} ({low_n[i]:g})" for i in same[:3])
    more = f" and {len(same) - 3} more" if len(same) > 3 else ""
    return [f"the readings of {shown}{more} never change"] if len(same) else []


def _in_order(table: Table, columns: list[int]) -> Table:
    return table._replace(
        client_ids=tuple(table.client_ids[i] for i in columns),
        values_tn=table.values_tn[:, columns],
        filled_tn=None if table.filled_tn is None else table.filled_tn[:, columns],
    )


def _parsed(files: list[File], data_format: str) -> tuple[list[Reader], list[str]]:
    """What the files hold: all raw meters together, then each table; and their names."""
    raw = [f for f in files if data_format == "daiad" or _is_daiad(f, data_format)]
    parts: list[Reader] = []
    names = []
    if raw:
        parts.append(daiad.Meters(raw))
        names.append(" and ".join(file.path.name for file in raw))
    for file in files:
        if file in raw:
            continue
        with unpacked(file) as stream:
            sheet = parse(file.path, stream.read())
        columns = find_columns(sheet) if data_format != "wide" else None
        is_long = data_format == "long" or columns is not None
        parts.append(Long(sheet, columns) if is_long else Wide(sheet))
        names.append(file.path.name)
    return parts, names


def _is_daiad(file: File, data_format: str) -> bool:
    if data_format != "auto":
        return False
    with unpacked(file) as stream:
        start = stream.read(_LOOKED_AT)
    if start.startswith(PARQUET):
        return False
    lines = start.split(b"\n")[:3]
    # Bytes that are no text are named when the whole file is read.
    return daiad_rows.looks_like(
        [line.decode("utf-8", "replace").lstrip("\ufeff") for line in lines]
    )
