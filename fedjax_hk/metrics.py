"""Figures over clients: their spread, the interval of a mean, and agreement of groupings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


def spread(values_n: ArrayLike, *, higher_is_better: bool = False) -> dict[str, float]:
    """How a figure is spread over the clients.

    Args:
      values_n: `[N]`; clients whose value is not finite are left out and counted.
      higher_is_better: True for accuracy, where the worst clients have the lowest.

    Returns:
      mean, std (over clients, divided by their number), q10, q25, median, q75, q90,
      worst_tenth (mean of the worst tenth of the clients, at least one), num_clients
      and num_left_out; NaN for all but the counts if nobody is left.

    Examples:
      >>> found = spread([1.0, 2.0, 6.0, float("nan")])
      >>> found["mean"], found["median"], found["worst_tenth"], found["num_left_out"]
      (3.0, 2.0, 6.0, 1)
      >>> spread([0.9, 0.5, 0.8], higher_is_better=True)["worst_tenth"]
      0.5
    """
    values_n = np.asarray(values_n, np.float64)
    kept = np.sort(values_n[np.isfinite(values_n)])
    counts = {"num_clients": len(kept), "num_left_out": len(values_n) - len(kept)}
    if not len(kept):
        names = ("mean", "std", "q10", "q25", "median", "q75", "q90", "worst_tenth")
        return dict.fromkeys(names, float("nan")) | counts
    num_worst = -(-len(kept) // 10)
    worst = kept[:num_worst] if higher_is_better else kept[-num_worst:]
    q10, q25, median, q75, q90 = (float(q) for q in np.quantile(kept, (0.1, 0.25, 0.5, 0.75, 0.9)))
    return {
        "mean": float(kept.mean()),
        "std": float(kept.std()),
        "q10": q10,
        "q25": q25,
        "median": median,
        "q75": q75,
        "q90": q90,
        "worst_tenth": float(worst.mean()),
    } | counts


class Interval(NamedTuple):
    """Attributes:
    mean: of the values that are finite.
    low, high: 95 % interval of the mean; NaN for fewer than two values.
    num: values that are finite.
    """

    mean: float
    low: float
    high: float
    num: int


def bootstrap_interval(values_n: ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Interval of a mean over clients: percentile bootstrap, clients drawn with replacement.

    For a comparison, give the differences client by client (paired).

    Args:
      values_n: `[N]`; what is not finite is left out.
      seed: the same seed gives the same interval.

    Source: Efron and Tibshirani (1993), chapter 13.
    """
    from scipy import stats  # about a second to load; only the end of a run asks for it

    every_n = np.asarray(values_n, np.float64)
    kept_n = every_n[np.isfinite(every_n)]
    num = len(kept_n)
    if num < 2:
        nan = float("nan")
        return Interval(float(kept_n[0]) if num else nan, nan, nan, num)
    batch = max(1, 2_000_000 // num)  # the draws of all resamples would be 80 MB at N = 1,000
    found = stats.bootstrap(
        (kept_n,), np.mean, n_resamples=resamples, batch=batch, method="percentile", rng=seed
    )
    low, high = found.confidence_interval
    return Interval(float(kept_n.mean()), float(low), float(high), num)


def adjusted_rand_index(labels_a: ArrayLike, labels_b: ArrayLike) -> float:
    """Agreement of two groupings of the same clients: 1 if equal, about 0 if by chance.

    NaN without any client. Source: Hubert and Arabie (1985), in the pair counts of
    Steinley (2004), as scikit-learn has it.
    """
    labels_a, labels_b = np.asarray(labels_a), np.asarray(labels_b)
    if labels_a.shape != labels_b.shape or labels_a.ndim != 1:
        raise ValueError(f"Expected two [S] labels, got {labels_a.shape} and {labels_b.shape}.")
    num = len(labels_a)
    if num == 0:
        return float("nan")
    _, a = np.unique(labels_a, return_inverse=True)
    _, b = np.unique(labels_b, return_inverse=True)
    both = np.bincount(a * (int(b.max()) + 1) + b)

    def ordered_pairs(sizes):  # Python integers: no overflow
        return int((sizes.astype(np.int64) ** 2).sum()) - num

    together, in_a, in_b = (ordered_pairs(s) for s in (both, np.bincount(a), np.bincount(b)))
    only_a, only_b = in_a - together, in_b - together
    if only_a == 0 and only_b == 0:
        return 1.0
    apart = num * num - num - together - only_a - only_b
    above = 2.0 * (together * apart - only_a * only_b)
    below = (together + only_a) * (only_a + apart) + (together + only_b) * (only_b + apart)
    return above / below


def agreement(labels_s: ArrayLike, planted_s: ArrayLike) -> float:
    """Agreement of coalitions with the planted groups: their adjusted Rand index.

    Args:
      labels_s: `[S]` coalition of each client; -1, a masked client, is left out.
      planted_s: `[S]` planted group; -1, a planted outlier, is a group of its own each,
        so that a rule is rewarded for leaving it alone.

    Returns:
      The index, NaN if every client is masked.

    Examples:
      >>> agreement([0, 0, 2, 2, 4], [7, 7, 3, 3, -1])  # how groups are called does not count
      1.0
      >>> agreement([0, 0, 0, 0, 0], [7, 7, 3, 3, -1])  # everybody in one coalition
      0.0
    """
    labels_s, planted_s = np.asarray(labels_s), np.asarray(planted_s)
    if labels_s.shape != planted_s.shape:
        raise ValueError(f"Expected two [S] labels, got {labels_s.shape} and {planted_s.shape}.")
    own_s = planted_s.max(initial=0) + 1 + np.arange(len(planted_s))
    truth_s = np.where(planted_s < 0, own_s, planted_s)
    taking_part_s = labels_s >= 0
    return adjusted_rand_index(labels_s[taking_part_s], truth_s[taking_part_s])
