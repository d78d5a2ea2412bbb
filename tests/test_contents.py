"""What a run folder holds: the tables, and the report."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from small_run import ROUNDS, Ran, prepared_with, small_fleet

from fedjax_hk import hk
from fedjax_hk.report import build
from fedjax_hk.run import prepare as prepare_lib
from fedjax_hk.types import Excluded


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The run that most tests look at."""
    return Ran(prepared_with(), tmp_path_factory.mktemp("runs") / "run")


def test_one_row_a_round_with_all_quantities(ran):
    rounds = ran.csv("rounds")
    assert rounds["round"].tolist() == [1, 2, 3, 4]
    assert {
        "clients", "train_loss", "mse", "mae", "mae_units", "mae_units_std", "rmse_units",
        "accuracy", "num_coalitions", "coalition_sizes", "inner_steps", "converged", "margin",
        "apart_min", "apart_median", "apart_max", "largest_weight", "dispersion",
        "within_spread", "dead_clients", "diverged_clients", "left_out", "seconds",
        "gradient_spread", "agreement", "limit", "changes_nothing",
    } <= set(rounds.columns)  # fmt: skip
    assert (rounds["sampled_clients"] == 5).all()
    assert (rounds["clients"] == 5).all()
    assert (rounds["seconds"] > 0).all()
    assert rounds["converged"].dtype == bool
    assert rounds["gradient_spread"].isna().all()  # only on request
    named = ["train_loss", "mse", "mae", "mae_units", "rmse_units", "accuracy", "dispersion",
             "within_spread", "apart_min", "apart_max", "largest_weight", "limit"]  # fmt: skip
    assert np.isfinite(rounds[named]).all(axis=None)
    assert (rounds["apart_min"] <= rounds["apart_max"]).all()


def test_every_sampled_client_once_a_round(ran):
    coalitions, rounds = ran.csv("coalitions"), ran.csv("rounds", dtype={"coalition_sizes": str})
    for number, of_round in coalitions.groupby("round"):
        row = rounds[rounds["round"] == number].iloc[0]
        assert of_round["client"].is_unique
        assert len(of_round) == 5
        assert set(of_round["client"]) <= set(small_fleet().client_ids)
        sizes = of_round.groupby("coalition").size()
        assert sorted(sizes, reverse=True) == [int(n) for n in row["coalition_sizes"].split()]
        assert len(sizes) == row["num_coalitions"]
        assert (of_round["coalition"].map(sizes) == of_round["size"]).all()
        # A coalition bears the name of one of its members.
        named = of_round.set_index("client")["coalition"]
        assert all(named[name] == name for name in named)
        expected = 1 / (len(sizes) * of_round["size"])
        np.testing.assert_allclose(of_round["weight"], expected, rtol=1e-6)  # float32
        assert of_round["weight"].sum() == pytest.approx(1, abs=1e-6)
        assert row["largest_weight"] == of_round["weight"].max()
        assert (of_round["status"] == "took part").all()
    assert rounds["num_coalitions"].max() > 1  # or this test would see nothing


def test_one_row_a_client(ran):
    clients, coalitions = ran.csv("clients"), ran.csv("coalitions")
    fleet = small_fleet()
    assert tuple(clients["client"]) == fleet.client_ids
    assert clients["train_windows"].tolist() == fleet.train.mask.sum(axis=1).tolist()
    assert clients["test_windows"].tolist() == fleet.test.mask.sum(axis=1).tolist()
    assert clients["planted_group"].tolist() == fleet.planted.tolist()
    assert {"mse", "mae", "mae_units", "rmse_units", "wape", "accuracy", "dead"} <= set(clients)
    assert {f"{name}_mae_units" for name in fleet.naive} <= set(clients.columns)
    sampled = coalitions["client"].value_counts()
    alone = coalitions[coalitions["size"] == 1]["client"].value_counts()
    for row in clients.itertuples():
        assert row.rounds_sampled == sampled.get(row.client, 0)
        assert row.rounds_alone == alone.get(row.client, 0)
        last = coalitions[coalitions["client"] == row.client]["coalition"].tail(1).tolist()
        assert (row.last_coalition if last else None) == (last[0] if last else None)


