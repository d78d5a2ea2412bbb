"""What a format of readings is: the one thing that `read` asks of it."""

from __future__ import annotations

from typing import Protocol

from fedjax_hk.data.table import Table


class Reader(Protocol):
    """The content of one file, or of several that belong together, parsed.

    Attributes:
      client_ids: who is in it, each once, in order of appearance.
    """

    client_ids: list[str]

    def to_table(self, wanted: list[str], resample: str, zone: str) -> Table:
        """The wanted clients on one regular grid, each or in `excluded` with the reason.

        Args:
          wanted: some of `client_ids`.
          resample: "hourly", "daily" or "weekly"; "" is the format's own step. A format of
            amounts for each step hands its table to `reshape.resampled`.
          zone: whose calendar days and weeks are; "" is the format's own.

        Returns:
          The table; `fingerprint` may be empty, `source` says what was done to the readings.

        Raises:
          DataError: names file, row, column, client and value of what cannot be read; or
            nobody is left.
        """
        ...
