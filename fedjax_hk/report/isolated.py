"""Clients that were mostly alone in their rounds, and whether they are unusual ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk.tasks import Trait

LEAST_SHARE = 0.5  # alone in at least this share of the rounds it took part in
LEAST_CLIENTS = 3  # on either side, for a comparison that means something


class Comparison(NamedTuple):
    """One trait of the isolated clients beside the others.

    Attributes:
      trait: what was compared.
      isolated, others: medians.
      distance: mean distance of the isolated clients from the fleet's middle, in ranks: 0 in
        the middle, 1 at an end; 0.5 for clients picked blindly.
      p_value: how often clients picked blindly lie at least as far out.
    """

    trait: Trait
    isolated: float
    others: float
    distance: float
    p_value: float


def isolated_clients(clients: pd.DataFrame) -> pd.DataFrame:
    """The rows of `clients.csv` that were mostly alone, those most often alone first."""
    share = clients["rounds_alone"] / clients["rounds_sampled"].where(clients["rounds_sampled"] > 0)
    found = clients.assign(share_alone=share)[share >= LEAST_SHARE]
    return found.sort_values(["share_alone", "rounds_alone"], ascending=False, kind="stable")


def compare(
    clients: pd.DataFrame, traits: Sequence[Trait], resamples: int = 5000, seed: int = 0
) -> list[Comparison]:
    """Whether isolated clients are unlike the others, such as in what they use.

    A permutation test of how far out they lie, over the clients that took part at all (exact
    where there are no more ways to pick them than `resamples`); empty if there are too few on
    either side. A trait that the table lacks is left out.
    """
    from scipy import stats  # see `metrics.bootstrap_interval`

    seen = clients[clients["rounds_sampled"] > 0]
    alone_n = seen.index.isin(isolated_clients(clients).index)
    if min(alone_n.sum(), (~alone_n).sum()) < LEAST_CLIENTS:
        return []
    found = []
    for trait in traits:
        if trait.column not in seen:
            continue
        values = seen[trait.column].to_numpy(np.float64)
        far_n = distance_from_middle(values)
        tested = stats.permutation_test(
            (far_n[alone_n], far_n[~alone_n]),
            lambda alone, others, axis: alone.mean(axis=axis),
            n_resamples=resamples, batch=1000, vectorized=True, alternative="greater", rng=seed,
        )  # fmt: skip
        alone, others = (float(np.median(values[side])) for side in (alone_n, ~alone_n))
        statistic, p_value = float(tested.statistic), float(tested.pvalue)
        found.append(Comparison(trait, alone, others, statistic, p_value))
    return found


def distance_from_middle(values_n: np.ndarray) -> np.ndarray:
    """`[N]` how far out each value's rank is: 0 in the middle, 1 at an end; ties share it."""
    ranks_n = pd.Series(values_n).rank().to_numpy()
    return np.abs(2 * (ranks_n - 1) / max(len(values_n) - 1, 1) - 1)


def sentences(clients: pd.DataFrame, unit: str, traits: Sequence[Trait]) -> list[str]:
    """Who was alone and whether that says something about them; empty if nobody was."""
    found = isolated_clients(clients)
    num_seen = int((clients["rounds_sampled"] > 0).sum())
    if not len(found):
        return []
    half = "in at least half of their rounds"
    if len(found) == num_seen:
        return [f"All {num_seen} clients that took part were alone {half}."]
    shown = ", ".join(
        f"{one.client} ({one.rounds_alone} of {one.rounds_sampled})"
        for one in found.head(5).itertuples()
    )
    rest = f", and {len(found) - 5} more" if len(found) > 5 else ""
    lines = [f"Alone {half}: {len(found)} of {num_seen} clients, {shown}{rest}."]
    comparisons = compare(clients, traits)
    if not comparisons:
        lines.append("Too few on one side to say whether they are unusual.")
    for one in comparisons:
        medians = " beside ".join(
            one.trait.shown(value, unit or "units") for value in (one.isolated, one.others)
        )
        word = "unusual" if one.p_value < 0.05 else "not unusual"
        lines.append(
            f"In {one.trait.words} they are {word}: {medians} (medians, the others second); "
            f"distance from the fleet's middle {one.distance:.2f}, 0.50 by chance (p = "
            f"{one.p_value:.2g})."
        )
    return lines
