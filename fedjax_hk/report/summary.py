"""What a run says in plain words, on the terminal and in `summary.txt`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedjax_hk import metrics
from fedjax_hk.report import isolated
from fedjax_hk.report.text import format_table
from fedjax_hk.rules import NO_OPINIONS
from fedjax_hk.settings.config import TASK_OF, Config
from fedjax_hk.settings.thresholds import meaning_of
from fedjax_hk.store.records import QUANTILE_NAMES
from fedjax_hk.tasks import TASKS, Task
from fedjax_hk.types import Fleet


def task_of(config: Config) -> Task:
    """What a run learns."""
    return TASKS[TASK_OF[config.samples]]


def describe_fleet(fleet: Fleet) -> str:
    """One paragraph on the data."""
    train_n, test_n = fleet.train.mask.sum(axis=1), fleet.test.mask.sum(axis=1)
    samples = TASKS[fleet.task].words.samples_noun
    lines = [
        f"Data: {fleet.source}",
        f"  {len(fleet.client_ids)} clients, {np.median(train_n):.0f} training and "
        f"{np.median(test_n):.0f} test {samples} each (median; {train_n.min()} to "
        f"{train_n.max()} training).",
    ]
    if fleet.excluded:
        lines.append(f"  {len(fleet.excluded)} left out (all in excluded.csv), such as:")
        lines += [f"    {one.client}: {one.reason}" for one in fleet.excluded[:3]]
    return "\n".join(lines)


def round_line(row: dict[str, Any], unit: str, task: Task) -> str:
    """The round in one line of the terminal."""
    sizes = row["coalition_sizes"].split()
    shown = ", ".join(sizes[:4]) + (", ..." if len(sizes) > 4 else "")
    many = "coalition" if len(sizes) == 1 else "coalitions"
    line = f"{task.words.line(row, unit)}  "
    line += f"{len(sizes)} {many} ({shown})" if sizes else "no coalition"
    if row["dead_clients"]:
        line += f"  {row['dead_clients']} dead"
    if row["clients"] < row["sampled_clients"]:
        line += f"  left out: {row['left_out']}"
    return line


def nothing_changed(row: dict[str, Any], config: Config, splitting: str | None) -> str:
    """Why a grouping that changes nothing does not, and what to try instead.

    Args:
      splitting: threshold under which this round's opinions give another aggregate, None if
        none is known.
    """
    num, clients = row["num_coalitions"], row["clients"]
    if config.rule().weighs_alike:
        rule = config.rule()
        shape = f"--within={rule.within} --between={rule.between} weigh every client alike"
    elif num == 1:
        shape = "all clients are one coalition"
    elif num == clients:
        shape = "every client is alone"
    else:
        shape = f"all {num} coalitions weigh as many clients"
    spread = ", ".join(f"{name} {row[f'apart_{name}']:.3g}" for name in QUANTILE_NAMES)
    measure = "distance" if _is_raw(config) else "1 - cos"
    lines = [
        f"Note: in round {row['round']} the grouping changes nothing: {shape}, so the global "
        "model is the plain mean of the local ones.",
        f"  {measure} of the pairs: {spread}"
        + (f"; neighbors are within {row['limit']:.3g}." if np.isfinite(row["limit"]) else "."),
    ]
    meaning = meaning_of(config, outright=True)
    if splitting is not None and meaning is not None:
        outright = "" if config.tau_mode == "absolute" else " --tau_mode=absolute"
        flags = meaning.flag.format(splitting) + outright
        lines.append(f"  A threshold that would change this round: {flags}")
    tries = grouping_tries(config)
    if tries:
        lines.append("  Try: " + "; ".join(tries) + ".")
    return "\n".join(lines)


def grouping_tries(config: Config) -> list[str]:
    """Flags under which a grouping that changes nothing would do something."""
    tries = []
    if config.opinion in (None, "weights"):
        tries.append("--opinion=update (compare what clients learned this round)")
    if config.rule().weighs_alike:
        tries.append("--within=uniform --between=equal")
    elif config.agg in ("hk_cosine", "hk_euclidean") and config.tau_mode == "absolute":
        without = " without --epsilon" if _is_raw(config) else ""
        tries.append("--tau_mode=quantile --tau=0.95" + without)
    if config.rule().serve == "global":
        tries.append("--serve=coalition")
    return tries


def _is_raw(config: Config) -> bool:
    """Whether the threshold is a distance in parameter units."""
    meaning = meaning_of(config)
    return meaning is not None and meaning.settings == ("epsilon",)


def summarize(config: Config, unit: str, rounds: pd.DataFrame, clients: pd.DataFrame) -> str:
    """The end of a run: errors beside the naive ones, coalitions, what to look at.

    Args:
      rounds, clients: the tables of these names.
    """
    task = task_of(config)
    parts = [
        headline(config, rounds, clients) + ":",
        format_table(*error_table(config, clients, unit)),
        verdict(clients, unit, task),
        progress(rounds, unit, task),
        "\n".join(
            coalition_sentences(config, rounds) + isolated_sentences(config, unit, rounds, clients)
        ),
        *troubles(rounds, clients, task),
    ]
    tries = what_to_try(config, rounds, clients)
    if tries:
        parts.append("\n".join(["To try next:", *(f"  {one}" for one in tries)]))
    return "\n\n".join(part for part in parts if part)


def headline(config: Config, rounds: pd.DataFrame, clients: pd.DataFrame) -> str:
    """What was run, in half a line."""
    many = "round" if len(rounds) == 1 else "rounds"
    who = "client" if len(clients) == 1 else "clients"
    return (
        f"{config.agg} after {len(rounds)} {many}, {len(clients)} {who} judged on "
        f"{task_of(config).words.judged}"
    )


def naive_columns(clients: pd.DataFrame, task: Task, field: str | None = None) -> dict[str, str]:
    """What needs no model and can be made for some client, with its column of a field (of the
    headline if None)."""
    found = {name: f"{name}_{field or task.headline.column}" for name in task.words.naive_names}
    return {n: c for n, c in found.items() if c in clients and np.isfinite(clients[c]).any()}


def best_naive(clients: pd.DataFrame, task: Task) -> str | None:
    """Name of the best of what needs no model, by the mean; None without any."""
    columns = naive_columns(clients, task)
    if not columns:
        return None
    return min(columns, key=lambda name: task.headline.sign * clients[columns[name]].mean())


def model_name(config: Config) -> str:
    """What clients are judged with, in a table."""
    rule = config.rule()
    if rule.select == "pooled":
        return "the central model"
    if rule.serve == "coalition":
        alone = rule.grouping == "singletons"
        return "the client's own model" if alone else "the coalition's model"
    return "the federated model"


def error_table(
    config: Config, clients: pd.DataFrame, unit: str
) -> tuple[list[list[str]], list[str]]:
    """Rows and header of the errors beside the naive ones."""
    unit, task = unit or "units", task_of(config)
    rows = [_error_row(model_name(config), clients, "", task)]
    rows += [
        _error_row(task.words.naive_names[name], clients, f"{name}_", task)
        for name in naive_columns(clients, task)
    ]
    header = [task.words.naive_short, task.headline.axis(unit), "std", "median", "worst tenth"]
    return rows, header + [one.title(unit) for one in task.words.side_metrics]


def _error_row(label: str, clients: pd.DataFrame, prefix: str, task: Task) -> list[str]:
    spread = task.headline.spread(task.headline.factor * clients[prefix + task.headline.column])
    return [
        label,
        *(f"{spread[key]:.4g}" for key in ("mean", "std", "median", "worst_tenth")),
        *(one.shown(one.value(clients, prefix)) for one in task.words.side_metrics),
    ]


def differences(clients: pd.DataFrame, naive: str, task: Task) -> pd.Series:
    """Client by client, the model's headline minus that of one that needs no model."""
    apart = clients[task.headline.column] - clients[f"{naive}_{task.headline.column}"]
    return apart.replace([np.inf, -np.inf], np.nan)


