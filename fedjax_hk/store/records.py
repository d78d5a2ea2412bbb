"""Rows of the run folder's tables, from what a round returned. NumPy only, on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedjax_hk import hk, metrics
from fedjax_hk.round.state import RoundInfo, Traffic
from fedjax_hk.tasks import TASKS, Task
from fedjax_hk.types import Fleet

QUANTILE_NAMES = ("min", "q25", "median", "q75", "max")
TEXT_COLUMNS = ("coalition_sizes", "left_out")  # of rounds.csv, whatever they look like
POOLED = "all windows"  # stands for a client's name where they are trained on as one
NOT_FINITE = "not finite"  # the status of a client whose model or loss diverged


def round_row(
    round_number: int,
    info: RoundInfo[np.ndarray],
    fleet: Fleet,
    seconds: float,
    traffic: Traffic = Traffic(0, 0),  # noqa: B008
) -> dict[str, Any]:
    """One row a round: `rounds.csv`.

    The task says which errors there are. `apart_*` are quantiles of the pairs' 1 - cos (or
    distances), which `limit` is compared with. `bytes_down` goes to everybody who is asked,
    `bytes_up` comes from everybody who answers; `*_tuned` are errors after the fine-tuning
    epochs, if there are any; `attackers_mixed` as in `Seating`.
    """
    present_s = info.present_s
    loss_s = info.loss_s[present_s]
    weights_s = info.weights_s[info.weights_s > 0]
    left_out = [_name(fleet, c) for c in info.cohort_s[info.sampled_s & ~info.present_s]]
    diverged = [_name(fleet, c) for c in info.cohort_s[~info.finite_s]]
    return {
        "round": round_number,
        "sampled_clients": int(info.sampled_s.sum()),
        "clients": int(present_s.sum()),
        "local_steps": int(info.steps_s[present_s].sum()),
        "bytes_down": traffic.down * int(info.sampled_s.sum()),
        "bytes_up": traffic.up * int(info.reported_s.sum()),
        "train_loss": float(loss_s.mean()) if len(loss_s) else float("nan"),
        **TASKS[fleet.task].tables.columns(info.errors),
        **_tuned(info, TASKS[fleet.task]),
        "num_coalitions": int(info.num_coalitions),
        "coalition_sizes": " ".join(map(str, coalition_sizes(info.labels_s))),
        "inner_steps": int(info.num_steps),
        "converged": bool(info.converged),
        "margin": float(info.margin),
        "residual": float(info.residual),
        "limit": float(info.limit),
        **{
            f"apart_{name}": float(value)
            for name, value in zip(QUANTILE_NAMES, info.dissimilarity_q, strict=True)
        },
        "largest_weight": float(weights_s.max()) if len(weights_s) else float("nan"),
        "effective_clients": (
            float(1 / np.sum(weights_s.astype(np.float64) ** 2)) if len(weights_s) else 0.0
        ),
        "changes_nothing": bool(info.changes_nothing),
        "agreement": agreement(info, fleet),
        "attackers_mixed": seating(info.labels_s, info.attacker_s).attackers_mixed,
        "dispersion": float(info.dispersion),
        "within_spread": float(info.within_spread),
        "gradient_spread": float(info.gradient_spread),
        "gradient_norm": float(info.gradient_norm),
        "dead_clients": int(info.dead_n.sum()),
        "diverged_clients": len(diverged),
        "left_out": " ".join(left_out),
        "seconds": round(seconds, 4),
    }


def _tuned(info: RoundInfo[np.ndarray], task: Task) -> dict[str, float]:
    """Mean errors after the fine-tuning epochs; nothing without any."""
    errors = info.finetuned_errors
    return {
        f"{name}_tuned": metrics.spread(getattr(errors, name))["mean"]
        for name in task.tables.kept
        if errors
    }


def _name(fleet: Fleet, client: int) -> str:
    return fleet.client_ids[client] if client >= 0 else POOLED


def agreement(info: RoundInfo[np.ndarray], fleet: Fleet) -> float:
    """Adjusted Rand index of the coalitions with the planted groups; NaN without truth."""
    if fleet.planted is None or not info.present_s.any() or (info.cohort_s < 0).any():
        return float("nan")
    return float(metrics.agreement(info.labels_s, fleet.planted[info.cohort_s]))


class Seating(NamedTuple):
    """Whom attackers sat with; NaN where a round has nobody of that kind.

    Attributes:
      attackers_mixed: share of the attackers that shared a coalition with an honest client.
      attackers_alone: share of the attackers in a coalition of one; the rest sat with
        attackers only.
      honest_mixed: share of the honest clients that shared a coalition with an attacker.
    """

    attackers_mixed: float
    attackers_alone: float
    honest_mixed: float


def seating(labels_s: np.ndarray, attacker_s: np.ndarray) -> Seating:
    """Who sat with whom, of those who took part.

    Args:
      labels_s: `[S]` coalition of each client, -1 if left out.
      attacker_s: `[S]` bool.
    """
    present_s = labels_s >= 0
    same_ss = labels_s[:, None] == labels_s[None, :]
    bad_s, good_s = present_s & attacker_s, present_s & ~attacker_s

    def share(true_s, of_s):
        return float(true_s[of_s].mean()) if of_s.any() else float("nan")

    return Seating(
        attackers_mixed=share((same_ss & good_s).any(axis=1), bad_s),
        attackers_alone=share(same_ss.sum(axis=1) == 1, bad_s),
        honest_mixed=share((same_ss & bad_s).any(axis=1), good_s),
    )


def coalition_sizes(labels_s: np.ndarray) -> list[int]:
    """Sizes of the coalitions, largest first."""
    _, counts = np.unique(labels_s[labels_s >= 0], return_counts=True)
    return sorted((int(count) for count in counts), reverse=True)


def coalition_rows(
    round_number: int, info: RoundInfo[np.ndarray], fleet: Fleet
) -> list[dict[str, Any]]:
    """One row a client and round: `coalitions.csv`. A coalition bears a member's name."""
    rows = []
    for place in np.flatnonzero(info.sampled_s):
        label = int(info.labels_s[place])
        rows.append(
            {
                "round": round_number,
                "client": _name(fleet, info.cohort_s[place]),
                "coalition": _name(fleet, info.cohort_s[label]) if label >= 0 else "",
                "size": int((info.labels_s == label).sum()) if label >= 0 else 0,
                "weight": float(info.weights_s[place]),
                "train_loss": float(info.loss_s[place]),
                "steps": int(info.steps_s[place]),
                "attacker": bool(info.attacker_s[place]),
                "status": _status(info, int(place)),
            }
        )
    return rows


