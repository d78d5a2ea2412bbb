"""Daily totals from the raw Alicante files beside the table that came with them.

    python experiments/check_daily_totals.py --folder=../shared/data/alicante_swm \
        --json=daily.json

Every client and day that either has is compared; those that differ by more than 0.1 L are
listed, with the readings around the two midnights.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pandas as pd
from absl import app, flags

from fedjax_hk.data import read
from fedjax_hk.data.meters import daiad
from fedjax_hk.data.meters.files import examine

_FOLDER = flags.DEFINE_string("folder", "../shared/data/alicante_swm", "Where the data lie.")
_JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")
_NAMES = ("swm_trialA_1K_subset78", "swm_trialA", "swm_trialA_extended")
_TOLERANCE = 0.1 + 1e-9  # liters; the table has one decimal
_AROUND = np.timedelta64(8, "h")


def compare(folder: Path) -> tuple[dict, list[dict]]:
    """The figures, and a row for each client and day that differs."""
    paths = [folder / "raw" / f"{name}.csv.xz" for name in _NAMES]
    meters = daiad.Meters([examine(path) for path in paths])
    ours = meters.to_table(meters.client_ids, "daily", "")
    kept = read(paths, cache=False)
    clients = pd.read_csv(folder / "clients.csv")
    twins = [one for one in kept.excluded if "same meter" in one.reason]
    clients = clients[clients["duplicate_of"].isna()]
    theirs = pd.read_csv(folder / "daily_litres.csv", index_col=0, parse_dates=True)
    found = pd.DataFrame(ours.values_tn, ours.times, ours.client_ids)
    days = theirs.index.union(found.index)
    found = found[clients["user_key"]].reindex(days).to_numpy()
    given = theirs[clients["client"]].reindex(days).to_numpy()
    either = np.isfinite(found) | np.isfinite(given)
    differs = either & ~(np.abs(found - given) <= _TOLERANCE)
    rows = [
        {
            "client": clients["client"].iloc[i],
            "user_key": clients["user_key"].iloc[i],
            "date": str(days[t].date()),
            "read": float(found[t, i]),
            "table": float(given[t, i]),
        }
        for t, i in np.argwhere(differs)
    ]
    figures = {
        "totals": int(either.sum()),
        "differ": len(rows),
        "agree_share": 1 - len(rows) / int(either.sum()),
        "same_meter_twice": len(twins),
    }
    return figures, rows


def readings_around(folder: Path, key: str, date: str) -> list[str]:
    """The raw readings next to the midnights that begin and end a day."""
    lines = []
    for name in _NAMES:
        with lzma.open(folder / "raw" / f"{name}.csv.xz", "rt") as file:
            lines += [line.strip() for line in file if line.startswith(key)]
    if not lines:
        return []
    times = pd.to_datetime([line.split(";")[1] for line in lines], format="%d/%m/%Y %H:%M:%S")
    order = np.argsort(times.to_numpy(), kind="stable")
    times, lines = times[order], [lines[i] for i in order]
    shown = []
    for midnight in (pd.Timestamp(date), pd.Timestamp(date) + pd.Timedelta(days=1)):
        at = times.searchsorted(midnight)
        shown += lines[max(at - 1, 0) : at + 2]
    return list(dict.fromkeys(shown))


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Expected flags only, got {argv[1:]}.")
    folder = Path(_FOLDER.value)
    figures, rows = compare(folder)
    print(
        f"{figures['totals']} daily totals, {figures['agree_share']:.4%} agree within 0.1 L, "
        f"{figures['differ']} differ; {figures['same_meter_twice']} meters there twice."
    )
    for row in rows:
        print(f"{row['client']} {row['date']}: read {row['read']}, table {row['table']}")
        row["readings"] = readings_around(folder, row["user_key"], row["date"])
        for line in row["readings"]:
            print(f"    {line}")
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps({**figures, "rows": rows}, indent=2))


if __name__ == "__main__":
    app.run(main)
