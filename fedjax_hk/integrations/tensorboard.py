"""Rounds as TensorBoard event files."""

from __future__ import annotations

import math
import numbers
import os
from typing import Any


class TensorBoard:
    """A callback of `simulation.run`: every number of `rounds.csv` becomes a scalar.

    Written by tensorboardX, which needs no TensorFlow; `tensorboard --logdir=FOLDER` shows it.

    Args:
      folder: for the event files; made if it is not there.

    Raises:
      ImportError: tensorboardX is not installed; the message says how to get it.
    """

    def __init__(self, folder: str | os.PathLike):
        check_installed()
        self._folder = str(folder)
        self._writer = None

    def on_round_end(self, round_number: int, metrics: dict[str, Any]) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # Hides what a run that was killed had written of rounds that are done again.
            # The suffix: a file's name is else the second it was made in.
            self._writer = SummaryWriter(
                self._folder, purge_step=round_number, filename_suffix=f".from_{round_number}"
            )
        for name, value in metrics.items():
            if isinstance(value, numbers.Real) and name != "round" and math.isfinite(value):
                self._writer.add_scalar(name, float(value), round_number)
        self._writer.flush()  # a run that is killed has told all it knew


def check_installed() -> None:
    """Errors: ImportError if tensorboardX is not there, with the command that gets it."""
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "TensorBoard files need tensorboardX: pip install 'fedjax-hk[tensorboard]'."
        ) from error
