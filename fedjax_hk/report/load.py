"""A run folder read back, whole or as far as the run has come."""

from __future__ import annotations

import os
import pathlib
import zipfile
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk.report.numbers import Opinions
from fedjax_hk.report.summary import task_of
from fedjax_hk.settings.config import Config, from_stored
from fedjax_hk.store.records import TEXT_COLUMNS
from fedjax_hk.store.run_folder import RunFolder, RunFolderError
from fedjax_hk.tasks import Task

_EARLIER_COLUMNS = {  # of rounds.csv by earlier versions, and their names of now
    "dissimilarity": "within_spread",
    "gradient_dissimilarity": "gradient_spread",
}


class RunTables(NamedTuple):
    """Attributes:
    path: the folder.
    config: the settings; flags of another version are left out.
    flags: all flags as they are stored.
    data, device, versions: as in config.json.
    rounds, coalitions: of all rounds so far.
    clients, forecasts, opinions: of the end; None for a run that has not reached it, or has
      gone on since.
    partition: `partition.csv` of samples that were dealt out; else None.
    excluded: client and reason; may be empty.
    """

    path: pathlib.Path
    config: Config
    flags: dict[str, Any]
    data: dict[str, Any]
    device: dict[str, Any]
    versions: dict[str, Any]
    rounds: pd.DataFrame
    coalitions: pd.DataFrame
    clients: pd.DataFrame | None
    forecasts: pd.DataFrame | None
    opinions: Opinions | None
    partition: pd.DataFrame | None
    excluded: pd.DataFrame

    @property
    def unit(self) -> str:
        return self.data.get("unit") or "units"

    @property
    def task(self) -> Task:
        return task_of(self.config)

    @property
    def planned_rounds(self) -> int:
        return max(self.config.rounds, int(self.rounds["round"].iloc[-1]))


def load_run(path: str | os.PathLike) -> RunTables:
    """Reads a run folder; takes no lock, so a run that goes on may be looked at.

    Raises:
      RunFolderError: no run folder, no finished round yet, or a file that was altered.
    """
    path = pathlib.Path(path)
    if not (path / "config.json").is_file():
        raise RunFolderError(f"{path} is no run folder: it has no config.json; give one that has.")
    folder = RunFolder(path, None)
    stored = folder.read_config()
    if not (path / "rounds.csv").is_file() or not len(folder.read_table("rounds")):
        raise RunFolderError(f"{path}: no round of it is finished; resume it first.")
    rounds = folder.read_table("rounds", TEXT_COLUMNS).rename(columns=_EARLIER_COLUMNS)
    last = rounds["round"].iloc[-1]
    coalitions = folder.read_table("coalitions", ["client", "coalition", "status"])
    opinions = read_opinions(path)
    flags = stored.get("flags", {})
    config = from_stored(flags)
    if opinions is None:  # stopped, or by a version that did not keep them
        ended = last >= config.rounds and (path / "clients.csv").is_file()
    else:
        ended = opinions.round == last
    forecasts = None
    if ended and (path / "forecasts.csv").is_file():
        forecasts = folder.read_table("forecasts", ["client", "time"])
    partition = None
    if (path / "partition.csv").is_file():
        partition = folder.read_table("partition", ["client"])
    try:
        excluded = folder.read_table("excluded", ["client", "reason"])
    except RunFolderError:
        excluded = pd.DataFrame({"client": [], "reason": []})
    return RunTables(
        path=path,
        config=config,
        flags=flags,
        data=stored.get("data", {}),
        device=stored.get("device", {}),
        versions=stored.get("versions", {}),
        rounds=rounds,
        coalitions=coalitions[coalitions["round"] <= last],  # written before the round's row
        clients=folder.read_table("clients", ["client", "last_coalition"]) if ended else None,
        forecasts=forecasts,
        opinions=opinions if ended else None,
        partition=partition,
        excluded=excluded,
    )


def read_opinions(path: pathlib.Path) -> Opinions | None:
    """`opinions.npz`; None if there is none.

    Raises:
      RunFolderError: it cannot be read.
    """
    file = path / "opinions.npz"
    if not file.is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as arrays:
            stored = dict(arrays)
            return Opinions(
                int(stored["round"]),
                [str(name) for name in stored["cohort"]],
                stored["present"],
                stored["labels"],
                float(stored["limit"]),
                float(stored["floor"]),
                str(stored["kind"]),
                {k.removeprefix("gram_"): v for k, v in stored.items() if k.startswith("gram_")},
            )
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise RunFolderError(f"{file} cannot be read ({error}); run again.") from error
