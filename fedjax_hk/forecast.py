"""`python -m fedjax_hk.forecast --run=FOLDER --data=FILE`: the next reading of every client.

Each client's model is the one that the run serves it: its own coalition's where it has one,
else the global one, which clients that the run did not know get too.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import numpy as np
import pandas as pd
from absl import flags

from fedjax_hk.data import DataError, Table, next_windows
from fedjax_hk.data.scaling import fit_scaler
from fedjax_hk.settings.config import Config, ConfigError, from_stored
from fedjax_hk.settings.derived import kept_for_forecasts
from fedjax_hk.store.run_folder import RunFolder, RunFolderError, open_folder
from fedjax_hk.types import Excluded, Fleet

# What a forecast needs of a state, and what earlier versions called it.
_PARAMS = ".server.params"
_SERVED = {
    _PARAMS: (".params",),
    ".memory_n['start']": (".starts_nd",),
    ".memory_n['personal']": (".personal_np", ".own_np"),
}


def forecast(
    run: str | os.PathLike, table: Table, model=None
) -> tuple[pd.DataFrame, tuple[Excluded, ...]]:
    """The reading of every client that comes `horizon` steps after its last one.

    Args:
      run: folder of a run of forecasters that has a checkpoint.
      table: readings, in the units and steps that the run was trained with.
      model: the run's own model, if it was not the LSTM of the settings.

    Returns:
      One row a client: `client`, `last_reading` (time), `time` (of the forecast), `forecast`
      (units), `unit`, `model` ("own coalition" or "global"), `coalition` (its name, or empty);
      and the clients for which there is none, with the reason.

    Raises:
      RunFolderError: no such run, one of another kind, or one that is going on.
      CheckpointError: no checkpoint of it can be read.
    """
    with open_folder(run, flag="--run") as folder:
        config = _forecaster(folder)
        scaling = folder.read_table("scaling", ["client"])
        coalitions = folder.read_table("coalitions", ["client", "coalition", "status"])
        served = _last_served(folder, config, scaling, model)
        known = _forecasts(config, table, scaling, served, model)
        strangers = _scaling_of_strangers(config, table, scaling)
        rows = [known]
        if len(strangers):
            served = {_PARAMS: served[_PARAMS]}
            rows.append(_forecasts(_global(config), table, strangers, served, model))
    found = pd.concat(rows, ignore_index=True).set_index("client")
    found = found.reindex(list(table.client_ids)).reset_index()
    joined = coalitions[coalitions["status"] == "took part"].groupby("client")["coalition"].last()
    own = found["client"].isin(joined.index) & (config.rule().serve == "coalition")
    found["model"] = np.where(own, "own coalition", "global")
    found["coalition"] = found["client"].map(joined).where(own, "")
    found["unit"] = table.unit
    usable = found["forecast"].notna()
    gap = f"a reading of its last {config.lookback} steps is missing"
    without = tuple(
        Excluded(client, "no reading at all" if pd.isna(time) else gap)
        for client, time in found.loc[~usable, ["client", "time"]].itertuples(index=False)
    )
    columns = ["client", "last_reading", "time", "forecast", "unit", "model", "coalition"]
    return found.loc[usable, columns].reset_index(drop=True), without


def _forecaster(folder: RunFolder) -> Config:
    """The settings of a run of forecasts, on whatever devices there are now.

    Raises:
      RunFolderError: the run is of another task.
    """
    config = from_stored(folder.read_config().get("flags", {}))
    if config.samples != "readings":
        raise RunFolderError(
            f"--run={folder.path}: it is a run of --samples={config.samples}, which has no "
            "readings to forecast; give a run of --samples=readings."
        )
    return dataclasses.replace(config, devices=0)


def _last_served(
    folder: RunFolder, config: Config, scaling: pd.DataFrame, model
) -> dict[str, np.ndarray]:
    """Leaves of the newest state, of this version or of an earlier one, by their path."""
    import jax

    from fedjax_hk.store.checkpoint import CheckpointError, Checkpoints

    assembled = _assemble(config, _no_windows(config, tuple(scaling["client"])), model)
    params = jax.ShapeDtypeStruct((assembled.model.num_parameters,), np.float32)
    like = jax.eval_shape(assembled.engine.init, params)
    with Checkpoints(folder.path / "checkpoints", log=folder.log) as checkpoints:
        found = checkpoints.latest_leaves(like, _SERVED)
    if found is None:
        raise CheckpointError(f"{folder.path} has no checkpoint yet; let a round of it end.")
    return found[1]


def _forecasts(
    config: Config, table: Table, scaling: pd.DataFrame, served: dict[str, np.ndarray], model
) -> pd.DataFrame:
    """`client`, `last_reading`, `time`, `forecast` (NaN where a reading is missing).

    Args:
      scaling: the clients; those that the table lacks are left out.
      served: leaves of a state of these clients, by their path; the global model at least.
    """
    import jax

    names = tuple(scaling["client"])
    shift_n, scale_n = (scaling[name].to_numpy(float) for name in ("shift", "scale"))
    of_names = _columns(table, names)
    train, last, times_n = next_windows(
        of_names,
        shift_n,
        scale_n,
        lookback=config.lookback,
        horizon=config.horizon,
        scaler=config.scaler,
        gaps=config.gaps,
    )
    fleet = _no_windows(config, names)._replace(train=train, test=last)
    assembled = _assemble(config, fleet, model)
    engine = assembled.engine
    state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: served.get(jax.tree_util.keystr(path), leaf),
        engine.init(served[_PARAMS]),
    )
    outputs_nw = jax.jit(engine.outputs)(state, assembled.arrays, assembled.hparams)
    units_n = (np.asarray(outputs_nw) * last.scale + last.shift)[:, 0]
    step = table.times[1] - table.times[0]
    found = pd.DataFrame(
        {
            "client": names,
            "last_reading": times_n - config.horizon * step,
            "time": times_n,
            "forecast": np.where(last.mask[:, 0], units_n, np.nan),
        }
    )
    return found[found["client"].isin(table.client_ids)]


def _assemble(config: Config, fleet: Fleet, model):
    from fedjax_hk.run.prepare import assemble

    return assemble(config, fleet, model)


def _global(config: Config) -> Config:
    return Config(agg="fedavg", local=config.rule().local, **kept_for_forecasts(config))


def _no_windows(config: Config, names: tuple[str, ...]) -> Fleet:
    """A fleet of these clients, each with one masked window: enough to shape a state."""
    table = Table(
        times=np.datetime64("2000-01-01", "s") + np.arange(2) * np.timedelta64(1, "D"),
        client_ids=names,
        values_tn=np.full((2, len(names)), np.nan),
        unit="",
        source="",
        fingerprint="",
    )
    nothing = np.zeros(len(names))
    train, last, _ = next_windows(table, nothing, nothing + 1, lookback=config.lookback)
    return Fleet(
        client_ids=names,
        unit="",
        train=train,
        test=last,
        test_times=np.full(last.mask.shape, np.datetime64("NaT")),
        naive={},
        excluded=(),
        planted=None,
        source="",
        fingerprint="",
    )


def _columns(table: Table, names: tuple[str, ...]) -> Table:
    """The table with these clients in this order; no reading of those that it lacks."""
    place = {name: i for i, name in enumerate(table.client_ids)}
    columns = np.array([place.get(name, -1) for name in names])

    def picked(x_tn: np.ndarray) -> np.ndarray:
        return np.where(columns >= 0, x_tn[:, columns], np.nan)

    filled_tn = None if table.filled_tn is None else picked(table.filled_tn)
    return table._replace(
        client_ids=names, values_tn=picked(table.values_tn), filled_tn=filled_tn, planted=None
    )


def _scaling_of_strangers(config: Config, table: Table, scaling: pd.DataFrame) -> pd.DataFrame:
    """Shift and scale of the clients that the run did not know, from all their readings."""
    known = set(scaling["client"])
    finite_n = np.isfinite(table.values_tn).any(axis=0)
    strangers = np.array(
        [i for i, name in enumerate(table.client_ids) if name not in known and finite_n[i]], int
    )
    names = [table.client_ids[i] for i in strangers]
    if config.scaler_scope == "fleet":
        shift, scale = (scaling[name].iloc[0] for name in ("shift", "scale"))
    elif names:
        shift, scale = fit_scaler(table.values_tn[:, strangers].T, config.scaler, "client")
    else:
        shift = scale = 0.0
    return pd.DataFrame({"client": names, "shift": shift, "scale": scale})


def main(argv: list[str] | None = None) -> int:
    """From command line arguments; returns the exit code."""
    values = flags.FlagValues()
    for name, text in (
        ("run", "run folder"),
        ("data", "readings, as of fedjax_hk.main; empty: the data of the run"),
        ("data_format", "as of fedjax_hk.main; empty: as of the run, or auto with --data"),
        ("output", "CSV file for the forecasts; empty: standard output"),
    ):
        flags.DEFINE_string(name, "", text, flag_values=values)
    try:
        rest = values(sys.argv if argv is None else argv)
        if len(rest) > 1 or not values.run:
            raise flags.Error(
                "give the run folder: python -m fedjax_hk.forecast --run=FOLDER --data=FILE"
            )
        text, notes = _main(values.run, values.data, values.data_format, values.output)
    except (flags.Error, ValueError) as error:
        if not isinstance(error, (flags.Error, ConfigError, DataError)) and not _is_ours(error):
            raise
        print(f"Error:\n  {error}", file=sys.stderr)
        return 2
    print(notes, file=sys.stderr, end="")
    print(text, end="")
    return 0


def _is_ours(error: Exception) -> bool:
    from fedjax_hk.store.checkpoint import CheckpointError

    return isinstance(error, (RunFolderError, CheckpointError))


def _main(run: str, data: str, data_format: str, output: str) -> tuple[str, str]:
    """What goes to standard output, and the notes beside it."""
    from fedjax_hk.run.load import load_table

    with open_folder(run, lock=False, flag="--run") as folder:
        config = _forecaster(folder)
    if data:
        config = dataclasses.replace(config, data=data, data_format=data_format or "auto")
    elif data_format:
        config = dataclasses.replace(config, data_format=data_format)
    if output and not (parent := pathlib.Path(output).absolute().parent).is_dir():
        raise ConfigError(f"--output={output}: there is no folder {parent}; make it first.")
    table = load_table(config)
    found, without = forecast(run, table)
    found["last_reading"], found["time"] = (
        np.datetime_as_string(found[name].to_numpy("datetime64[s]"), unit="auto")
        for name in ("last_reading", "time")
    )
    notes = (
        f"{len(found)} clients; each forecast is {config.horizon} steps after the last reading.\n"
    )
    notes += "".join(f"No forecast for {one.client}: {one.reason}.\n" for one in without)
    text = found.to_csv(index=False)
    if output:
        pathlib.Path(output).write_text(text)
        return f"Forecasts: {output}\n", notes
    return text, notes


if __name__ == "__main__":
    sys.exit(main())
