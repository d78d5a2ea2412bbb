"""The command on tables, in this process: folders, and what is refused."""

import dataclasses
import json
import re

import numpy as np
import pandas as pd
import pytest
from small_run import MODEL, Calls, on_fleet

from fedjax_hk import main as main_lib
from fedjax_hk.data import synthetic_fleet
from fedjax_hk.run import loop
from fedjax_hk.run import prepare as prepare_lib
from fedjax_hk.settings.config import Config

compiled = {}  # by the shape of the data; the tests run one rule only


@pytest.fixture
def command(monkeypatch, tmp_path, capfd):
    """The command with the small forecaster; returns code, output and error."""
    prepare, run = prepare_lib.prepare, loop.simulate
    monkeypatch.chdir(tmp_path)

    def prepare_small(config, fleet):
        shape = fleet.train.inputs.shape, fleet.test.inputs.shape
        if shape not in compiled:
            compiled[shape] = prepare(config, fleet, MODEL)
        return on_fleet(compiled[shape], fleet)._replace(config=config)

    monkeypatch.setattr(prepare_lib, "prepare", prepare_small)

    def call(*flags, callback=None):
        callbacks = [] if callback is None else [Calls(callback)]
        monkeypatch.setattr(
            loop, "simulate", lambda *args, **kw: run(*args, **{**kw, "callbacks": callbacks})
        )
        code = main_lib.main(["main", "--devices=1", "--epochs=1", "--noreport", *flags])
        return code, *capfd.readouterr()

    return call


def write_table(path, clients=5, change=0.0):
    table = synthetic_fleet(clients, 70)
    frame = pd.DataFrame(table.values_tn, columns=[f"home {i}" for i in range(clients)])
    frame.iloc[40, 1] += change
    frame.insert(0, "day", pd.to_datetime(table.times).strftime("%Y-%m-%d"))
    frame["too short"] = [*([np.nan] * 65), *([1.0] * 5)]
    frame.to_csv(path, index=False)


def test_a_run_on_a_table(command, tmp_path):
    write_table(tmp_path / "meters.csv")
    at_first = {}

    def look(number, row):
        path = next((tmp_path / "runs").iterdir())
        at_first.setdefault("config", json.loads((path / "config.json").read_text()))
        at_first.setdefault("excluded", pd.read_csv(path / "excluded.csv"))

    flags = ("--data=meters.csv", "--unit=kWh", "--rounds=2", "--agg=fedavg")
    code, out, err = command(*flags, callback=look)
    assert code == 0, err
    assert re.search(r"MAE [\d.]+ kWh", err)
    assert "MAE kWh" in out
    assert "5 clients" in out
    assert "too short" in out
    config = at_first["config"]
    assert config["flags"]["data"] == "meters.csv"
    assert config["flags"].keys() == {item.name for item in dataclasses.fields(Config)}
    assert {"versions", "device", "data"} <= set(config)
    assert at_first["excluded"]["client"].tolist() == ["too short"]
    first = next((tmp_path / "runs").iterdir())
    assert json.loads((first / "config.json").read_text()) == config
    # Another run at once has another folder.
    assert command(*flags)[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2

    write_table(tmp_path / "meters.csv", change=1.0)
    code, out, err = command(f"--resume={first}", "--rounds=3")
    assert code == 2
    assert "--data=meters.csv: its content is not what the run was started with" in err
    assert len(pd.read_csv(first / "rounds.csv")) == 2
    (tmp_path / "meters.csv").unlink()
    code, out, err = command(f"--resume={first}", "--rounds=3")
    assert code == 2
    assert "meters.csv" in err
    write_table(tmp_path / "meters.csv")
    code, out, err = command(f"--resume={first}", "--rounds=3")
    assert code == 0, err
    assert pd.read_csv(first / "rounds.csv")["round"].tolist() == [1, 2, 3]
    assert json.loads((first / "config.json").read_text())["flags"]["rounds"] == 3
    assert "fedavg after 3 rounds" in out


def test_a_list_of_clients_that_changed_is_refused(command, tmp_path):
    write_table(tmp_path / "meters.csv", clients=6)
    (tmp_path / "who.txt").write_text("".join(f"home {i}\n" for i in (0, 1, 2, 3, 4)))
    flags = ("--data=meters.csv", "--clients=who.txt", "--rounds=1", "--agg=fedavg", "--output=run")
    assert command(*flags)[0] == 0
    (tmp_path / "who.txt").write_text("".join(f"home {i}\n" for i in (0, 1, 2, 3, 5)))
    code, _, err = command("--resume=run", "--rounds=2")
    assert code == 2
    assert "--clients=who.txt: it names 5 clients that are not the 5" in err


def test_checkpoints_that_cannot_be_read_are_named(command, tmp_path):
    write_table(tmp_path / "meters.csv")
    flags = ("--data=meters.csv", "--agg=fedavg", "--rounds=1", "--output=run")
    assert command(*flags)[0] == 0
    for file in (tmp_path / "run" / "checkpoints").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    code, _, err = command("--resume=run", "--rounds=2")
    assert code == 2
    assert "no checkpoint can be read" in err
    assert "Traceback" not in err
