"""Who got which samples: the tables and the picture in the run folder."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedjax_hk import data
from fedjax_hk.store.run_folder import RunFolder
from fedjax_hk.types import Fleet


def write(folder: RunFolder, fleet: Fleet) -> None:
    """Writes `partition.csv` (clients by classes, training samples), `partition.npz` (the
    client of each sample of the source, and the digest) and `pictures/partition.png`, `.svg`;
    nothing where samples are not dealt out."""
    owners = fleet.owners
    if owners is None:
        return
    from fedjax_hk.report import plots  # loads matplotlib

    counts_nc = data.label_counts(fleet.train, len(fleet.classes))
    table = pd.DataFrame(counts_nc, columns=[f"class_{name}" for name in fleet.classes])
    table.insert(0, "client", list(fleet.client_ids))
    folder.write_table("partition", table)
    train, test = owners
    digest = np.array(data.partition_digest(owners))
    folder.write_arrays("partition.npz", {"train": train, "test": test, "sha256": digest})
    figure = plots.label_counts(counts_nc, fleet.client_ids, fleet.classes)
    plots.write(folder, "partition", figure, plots.to_svg(figure, "partition"))
