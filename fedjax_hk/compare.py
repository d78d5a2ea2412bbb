"""`python -m fedjax_hk.compare RUN RUN ...`: several runs on the same data, side by side.

Runs that differ in their seed, or in how they were carried out, are one method; its figures are
means over seeds.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from absl import flags

from fedjax_hk import metrics
from fedjax_hk.report import page, plots, summary
from fedjax_hk.report.load import RunTables, load_run
from fedjax_hk.report.text import format_table
from fedjax_hk.settings.config import SETTINGS, Config
from fedjax_hk.settings.derived import method_of
from fedjax_hk.store.run_folder import RunFolder, RunFolderError
from fedjax_hk.tasks import Task
from fedjax_hk.tasks.task import number


class CompareError(ValueError):
    """Runs that cannot be compared; the message names them and the fix."""


class Method(NamedTuple):
    """Runs that differ in the seed alone.

    Attributes:
      name: the rule, and the flags in which it differs from the others.
      runs: one or more.
      headline_n: `[N]` what the task compares by (see `Task.headline`) of each client, as it is
        shown, mean over the runs; NaN if it cannot be scored in one of them.
    """

    name: str
    runs: list[RunTables]
    headline_n: np.ndarray

    @property
    def task(self) -> Task:
        return self.runs[0].task


def load_methods(paths: Sequence[str | os.PathLike]) -> list[Method]:
    """Reads and groups the runs, in the order in which they were given.

    Raises:
      CompareError: fewer than two runs, one given twice or not at its end, other data,
        task, unit, clients or targets.
      RunFolderError: as `load_run`.
    """
    whole = [pathlib.Path(path).resolve() for path in paths]
    if len(set(whole)) < len(whole):
        again = next(path for path in whole if whole.count(path) > 1)
        raise CompareError(f"{again} is given twice; give each run once.")
    if len(whole) < 2:
        raise CompareError("Give two run folders or more.")
    runs = [load_run(path) for path in paths]
    for run in runs:
        clients_of(run)  # a run that goes on is told before what it differs in
        _check_same(runs[0], run)
    groups: dict[Config, list[RunTables]] = {}
    for run in runs:
        groups.setdefault(method_of(run.config), []).append(run)
    names = _names(list(groups))
    headline = runs[0].task.headline
    headlines = [
        headline.factor * np.mean([clients_of(run)[headline.column] for run in one], axis=0)
        for one in groups.values()
    ]
    return [Method(*parts) for parts in zip(names, groups.values(), headlines, strict=True)]


def clients_of(run: RunTables) -> pd.DataFrame:
    """`clients.csv`.

    Raises:
      CompareError: the run has not reached its end.
    """
    if run.clients is None:
        raise CompareError(
            f"{run.path} has not reached its end; go on with it first: "
            f"python -m fedjax_hk.main --resume={run.path}"
        )
    return run.clients


def _check_same(first: RunTables, other: RunTables) -> None:
    def refuse(what: str, one: object, two: object) -> None:
        raise CompareError(
            f"{first.path} and {other.path} have {what} ({one} and {two}); errors on them cannot "
            "be compared. Give runs on the same data."
        )

    if first.config.samples != other.config.samples:
        refuse("other tasks", first.config.samples, other.config.samples)
    for key, what in (
        ("fingerprint", "other data"),
        ("unit", "other units"),
        ("partition_fingerprint", "samples dealt out otherwise, as by another --seed"),
    ):
        if first.data.get(key) != other.data.get(key):
            refuse(what, first.data.get(key) or "none", other.data.get(key) or "none")
    tables = clients_of(first), clients_of(other)
    names = [set(table["client"]) for table in tables]
    if list(tables[0]["client"]) != list(tables[1]["client"]):
        odd = sorted(names[0] ^ names[1])[:3] or ["another order"]
        refuse("other clients", len(names[0]), f"{len(names[1])}; {', '.join(odd)}")
    if first.config.judge != other.config.judge:
        refuse("other parts to be judged on (--judge)", first.config.judge, other.config.judge)
    if first.config.horizon != other.config.horizon:
        refuse("other horizons", first.config.horizon, other.config.horizon)
    samples = first.task.words.samples_noun
    judged = [table[f"test_{samples}"] for table in tables]
    if not judged[0].equals(judged[1]):
        refuse(f"other test {samples}", int(judged[0].sum()), int(judged[1].sum()))


def _names(configs: Sequence[Config]) -> list[str]:
    """The rule, and flags that are not the default where the methods differ in them."""
    names = []
    for config in configs:
        parts = [config.agg]
        for name, known in SETTINGS.items():
            value = getattr(config, name)
            differs = len({getattr(one, name) for one in configs}) > 1
            if name != "agg" and differs and value != known.default:
                parts.append(f"--{name}={value}")
        names.append(" ".join(parts))
    return names


def method_table(methods: Sequence[Method]) -> pd.DataFrame:
    """One row a method, then one for each that needs no model.

    `headline` is what the task compares by, as it is shown; `std_clients` is over the clients,
    each a mean over seeds, `std_seeds` over the fleet means of the seeds (divided by their
    number less one). Then come the task's further figures.
    """
    rows, task = [], methods[0].task
    factor, column = task.headline.factor, task.headline.column
    for method in methods:
        tables = [clients_of(run) for run in method.runs]
        seeds = [factor * task.headline.spread(table[column])["mean"] for table in tables]
        coalitions = pd.concat([run.rounds["num_coalitions"] for run in method.runs])
        rows.append(
            _row(method.name, task, method.headline_n, tables, "")
            | {
                "seeds": len({run.config.seed for run in method.runs}),
                "std_seeds": float(np.std(seeds, ddof=1)) if len(seeds) > 1 else np.nan,
                "coalitions_median": float(coalitions.median()),
            }
        )
    clients = clients_of(methods[0].runs[0])
    for name, naive in summary.naive_columns(clients, task).items():
        label = f"naive: {task.words.naive_names[name]}"
        rows.append(_row(label, task, factor * clients[naive], [clients], f"{name}_"))
    columns = [
        "method", "seeds", "headline", "std_clients", "std_seeds", "median", "worst_tenth",
        *(one.column for one in task.words.side_metrics), "coalitions_median",
    ]  # fmt: skip
    return pd.DataFrame(rows).reindex(columns=columns)


def _row(name: str, task: Task, headline_n, tables: list[pd.DataFrame], prefix: str) -> dict:
    spread = task.headline.spread(headline_n)
    beside = {
        one.column: float(np.mean([one.value(table, prefix) for table in tables]))
        for one in task.words.side_metrics
    }
    return {
        "method": name,
        "headline": spread["mean"],
        "std_clients": spread["std"],
        "median": spread["median"],
        "worst_tenth": spread["worst_tenth"],
    } | beside


def _stored(table: pd.DataFrame, task: Task) -> pd.DataFrame:
    """`compare.csv`: the headline's columns bear its name."""
    name = task.headline.short.lower()
    named = {one: f"{name}_{one}" for one in ("std_clients", "std_seeds")}
    return table.rename(columns={"headline": name} | named)


