"""Each client's own span of a table: where it begins, what of it is for training, its gaps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_hk.data.table import Table

GAPS = ("mask", "interpolate")


class Series(NamedTuple):
    """Each client's own span, moved to position 0, and where it is split.

    Attributes:
      series_nt: `[N, T]` float64, NaN where missing and after the client's last reading.
      inputs_nt: the same, as inputs see it: with gaps filled if they are to be.
      start_n: `[N]` position of the first reading in the table's times.
      length_n: `[N]` steps from the first to the last reading; 0 without any reading.
      num_train_n: `[N]` steps that belong to the training span.
    """

    series_nt: np.ndarray
    inputs_nt: np.ndarray
    start_n: np.ndarray
    length_n: np.ndarray
    num_train_n: np.ndarray


def aligned(table: Table, train_share: float, gaps: str) -> Series:
    """Moves every client's first reading to position 0 and splits its span.

    Args:
      gaps: "mask" leaves gaps in the inputs missing, "interpolate" fills them.
    """
    inputs_tn = table.values_tn if gaps == "mask" else interpolated(table)
    values_nt, inputs_nt = (
        np.ascontiguousarray(x_tn.T, dtype=np.float64) for x_tn in (table.values_tn, inputs_tn)
    )
    num_times = values_nt.shape[1]
    start_n, length_n, num_train_n = own_spans(table.values_tn, train_share)
    position_nt = start_n[:, None] + np.arange(max(length_n.max(initial=0), 1))
    inside_nt = position_nt < (start_n + length_n)[:, None]
    position_nt = np.minimum(position_nt, num_times - 1)
    series_nt, own_nt = (
        np.where(inside_nt, np.take_along_axis(x_nt, position_nt, axis=1), np.nan)
        for x_nt in (values_nt, inputs_nt)
    )
    return Series(series_nt, own_nt, start_n, length_n, num_train_n)


def own_spans(values_tn: np.ndarray, train_share: float) -> tuple[np.ndarray, ...]:
    """`[N]` each: first reading, steps from there to the last one, steps to train on."""
    known_tn = np.isfinite(values_tn)
    start_n = known_tn.argmax(axis=0)
    end_n = len(known_tn) - known_tn[::-1].argmax(axis=0)
    length_n = np.where(known_tn.any(axis=0), end_n - start_n, 0)
    # 1e-9: 0.7 * 730 is 510.99999999999994 in floating point and means 511.
    return start_n, length_n, np.floor(train_share * length_n + 1e-9).astype(np.int64)


def interpolated(table: Table) -> np.ndarray:
    """Readings with the gaps filled, `[T, N]`; NaN before the first and after the last.

    A gap holds its own volume where the table knows it, and else a line between the
    readings around it.
    """
    filled_tn = np.array(table.values_tn, np.float64)
    position_t = np.arange(len(filled_tn))
    for i in range(filled_tn.shape[1]):
        known = np.flatnonzero(np.isfinite(table.values_tn[:, i]))
        if len(known):
            inside = slice(known[0], known[-1] + 1)
            line = np.interp(position_t[inside], known, table.values_tn[known, i])
            if table.filled_tn is not None:
                own = table.filled_tn[inside, i]
                line = np.where(np.isfinite(own), own, line)
            filled_tn[inside, i] = line
    return filled_tn
