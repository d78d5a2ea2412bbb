"""What a run found, as one page with pictures.

The page depends on the files of the run folder alone.
"""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pandas as pd

from fedjax_hk.report import isolated, page, plots, summary
from fedjax_hk.report.load import RunTables, load_run
from fedjax_hk.report.pictures import pictures
from fedjax_hk.rules import NO_OPINIONS
from fedjax_hk.settings.config import Config
from fedjax_hk.settings.words import rule_in_words
from fedjax_hk.store.run_folder import RunFolder

ROWS_SHOWN = 30  # of a table in the page; the CSV files have them all


def write_report(path: str | os.PathLike) -> pathlib.Path:
    """Makes `report.html` and `pictures/` in a run folder; returns the page's path.

    Raises:
      RunFolderError: as `load_run`.
    """
    run, folder = load_run(path), RunFolder(pathlib.Path(path), None)
    figures = []
    for one in pictures(run):
        svg = plots.to_svg(one.figure, one.name)
        figures.append(page.figure(svg, one.title, one.caption, one.alt))
        plots.write(folder, one.name, one.figure, svg)
    folder.write_text("report.html", page_of(run, figures))
    return folder.path / "report.html"


def page_of(run: RunTables, figures: list[str]) -> str:
    """The page, with its pictures as HTML."""
    title = f"{run.config.agg} on {run.data.get('clients', len(_names(run)))} clients"
    return page.page(
        title,
        [
            page.heading(title, 1),
            *_answer(run),
            *_what_was_run(run),
            *_errors(run),
            *_coalitions(run),
            *_isolated(run),
            *_left_out(run),
            *_to_try(run),
            page.heading("Pictures"),
            *figures,
            *_settings(run),
        ],
    )


def _names(run: RunTables) -> list[str]:
    return sorted(run.coalitions["client"].unique())


def _answer(run: RunTables) -> list[str]:
    done, planned, headline = len(run.rounds), run.planned_rounds, run.task.headline
    if run.clients is not None:
        first = summary.headline(run.config, run.rounds, run.clients) + "."
        texts = [first, summary.verdict(run.clients, run.unit, run.task)]
    else:
        value = run.rounds[headline.column].iloc[-1]
        texts = [
            f"{run.config.agg}, stopped after {done} of {planned} rounds. The {headline.name} is "
            f"{headline.shown(value, run.unit)} so far; what needs no model is compared at the "
            "end.",
            f"To go on: python -m fedjax_hk.main --resume={run.path}",
        ]
    texts.append(summary.progress(run.rounds, run.unit, run.task))
    idle = run.rounds["changes_nothing"].all()
    rule = run.config.rule()
    if rule.grouping not in NO_OPINIONS and idle and rule.serve == "global":
        texts.append(
            f"The coalitions did nothing to the {headline.word}: the grouping changed no round."
        )
    return ['<div class="answer">', page.paragraphs(texts), "</div>"]


def _what_was_run(run: RunTables) -> list[str]:
    data, rounds = run.data, run.rounds
    source = f"Data: {data['source']}." if data.get("source") else ""
    held, samples = "", run.task.words.samples_noun
    if run.clients is not None:
        train, test = (run.clients[f"{part}_{samples}"] for part in ("train", "test"))
        held = (
            f"{len(run.clients)} clients with {train.median():.0f} training and "
            f"{test.median():.0f} test {samples} each (median)."
        )
    took = f"A round took {rounds['seconds'].median():.3g} s (median)."
    if "bytes_down" in rounds and rounds["bytes_down"].any():
        down, up = (rounds[f"bytes_{way}"].sum() / 1e6 for way in ("down", "up"))
        took += f" In all, {down:.3g} MB went to the clients and {up:.3g} MB came back."
    return [
        page.heading("What was run"),
        page.paragraphs([source, f"{held} {_drawn(run)} {took}", *rule_in_words(run.config)]),
    ]


def _drawn(run: RunTables) -> str:
    """How many clients a round asked."""
    drawn = run.rounds["sampled_clients"]
    if run.config.rule().select == "pooled":
        return ""
    if drawn.nunique() == 1:
        return f"Of them, {drawn.iloc[0]} were drawn for each round."
    return (
        f"Of them, {drawn.iloc[0]} were drawn for the first round and {drawn.iloc[-1]} for the "
        "last."
    )


def _errors(run: RunTables) -> list[str]:
    if run.clients is None:
        return []
    return [
        page.heading("Errors"),
        page.table(*summary.error_table(run.config, run.clients, run.unit), "Errors"),
        page.paragraphs(
            [
                "Means over the clients, each client counting once; worst tenth: the mean of the "
                f"tenth of the clients with {run.task.headline.worst}. {run.task.words.note}"
            ]
        ),
        page.paragraphs(summary.troubles(run.rounds, run.clients, run.task), "note"),
    ]


def _coalitions(run: RunTables) -> list[str]:
    sentences = summary.coalition_sentences(run.config, run.rounds)
    sentences = sentences or rule_in_words(run.config)[:1]
    if run.config.rule().grouping in ("none", "singletons"):
        return [page.heading("Coalitions"), page.paragraphs(sentences)]
    last = run.coalitions[run.coalitions["round"] == run.rounds["round"].iloc[-1]]
    last = last[last["status"] == "took part"]
    groups = sorted(last.groupby("coalition")["client"].agg(list), key=len, reverse=True)
    rows = [[len(one), _some(one, 12)] for one in groups if len(one) > 1][:ROWS_SHOWN]
    alone = [one[0] for one in groups if len(one) == 1]
    if alone:
        rows.append(["alone", f"{len(alone)}: {_some(alone, 12)}"])
    return [
        page.heading("Coalitions"),
        page.paragraphs(sentences),
        page.heading(f"In round {run.rounds['round'].iloc[-1]}", 3),
        page.table(rows, ["size", "members"], "Coalitions of the last round"),
    ]


