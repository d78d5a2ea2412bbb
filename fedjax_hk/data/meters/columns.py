"""Which columns of a table are wanted: a list of clients, or a file of them."""

from __future__ import annotations

import difflib
import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedjax_hk.data.errors import DataError
from fedjax_hk.types import Excluded

_ID_COLUMNS = ("client", "user_key", "user key")
_YES = ("1", "1.0", "true", "yes")


def select_clients(
    clients: str, client_ids: Sequence[str], table_name: str
) -> tuple[list[str], tuple[Excluded, ...]]:
    """The clients to read, in the order asked for.

    Args:
      clients: "" for all; ids between commas; or the path of a file with one id per
        line, or of a CSV with a column `client` or `user_key`. If that CSV has a column
        `recommended` too, it describes more clients than it asks for: the rows with
        recommended = 1 are taken, and those of them that the table lacks are left out with
        that reason. If every name between the commas is a column, it is not taken for a file.
      client_ids: the columns of the table.
      table_name: for messages.

    Returns:
      The ids, and who was asked for but is left out.

    Raises:
      DataError: an id is unknown or named twice, the file is missing or names nobody.
    """
    if not clients.strip():
        return list(client_ids), ()
    wanted = [part.strip() for part in clients.split(",") if part.strip()]
    origin = f"the list {clients!r}"
    excluded: tuple[Excluded, ...] = ()
    if not wanted or not set(wanted) <= set(client_ids):
        path = Path(clients)
        # os.path, not Path: it says False of a list that is too long to be a file name.
        if os.path.isdir(clients):
            raise DataError(f"{path} is a folder. Name a file of clients, or ids between commas.")
        if os.path.isfile(clients):
            origin = str(path)
            wanted, excluded = _read_list(path, client_ids, table_name)
        elif len(wanted) == 1 and (path.suffix in (".csv", ".txt") or len(path.parts) > 1):
            raise DataError(f"{missing_file(path)} It was to list the clients.")
    _check(wanted, client_ids, origin, table_name)
    return wanted, excluded


def missing_file(path: Path) -> str:
    """Says that `path` does not exist, and what files of a like name there are."""
    if not path.parent.is_dir():
        return f"There is no file {path}: its folder {path.parent} does not exist."
    names = [p.name for p in path.parent.iterdir() if p.is_file()]
    similar = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    similar += [n for n in sorted(names) if n not in similar and n.startswith(path.stem)][:3]
    hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
    return f"There is no file {path}.{hint}"


def _read_list(
    path: Path, client_ids: Sequence[str], table_name: str
) -> tuple[list[str], tuple[Excluded, ...]]:
    """The ids that a file asks for, and those it recommends that the table lacks."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text ({error}). Name a file of client ids.") from None
    lines = text.splitlines()
    header = [cell.strip().strip('"') for cell in lines[0].split(",")] if lines else []
    if not {*_ID_COLUMNS} & {*header}:
        return [line.strip() for line in lines if line.strip()], ()
    try:
        rows = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, index_col=False)
    except pd.errors.ParserError as error:
        raise DataError(f"{path} is no CSV: {error}.") from None
    rows.columns = rows.columns.str.strip()
    known = set(client_ids)
    # A list may give clients a short name of its own beside the meter's key.
    columns = [rows[name].str.strip() for name in _ID_COLUMNS if name in rows]
    listed = max(columns, key=lambda column: column.isin(known).sum())
    if "recommended" not in rows:
        return [c for c in listed if c], ()
    listed = listed[rows["recommended"].str.strip().str.lower().isin(_YES)]
    reason = f"recommended in {path}, but {table_name} has no such column"
    absent = tuple(Excluded(c, reason) for c in listed if c not in known)
    return [c for c in listed if c in known], absent


def _check(wanted: list[str], client_ids: Sequence[str], origin: str, table_name: str) -> None:
    """Refuses an empty choice, unknown ids and ids named twice."""
    if not wanted:
        raise DataError(f"{origin} names no client of {table_name}. Name at least one.")
    repeated = [c for c, count in Counter(wanted).items() if count > 1]
    if repeated:
        raise DataError(f"{origin} names {', '.join(repeated[:5])} twice. Name each client once.")
    known = set(client_ids)
    unknown = [c for c in wanted if c not in known]
    if unknown:
        parts = []
        for client in unknown[:5]:
            close = difflib.get_close_matches(client, client_ids, n=3)
            parts.append(
                f"{client!r}" + (f" (did you mean {' or '.join(close)}?)" if close else "")
            )
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise DataError(
            f"{origin} names clients that {table_name} has no column for: "
            f"{', '.join(parts)}{more}. "
            f"It has {len(known)} clients: {', '.join(list(client_ids)[:5])}, ..."
        )