def interval_text(interval: metrics.Interval, unit: str) -> str:
    """The interval in words; empty for a single client, which has none."""
    if not np.isfinite(interval.low):
        return ""
    return f"95 % interval over clients {interval.low:+.3g} to {interval.high:+.3g} {unit}"


def verdict(clients: pd.DataFrame, unit: str, task: Task) -> str:
    """The model against the best that needs none, client by client."""
    best, unit = best_naive(clients, task), task.headline.apart_of(unit or "units")
    if best is None:
        return ""
    apart = task.headline.factor * differences(clients, best, task)
    if apart.isna().all():
        return "No client's errors are finite: the model cannot be compared."
    found = metrics.bootstrap_interval(apart)
    better, known = int((task.headline.sign * apart < 0).sum()), int(apart.notna().sum())
    word = "beats" if task.headline.sign * found.mean < 0 else "does NOT beat"
    if found.low <= 0 <= found.high:
        word = "cannot be told apart from"
    interval = interval_text(found, unit)
    return (
        f"The model {word} the best {task.words.naive} ({task.words.naive_names[best]}): "
        f"{abs(found.mean):.3g} {unit} {'less' if found.mean < 0 else 'more'} on average"
        f"{f' ({interval}, paired bootstrap)' if interval else ''}; "
        f"it is better for {better} of {known} clients."
    )


def progress(rounds: pd.DataFrame, unit: str, task: Task) -> str:
    """How the headline went over the rounds; empty for a single round."""
    headline = task.headline
    values = rounds[headline.column]
    if len(rounds) < 2 or values.isna().all():
        return ""
    best, unit = rounds.loc[(headline.sign * values).idxmin()], unit or "units"
    return (
        f"{headline.word.capitalize()} by round: {headline.shown(values.iloc[0], unit)} after "
        f"round 1, {headline.shown(values.iloc[-1], unit)} after round {rounds['round'].iloc[-1]}; "
        f"the best was {headline.shown(best[headline.column], unit)} after round {best['round']}."
    )


