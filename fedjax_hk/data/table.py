"""Readings of a fleet on one regular grid of times: what every reader returns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_hk.types import Excluded


class Table(NamedTuple):
    """Readings of N clients at T times; the times are one step apart, without gaps.

    Attributes:
      times: `[T]` datetime64[s], strictly rising by one constant step.
      client_ids: N names.
      values_tn: `[T, N]` float64, in units per step, NaN where a reading is missing.
      unit: label of the readings' unit, such as "L"; may be empty.
      source: what was read and what was done to it, in words.
      fingerprint: hexadecimal sha256 of the content that was read.
      planted: `[N]` int32 planted group (-1: planted outlier), None if no truth is known.
      excluded: clients that the reader left out.
      filled_tn: `[T, N]` the readings with the volume of each gap shared over its steps,
        where the source knows that volume (a register does); NaN outside a client's span.
    """

    times: np.ndarray
    client_ids: tuple[str, ...]
    values_tn: np.ndarray
    unit: str
    source: str
    fingerprint: str
    planted: np.ndarray | None = None
    excluded: tuple[Excluded, ...] = ()
    filled_tn: np.ndarray | None = None