def describe_left_out(info: RoundInfo[np.ndarray], fleet: Fleet) -> str:
    """Who was left out of the round and why, in words; empty if nobody was."""
    by_status: dict[str, list[str]] = {}
    for place in np.flatnonzero(info.sampled_s & ~info.present_s):
        name = _name(fleet, info.cohort_s[place])
        by_status.setdefault(_status(info, int(place)), []).append(name)
    return "; ".join(f"{', '.join(names)} ({status})" for status, names in by_status.items())


def _status(info: RoundInfo[np.ndarray], place: int) -> str:
    if info.present_s[place]:
        return "took part"
    return "unavailable or empty" if info.finite_s[place] else NOT_FINITE


def client_table(
    info: RoundInfo[np.ndarray], fleet: Fleet, coalitions: pd.DataFrame
) -> pd.DataFrame:
    """One row a client: `clients.csv`, errors after the last round and what went before."""
    seen = coalitions[coalitions["status"] == "took part"]
    by_client = seen.groupby("client", sort=False)
    table = pd.DataFrame({"client": list(fleet.client_ids)})
    if fleet.planted is not None:
        table["planted_group"] = fleet.planted
    task = TASKS[fleet.task]
    table[f"train_{task.words.samples_noun}"] = fleet.train.mask.sum(axis=1)
    for name, values in info.errors._asdict().items():
        table[name.replace("num_", "test_")] = values
    if info.finetuned_errors:
        for name, values in info.finetuned_errors._asdict().items():
            table[f"{name}_tuned"] = values
        table = table.drop(columns=f"num_{task.words.samples_noun}_tuned")
    for name, errors in task.judge.naive_errors(fleet).items():
        for field in task.tables.kept:
            table[f"{name}_{field}"] = getattr(errors, field)
    for name, values in task.tables.traits_of(fleet).items():
        table[name] = values
    table["dead"] = info.dead_n
    alone = seen[seen["size"] == 1].groupby("client").size()
    names = fleet.client_ids
    table["rounds_sampled"] = _of_clients(by_client.size(), names, 0)
    table["rounds_alone"] = _of_clients(alone, names, 0)
    table["last_coalition"] = _of_clients(by_client["coalition"].last(), names, "")
    return table


def _of_clients(found: pd.Series, names: tuple[str, ...], otherwise: Any) -> list[Any]:
    """What was found by client, in the fleet's order. Not by `Series.map`, which makes floats
    of a column of which nothing was found."""
    by_name = found.to_dict()
    return [by_name.get(name, otherwise) for name in names]


def opinion_arrays(
    round_number: int,
    info: RoundInfo[np.ndarray],
    fleet: Fleet,
    grams: dict[str, Any],
    neighborhood: Any,
) -> dict[str, np.ndarray]:
    """What the opinions of a round were: `opinions.npz`.

    Args:
      info: of the round.
      grams: inner products by opinion space, from `Engine.gram`.
      neighborhood: `hk.Neighborhood` of the grouping, None for one without a threshold.

    Returns:
      `round`, `cohort` (names), `present`, `labels`, `limit`, `floor` (NaN without a
      threshold), `kind` (`cosine` or `ball`), and for every opinion space
      `gram_<space>`: `[S, S]` inner products, float64.
    """
    arrays: dict[str, Any] = {
        "round": np.int64(round_number),
        "cohort": np.array([_name(fleet, c) for c in np.asarray(info.cohort_s)], str),
        "present": np.asarray(info.present_s),
        "labels": np.asarray(info.labels_s),
        "limit": np.float64(info.limit),
        "floor": np.float64(neighborhood.floor if neighborhood else np.nan),
        "kind": np.array(neighborhood.kind if neighborhood else "cosine"),
    }
    return arrays | {f"gram_{name}": hk.inner_products(one) for name, one in grams.items()}
