"""What the pictures of a report show, as numbers; `plots.py` draws them.

S clients of the last round   N clients   R rounds   T thresholds or inner steps
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from fedjax_hk import hk
from fedjax_hk.report.coalition_map import CoalitionMap, coalition_map, pair_limits
from fedjax_hk.report.isolated import isolated_clients
from fedjax_hk.rules.grouping import pair_dissimilarity
from fedjax_hk.rules.hegselmann_krause import MAX_STEPS
from fedjax_hk.tasks import Headline

MAP_CLIENTS = 200  # the map of more clients takes minutes; so many are drawn for it
NUM_LIMITS = 64
SPACES = {"weights": "Weights", "update": "Updates", "centered": "Weights minus their mean"}


_pair_dissimilarity = jax.jit(pair_dissimilarity, static_argnames="kind")


class Opinions(NamedTuple):
    """`opinions.npz` of a run folder; see `records.opinion_arrays`."""

    round: int
    cohort: list[str]
    present: np.ndarray
    labels: np.ndarray
    limit: float
    floor: float
    kind: str
    grams: dict[str, np.ndarray]


class Trajectory(NamedTuple):
    """Attributes:
    positions_tsa: `[T, S, 2]` of the clients that took part, on the two axes along which
      their opinions differ most, before the first and after every inner step.
    share_a: `[2]` of the opinions' variance that lies along each axis.
    labels_s: `[S]` coalition.
    """

    positions_tsa: np.ndarray
    share_a: np.ndarray
    labels_s: np.ndarray


def float64(gram_ss: np.ndarray) -> jax.Array:
    """Inner products on the device without rounding them to float32."""
    with jax.enable_x64(True):
        return jnp.asarray(np.asarray(gram_ss, np.float64))


def trajectory(opinions: Opinions, space: str, state_norm: str, steps: int) -> Trajectory | None:
    """How the opinions moved in the last round; None for a grouping without a threshold.

    All that is needed of the opinions is their inner products G: positions after a step are
    `T z`, the main axes of the centered opinions are those of `H G H`, and the coordinates
    of `T z` on them are `T G H v / sqrt(lambda)`.

    Args:
      steps: inner steps that the round took; the first 12 are shown of more than 300 clients.
    """
    here = opinions.present
    if not np.isfinite(opinions.limit) or here.sum() < 2:
        return None
    gram_ss = opinions.grams[space][np.ix_(here, here)]
    near = hk.Neighborhood(opinions.kind, np.float32(opinions.limit), np.float32(opinions.floor))
    moved = hk.interact_from_gram(
        float64(gram_ss),
        near,
        max_steps=MAX_STEPS,
        state_norm=state_norm,
        trajectory_steps=steps if len(gram_ss) <= 300 else min(steps, 12),
    )
    influence_tss = np.asarray(moved.trajectory, np.float64)

    centered_ss = gram_ss - gram_ss.mean(axis=0, keepdims=True)
    values, axes_sa = np.linalg.eigh(centered_ss - centered_ss.mean(axis=1, keepdims=True))
    values, axes_sa = np.maximum(values[::-1][:2], 0), axes_sa[:, ::-1][:, :2]
    scale_a = np.sqrt(np.where(values > 0, values, 1))
    total = np.trace(centered_ss - centered_ss.mean(axis=1, keepdims=True))
    projected_sa = gram_ss @ (axes_sa - axes_sa.mean(axis=0)) / scale_a
    projected_sa -= projected_sa.mean(axis=0)
    positions_tsa = influence_tss @ projected_sa
    share_a = values / total if total > 0 else np.zeros(2)
    return Trajectory(positions_tsa, share_a, opinions.labels[here])


def limits_of(gram_ss: np.ndarray, mask_s: np.ndarray) -> np.ndarray | None:
    """`[T]` values of 1 - tau from where nobody is linked to tau = -1, ascending; None if no
    two clients differ."""
    pairs = pair_limits(float64(gram_ss), mask_s, "cosine", NUM_LIMITS // 2)
    positive = pairs[np.isfinite(pairs) & (pairs > 0)]
    if not len(positive):
        return None
    # 0.7: one step in which everybody is still alone. 1e-7: tau in float32 ends there.
    whole = np.geomspace(max(0.7 * positive[0], 1e-7), 2.0, NUM_LIMITS - len(pairs))
    return np.sort(np.concatenate([whole, np.where(pairs > 0, pairs, whole[0])]))


def coalition_maps(opinions: Opinions, state_norm: str) -> tuple[dict[str, CoalitionMap], int]:
    """Coalitions over the whole range of tau, for each opinion space.

    Returns:
      maps by space (of cosine thresholds), and how many clients they are of.
    """
    here = np.flatnonzero(opinions.present)
    if len(here) > MAP_CLIENTS:
        here = np.sort(np.random.default_rng(0).permutation(here)[:MAP_CLIENTS])
    maps, mask_s = {}, np.ones(len(here), bool)
    for space in SPACES:
        gram_ss = opinions.grams[space]
        gram_ss = gram_ss[np.ix_(here, here)]
        limits = limits_of(gram_ss, mask_s) if len(here) > 1 else None
        if limits is not None:
            maps[space] = coalition_map(
                float64(gram_ss), mask_s, "cosine", limits, state_norm=state_norm
            )
    return maps, len(here)


class Dissimilarity(NamedTuple):
    """Attributes:
    apart_ss: `[S, S]` dissimilarities of those who took part, ordered by coalition, the
      largest first.
    pairs: of all pairs, `[S (S - 1) / 2]`.
    names: `[S]` in that order.
    sizes: of the coalitions, in that order.
    """

    apart_ss: np.ndarray
    pairs: np.ndarray
    names: list[str]
    sizes: list[int]


def dissimilarity(opinions: Opinions, space: str) -> Dissimilarity | None:
    """Dissimilarities of the last round's opinions; None without a pair."""
    here = np.flatnonzero(opinions.present)
    if len(here) < 2:
        return None
    gram_ss = float64(opinions.grams[space][np.ix_(here, here)])
    apart_ss = np.asarray(_pair_dissimilarity(gram_ss, opinions.kind))
    labels_s = opinions.labels[here]
    names, counts = np.unique(labels_s, return_counts=True)
    size_s = counts[np.searchsorted(names, labels_s)]
    # Within a coalition, those who are close to the others come first.
    order = np.lexsort((apart_ss.mean(axis=1), labels_s, -size_s))
    return Dissimilarity(
        apart_ss[np.ix_(order, order)],
        apart_ss[np.triu_indices(len(here), 1)],
        [opinions.cohort[here[i]] for i in order],
        sorted(map(int, counts), reverse=True),
    )


