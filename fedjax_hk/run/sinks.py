"""Where the row of a round goes: tables, callbacks, terminal, notes, results, checkpoint.

The order of the sinks is a guarantee. A round is in the tables before anybody hears of it; the
tables of all rounds and the results of the last one are on the disk before the checkpoint that
vouches for them. A run that goes on drops the rows beyond its checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd

from fedjax_hk.report import summary
from fedjax_hk.round.state import RoundInfo, RoundState, Snapshot
from fedjax_hk.rules import CHOICES
from fedjax_hk.run import contents
from fedjax_hk.run.notes import Notes
from fedjax_hk.run.prepare import Prepared, gram, outputs
from fedjax_hk.run.terminal import Progress
from fedjax_hk.store import records
from fedjax_hk.store.checkpoint import Checkpoints
from fedjax_hk.store.run_folder import RunFolder
from fedjax_hk.tasks import TASKS


class Kept(NamedTuple):
    """What is on the devices after the last round of a chunk."""

    state: RoundState
    snapshot: Snapshot


class RoundRecord(NamedTuple):
    """A round that has come from the device.

    Attributes:
      number: from 1.
      info: `RoundInfo` as NumPy.
      row: of `rounds.csv`.
      kept: of the last round of a chunk; else None.
    """

    number: int
    info: RoundInfo[np.ndarray]
    row: dict[str, Any]
    kept: Kept | None = None


class Sink(Protocol):
    def on_round(self, record: RoundRecord) -> None:
        """Takes each round, in order."""


class Callback(Protocol):
    """What `simulate` calls, such as `integrations.tensorboard.TensorBoard`."""

    def on_round_end(self, round_number: int, metrics: dict[str, Any]) -> None:
        """Takes the row of `rounds.csv` once a round is in the tables."""


class TableSink:
    """`coalitions.csv`, then `rounds.csv`."""

    def __init__(self, folder: RunFolder, prepared: Prepared):
        self._folder, self._fleet = folder, prepared.fleet

    def on_round(self, record: RoundRecord) -> None:
        rows = records.coalition_rows(record.number, record.info, self._fleet)
        self._folder.append_rows("coalitions", rows)
        self._folder.append_rows("rounds", [record.row])


class CallbackSink:
    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = callbacks

    def on_round(self, record: RoundRecord) -> None:
        for callback in self._callbacks:
            callback.on_round_end(record.number, record.row)


class TerminalSink:
    """One line a round."""

    def __init__(self, progress: Progress, prepared: Prepared):
        self._progress, self._fleet = progress, prepared.fleet

    def on_round(self, record: RoundRecord) -> None:
        unit, task = self._fleet.unit or "units", TASKS[self._fleet.task]
        self._progress.update(record.number, summary.round_line(record.row, unit, task))


class NoteSink:
    """Notes, to the terminal and the log."""

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        prepared: Prepared,
        before: pd.DataFrame | None,
    ):
        self._folder, self._progress, self._prepared = folder, progress, prepared
        self._notes = Notes(prepared.config, prepared.fleet, before)

    def on_round(self, record: RoundRecord) -> None:
        gram_ss = None
        if record.kept is not None:
            space = self._prepared.config.rule().opinion
            gram_ss = functools.partial(gram, self._prepared, record.kept.snapshot, space)
        for note in self._notes.about(record.row, record.info, gram_ss):
            self._folder.log(note)
            self._progress.say(note)


class ResultSink:
    """What the last round leaves.

    Attributes:
      found: `clients.csv` as a table and the summary; None before the last round.
    """

    def __init__(self, folder: RunFolder, prepared: Prepared):
        self._folder, self._prepared = folder, prepared
        self.found: tuple[pd.DataFrame, str] | None = None

    def on_round(self, record: RoundRecord) -> None:
        config, fleet = self._prepared.config, self._prepared.fleet
        if record.kept is None or record.number < config.rounds:
            return
        state, snapshot = record.kept
        spaces = CHOICES["opinion"]
        grams = {space: gram(self._prepared, snapshot, space) for space in spaces}
        outputs_nw = outputs(self._prepared, state)
        self.found = contents.end(
            self._folder, config, fleet, record.number, record.info, outputs_nw, grams
        )


class CheckpointSink:
    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def on_round(self, record: RoundRecord) -> None:
        if record.kept is not None:
            self._checkpoints.save(record.number, record.kept.state)
