"""What a run says in plain words, on the terminal and in `summary.txt`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedjax_hk import metrics
from fedjax_hk.config import Config
from fedjax_hk.records import AFFINITY_NAMES
from fedjax_hk.terminal import format_table
from fedjax_hk.types import Fleet

NAIVE_NAMES = {
    "yesterday": "the reading before",
    "last_week": "same time last week",
    "mean_7_days": "mean of the last 7 days",
    "train_median": "the client's training median",
}


def describe_fleet(fleet: Fleet) -> str:
    """One paragraph on the data."""
    train_n, test_n = fleet.train.mask.sum(axis=1), fleet.test.mask.sum(axis=1)
    lines = [
        f"Data: {fleet.source}",
        f"  {len(fleet.client_ids)} clients, {int(np.median(train_n))} training and "
        f"{int(np.median(test_n))} test windows each (median; {train_n.min()} to "
        f"{train_n.max()} training).",
    ]
    if fleet.excluded:
        lines.append(f"  {len(fleet.excluded)} left out (all in excluded.csv), such as:")
        lines += [f"    {one.client}: {one.reason}" for one in fleet.excluded[:3]]
    return "\n".join(lines)


def round_line(row: dict[str, Any], unit: str) -> str:
    """The round in one line of the terminal."""
    sizes = row["coalition_sizes"].split()
    shown = ", ".join(sizes[:4]) + (", ..." if len(sizes) > 4 else "")
    many = "coalition" if len(sizes) == 1 else "coalitions"
    line = f"MAE {row['mae_units']:.4g} {unit}  "
    line += f"{len(sizes)} {many} ({shown})" if sizes else "no coalition"
    if row["dead_clients"]:
        line += f"  {row['dead_clients']} dead"
    if row["clients"] < row["sampled_clients"]:
        line += f"  left out: {row['left_out']}"
    return line


def partition_counts(config: Config) -> bool:
    """Whether the global model depends on the partition (spec: eqs. 15, 16 do)."""
    rule = config.rule()
    return (rule.within, rule.between) not in (("uniform", "size"), ("samples", "samples"))


def threshold_meaning(config: Config) -> str:
    """What the rule's threshold means, as `splitting_threshold` names it."""
    if config.epsilon is not None:
        return "distance"
    return config.euclid_tau if config.rule().partition == "hk_euclidean" else "cosine"


def nothing_changed(row: dict[str, Any], config: Config, splitting: str | None) -> str:
    """Why a partition that changes nothing does not, and what to try instead.

    Args:
      splitting: threshold under which this round's opinions give another aggregate, None if
        none is known.
    """
    num, clients = row["num_coalitions"], row["clients"]
    if not partition_counts(config):
        rule = config.rule()
        shape = f"--within={rule.within} --between={rule.between} weigh every client alike"
    elif num == 1:
        shape = "all clients are one coalition"
    elif num == clients:
        shape = "every client is alone"
    else:
        shape = f"all {num} coalitions weigh as many clients"
    spread = ", ".join(f"{name} {row[f'apart_{name}']:.3g}" for name in AFFINITY_NAMES)
    raw = config.epsilon is not None
    measure = "distance" if raw else "1 - cos"
    lines = [
        f"Note: in round {row['round']} the partition changes nothing: {shape}, so the global "
        "model is the plain mean of the local ones.",
        f"  {measure} of the pairs: {spread}"
        + (f"; neighbors are within {row['limit']:.3g}." if np.isfinite(row["limit"]) else "."),
    ]
    if splitting is not None:
        lines.append(f"  A threshold that would change this round: {_as_flag(splitting, config)}")
    tries = []
    if not partition_counts(config):
        tries.append("--within=uniform --between=equal")
    elif config.agg in ("hk_cosine", "hk_euclidean") and config.tau_mode == "absolute":
        tries.append("--tau_mode=quantile --tau=0.95" + (" without --epsilon" if raw else ""))
    if config.opinion in (None, "weights"):
        tries.insert(0, "--opinion=update (compare what clients learned this round)")
    if config.rule().serve == "global":
        tries.append("--serve=coalition")
    if tries:
        lines.append("  Try: " + "; ".join(tries) + ".")
    return "\n".join(lines)


def _as_flag(threshold: str, config: Config) -> str:
    """The flags that set a threshold."""
    if config.epsilon is not None:
        return f"--epsilon={threshold}"
    flags = f"--tau={threshold}"
    if config.rule().partition == "hk_band":
        flags = f"--eps_lower={threshold} --eps_upper=1"
    return flags + (" --tau_mode=absolute" if config.tau_mode != "absolute" else "")


