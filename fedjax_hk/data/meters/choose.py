"""Who of a fleet takes part: households that use enough, for long enough."""

from __future__ import annotations

import numpy as np

from fedjax_hk.data.errors import DataError, first_reasons
from fedjax_hk.data.meters.clock import DAY
from fedjax_hk.data.meters.reshape import keep_clients
from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded

# The FedHK paper's counts (section 5.1): all households of the Alicante set, those that use
# 1.6 times the mean, and those of them with two years of data.
_PAPER = 1099, 188, 184
_PAPER_FLAGS = 1.6, 730
_LIKE_PAPER = 0.05  # a fleet this close to the first count is taken for that set


def choose_clients(table: Table, active_factor: float = 0, min_days: int = 0) -> Table:
    """Leaves out clients that use too little or were recorded too short.

    Args:
      active_factor: least mean use, as a multiple of the mean over clients of their mean
        use; 0 keeps everybody.
      min_days: least days from a client's first to its last reading, both included.

    Errors: DataError with the numbers if nobody is left.

    Source: eq. (17) and section 5.1 of the FedHK paper; spec A35.
    """
    known_tn = np.isfinite(table.values_tn)
    count_n = known_tn.sum(axis=0)
    step = int((table.times[1] - table.times[0]).astype(np.int64))
    sum_n = np.where(known_tn, table.values_tn, 0.0).sum(axis=0)
    mean_n = np.where(count_n > 0, sum_n / np.maximum(count_n, 1), np.nan)
    fleet_mean = np.nanmean(mean_n) if count_n.any() else np.nan
    last_n = len(known_tn) - known_tn[::-1].argmax(axis=0)
    days_n = np.where(count_n > 0, (last_n - known_tn.argmax(axis=0)) * step / DAY, 0.0)
    active_n = ~(mean_n < active_factor * fleet_mean)
    enough_n = days_n >= min_days
    unit = table.unit or "units"
    excluded = []
    for i in np.flatnonzero(~(active_n & enough_n)):
        if not active_n[i]:
            reason = (
                f"mean use {mean_n[i]:.4g} {unit} a step is below {active_factor:g} times the "
                f"fleet's {fleet_mean:.4g} (--active_factor)"
            )
        else:
            reason = f"{days_n[i]:g} days of data, fewer than {min_days} (--min_days)"
        excluded.append(Excluded(table.client_ids[i], reason))
    counts = len(count_n), int(active_n.sum()), int((active_n & enough_n).sum())
    if not counts[2]:
        raise DataError(
            f"--active_factor={active_factor:g} and --min_days={min_days} leave none of the "
            f"{counts[0]} clients of {table.source}: {counts[1]} use enough, {counts[2]} of them "
            f"for long enough. Lower them.{first_reasons(excluded)}"
        )
    notes = [table.source]
    if active_factor:
        notes.append(f"{counts[1]} of {counts[0]} clients use {active_factor:g} times the mean")
    if min_days:
        notes.append(f"{counts[2]} of these have {min_days} days of data")
    whole = counts[0] + len(table.excluded)
    if abs(whole - _PAPER[0]) <= _LIKE_PAPER * _PAPER[0]:
        notes.append(_against_the_paper(whole, counts, (active_factor, min_days)))
    table = keep_clients(table, active_n & enough_n, tuple(excluded))
    return table._replace(source="; ".join(notes))


def _against_the_paper(whole: int, counts: tuple[int, int, int], given) -> str:
    """What was found of the counts that the paper gives for its data set."""
    said = f"the paper has {_PAPER[0]} households, {_PAPER[1]} of them active, {_PAPER[2]} used"
    if given != _PAPER_FLAGS:
        return f"{said} (with --active_factor=1.6 --min_days=730); this file has {whole}"
    found = whole, *counts[1:]
    word = "as here" if found == _PAPER else f"here {found[0]}, {found[1]} and {found[2]}"
    return f"{said}; {word}"
