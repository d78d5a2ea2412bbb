"""A run from its first round, or from its last checkpoint, to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TextIO

import pandas as pd

from fedjax_hk.round.state import RoundState
from fedjax_hk.run import contents, sinks
from fedjax_hk.run.prepare import Chunk, Prepared, chunks
from fedjax_hk.run.sinks import Callback, RoundRecord, Sink
from fedjax_hk.run.terminal import Progress, StopRequest
from fedjax_hk.store import records
from fedjax_hk.store.checkpoint import Checkpoints
from fedjax_hk.store.run_folder import RunFolder


class Outcome(NamedTuple):
    """Attributes:
    state: after the last round.
    rounds: `rounds.csv` as a table.
    clients: `clients.csv` as a table; None if the run was stopped before its end.
    text: the summary; empty if the run was stopped.
    stopped: name of the signal that stopped the run, or "".
    """

    state: RoundState
    rounds: pd.DataFrame
    clients: pd.DataFrame | None
    text: str
    stopped: str


def simulate(
    prepared: Prepared,
    folder: RunFolder,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    stream: TextIO | None = None,
) -> Outcome:
    """Trains for `config.rounds` rounds and writes everything into the run folder.

    Rounds are appended to the tables and then saved, so that a kill at any moment costs at
    most the rounds that the device had not handed out (`config.rounds_per_sync`). A signal
    ends the run after these.

    Args:
      folder: of this run; with `resume`, holds what went before.
      callbacks: told of every round.
      stream: where progress goes; standard error if None.
    """
    config = prepared.config
    if not (folder.path / "config.json").exists():  # a command writes it before it compiles
        contents.begin(folder, config, prepared.fleet)
    with (
        Checkpoints(folder.path / "checkpoints", log=folder.log) as checkpoints,
        _stop_request(config.rounds_per_sync) as stop,
    ):
        done, state = _go_on(prepared, folder, checkpoints) if resume else (0, prepared.state)
        before = folder.read_table("rounds", records.TEXT_COLUMNS) if done else None
        results = sinks.ResultSink(folder, prepared)
        with Progress(config.rounds, done, stream) as progress:
            in_order: list[Sink] = [
                sinks.TableSink(folder, prepared),
                sinks.CallbackSink(callbacks),
                sinks.TerminalSink(progress, prepared),
                sinks.NoteSink(folder, progress, prepared, before),
                results,
                sinks.CheckpointSink(checkpoints),
            ]
            for first, chunk, seconds in chunks(prepared, state, done):
                state = chunk.state
                _hand_out(prepared, first, chunk, seconds, in_order)
                if stop.requested:
                    break
        checkpoints.wait()
    found = results.found
    if found is not None and config.report:
        contents.draw_report(folder, stream)
    if done == config.rounds:  # nothing was left to do
        found = contents.read_end(folder)
    rounds = folder.read_table("rounds", records.TEXT_COLUMNS)
    if found is None:
        return Outcome(state, rounds, None, "", stop.requested)
    return Outcome(state, rounds, *found, "")


def _stop_request(together: int) -> StopRequest:
    if together == 1:
        return StopRequest()
    return StopRequest(then=f"up to {together} rounds on the device end and are saved")


def _go_on(
    prepared: Prepared, folder: RunFolder, checkpoints: Checkpoints
) -> tuple[int, RoundState]:
    """The last round saved and its state; rows of later rounds are dropped."""
    done, state = checkpoints.restore_latest(prepared.state) or (0, prepared.state)
    for table in ("rounds", "coalitions"):
        folder.truncate_after(table, "round", done)
    return done, state


def _hand_out(
    prepared: Prepared, first: int, chunk: Chunk, seconds: float, in_order: Sequence[Sink]
) -> None:
    """Each round of a chunk, to each sink; the last one with the state."""
    fleet, traffic = prepared.fleet, prepared.engine.traffic
    last = first + len(chunk.infos) - 1
    for number, info in enumerate(chunk.infos, start=first):
        row = records.round_row(number, info, fleet, seconds, traffic)
        kept = sinks.Kept(chunk.state, chunk.snapshot) if number == last else None
        for sink in in_order:
            sink.on_round(RoundRecord(number, info, row, kept))
