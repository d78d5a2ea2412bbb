"""From tables to tables: coarser steps, several files as one, meters that are there twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedjax_hk.data.errors import DataError, first_reasons
from fedjax_hk.data.meters.clock import DAY, STEPS, clock, step_in_words
from fedjax_hk.data.table import Table
from fedjax_hk.types import Excluded

# Two columns are one meter if this share of the readings above zero that both have is
# equal, and there are this many of them: idle homes are alike without being one.
_SAME_SHARE = 0.9
_SAME_LEAST = 20
_SAMPLED_CELLS = 2e9  # pairs times steps that are compared to find candidates


def resampled(table: Table, every: str, zone: str) -> Table:
    """Sums of readings over hours, or days or weeks of a zone's calendar.

    A period is missing if one of its readings is. Weeks begin on Monday.

    Args:
      every: "hourly", "daily" or "weekly"; "" leaves the table as it is.
      zone: whose calendar it is if the table's times are UTC; "" takes them as they are.

    Errors: DataError if the readings are coarser than the period, or do not divide it.
    """
    step = int((table.times[1] - table.times[0]).astype(np.int64))
    if not every or step == STEPS[every]:
        return table
    if step > STEPS[every] or STEPS[every] % step:
        raise DataError(
            f"--resample={every}: {table.source} has steps of {step_in_words(step)}, which do not "
            "add up to such periods. Choose a coarser one or leave it out."
        )
    time_t = table.times.astype(np.int64)
    # Days are the calendar's own already, whatever the clocks do.
    calendar = clock(zone if step < DAY else "")
    edge_p, name_p = calendar.edges(every, int(time_t[0]), int(time_t[-1]) + 1)
    first_p = np.searchsorted(time_t, edge_p)
    whole_p = np.diff(first_p) * step == np.diff(edge_p)
    sums_pn = np.add.reduceat(table.values_tn, first_p[:-1], axis=0)
    sums_pn[~whole_p] = np.nan
    known = np.flatnonzero(np.isfinite(sums_pn).any(axis=1))
    if len(known) < 2:
        raise DataError(
            f"--resample={every}: {table.source} has no two whole periods from {table.times[0]} "
            f"to {table.times[-1]}. Give longer series or finer steps."
        )
    span = slice(known[0], known[-1] + 1)
    notes = [n for n in (table.source, f"{every} sums of steps of {step} s") if n]
    return table._replace(
        times=name_p[span].astype("datetime64[s]"),
        values_tn=sums_pn[span],
        source="; ".join(notes),
    )


def joined(tables: list[Table], names: list[str]) -> Table:
    """Several tables as one on a common grid.

    A client in two of them keeps the readings of both; it is left out if they differ.

    Args:
      names: of the tables, for messages.

    Errors: DataError if steps differ or do not meet.
    """
    if len(tables) == 1:
        return tables[0]
    times = _common_grid(tables, names)
    ids = list(dict.fromkeys(client for table in tables for client in table.client_ids))
    column = {client: i for i, client in enumerate(ids)}
    values_tn, filled_tn = (np.full((len(times), len(ids)), np.nan) for _ in range(2))
    excluded = {one.client: one for table in tables for one in table.excluded}
    for table, name in zip(tables, names, strict=True):
        rows = np.searchsorted(times, table.times)
        place = np.ix_(rows, np.array([column[client] for client in table.client_ids], int))
        excluded |= {one.client: one for one in _differing(values_tn[place], table, name)}
        filled = table.values_tn if table.filled_tn is None else table.filled_tn
        for whole_tn, own_tn in ((values_tn, table.values_tn), (filled_tn, filled)):
            whole_tn[place] = np.where(np.isnan(whole_tn[place]), own_tn, whole_tn[place])
    keep = [i for i, client in enumerate(ids) if client not in excluded]
    if not keep:
        reasons = first_reasons(list(excluded.values()))
        raise DataError(f"No client of {', '.join(names)} can be used.{reasons}")
    sources = [f"{name}: {t.source}" for t, name in zip(tables, names, strict=True) if t.source]
    return tables[0]._replace(
        times=times,
        client_ids=tuple(ids[i] for i in keep),
        values_tn=values_tn[:, keep],
        source="; ".join(sources),
        excluded=tuple(excluded.values()),
        filled_tn=None if all(t.filled_tn is None for t in tables) else filled_tn[:, keep],
    )


def _common_grid(tables: list[Table], names: list[str]) -> np.ndarray:
    """The times that all tables lie on, from the first to the last of them.

    Errors: DataError if steps differ or do not meet.
    """
    first = tables[0].times
    start, step = min(table.times[0] for table in tables), first[1] - first[0]
    for table, name in zip(tables, names, strict=True):
        own = table.times[1] - table.times[0]
        if own != step or (table.times[0] - start) % step:
            raise DataError(
                f"{name} has steps of {step_in_words(own)} from {table.times[0]}, {names[0]} "
                f"steps of {step_in_words(step)} from {first[0]}, which are no common grid. "
                "Give --resample, or read them apart."
            )
    return np.arange(start, max(table.times[-1] for table in tables) + step, step)


def _differing(before_tn: np.ndarray, table: Table, name: str) -> Iterator[Excluded]:
    """Clients whose readings are others than the files before have, `[T, N]` as the table's."""
    differs_tn = np.abs(before_tn - table.values_tn) > 1e-6
    for i in np.flatnonzero(differs_tn.any(axis=0)):
        at = differs_tn[:, i].argmax()
        yield Excluded(
            table.client_ids[i],
            f"at {table.times[at]} {name} has {table.values_tn[at, i]:g} and another file "
            f"{before_tn[at, i]:g}; give one of them, or name the clients apart",
        )