def differences(methods: Sequence[Method], base: int) -> list[tuple[str, metrics.Interval, int]]:
    """Every other method against one of them, client by client.

    Returns:
      name, mean difference (method minus base) with its interval, and how many clients it is
      better for.
    """
    found = []
    for place, method in enumerate(methods):
        apart_n = method.headline_n - methods[base].headline_n
        if place != base:
            better = int((method.task.headline.sign * apart_n < 0).sum())
            found.append((method.name, metrics.bootstrap_interval(apart_n), better))
    return found


def base_of(methods: Sequence[Method]) -> int:
    """The method that others are measured against: FedAvg if it is there, else the first."""
    averages = [n for n, one in enumerate(methods) if one.runs[0].config.agg == "fedavg"]
    return averages[0] if averages else 0


def sentences(methods: Sequence[Method]) -> list[str]:
    """The paired differences in words."""
    base, unit = base_of(methods), methods[0].task.headline.apart_of(methods[0].runs[0].unit)
    lines = []
    for name, found, better in differences(methods, base):
        if not found.num:
            lines.append(f"{name}: no client can be scored in both.")
            continue
        word = "less" if found.mean < 0 else "more"
        interval = summary.interval_text(found, unit)
        told = " (cannot be told apart)" if found.low <= 0 <= found.high else ""
        lines.append(
            f"{name}: {abs(found.mean):.3g} {unit} {word} than {methods[base].name}{told}"
            f"{f'; {interval}' if interval else ''}; better for {better} of {found.num} clients."
        )
    return lines


def write_comparison(paths: Sequence[str | os.PathLike], output: str | os.PathLike) -> str:
    """Makes `compare.csv`, `compare_clients.csv`, `compare.html` and `pictures/` in a folder.

    Returns:
      The table and the sentences as text.

    Raises:
      CompareError, RunFolderError: as `load_methods`.
    """
    methods = load_methods(paths)
    pathlib.Path(output).mkdir(parents=True, exist_ok=True)
    folder, table = RunFolder(pathlib.Path(output), None), method_table(methods)
    folder.write_table("compare", _stored(table, methods[0].task))
    by_client = {"client": clients_of(methods[0].runs[0])["client"]}
    folder.write_table(
        "compare_clients", pd.DataFrame(by_client | {one.name: one.headline_n for one in methods})
    )
    rows, header = _shown(table, methods[0].task, methods[0].runs[0].unit)
    lines = sentences(methods)
    figures = _figures(methods, table, folder)
    title = f"{len(methods)} methods, {sum(len(one.runs) for one in methods)} runs"
    folder.write_text("compare.html", _page(title, methods, rows, header, lines, figures))
    paired = f"Paired over clients, against {methods[base_of(methods)].name}:"
    return "\n".join([format_table(rows, header), "", *([paired] if lines else []), *lines])


