"""The record that a task is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from fedjax_hk.types import Array, Fleet, Samples


class Task(NamedTuple):
    """How outputs are judged, and how a run speaks of it. Pure functions and words.

    Attributes:
      errors: `(outputs_nw, samples) -> ` record of `[N]` errors, the last field how many
        samples were judged; runs inside jit. Outputs are `[N, W, ...]` as models give them.
      dead: `(outputs_nw, mask_nw) -> [N]` bool, the outputs look as those of a dead network.
      naive_errors: `fleet -> {name: errors}` of what needs no model.
      columns: `errors -> ` what a round's row says of the errors, column to number.
      headline: the error that models are compared by, a field of the errors.
      higher_is_better: whether that holds for the headline.
      samples: what samples are called, plural; names columns.
      judged: what clients are judged on, in words.
      naive: what needs no model is called, in words.
      naive_names: name to words.
      line: `(row, unit) -> ` the errors of a round, for the terminal.
      header: `unit -> ` titles of the summary's table.
      cells: `errors -> ` a row of it without its name; takes the table of clients too.
      amount: `(difference, unit) -> ` of two headlines, in words.
      troubles: `clients.csv -> ` what went wrong, sentences.
    """

    errors: Callable[[Array, Samples], NamedTuple]
    dead: Callable[[Array, Array], Array]
    naive_errors: Callable[[Fleet], dict[str, NamedTuple]]
    columns: Callable[[NamedTuple], dict[str, float]]
    headline: str
    higher_is_better: bool
    samples: str
    judged: str
    naive: str
    naive_names: dict[str, str]
    line: Callable[[dict, str], str]
    header: Callable[[str], list[str]]
    cells: Callable[[NamedTuple | pd.DataFrame], list[str]]
    amount: Callable[[float, str], str]
    troubles: Callable[[pd.DataFrame], list[str]]


def some(names: pd.Series) -> str:
    """The first few."""
    return ", ".join(names.head(3))
