"""Forecasts of the next readings from a run's folder."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from made_run import classes_of, make_run

from fedjax_hk import data, models
from fedjax_hk import forecast as forecast_lib
from fedjax_hk.data import synthetic_fleet
from fedjax_hk.run import loop
from fedjax_hk.run import prepare as prepare_lib
from fedjax_hk.settings.config import Config
from fedjax_hk.store import run_folder
from fedjax_hk.store.run_folder import RunFolderError

LOOKBACK, CLIENTS, DAYS = 5, 6, 90


class Linear(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(1, bias_init=nn.initializers.constant(0.3))(inputs[:, :, 0])[:, 0]


MODEL = models.from_flax(Linear(), jnp.zeros((2, LOOKBACK, 1)))


def settings(**changes):
    return Config(
        agg="hk_cosine", opinion="update", tau=0.5, serve="coalition", rounds=2, epochs=1,
        clients_per_round=4, devices=1, lookback=LOOKBACK, report=False, **changes,
    )  # fmt: skip


def part_of(table, days):
    return table._replace(times=table.times[:days], values_tn=table.values_tn[:days])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run on the first 80 of 90 days: its folder, last state, fleet and the whole table."""
    table = synthetic_fleet(CLIENTS, DAYS)
    fleet = data.build_fleet(part_of(table, 80), lookback=LOOKBACK)
    path = tmp_path_factory.mktemp("forecast") / "run"
    prepared = prepare_lib.prepare(settings(), fleet, MODEL)
    with run_folder.create_folder(path) as folder:
        outcome = loop.simulate(prepared, folder)
    return path, outcome.state, fleet, table


def test_forecast_is_the_served_model_on_the_last_window(ran):
    path, state, fleet, table = ran
    sampled = set(pd.read_csv(path / "coalitions.csv")["client"])
    assert 4 <= len(sampled) <= CLIENTS
    found, without = forecast_lib.forecast(path, table, MODEL)
    assert without == ()
    assert found["client"].tolist() == list(table.client_ids)
    assert (found["last_reading"] == table.times[-1]).all()
    assert (found["time"] == table.times[-1] + np.timedelta64(1, "D")).all()
    for i, row in found.iterrows():
        assert row["model"] == ("own coalition" if row["client"] in sampled else "global")
        assert bool(row["coalition"]) == (row["client"] in sampled)
        window = (table.values_tn[-LOOKBACK:, i] - fleet.shift_n[i]) / fleet.scale_n[i]
        output = MODEL.apply(state.memory_n["start"][i], jnp.float32(window)[None, :, None], None)[
            0
        ]
        expected = float(output) * fleet.scale_n[i] + fleet.shift_n[i]
        assert row["forecast"] == pytest.approx(expected, rel=1e-5)


def test_strangers_gaps_and_clients_that_the_file_lacks(ran):
    path, state, _, table = ran
    values = table.values_tn.copy()
    values[-2, 1] = np.nan  # a gap in the last window
    values[-3:, 2] = np.nan  # ends earlier
    names = (*table.client_ids[:3], "new one", "empty one")
    values = np.column_stack([values[:, :3], 7 + values[:, 3], np.full(DAYS, np.nan)])
    found, without = forecast_lib.forecast(
        path, table._replace(values_tn=values, client_ids=names, planted=None), MODEL
    )
    assert found["client"].tolist() == [names[0], names[2], names[3]]
    assert found["time"].iloc[1] == table.times[-3]
    assert [one.client for one in without] == [names[1], names[4]]
    assert "last 5 steps is missing" in without[0].reason
    assert "no reading" in without[1].reason
    new = found.iloc[2]
    assert (new["model"], new["coalition"]) == ("global", "")
    low, high = values[:, 3].min(), values[:, 3].max()
    window = jnp.float32((values[-LOOKBACK:, 3] - low) / (high - low))[None, :, None]
    expected = float(MODEL.apply(state.params, window, None)[0]) * (high - low) + low
    assert new["forecast"] == pytest.approx(expected, rel=1e-5)


def test_folders_that_cannot_forecast(ran, tmp_path):
    path, _, _, table = ran
    with pytest.raises(RunFolderError, match=r"flag --run: .* does not exist"):
        forecast_lib.forecast(tmp_path / "nothing", table)
    with (
        run_folder.open_folder(path),
        pytest.raises(RunFolderError, match=r"process .* is running"),
    ):
        forecast_lib.forecast(path, table, MODEL)


def test_runs_of_another_task_are_refused(tmp_path, capsys):
    path = make_run(tmp_path / "run", Config(samples="digits", rounds=2), fleet=classes_of())
    with pytest.raises(
        RunFolderError, match="it is a run of --samples=digits, which has no readings"
    ):
        forecast_lib.forecast(path, synthetic_fleet(CLIENTS, DAYS))
    assert forecast_lib.main(["forecast", f"--run={path}"]) == 2
    assert "give a run of --samples=readings" in capsys.readouterr().err


def test_the_command(ran, monkeypatch, tmp_path, capsys):
    path, _, _, table = ran
    plain = forecast_lib.forecast
    monkeypatch.setattr(forecast_lib, "forecast", lambda run, t: plain(run, t, MODEL))
    frame = pd.DataFrame(table.values_tn, columns=table.client_ids)
    frame.insert(0, "day", np.datetime_as_string(table.times, unit="D"))
    frame.iloc[-1, 2] = np.nan
    frame.iloc[-3, 1] = np.nan
    frame.to_csv(tmp_path / "later.csv", index=False)
    arguments = [f"--run={path}", f"--data={tmp_path / 'later.csv'}"]
    assert forecast_lib.main(["forecast", *arguments]) == 0
    out, err = capsys.readouterr()
    assert f"{CLIENTS - 1} clients" in err
    assert f"No forecast for {table.client_ids[0]}" in err
    assert len(out.splitlines()) == CLIENTS
    assert forecast_lib.main(["forecast", *arguments, f"--output={tmp_path / 'next.csv'}"]) == 0
    assert (tmp_path / "next.csv").read_text() == out
    for wrong, said in (
        ([], "give the run folder"),
        ([f"--run={tmp_path / 'x'}"], "flag --run"),
        ([*arguments, "--output=/nowhere/next.csv"], "--output=/nowhere/next.csv: there is no"),
        ([f"--run={path}", "--data=nothing.csv"], "nothing.csv"),
        ([f"--run={path}", "--dta=x"], "dta"),
    ):
        capsys.readouterr()
        assert forecast_lib.main(["forecast", *wrong]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err
