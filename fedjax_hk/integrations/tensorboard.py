"""Rounds as TensorBoard event files."""

from __future__ import annotations

import math
import numbers
import os
import time
from typing import Any


class TensorBoard:
    """A callback of `run.loop.simulate`: every number of `rounds.csv` becomes a scalar.

    A context manager, which closes the file. Written by tensorboardX, which needs no
    TensorFlow; `tensorboard --logdir=FOLDER` shows it.

    Args:
      folder: for the event files; made if it is not there.

    Raises:
      ImportError: tensorboardX is not installed; the message says how to get it.
    """

    def __init__(self, folder: str | os.PathLike):
        check_installed()
        self._folder = str(folder)
        self._writer: Any = None  # tensorboardX has no types

    def on_round_end(self, round_number: int, metrics: dict[str, Any]) -> None:
        # Not its SummaryWriter: that hands events to a thread, and flush does not wait for it.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        now = time.time()
        if self._writer is None:
            os.makedirs(self._folder, exist_ok=True)
            # The suffix: a file's name is else the second it was made in.
            prefix = os.path.join(self._folder, "events")
            self._writer = EventsWriter(prefix, f".from_{round_number}")
            # Hides what a run that was killed had written of rounds that are done again.
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=now, step=round_number, session_log=start))
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if isinstance(value, numbers.Real) and name != "round" and math.isfinite(value)
        ]
        summary = Summary(value=values)
        self._writer.write_event(Event(wall_time=now, step=round_number, summary=summary))
        self._writer.flush()  # a run that is killed has told all it knew

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *exc_info) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def check_installed() -> None:
    """Errors: ImportError if tensorboardX is not there, with the command that gets it."""
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "TensorBoard files need tensorboardX: pip install 'fedjax-hk[tensorboard]'."
        ) from error
