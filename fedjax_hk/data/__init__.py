"""Readers, made-up fleets, and the cut into padded windows.

A reader turns a source into a `Table` (readings on a regular grid); `build_fleet` turns
any `Table` into a `Fleet`. A new format is a new module beside `wide.py` with a
function that returns a `Table`; what resamples or drops clients is a function from
`Table` to `Table`.
"""

from fedjax_hk.data.choose import choose_clients
from fedjax_hk.data.errors import DataError
from fedjax_hk.data.reading import read, read_wide
from fedjax_hk.data.synthetic import synthetic_fleet
from fedjax_hk.data.table import Table
from fedjax_hk.data.windows import build_fleet, next_windows

__all__ = [
    "DataError",
    "Table",
    "build_fleet",
    "choose_clients",
    "next_windows",
    "read",
    "read_wide",
    "synthetic_fleet",
]