def _some(names: list[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _isolated(run: RunTables) -> list[str]:
    if run.clients is None or run.config.rule().grouping in NO_OPINIONS:
        return []
    found = isolated.isolated_clients(run.clients)
    intro = "Clients that were alone in at least half of the rounds they took part in"
    if not len(found):
        return [page.heading("Isolated clients"), page.paragraphs([f"{intro}: none."])]
    task = run.task
    traits = [one for one in task.words.traits if one.column in found]
    figures = [(one.column, one.shown) for one in traits]
    figures.append((task.headline.column, task.headline.shown))

    def row(name: str, alone: str, of: pd.Series) -> list[str]:
        shown = [show(of[c], run.unit) if np.isfinite(of[c]) else "-" for c, show in figures]
        return [name, alone, *shown]

    rows = [
        row(one["client"], f"{one['rounds_alone']} of {one['rounds_sampled']}", one)
        for _, one in found.head(ROWS_SHOWN).iterrows()
    ]
    header = ["client", "rounds alone", *(one.words for one in traits), task.headline.short]
    if len(found) > ROWS_SHOWN:
        intro += f" (the first {ROWS_SHOWN} of {len(found)}; all in clients.csv)"
    others = run.clients.drop(found.index)
    if len(others):
        rows.append(row("median of the others", "", others[[c for c, _ in figures]].median()))
    return [
        page.heading("Isolated clients"),
        page.paragraphs([intro + ":"]),
        page.table(rows, header, "Isolated clients"),
        page.paragraphs(
            summary.isolated_sentences(run.config, run.unit, run.rounds, run.clients)[1:]
        ),
    ]


def _left_out(run: RunTables) -> list[str]:
    parts = [page.heading("Left out")]
    excluded = run.excluded
    if len(excluded):
        rows = excluded.head(ROWS_SHOWN)[["client", "reason"]].values.tolist()
        more = f"; the first {ROWS_SHOWN}, all in excluded.csv" if len(rows) < len(excluded) else ""
        parts += [
            page.paragraphs([f"Left out before the run: {len(excluded)} clients{more}."]),
            page.table(rows, ["client", "reason"], "Clients left out"),
        ]
    missed = run.coalitions[run.coalitions["status"] != "took part"]
    if len(missed):
        counts = missed.groupby(["client", "status"]).size().sort_values(ascending=False)
        rows = [[client, why, num] for (client, why), num in counts.head(ROWS_SHOWN).items()]
        parts += [
            page.paragraphs(["Drawn for a round, but not part of it:"]),
            page.table(rows, ["client", "reason", "rounds"], "Clients left out of rounds"),
        ]
    parts += _unheard(run)
    if len(parts) == 1:
        parts.append(page.paragraphs(["Nobody."]))
    return parts


def _unheard(run: RunTables) -> list[str]:
    """Clients whose models the server had and gave no weight, as Krum or `min_coalition` do."""
    if run.config.rule().serve == "coalition":  # nobody is served what the weights make
        return []
    seen = run.coalitions[run.coalitions["status"] == "took part"]
    found = seen.assign(unheard=seen["weight"] == 0).groupby("client")["unheard"]
    table = found.agg(["sum", "size"]).sort_values("sum", ascending=False, kind="stable")
    table = table[table["sum"] > 0]
    if not len(table):
        return []
    attackers = set(seen["client"][seen["attacker"]]) if "attacker" in seen else set()
    rows = [
        [client, f"{row['sum']} of {row['size']}", "yes" if client in attackers else "no"]
        for client, row in table.head(ROWS_SHOWN).iterrows()
    ]
    header = ["client", "rounds", "attacker"]
    if run.config.attack == "none":
        rows, header = [row[:2] for row in rows], header[:2]
    more = f" (the first {ROWS_SHOWN} of {len(table)})" if len(table) > ROWS_SHOWN else ""
    return [
        page.paragraphs([f"Took part, but did not count in the average{more}:"]),
        page.table(rows, header, "Clients without weight"),
    ]


def _to_try(run: RunTables) -> list[str]:
    if run.clients is None:
        return []
    tries = summary.what_to_try(run.config, run.rounds, run.clients)
    return [page.heading("What to try next"), page.bullets(tries)] if tries else []


def _settings(run: RunTables) -> list[str]:
    def rows(values: dict) -> list[list]:
        return [[name, "" if value is None else value] for name, value in values.items()]

    about = {"data fingerprint": run.data.get("fingerprint", ""), **run.device, **run.versions}
    flags_of = {f"--{name}": value for name, value in run.flags.items()}
    changed = {
        f"--{name}": value
        for name, value in run.flags.items()
        if value != getattr(Config, name, None)
    }
    return [
        page.heading("Settings"),
        page.paragraphs([f"Run folder: {run.path}"]),
        page.table(rows(changed), ["flag", "value"], "Settings that are not the default"),
        page.details("All settings", page.table(rows(flags_of), ["flag", "value"], "Settings")),
        page.details("Data, device and versions", page.table(rows(about), ["", ""], "Versions")),
    ]