def summarize(config: Config, fleet: Fleet, rounds: pd.DataFrame, clients: pd.DataFrame) -> str:
    """The end of a run: errors beside the naive forecasts, coalitions, what to look at."""
    unit = fleet.unit or "units"
    parts = [
        f"{config.agg} after {len(rounds)} rounds, {len(clients)} clients judged on the last "
        "fifth of their readings:",
        _error_table(fleet, clients, unit),
        _verdict(clients, unit),
        _coalitions(config, fleet, rounds, clients),
    ]
    unscored = ~np.isfinite(clients["mae_units"])
    if unscored.any():
        parts.append(
            f"Clients whose forecasts are not finite, left out of the means: {unscored.sum()}, "
            f"such as {_some(clients['client'][unscored])}."
        )
    empty = clients["accuracy"].isna() & ~unscored
    if empty.any():
        parts.append(
            f"Clients that read zero throughout their test span: {empty.sum()}, such as "
            f"{_some(clients['client'][empty])}. They have no accuracy and count in the other "
            "means."
        )
    dead = int(clients["dead"].sum())
    if dead:
        parts.append(
            f"{dead} clients are forecast as zero throughout (dead output); "
            "--activation=softplus cannot die."
        )
    if rounds["diverged_clients"].sum():
        parts.append(
            f"Models that were not finite were left out {int(rounds['diverged_clients'].sum())} "
            "times; who and when is in coalitions.csv. A smaller --learning_rate may help."
        )
    return "\n\n".join(part for part in parts if part)


def _some(names: pd.Series) -> str:
    return ", ".join(names.head(3))


def _error_table(fleet: Fleet, clients: pd.DataFrame, unit: str) -> str:
    rows = [_error_row("the federated model", clients["mae_units"], clients["rmse_units"],
                       clients["accuracy"], clients["mse"])]  # fmt: skip
    for name, errors in metrics.naive_errors(fleet).items():
        rows.append(
            _error_row(
                NAIVE_NAMES.get(name, name),
                errors.mae_units,
                errors.rmse_units,
                errors.accuracy,
                errors.mse,
            )
        )
    header = [
        "forecast", f"MAE {unit}", "std", "median", "worst tenth", f"RMSE {unit}", "accuracy",
        "MSE scaled",
    ]  # fmt: skip
    return format_table(rows, header)


def _error_row(name, mae, rmse, accuracy, mse) -> list[str]:
    spread = metrics.spread(np.asarray(mae))
    right = metrics.spread(np.asarray(accuracy), higher_is_better=True)["mean"]
    return [
        name,
        *(f"{spread[key]:.4g}" for key in ("mean", "std", "median", "worst_tenth")),
        f"{metrics.spread(np.asarray(rmse))['mean']:.4g}",
        f"{100 * right:.1f} %",
        f"{metrics.spread(np.asarray(mse))['mean']:.5f}",
    ]


def _verdict(clients: pd.DataFrame, unit: str) -> str:
    """The model against the best naive forecast, client by client."""
    naive = [c for c in clients.columns if c.endswith("_mae_units") and c != "mae_units"]
    if not naive:
        return ""
    best = min(naive, key=lambda column: clients[column].mean())
    name = NAIVE_NAMES.get(best.removesuffix("_mae_units"), best)
    difference = (clients["mae_units"] - clients[best]).replace([np.inf, -np.inf], np.nan)
    if difference.isna().all():
        return "No client's forecasts are finite: the model cannot be compared."
    better, known = int((difference < 0).sum()), int(difference.notna().sum())
    word = "beats" if difference.mean() < 0 else "does NOT beat"
    return (
        f"The model {word} the best naive forecast ({name}): {abs(difference.mean()):.3g} {unit} "
        f"{'less' if difference.mean() < 0 else 'more'} on average; "
        f"it is better for {better} of {known} clients."
    )


def _coalitions(config, fleet, rounds: pd.DataFrame, clients: pd.DataFrame) -> str:
    if config.rule().partition in ("none", "singletons", "planted"):
        return ""
    num = rounds["num_coalitions"]
    idle = int(rounds["changes_nothing"].sum())
    lines = [
        f"Coalitions a round: {num.min()} to {num.max()} (median {num.median():g}); "
        f"largest weight of one client {rounds['largest_weight'].max():.3f}.",
    ]
    if idle and config.rule().serve == "global":
        lines.append(
            f"In {idle} of {len(rounds)} rounds the partition changed nothing: the result there "
            "is that of a uniform average of the clients."
        )
    stuck = int((~rounds["converged"].astype(bool)).sum())
    if stuck:
        lines.append(f"In {stuck} rounds opinions were still moving at the last inner step.")
    if fleet.planted is not None and rounds["agreement"].notna().any():
        lines.append(
            f"Agreement with the planted groups (adjusted Rand index, 1 is perfect, 0 is "
            f"chance): {rounds['agreement'].mean():.2f} on average."
        )
    often = clients[clients["rounds_alone"] > 0].sort_values("rounds_alone", ascending=False)
    if len(often) and num.max() > 1:
        shown = ", ".join(
            f"{one.client} ({one.rounds_alone} of {one.rounds_sampled})"
            for one in often.head(5).itertuples()
        )
        lines.append(f"Most often alone in their rounds: {shown}.")
    return "\n".join(lines)
