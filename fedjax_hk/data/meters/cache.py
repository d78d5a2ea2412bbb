"""Parsed tables, kept by what they were parsed from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded

_KEPT = 10  # tables; the ones used last


def folder() -> Path:
    """Where tables are kept: below XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fedjax_hk"


def key(*parts: object) -> str:
    """A name for what comes of these inputs, read by this version of the readers."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def load(name: str) -> Table | None:
    """The table kept under a name; None if there is none, or not a whole one."""
    path = folder() / f"{name}.npz"
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            meta = json.loads(str(stored["meta"]))
            table = Table(
                times=stored["times"],
                client_ids=tuple(meta["client_ids"]),
                values_tn=stored["values_tn"],
                unit=meta["unit"],
                source=meta["source"],
                fingerprint=meta["fingerprint"],
                excluded=tuple(Excluded(*one) for one in meta["excluded"]),
                filled_tn=stored.get("filled_tn"),
            )
        with contextlib.suppress(OSError):
            os.utime(path)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    shape = len(table.times), len(table.client_ids)
    return table if table.values_tn.shape == shape else None


def store(name: str, table: Table) -> None:
    """Keeps a table, whole or not at all; without a word where that is not possible."""
    meta = {
        "client_ids": table.client_ids,
        "unit": table.unit,
        "source": table.source,
        "fingerprint": table.fingerprint,
        "excluded": table.excluded,
    }
    arrays: dict[str, Any] = {"times": table.times, "values_tn": table.values_tn}
    if table.filled_tn is not None:
        arrays["filled_tn"] = table.filled_tn
    with contextlib.suppress(OSError):  # a full disk or a read-only home costs only time
        folder().mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=folder(), suffix=".part")
        try:
            with os.fdopen(handle, "wb") as stream:
                np.savez(stream, meta=np.array(json.dumps(meta)), **arrays)
            os.replace(part, folder() / f"{name}.npz")
        except BaseException:
            os.unlink(part)
            raise
        kept = sorted(folder().glob("*.npz"), key=lambda p: p.stat().st_mtime, reverse=True)
        for path in kept[_KEPT:]:
            path.unlink()
