"""The pictures of one run, each with what it says in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedjax_hk.report import numbers, plots, summary
from fedjax_hk.report.isolated import isolated_clients
from fedjax_hk.report.load import RunTables
from fedjax_hk.report.numbers import SPACES, Opinions
from fedjax_hk.rules import NO_OPINIONS
from fedjax_hk.tasks import Curve


class Picture(NamedTuple):
    """Attributes:
    name: of its files.
    title, caption: above and below it.
    alt: what it shows, with numbers, for those who cannot see it.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


def pictures(run: RunTables) -> Iterator[Picture]:
    """Those that can be drawn from what is there, in the order of the report."""
    if run.partition is not None:
        yield _partition(run.partition)
    yield from _over_rounds(run)
    if run.clients is not None:
        yield from _errors(run, run.clients)
        if run.forecasts is not None:
            yield from _forecasts(run, run.clients, run.forecasts)
    if run.opinions is not None:
        yield from _trajectories(run, run.opinions)
        yield from _maps(run, run.opinions)
        yield from _dissimilarity(run, run.opinions)
    yield from _together(run)


def space_of(run: RunTables) -> str:
    """The opinion space that the rule compares; without a grouping, the one that says most."""
    rule = run.config.rule()
    return "update" if rule.grouping in NO_OPINIONS else rule.opinion


def _partition(partition: pd.DataFrame) -> Picture:
    counts = partition.set_index("client")
    classes = [column.removeprefix("class_") for column in counts]
    held_n = (counts > 0).sum(axis=1)
    return Picture(
        "partition",
        "Who has which classes",
        "Training samples of each class that each client has; open where it has none.",
        f"Matrix of {len(counts)} clients by {len(classes)} classes; a client has samples of "
        f"{held_n.min()} to {held_n.max()} classes, {held_n.median():g} in the median.",
        plots.label_counts(counts.to_numpy(), counts.index.tolist(), classes),
    )


def _over_rounds(run: RunTables) -> Iterator[Picture]:
    rounds = run.rounds
    for curve in run.task.words.curves:
        lines = {name: curve.factor * rounds[column] for name, column in curve.lines.items()}
        first = next(iter(lines.values()))
        if first.isna().all():
            continue
        axis = curve.axis(run.unit)
        yield Picture(
            curve.name,
            curve.title,
            curve.caption,
            f"Lines over {len(rounds)} rounds: {next(iter(lines))}, {axis}, goes from "
            f"{first.iloc[0]:.4g} to {first.iloc[-1]:.4g}.",
            plots.over_rounds(rounds["round"], lines, _levels(run, curve), plots.plain(axis)),
        )


def _levels(run: RunTables, curve: Curve) -> dict[str, float]:
    """What needs no model, the best first."""
    if run.clients is None or not curve.naive:
        return {}
    columns = summary.naive_columns(run.clients, run.task, curve.naive)
    means = {name: curve.factor * run.clients[column].mean() for name, column in columns.items()}
    ordered = sorted(means, key=means.__getitem__, reverse=curve.higher_is_better)
    words = run.task.words.naive_names
    return {f"{words[name]}: {means[name]:.4g}": means[name] for name in ordered}


def _errors(run: RunTables, clients: pd.DataFrame) -> Iterator[Picture]:
    task, headline = run.task, run.task.headline
    best = summary.best_naive(clients, task)
    if best is None:
        return
    apart = summary.differences(clients, best, task)
    clients, apart = clients[apart.notna()], headline.sign * apart[apart.notna()]
    if not len(clients):
        return
    name, side = task.words.naive_names[best], "above" if headline.higher_is_better else "below"
    alone_n = clients.index.isin(isolated_clients(clients).index)
    alone_n &= not alone_n.all()
    marked = " Triangles: clients that were mostly alone." if alone_n.any() else ""
    yield Picture(
        "errors_against_naive",
        f"All clients against the best {task.words.naive}",
        f"One mark a client; {side} the dashed line the model is better than the "
        f"{task.words.naive} ({name}).{marked}",
        f"Scatter of {len(clients)} clients; the model is better for {(apart < 0).sum()} of them.",
        plots.errors_against_naive(
            headline.factor * clients[f"{best}_{headline.column}"].to_numpy(),
            headline.factor * clients[headline.column].to_numpy(),
            alone_n,
            name,
            headline.axis(run.unit),
            headline.factor * headline.most,
        ),
    )