class Together(NamedTuple):
    """Attributes:
    share_nn: `[N, N]` share of the joint rounds that two clients spent in one coalition; NaN
      if they never took part in the same round.
    names: `[N]`; neighbors in this order were together often.
    """

    share_nn: np.ndarray
    names: list[str]


def together(coalitions: pd.DataFrame) -> Together:
    """Who sat with whom over the rounds, from `coalitions.csv`."""
    seen = coalitions[coalitions["status"] == "took part"]
    names = sorted(seen["client"].unique())
    number = {name: i for i, name in enumerate(names)}
    joint_nn, same_nn = (np.zeros((len(names), len(names)), np.int32) for _ in range(2))
    for _, rows in seen.groupby("round"):
        who = rows["client"].map(number).to_numpy()
        groups = rows["coalition"].to_numpy()
        joint_nn[np.ix_(who, who)] += 1
        same_nn[np.ix_(who, who)] += groups[:, None] == groups[None, :]
    share_nn = np.where(joint_nn > 0, same_nn / np.maximum(joint_nn, 1), np.nan)
    order = _by_similarity(share_nn)
    return Together(share_nn[np.ix_(order, order)], [names[i] for i in order])


def _by_similarity(share_nn: np.ndarray) -> np.ndarray:
    """An order in which clients that were together often are near each other."""
    if len(share_nn) < 3:
        return np.arange(len(share_nn))
    known_nn = np.isfinite(share_nn)
    apart_nn = 1 - np.where(known_nn, share_nn, share_nn[known_nn].mean())
    np.fill_diagonal(apart_nn, 0)
    pairs = squareform(apart_nn, checks=False)
    # Ordering the leaves well takes cubic time.
    tree = linkage(pairs, "average", optimal_ordering=len(share_nn) <= 200)
    return leaves_list(tree)


def telling_clients(clients: pd.DataFrame, headline: Headline) -> list[tuple[str, str]]:
    """Up to three clients to look at, each with its role: the median one, the worst one, and
    the one most often alone (the best one, where nobody is)."""
    ranked = clients[np.isfinite(clients[headline.column])]
    ranked = ranked.sort_values(
        headline.column, ascending=not headline.higher_is_better, kind="stable"
    )
    if not len(ranked):
        return []
    names = ranked["client"].tolist()
    word, (best, worst) = headline.word, ("smallest", "largest")[:: headline.sign]
    found = [(names[(len(names) - 1) // 2], f"median {word}"), (names[-1], f"{worst} {word}")]
    alone = isolated_clients(ranked)["client"].tolist()
    nobody = not alone or len(alone) == len(ranked)
    found.append((names[0], f"{best} {word}") if nobody else (alone[0], "most often alone"))
    roles: dict[str, list[str]] = {}
    for name, role in found:
        roles.setdefault(name, []).append(role)
    return [(name, " and ".join(role)) for name, role in roles.items()]


def last_forecasts(forecasts: pd.DataFrame, client: str) -> pd.DataFrame:
    """The end of a client's test span: 60 readings, or a week where the step is shorter.

    Times without a window are rows of NaN, so that a line breaks there.
    """
    mine = forecasts[forecasts["client"] == client]
    mine = mine.assign(time=pd.to_datetime(mine["time"])).set_index("time").sort_index()
    mine = mine.drop(columns="client")
    if len(mine) < 2:
        return mine
    step = mine.index.to_series().diff().min()
    num = min(max(60, int(pd.Timedelta(days=7) / step)), 400)
    grid = pd.date_range(end=mine.index[-1], periods=num, freq=step)
    return mine.reindex(grid[grid >= mine.index[0]])
