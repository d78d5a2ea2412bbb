"""Readers, made-up fleets, and the cut into padded clients.

A reader turns a source into a `Table` (readings on a regular grid); `build_fleet` turns
any `Table` into a `Fleet`. What resamples or drops clients is a function from `Table` to
`Table`. Likewise a reader of classes returns `Labelled` (samples and classes), and
`partition_samples` deals any `Labelled` out to the clients of a `Fleet`.

To add a format of meter files:

1. In `meters/`, beside `wide.py`, write a class with `client_ids` and
   `to_table(wanted, resample, zone)`, as the protocol `meters.reader.Reader` says. Its
   constructor takes what is parsed: a `Sheet` (header and cells of CSV text or Parquet, of
   which `sheet.times_of` and `sheet.numbers_of` make times and readings), or a `File`, whose
   content `files.unpacked` opens. `regular.regular_grid` puts rows onto a grid,
   `reshape.resampled` sums them to hours, days or weeks.
2. In `meters/reading.py`, name it in `FORMATS` and give it its line in `_parsed`; "auto" needs
   a way to tell it from the others. `--data_format` offers it when `DATA_FORMATS` of
   `settings/` has the name too (a test compares the two).

Selection by `--clients`, unpacking, several files as one, meters that are there twice,
fingerprint and cache come of themselves. To add a kind of samples, write a function that
returns `Labelled`, beside `samples/npz.py`. A way to deal samples out is a function in
`PARTITIONERS` of `samples/partitioners.py`.
"""

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters.choose import choose_clients
from fedjax_hk.data.meters.reader import Reader
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
    "Reader",
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
