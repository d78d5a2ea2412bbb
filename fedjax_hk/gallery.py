"""The pictures of one run, each with what it says in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fedjax_hk import plots, summary, views
from fedjax_hk.isolated import isolated_clients
from fedjax_hk.rules import BLIND
from fedjax_hk.run_tables import RunTables
from fedjax_hk.views import SPACES


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
    yield from _over_rounds(run)
    if run.clients is not None:
        yield from _errors(run)
    if run.forecasts is not None:
        yield from _forecasts(run)
    if run.opinions is not None:
        yield from _trajectories(run)
        yield from _maps(run)
        yield from _affinity(run)
    yield from _together(run)


def space_of(run: RunTables) -> str:
    """The opinion space that the rule compares; without a partition, the one that says most."""
    rule = run.config.rule()
    return "update" if rule.partition in BLIND else rule.opinion


def _over_rounds(run: RunTables) -> Iterator[Picture]:
    rounds, unit = run.rounds, run.unit
    first, last = rounds.iloc[0], rounds.iloc[-1]

    def levels(field: str, factor: float = 1.0) -> dict[str, float]:
        if run.clients is None:
            return {}
        columns = summary.naive_columns(run.clients, field)
        means = {name: factor * run.clients[column].mean() for name, column in columns.items()}
        ordered = sorted(means, key=means.get, reverse=factor > 1)  # the best comes first
        return {f"{summary.NAIVE_NAMES[name]}: {means[name]:.4g}": means[name] for name in ordered}

    if rounds["mae_units"].notna().any():
        yield Picture(
            "error_per_round",
            "Error per round",
            "Mean absolute error over the clients after each round, and their median; dashed: "
            "naive forecasts, which need no model.",
            f"Lines over {len(rounds)} rounds: the mean absolute error goes from "
            f"{first['mae_units']:.4g} to {last['mae_units']:.4g} {unit}.",
            plots.over_rounds(
                rounds["round"],
                {
                    "mean over clients": rounds["mae_units"],
                    "median client": rounds["mae_units_median"],
                },
                levels("mae_units"),
                f"MAE {plots.plain(unit)}",
            ),
        )
    if rounds["accuracy"].notna().any():
        yield Picture(
            "accuracy_per_round",
            "Accuracy per round",
            "Accuracy is 1 minus the sum of absolute errors over the sum of readings, not below "
            "0; mean over the clients. Higher is better.",
            f"Line over {len(rounds)} rounds: accuracy goes from {100 * first['accuracy']:.1f} "
            f"to {100 * last['accuracy']:.1f} percent.",
            plots.over_rounds(
                rounds["round"],
                {"mean over clients": 100 * rounds["accuracy"]},
                levels("accuracy", 100.0),
                "accuracy, %",
            ),
        )


def _errors(run: RunTables) -> Iterator[Picture]:
    best = summary.best_naive(run.clients)
    if best is None:
        return
    clients = run.clients[summary.differences(run.clients, best).notna()]
    if not len(clients):
        return
    name = summary.NAIVE_NAMES[best]
    naive_n = clients[f"{best}_mae_units"].to_numpy()
    model_n = clients["mae_units"].to_numpy()
    alone_n = clients.index.isin(isolated_clients(clients).index)
    alone_n &= not alone_n.all()
    better = int((model_n < naive_n).sum())
    yield Picture(
        "errors_against_naive",
        "All clients against the best naive forecast",
        f"One mark a client; below the dashed line the model is better than the naive forecast "
        f"({name}). Triangles: clients that were mostly alone.",
        f"Scatter of {len(clients)} clients; the model is better for {better} of them.",
        plots.errors_against_naive(naive_n, model_n, alone_n, name, run.unit),
    )


def _forecasts(run: RunTables) -> Iterator[Picture]:
    best, panels, said = summary.best_naive(run.clients), [], []
    mae = run.clients.set_index("client")["mae_units"]
    for client, role in views.telling_clients(run.clients):
        rows = views.last_forecasts(run.forecasts, client)
        if not len(rows):
            continue
        panels.append((f"{plots.plain(client, 16)}: {role} ({mae[client]:.3g})", rows))
        said.append(f"{client}, {role}, mean absolute error {mae[client]:.4g} {run.unit}")
    if panels:
        yield Picture(
            "forecasts",
            "Actual against forecast",
            f"The end of the test span of telling clients; in brackets their mean absolute error "
            f"in {run.unit}.",
            "Lines of actual and forecast readings of " + "; ".join(said) + ".",
            plots.forecasts(panels, best, run.unit),
        )


def _trajectories(run: RunTables) -> Iterator[Picture]:
    space = space_of(run)
    steps = int(run.rounds["inner_steps"].iloc[-1])
    moved = views.trajectory(run.opinions, space, run.config.state_norm, steps)
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


def _maps(run: RunTables) -> Iterator[Picture]:
    maps, num = views.coalition_maps(run.opinions, run.config.state_norm)
    if not maps:
        return
    used = {}
    if np.isfinite(run.opinions.limit) and run.opinions.kind == "cosine":
        used[space_of(run)] = max(run.opinions.limit, 1e-8)
    few = f" {num} clients, drawn at random." if num < run.opinions.present.sum() else ""
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


def _affinity(run: RunTables) -> Iterator[Picture]:
    space = space_of(run)
    found = views.affinity(run.opinions, space)
    if found is None or not (found.pairs > 0).any():
        return
    grouped = run.config.rule().partition not in BLIND
    measure = "distance" if run.opinions.kind == "ball" else "1 - cosine"
    low, middle, high = np.quantile(found.pairs, (0, 0.5, 1))
    order = "ordered by coalition, largest first, white lines between them" if grouped else ""
    limit = run.opinions.limit
    marked = " The dashed line is the threshold." if np.isfinite(limit) else ""
    yield Picture(
        "affinity",
        "How far apart the clients were",
        f"{SPACES[space]} of each pair in the last round{', ' if order else ''}{order}; below, "
        f"the same pairs as a histogram.{marked}",
        f"Matrix and histogram of {len(found.pairs)} pairs: {measure} from {low:.3g} to "
        f"{high:.3g}, median {middle:.3g}"
        + (f"; threshold {limit:.3g}." if np.isfinite(limit) else "."),
        plots.affinity(found, limit, measure, grouped),
    )


def _together(run: RunTables) -> Iterator[Picture]:
    if run.config.rule().partition in BLIND or run.rounds["num_coalitions"].max() < 2:
        return
    found = views.together(run.coalitions)
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