def isolated_sentences(
    config: Config, unit: str, rounds: pd.DataFrame, clients: pd.DataFrame
) -> list[str]:
    """Who was mostly alone, whether that says something about them, and their errors."""
    if config.rule().grouping in NO_OPINIONS or rounds["num_coalitions"].max() < 2:
        return []
    task = task_of(config)
    return isolated.sentences(clients, unit, task.words.traits) + _alone_and_error(clients, task)


def _alone_and_error(clients: pd.DataFrame, task: Task) -> list[str]:
    """Headlines of the clients that were mostly alone beside the others', in naive ones."""
    best = best_naive(clients, task)
    alone = clients.index.isin(isolated.isolated_clients(clients).index)
    if best is None or not 0 < alone.sum() < len(clients):
        return []
    known = differences(clients, best, task).notna()
    naive = clients[f"{best}_{task.headline.column}"]
    sides = [known & side for side in (alone, ~alone)]
    if not all(naive[side].sum() > 0 for side in sides):
        return []
    ratios = [clients[task.headline.column][side].sum() / naive[side].sum() for side in sides]
    return [
        f"{task.headline.word.capitalize()} over that of the best {task.words.naive}: "
        f"{ratios[0]:.2f} for clients that were mostly alone, {ratios[1]:.2f} for the others."
    ]


def coalition_sentences(config: Config, rounds: pd.DataFrame) -> list[str]:
    """How many coalitions there were, and what that did."""
    if config.rule().grouping in NO_OPINIONS:
        return []
    num = rounds["num_coalitions"]
    idle = int(rounds["changes_nothing"].sum())
    many = f"{num.min()} to {num.max()} (median {num.median():g})"
    lines = [f"Coalitions a round: {many if num.nunique() > 1 else num.iloc[0]}"]
    if config.rule().serve == "global":  # otherwise nobody is served what the weights make
        lines[0] += f"; largest weight of one client {rounds['largest_weight'].max():.3f}"
    lines[0] += "."
    if idle and config.rule().serve == "global":
        lines.append(
            f"In {idle} of {len(rounds)} rounds the grouping changed nothing: the result there "
            "is that of a uniform average of the clients."
        )
    stuck = int((~rounds["converged"].astype(bool)).sum())
    if stuck:
        lines.append(f"In {stuck} rounds opinions were still moving at the last inner step.")
    if rounds["agreement"].notna().any():
        lines.append(
            f"Agreement with the planted groups (adjusted Rand index, 1 is perfect, 0 is "
            f"chance): {rounds['agreement'].mean():.2f} on average."
        )
    if config.attack != "none" and rounds["attackers_mixed"].notna().any():
        lines.append(
            f"Attackers ({config.attack}) sat in a coalition with honest clients "
            f"{100 * rounds['attackers_mixed'].mean():.0f} % of the time."
        )
        rule = config.rule()
        if (rule.serve, rule.between, config.min_coalition) == ("global", "equal", 1):
            lines.append("One that is alone weighs as much as a coalition (--min_coalition=2).")
    return lines


def troubles(rounds: pd.DataFrame, clients: pd.DataFrame, task: Task) -> list[str]:
    """What went wrong for some clients, a sentence each."""
    found = task.words.troubles(clients)
    if rounds["diverged_clients"].sum():
        found.append(
            f"Models that were not finite were left out {int(rounds['diverged_clients'].sum())} "
            "times; who and when is in coalitions.csv. A smaller --learning_rate may help."
        )
    return found


def what_to_try(config: Config, rounds: pd.DataFrame, clients: pd.DataFrame) -> list[str]:
    """Flags that the run's own figures suggest, a line each; what follows is up to the data."""
    rule, task, tries = config.rule(), task_of(config), []
    groups = rule.grouping not in NO_OPINIONS
    if groups and rule.serve == "global" and rounds["changes_nothing"].mean() > 0.5:
        tries += [f"{one}: the grouping changed nothing." for one in grouping_tries(config)]
    values = task.headline.sign * rounds[task.headline.column].to_numpy()
    before = values[-1 - max(1, len(values) // 4)] if len(values) > 1 else np.nan
    if values[-1] < before - 0.01 * abs(before):
        going = "rising" if task.headline.higher_is_better else "falling"
        tries.append(
            f"--rounds={2 * config.rounds} with --resume: the {task.headline.word} was still "
            f"{going}."
        )
    typical = 1 / max(rounds["clients"].median(), 1)
    if groups and rule.between == "equal" and rounds["largest_weight"].max() > 5 * typical:
        tries.append(
            "--between=size or --min_coalition=2: a client that was alone weighed as much as a "
            "whole coalition."
        )
    best = best_naive(clients, task)
    apart = task.headline.sign * differences(clients, best, task).mean() if best else np.nan
    if best and rule.grouping != "singletons" and not apart < 0:
        tries.append(f"--agg=local: whether clients that train alone beat the {task.words.naive}.")
    if groups:
        tries.append(
            "--agg=fedavg with the same seed, then python -m fedjax_hk.compare RUN RUN: only that "
            f"says what the coalitions did to the {task.headline.word}."
        )
    return tries
