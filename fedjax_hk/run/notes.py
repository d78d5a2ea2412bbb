"""What a run says once: a grouping that changes nothing, clients that were left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from fedjax_hk.report import summary
from fedjax_hk.report.coalition_map import splitting_threshold
from fedjax_hk.round.state import RoundInfo
from fedjax_hk.settings import thresholds
from fedjax_hk.settings.choices import GROUPINGS
from fedjax_hk.settings.config import Config
from fedjax_hk.store import records
from fedjax_hk.types import Fleet, Params


class Notes:
    """Remembers what was said.

    Args:
      before: `rounds.csv` of a run that goes on, which does not say it again; else None.
    """

    def __init__(self, config: Config, fleet: Fleet, before: pd.DataFrame | None = None):
        self._config, self._fleet = config, fleet
        self._looks = GROUPINGS[config.rule().grouping].looks
        self._said_nothing, self._last_left_out = False, ""
        if before is not None:
            self._said_nothing = bool((before["changes_nothing"] & (before["clients"] > 1)).any())
            self._last_left_out = before["left_out"].iloc[-1] or ""

    def about(
        self, row: dict[str, Any], info: RoundInfo, gram: Callable[[], Params] | None
    ) -> Iterator[str]:
        """The notes on a round.

        Args:
          row: of `rounds.csv`.
          info: `RoundInfo`, as NumPy.
          gram: makes the inner products of what the rule compares; None where they are gone.
        """
        left_out = records.describe_left_out(info, self._fleet)
        if row["clients"] == 0:
            yield (
                f"Note: in round {row['round']} nobody took part, left out: {left_out}; "
                "the model stays as it was."
            )
        elif left_out and row["left_out"] != self._last_left_out:
            yield (
                f"Note: in round {row['round']} left out: {left_out}; the average is over the "
                "others (all rounds: coalitions.csv)."
            )
        self._last_left_out = row["left_out"]
        rule = self._config.rule()
        idle = row["changes_nothing"] and rule.serve == "global" and row["clients"] > 1
        if self._looks and idle and not self._said_nothing:
            self._said_nothing = True
            threshold = self._threshold(row, info, gram)
            yield summary.nothing_changed(row, self._config, threshold)

    def _threshold(
        self, row: dict[str, Any], info: RoundInfo, gram: Callable[[], Params] | None
    ) -> str | None:
        """A threshold that would change the round, if one is known."""
        config, rule = self._config, self._config.rule()
        weighing = (rule.within, rule.between, config.min_coalition)
        if gram is None or not np.isfinite(row["limit"]) or weighing != ("uniform", "equal", 1):
            return None
        meaning = thresholds.meaning_of(config, outright=True)
        if meaning is None:
            return None
        return splitting_threshold(gram(), info.present_s, meaning, state_norm=config.state_norm)
