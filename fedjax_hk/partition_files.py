"""Who got which samples: the tables and the picture in the run folder."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd

from fedjax_hk import data
from fedjax_hk.run_folder import RunFolder
from fedjax_hk.types import Fleet

MOST_WRITTEN = 400  # cells; above, a number in each would not be readable


def write(folder: RunFolder, fleet: Fleet) -> None:
    """Writes `partition.csv` (clients by classes, training samples), `partition.npz` (the
    client of each sample of the source, and the digest) and `partition.png`, `.svg`."""
    counts_nc = data.label_counts(fleet.train, len(fleet.classes))
    table = pd.DataFrame(counts_nc, columns=[f"class_{name}" for name in fleet.classes])
    table.insert(0, "client", list(fleet.client_ids))
    folder.write_table("partition", table)
    owners = io.BytesIO()
    digest = data.partition_digest(fleet.owners)
    np.savez_compressed(owners, train=fleet.owners[0], test=fleet.owners[1], sha256=digest)
    (folder.path / "partition.npz").write_bytes(owners.getvalue())
    figure = draw(counts_nc, fleet.client_ids, fleet.classes)
    for ending in ("png", "svg"):
        # Without a date, so that the same partition is the same file.
        metadata = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(folder.path / f"partition.{ending}", dpi=150, metadata=metadata)


def draw(counts_nc: np.ndarray, clients: tuple[str, ...], classes: tuple[str, ...]):
    """A figure of clients by classes: the darker, the more training samples; none is white.

    Read in gray and with any color vision: one scale that runs from light to dark.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts_nc.shape
    width = 2.5 + min(0.42 * num_classes, 9)
    height = 1.3 + min(0.24 * num_clients, 10)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    shown = np.ma.masked_equal(counts_nc, 0)
    image = axes.imshow(shown, cmap="cividis_r", vmin=0, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, label="training samples")
    bar.locator = MaxNLocator(integer=True, nbins=6)
    axes.set(xlabel="class", ylabel="client", title="Who has which classes")
    _name(axes.xaxis, classes, 24)
    _name(axes.yaxis, clients, 40)
    if counts_nc.size <= MOST_WRITTEN:
        half = counts_nc.max() / 2
        for (row, column), count in np.ndenumerate(counts_nc):
            if count:
                color = "white" if count > half else "black"
                axes.text(column, row, count, ha="center", va="center", size=6, color=color)
    return figure


def _name(axis, names: tuple[str, ...], most: int) -> None:
    """Names at the ticks, at most `most` of them."""
    places = range(0, len(names), -(-len(names) // most))
    axis.set_ticks(list(places), [names[place] for place in places])
    axis.set_tick_params(labelsize=7)