def _forecasts(run: RunTables, clients: pd.DataFrame, forecasts: pd.DataFrame) -> Iterator[Picture]:
    best, panels, said = summary.best_naive(clients, run.task), [], []
    headline = run.task.headline
    figure_of = clients.set_index("client")[headline.column]
    for client, role in numbers.telling_clients(clients, headline):
        rows = numbers.last_forecasts(forecasts, client)
        if not len(rows):
            continue
        value = figure_of[client]
        title = f"{plots.plain(client, 16)}: {role} ({headline.factor * value:.4g})"
        panels.append((title, rows))
        said.append(f"{client}, {role}, {headline.name} {headline.shown(value, run.unit)}")
    if panels:
        yield Picture(
            "forecasts",
            "Actual against forecast",
            f"The end of the test span of telling clients; in brackets their {headline.name} "
            f"in {headline.unit_of(run.unit)}.",
            "Lines of actual and forecast readings of " + "; ".join(said) + ".",
            plots.forecasts(panels, best, run.unit),
        )


def _trajectories(run: RunTables, opinions: Opinions) -> Iterator[Picture]:
    space = space_of(run)
    steps = int(run.rounds["inner_steps"].iloc[-1])
    moved = numbers.trajectory(opinions, space, run.config.state_norm, steps)
    if moved is None:
        return
    num = len(np.unique(moved.labels_s))
    yield Picture(
        "trajectories",
        "How opinions moved in the last round",
        f"Opinions ({SPACES[space].lower()}) of {len(moved.labels_s)} clients, projected onto the "
        "axes along which they differed most at the start (principal axes of the centered "
        "opinions; in brackets the share of the variance). Clients that end at one point are a "
        "coalition; what the picture leaves out may still hold others apart.",
        f"Paths of {len(moved.labels_s)} opinions over {steps} inner steps; they end in {num} "
        "coalitions.",
        plots.trajectories(moved),
    )


def _maps(run: RunTables, opinions: Opinions) -> Iterator[Picture]:
    maps, num = numbers.coalition_maps(opinions, run.config.state_norm)
    if not maps:
        return
    used = {}
    if np.isfinite(opinions.limit) and opinions.kind == "cosine":
        used[space_of(run)] = max(opinions.limit, 1e-8)
    few = f" {num} clients, drawn at random." if num < opinions.present.sum() else ""
    said = []
    for space, found in maps.items():
        several = found.sizes_ts[:, 1] > 1
        reach = "at no tau"
        if several.any():
            taus = 1 - found.limits_t[several]
            reach = f"between tau {taus.min():.6g} and {taus.max():.6g}"
        said.append(f"{SPACES[space]}: more than one coalition of two or more {reach}.")
    yield Picture(
        "coalition_map",
        "Coalition map of the last round",
        "How the clients would group under every cosine threshold tau, for what the rule could "
        "compare. Colored areas: clients in the largest coalition, the second and third, smaller "
        "ones, and alone; line: number of coalitions. The scale stretches the end near 1." + few,
        " ".join(said),
        plots.coalition_maps(maps, used, SPACES),
    )


def _dissimilarity(run: RunTables, opinions: Opinions) -> Iterator[Picture]:
    space = space_of(run)
    found = numbers.dissimilarity(opinions, space)
    if found is None or not (found.pairs > 0).any():
        return
    grouped = run.config.rule().grouping not in ("none", "singletons")
    measure = "distance" if opinions.kind == "ball" else "1 - cosine"
    low, middle, high = np.quantile(found.pairs, (0, 0.5, 1))
    order = "ordered by coalition, largest first, white lines between them" if grouped else ""
    limit = opinions.limit
    marked = " The dashed line is the threshold." if np.isfinite(limit) else ""
    yield Picture(
        "dissimilarity",
        "How far apart the clients were",
        f"{SPACES[space]} of each pair in the last round{', ' if order else ''}{order}; below, "
        f"the same pairs as a histogram.{marked}",
        f"Matrix and histogram of {len(found.pairs)} pairs: {measure} from {low:.3g} to "
        f"{high:.3g}, median {middle:.3g}"
        + (f"; threshold {limit:.3g}." if np.isfinite(limit) else "."),
        plots.dissimilarity(found, limit, measure, grouped),
    )


def _together(run: RunTables) -> Iterator[Picture]:
    if run.config.rule().grouping in NO_OPINIONS or run.rounds["num_coalitions"].max() < 2:
        return
    found = numbers.together(run.coalitions)
    pairs = found.share_nn[np.triu_indices(len(found.names), 1)]
    met = pairs[np.isfinite(pairs)]
    if not len(met):
        return
    yield Picture(
        "together",
        "Who sat with whom",
        "Share of the rounds in which both took part that a pair spent in one coalition; clients "
        "that were together often stand side by side. Gray: pairs that never met.",
        f"Matrix of {len(found.names)} clients; of {len(met)} pairs that met, "
        f"{(met == 1).sum()} were always together and {(met == 0).sum()} never.",
        plots.together(found),
    )