def test_errors_equal_those_of_plain_numpy(ran):
    prepared, fleet = prepared_with(), small_fleet()
    forecast = prepare_lib.outputs(prepared, ran.outcome.state)
    test = fleet.test
    mae, accuracy, mse = [], [], []
    for i in range(len(fleet.client_ids)):
        use = test.mask[i]
        scale, shift = test.scale[i][use].astype(np.float64), test.shift[i][use]
        units = np.asarray(forecast)[i][use] * scale + shift
        reading = test.targets[i][use] * scale + shift
        mae.append(np.abs(units - reading).mean())
        accuracy.append(max(0, 1 - np.abs(units - reading).sum() / np.abs(reading).sum()))
        mse.append(((np.asarray(forecast)[i][use] - test.targets[i][use]) ** 2).mean())
    clients, last = ran.csv("clients"), ran.csv("rounds").iloc[-1]
    np.testing.assert_allclose(clients["mae_units"], mae, rtol=1e-5)
    np.testing.assert_allclose(clients["accuracy"], accuracy, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(clients["mse"], mse, rtol=1e-4)
    np.testing.assert_allclose(last["mae_units"], np.mean(mae), rtol=1e-5)
    np.testing.assert_allclose(last["mae_units_median"], np.median(mae), rtol=1e-5)
    np.testing.assert_allclose(last["mae_units_std"], np.std(mae), rtol=1e-4)
    np.testing.assert_allclose(last["mae_units_worst_tenth"], np.max(mae), rtol=1e-5)


def test_outcome_is_what_was_written(ran):
    outcome = ran.outcome
    assert outcome.stopped == ""
    assert (ran.path / "summary.txt").read_text() == outcome.text + "\n"
    pd.testing.assert_frame_equal(outcome.rounds[["mae"]], ran.csv("rounds")[["mae"]])
    assert outcome.clients["mae_units"].tolist() == ran.csv("clients")["mae_units"].tolist()


def test_callbacks_and_plain_lines(ran):
    assert [number for number, _ in ran.seen] == [1, 2, 3, 4]
    assert ran.seen[2][1]["mae_units"] == ran.csv("rounds")["mae_units"][2]
    lines = [line for line in ran.said.splitlines() if line.startswith("round ")]
    assert len(lines) == 4
    assert all(re.match(r"round \d/4  0:\d\d:\d\d elapsed, .* left  MAE .* L  ", x) for x in lines)


def test_naive_forecasts_stand_beside_the_model_in_the_summary(ran):
    for name in ("the federated model", "the reading before", "same time last week",
                 "mean of the last 7 days", "the client's training median", "MAE L"):  # fmt: skip
        assert name in ran.outcome.text
    mean = ran.csv("clients")["yesterday_mae_units"].mean()
    assert re.search(rf"the reading before +{mean:.4g} ", ran.outcome.text)
    assert "Agreement with the planted groups" in ran.outcome.text


# The report


def test_a_run_ends_with_a_report(tmp_path):
    run = Ran(prepared_with(report=True, rounds=2), tmp_path / "run")
    page = (run.path / "report.html").read_text()
    for name in ("error_per_round", "forecasts", "trajectories", "coalition_map", "dissimilarity"):
        assert (run.path / "pictures" / f"{name}.svg").exists()
    assert page.count("<figure>") >= 6
    with np.load(run.path / "opinions.npz") as opinions:
        assert opinions["round"] == 2
        last = run.csv("coalitions").query("round == 2")
        assert opinions["cohort"].tolist() == last["client"].tolist()
        # The stored inner products lead to the coalitions that the round found.
        gram_ss = opinions["gram_update"]
        with jax.enable_x64(True):
            gram_ss = jnp.asarray(gram_ss)
        near = hk.Neighborhood("cosine", np.float32(opinions["limit"]), np.float32(0))
        found = hk.interact_from_gram(gram_ss, near)
        np.testing.assert_array_equal(found.labels_s, opinions["labels"])
    forecasts = run.csv("forecasts")
    mae = (forecasts["forecast"] - forecasts["actual"]).abs().groupby(forecasts["client"]).mean()
    clients = run.csv("clients").set_index("client")
    np.testing.assert_allclose(mae[clients.index], clients["mae_units"], rtol=1e-4)


def test_a_report_that_fails_costs_no_result(tmp_path, monkeypatch):

    def fail(path):
        raise RuntimeError("no ink")

    monkeypatch.setattr(build, "write_report", fail)
    run = Ran(prepared_with(report=True), tmp_path / "run")
    assert run.outcome.text and (run.path / "summary.txt").exists()
    assert (run.path / "checkpoints" / str(ROUNDS)).is_dir()
    for text in (run.said, run.log):
        assert "the report could not be made (RuntimeError: no ink)" in text
        assert f"python -m fedjax_hk.report --run={run.path}" in text


def test_a_library_users_folder_holds_what_a_commands_does(ran, tmp_path):
    config = json.loads((ran.path / "config.json").read_text())
    assert config["flags"] == dataclasses.asdict(prepared_with().config)
    assert {"versions", "device", "data"} <= set(config)
    scaling = ran.csv("scaling")
    assert tuple(scaling["client"]) == small_fleet().client_ids
    assert not (ran.path / "excluded.csv").exists()  # nobody was

    left = (Excluded("a client", "no reading"),)
    prepared = prepared_with(rounds=1)
    run = Ran(prepared._replace(fleet=prepared.fleet._replace(excluded=left)), tmp_path / "run")
    assert run.csv("excluded").to_dict("records") == [left[0]._asdict()]