def without_twins(table: Table) -> Table:
    """Leaves out clients whose readings are those of another one, which has more of them.

    The same meter under two names would be in the training data of one client and in the
    test data of another.
    """
    values_tn = table.values_tn
    twin_of: dict[int, tuple[int, int, int]] = {}
    # The one with the most readings is kept; the first in the file if several have.
    rank = np.argsort(-np.isfinite(values_tn).sum(axis=0), kind="stable")
    for a, b in _candidates(values_tn[:, rank]):
        kept, other = rank[a], rank[b]
        if kept in twin_of or other in twin_of:
            continue
        both_t = (values_tn[:, kept] > 0) & (values_tn[:, other] > 0)
        equal, num = int((values_tn[both_t, kept] == values_tn[both_t, other]).sum()), both_t.sum()
        own = (values_tn[:, other] > 0).sum()
        if num >= _SAME_LEAST and equal >= _SAME_SHARE * num and 2 * num >= own:
            twin_of[other] = kept, equal, int(num)
    if not twin_of:
        return table
    ids, known_n = table.client_ids, np.isfinite(values_tn).sum(axis=0)
    excluded = tuple(
        Excluded(
            ids[i],
            f"the same meter as {ids[kept]}, which is kept ({known_n[kept]} readings against "
            f"{known_n[i]}): {equal} of the {num} above zero that both have are equal",
        )
        for i, (kept, equal, num) in sorted(twin_of.items())
    )
    keep = np.array([i not in twin_of for i in range(len(ids))])
    return keep_clients(table, keep, excluded)


def _candidates(values_tn: np.ndarray):
    """Pairs of columns, first one first, that agree on a sample of times."""
    num_times, num = values_tn.shape
    sample = max(int(_SAMPLED_CELLS / num**2), 2 * _SAME_LEAST)
    sampled_tn = values_tn[:: max(num_times // sample, 1)]
    positive_tn = sampled_tn > 0
    for a in range(num - 1):
        times = np.flatnonzero(positive_tn[:, a])
        both_tn = positive_tn[times, a + 1 :]
        equal_tn = sampled_tn[times, a + 1 :] == sampled_tn[times, a][:, None]
        num_n, equal_n = both_tn.sum(axis=0), (both_tn & equal_tn).sum(axis=0)
        for b in np.flatnonzero((num_n > 0) & (equal_n >= _SAME_SHARE * num_n)):
            yield a, a + 1 + b


def keep_clients(table: Table, keep_n: np.ndarray, excluded: tuple[Excluded, ...]) -> Table:
    """The table without some clients, who join those left out."""
    return table._replace(
        client_ids=tuple(c for c, keep in zip(table.client_ids, keep_n, strict=True) if keep),
        values_tn=table.values_tn[:, keep_n],
        planted=None if table.planted is None else table.planted[keep_n],
        excluded=(*table.excluded, *excluded),
        filled_tn=None if table.filled_tn is None else table.filled_tn[:, keep_n],
    )
