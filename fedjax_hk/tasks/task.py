"""The records that a task is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from fedjax_hk import metrics
from fedjax_hk.models import Model
from fedjax_hk.settings.config import Config
from fedjax_hk.types import Array, Fleet, Samples


class SideMetric(NamedTuple):
    """A figure that tables show beside the headline.

    Attributes:
      column: its name in `compare.csv`.
      title: `unit -> ` its title in words.
      value: `(clients.csv, prefix) -> ` the figure over the clients; the prefix is "" for the
        model, else a naive one's.
      shown: the figure as text.
    """

    column: str
    title: Callable[[str], str]
    value: Callable[[pd.DataFrame, str], float]
    shown: Callable[[float], str]


class Curve(NamedTuple):
    """A picture of what the rounds brought.

    Attributes:
      name: of its files.
      title, caption: above and below it.
      lines: name in words to column of `rounds.csv`; the first one is said in words.
      naive: field of the naive ones' errors that is drawn as levels; "" for none.
      factor: what figures are multiplied by.
      axis: `unit -> ` label.
      higher_is_better: whether that holds for the figures.
    """

    name: str
    title: str
    caption: str
    lines: Mapping[str, str]
    naive: str
    factor: float
    axis: Callable[[str], str]
    higher_is_better: bool


class Trait(NamedTuple):
    """What a client is like, for looking at those that were alone.

    Attributes:
      column: of `clients.csv`.
      words: its name.
      shown: `(value, unit) -> ` text.
    """

    column: str
    words: str
    shown: Callable[[float, str], str]


Loss = Callable[[Array, Array, "Array | float"], Array]


class Judge(NamedTuple):
    """What models are trained towards and judged by; all that the engine reads of a task.

    Outputs are `[N, W, *output_shape]`, as models give them for samples `[N, W]`.

    Attributes:
      losses: the training losses, name to `(targets, outputs, level) -> [B]` for targets `[B]`,
        outputs `[B, *output_shape]` and the level of the quantile loss; the names are those of
        `LOSS` of `settings.choices`.
      output_shape: `fleet -> ` shape of the outputs for one sample.
      errors: `(outputs_nw, samples) -> ` record of `[N]` errors, the last field how many
        samples were judged; runs inside jit.
      dead: `(outputs_nw, mask_nw) -> [N]` bool, the outputs look as those of a dead network.
      naive_errors: `fleet -> {name: errors}` of what needs no model; NumPy.
      network: `(config, fleet, example_inputs) -> Model` where none is given.
    """

    losses: Mapping[str, Loss]
    output_shape: Callable[[Fleet], tuple[int, ...]]
    errors: Callable[[Array, Samples], NamedTuple]
    dead: Callable[[Array, Array], Array]
    naive_errors: Callable[[Fleet], Mapping[str, NamedTuple]]
    network: Callable[[Config, Fleet, np.ndarray], Model]


class Tables(NamedTuple):
    """What a run folder holds of the errors and outputs.

    Attributes:
      columns: `errors -> ` what a round's row says of the errors, column to number.
      kept: fields of the naive ones' and the fine-tuned models' errors that tables keep, the
        headline first.
      outputs_name: file of what was judged, one row a test sample, without `.csv`.
      outputs: `(outputs_nw, fleet) -> ` that table.
      traits_of: `fleet -> ` what clients are like, column of `clients.csv` to `[N]`.
    """

    columns: Callable[[Any], dict[str, float]]  # of the record that its own `errors` gives
    kept: tuple[str, ...]
    outputs_name: str
    outputs: Callable[[np.ndarray, Fleet], pd.DataFrame]
    traits_of: Callable[[Fleet], dict[str, np.ndarray]]


class Headline(NamedTuple):
    """The figure that models are compared by.

    Attributes:
      column: of tables, and field of the errors.
      higher_is_better: whether that holds for it.
      most: the largest value that it can take; infinite if there is none.
      factor: what it is multiplied by where it is shown.
      unit_of: `unit -> ` its unit as it is shown.
      apart_of: `unit -> ` unit of a difference of two.
      shown: `(value, unit) -> ` text.
      name: in words; `short`: in a table; `word`: in one word.
      worst: that of the worst clients, in words.
    """

    column: str
    higher_is_better: bool
    most: float
    factor: float
    unit_of: Callable[[str], str]
    apart_of: Callable[[str], str]
    shown: Callable[[float, str], str]
    name: str
    short: str
    word: str
    worst: str

    @property
    def sign(self) -> int:
        """Of two headlines, the better one is less after multiplying by it."""
        return -1 if self.higher_is_better else 1

    def axis(self, unit: str) -> str:
        """Label of an axis or column with headlines."""
        return f"{self.short} {self.unit_of(unit)}"

    def spread(self, values_n: ArrayLike) -> dict[str, float]:
        """`metrics.spread` of headlines."""
        return metrics.spread(values_n, higher_is_better=self.higher_is_better)


class Words(NamedTuple):
    """How reports speak of a task, and what they show beside the headline.

    Attributes:
      samples_noun: what samples are called, plural; names columns.
      judged: what clients are judged on, in words.
      naive: what needs no model is called, in words; `naive_short`: its place in a table.
      naive_names: name to words.
      side_metrics: further figures of tables.
      curves: pictures over the rounds.
      traits: those that clients that were alone are looked at by.
      note: what the figures of a table mean, a sentence; may be empty.
      line: `(row, unit) -> ` the errors of a round, for the terminal.
      troubles: `clients.csv -> ` what went wrong, sentences.
    """

    samples_noun: str
    judged: str
    naive: str
    naive_short: str
    naive_names: dict[str, str]
    side_metrics: tuple[SideMetric, ...]
    curves: tuple[Curve, ...]
    traits: tuple[Trait, ...]
    note: str
    line: Callable[[dict, str], str]
    troubles: Callable[[pd.DataFrame], list[str]]


class Task(NamedTuple):
    """What is learned, in four parts by who reads them. Pure functions and words.

    A unit is the readings' own, such as "L", and is read by tasks that have one.

    Attributes:
      judge: losses and errors; training and the engine read it.
      tables: columns and files of a run folder; what writes them reads it.
      headline: the figure that models are compared by; summaries, pictures and comparisons.
      words: what reports say and show.
    """

    judge: Judge
    tables: Tables
    headline: Headline
    words: Words


def mean_of(field: str) -> Callable[[pd.DataFrame, str], float]:
    """The `value` of a `SideMetric`: mean over the clients that can be scored; NaN without any."""

    def value(clients: pd.DataFrame, prefix: str) -> float:
        column = prefix + field
        return metrics.spread(clients[column])["mean"] if column in clients else float("nan")

    return value


def number(digits: str) -> Callable[[float], str]:
    """Text of a figure; "-" for one that is not finite."""
    return lambda value: format(value, digits) if np.isfinite(value) else "-"


def percent(value: float) -> str:
    """Text of a share; "-" for one that is not finite."""
    return f"{100 * value:.1f} %" if np.isfinite(value) else "-"


def some(names: pd.Series) -> str:
    """The first few."""
    return ", ".join(names.head(3))
