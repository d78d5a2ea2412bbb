"""`python -m fedjax_hk.report --run=FOLDER`: makes the report of a run again."""

from __future__ import annotations

import sys

from absl import flags

from fedjax_hk.report.build import write_report
from fedjax_hk.store.run_folder import RunFolderError


def main(argv: list[str] | None = None) -> int:
    """Makes the report of the folder again; returns the exit code."""
    values = flags.FlagValues()
    flags.DEFINE_string("run", "", "run folder", flag_values=values)
    try:
        rest = values(sys.argv if argv is None else argv)
        if len(rest) > 1 or not values.run:
            raise flags.Error("give the run folder: python -m fedjax_hk.report --run=FOLDER")
        print(f"Report: {write_report(values.run)}")
    except (flags.Error, RunFolderError) as error:
        print(f"Error:\n  {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