def _shown(table: pd.DataFrame, task: Task, unit: str) -> tuple[list[list[str]], list[str]]:
    four = number(".4g")
    shown = {
        "seeds": ("seeds", number(".0f")),
        "headline": (task.headline.axis(unit), four),
        "std_clients": ("std clients", four),
        "std_seeds": ("std seeds", four),
        "median": ("median", four),
        "worst_tenth": ("worst tenth", four),
        **{one.column: (one.title(unit), one.shown) for one in task.words.side_metrics},
        "coalitions_median": ("coalitions", number("g")),
    }
    rows = [
        [one["method"], *(show(one[column]) for column, (_, show) in shown.items())]
        for one in table.to_dict("records")
    ]
    return rows, ["method", *(title for title, _ in shown.values())]


def _figures(methods: Sequence[Method], table: pd.DataFrame, folder: RunFolder) -> list[str]:
    unit, base, task = methods[0].runs[0].unit, base_of(methods), methods[0].task
    headline = task.headline
    ours, naive = table.iloc[: len(methods)], table.iloc[len(methods) :]
    best = naive.loc[(headline.sign * naive["headline"]).idxmin()] if len(naive) else None
    level = None
    if best is not None:
        level = (f"{best['method']}: {best['headline']:.4g}", best["headline"])
    together = pd.DataFrame({one.name: _by_round(one) for one in methods})
    pairs = differences(methods, base)
    title, name, axis = headline.word.capitalize(), headline.name.capitalize(), headline.axis(unit)
    side = "Right" if headline.higher_is_better else "Left"
    drawn = [
        (
            "compare_methods",
            f"{title} by method",
            f"{name} over the clients; thin bars: standard deviation over the clients, thick "
            f"bars: over the seeds. Dashed: the best {task.words.naive}.",
            plots.methods(
                ours["method"], ours["headline"], ours["std_clients"], ours["std_seeds"], level,
                axis,
            ),
        ),
        (
            "compare_rounds",
            f"{title} per round",
            f"{name} over the clients after each round, mean over the seeds.",
            plots.over_rounds(
                together.index,
                {name: together[name] for name in together},
                dict([level]) if level else {},
                plots.plain(axis),
            ),
        ),
        (
            "compare_differences",
            "Paired differences",
            f"{title} minus that of {methods[base].name}, client by client: mean and 95 % interval "
            f"over the clients (percentile bootstrap). {side} of the dashed line is better.",
            plots.intervals(
                [one[0] for one in pairs], [one[1] for one in pairs], methods[base].name, axis,
                headline.sign,
            )
            if pairs
            else None,
        ),
    ]  # fmt: skip
    alt = "; ".join(
        f"{one.method} {one.headline:.4g} {headline.unit_of(unit)}" for one in ours.itertuples()
    )
    said = {"compare_methods": alt, "compare_rounds": f"At the end: {alt}"}
    figures = []
    for name, title, caption, figure in drawn:
        if figure is None:
            continue
        svg = plots.to_svg(figure, name)
        text = said.get(name, " ".join(sentences(methods)))
        figures.append(page.figure(svg, title, caption, f"{title}. {text}"))
        plots.write(folder, name, figure, svg)
    return figures


def _by_round(method: Method) -> pd.Series:
    """Headline after each round, mean over the seeds."""
    headline = method.task.headline
    runs = [run.rounds.set_index("round")[headline.column] for run in method.runs]
    return pd.concat([headline.factor * one for one in runs], axis=1).mean(axis=1)


def _page(title, methods, rows, header, lines, figures) -> str:
    first = methods[0].runs[0]
    paths = [
        [one.name, run.config.seed, len(run.rounds), run.path] for one in methods
        for run in one.runs
    ]  # fmt: skip
    base = methods[base_of(methods)].name
    return page.page(
        title,
        [
            page.heading(title, 1),
            page.paragraphs(
                [f"Data: {first.data.get('source', '')}; {len(clients_of(first))} clients."]
            ),
            page.table(rows, header, "Errors by method"),
            page.heading(f"Client by client against {base}") if lines else "",
            page.bullets(lines),
            page.heading("Pictures"),
            *figures,
            page.heading("Runs"),
            page.table(paths, ["method", "seed", "rounds", "folder"], "Runs"),
        ],
    )


def main(argv: list[str] | None = None) -> int:
    """Compares the run folders named; returns the exit code."""
    values = flags.FlagValues()
    flags.DEFINE_string("output", "compare", "folder of the comparison", flag_values=values)
    try:
        paths = values(sys.argv if argv is None else argv)[1:]
        print(write_comparison(paths, values.output))
        print(f"\nComparison: {pathlib.Path(values.output) / 'compare.html'}")
    except (flags.Error, CompareError, RunFolderError) as error:
        print(f"Error:\n  {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"Error:\n  --output={values.output}: {error.strerror}.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
