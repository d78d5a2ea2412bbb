"""What a run folder holds from its first round on, and from its last one."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import sys
from typing import Any, TextIO

import numpy as np
import pandas as pd

from fedjax_hk import data, hk
from fedjax_hk.report import partition_files, summary
from fedjax_hk.round.state import RoundInfo
from fedjax_hk.run import devices
from fedjax_hk.run.prepare import hparams_of, settings_of
from fedjax_hk.settings.choices import implementation
from fedjax_hk.settings.config import Config
from fedjax_hk.store import records, run_folder
from fedjax_hk.store.run_folder import RunFolder
from fedjax_hk.tasks import TASKS
from fedjax_hk.types import Array, Fleet, Params


def begin(folder: RunFolder, config: Config, fleet: Fleet) -> None:
    """Writes what is known before round one: `excluded.csv`, `partition.*`, `scaling.csv`,
    and at last `config.json`, which says that the run can be resumed."""
    if fleet.excluded:
        folder.write_table("excluded", pd.DataFrame(fleet.excluded))
    partition_files.write(folder, fleet)
    if len(fleet.shift_n):  # for forecasts of later readings
        scaling = {"client": fleet.client_ids, "shift": fleet.shift_n, "scale": fleet.scale_n}
        folder.write_table("scaling", pd.DataFrame(scaling))
    folder.write_config(
        {
            "flags": dataclasses.asdict(config),
            "versions": run_folder.versions(),
            "device": devices.describe(),
            "data": describe_data(fleet),
        }
    )


def describe_data(fleet: Fleet) -> dict[str, Any]:
    """What a resumed run must find again, and what a reader of the folder must know."""
    names = "\n".join(fleet.client_ids).encode()
    dealt = {}
    if fleet.owners is not None:
        dealt = {"partition_fingerprint": data.partition_digest(fleet.owners)}
    return {
        "source": fleet.source,
        "fingerprint": fleet.fingerprint,
        "unit": fleet.unit,
        "clients": len(fleet.client_ids),
        "clients_fingerprint": hashlib.sha256(names).hexdigest(),
        **dealt,
    }


def end(
    folder: RunFolder,
    config: Config,
    fleet: Fleet,
    round_number: int,
    info: RoundInfo,
    outputs_nw: Array,
    grams: dict[str, Params],
) -> tuple[pd.DataFrame, str]:
    """Writes what the last round leaves: forecasts or classes, `opinions.npz`, `clients.csv`,
    and at last `summary.txt`.

    To be called before the last checkpoint is saved, so that a run whose last checkpoint is
    there has them all.

    Args:
      info: of the last round, as NumPy.
      outputs_nw: `[N, W_test, ...]` of what everybody is served.
      grams: inner products of its opinions in every space.

    Returns:
      `clients.csv` as a table, and the summary.
    """
    tables = TASKS[fleet.task].tables
    folder.write_table(tables.outputs_name, tables.outputs(np.asarray(outputs_nw), fleet))
    near = _neighborhood(config, info, grams)
    folder.write_arrays(
        "opinions.npz", records.opinion_arrays(round_number, info, fleet, grams, near)
    )
    rounds = folder.read_table("rounds", records.TEXT_COLUMNS)
    coalitions = folder.read_table("coalitions", text=["client", "coalition", "status"])
    clients = records.client_table(info, fleet, coalitions)
    folder.write_table("clients", clients)
    text = summary.summarize(config, fleet.unit, rounds, clients)
    folder.write_text("summary.txt", text + "\n")
    return clients, text


def read_end(folder: RunFolder) -> tuple[pd.DataFrame, str] | None:
    """What `end` returned; None if the folder does not hold it."""
    path = folder.path / "summary.txt"
    if not path.exists():
        return None
    return folder.read_table("clients", ["client", "last_coalition"]), path.read_text().rstrip("\n")


def _neighborhood(
    config: Config, info: RoundInfo, grams: dict[str, Params]
) -> hk.Neighborhood | None:
    """Whom clients listened to in the round, None if the grouping has no threshold."""
    rule = config.rule()
    near = implementation("grouping", rule.grouping)(settings_of(config)).neighborhood
    if near is None:
        return None
    return near(hparams_of(config), grams[rule.opinion], info.present_s)


def draw_report(folder: RunFolder, stream: TextIO | None = None) -> None:
    """Makes report.html. All results are on the disk already, so whatever fails here is said
    and costs the pictures alone."""
    try:
        from fedjax_hk.report import build  # loads matplotlib

        build.write_report(folder.path)
    except Exception as error:
        path = shlex.quote(str(folder.path))
        note = (
            f"Note: the report could not be made ({type(error).__name__}: {error}). All tables "
            f"are there; to try again: python -m fedjax_hk.report --run={path}"
        )
        folder.log(note)
        print(note, file=stream or sys.stderr)
