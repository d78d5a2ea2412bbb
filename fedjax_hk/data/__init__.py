"""Readers, made-up fleets, and the cut into padded clients.

A reader turns a source into a `Table` (readings on a regular grid); `build_fleet` turns
any `Table` into a `Fleet`. A new format is a new module beside `wide.py` with a
function that returns a `Table`; what resamples or drops clients is a function from
`Table` to `Table`. Likewise a reader of classes returns `Labelled` (samples and classes),
and `partition_samples` deals any `Labelled` out to the clients of a `Fleet`.
"""

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters.choose import choose_clients
from fedjax_hk.data.meters.reading import read, read_wide
from fedjax_hk.data.samples.labelled import (
    Labelled,
    digits,
    label_counts,
    mnist5k,
    partition_digest,
    partition_samples,
    without_test_samples,
)
from fedjax_hk.data.samples.leaf import read_leaf
from fedjax_hk.data.samples.npz import read_npz
from fedjax_hk.data.samples.partitioners import Partition
from fedjax_hk.data.synthetic import synthetic_fleet
from fedjax_hk.data.table import Table
from fedjax_hk.data.windows import build_fleet, next_windows, without_test_span

__all__ = [
    "DataError",
    "Labelled",
    "Partition",
    "Table",
    "build_fleet",
    "choose_clients",
    "digits",
    "label_counts",
    "mnist5k",
    "next_windows",
    "partition_digest",
    "partition_samples",
    "read",
    "read_leaf",
    "read_npz",
    "read_wide",
    "synthetic_fleet",
    "without_test_samples",
    "without_test_span",
]
