"""A whole run in this process, with a small linear forecaster: tables, resume, notes."""

import dataclasses
import functools
import gc
import io
import json
import os
import re
import shutil
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from fedjax_hk import data, hk, models, parallel
from fedjax_hk import main as main_lib
from fedjax_hk.data import synthetic_fleet
from fedjax_hk.report import build
from fedjax_hk.report.coalition_map import coalition_map, pair_limits, splitting_threshold
from fedjax_hk.run import simulation
from fedjax_hk.settings import thresholds
from fedjax_hk.settings.config import Config, ConfigError
from fedjax_hk.store import run_folder

POISON = 1e6  # the forecaster answers NaN to windows that hold a reading above half of it
ROUNDS = 4

# pandas reads floats to the last bit by itself from 3.1 on, where the option is deprecated.
EXACT = {} if pd.__version__ >= "3.1" else {"float_precision": "round_trip"}


class Linear(nn.Module):
    """13 parameters."""

    @nn.compact
    def __call__(self, inputs):
        outputs = nn.Dense(1, bias_init=nn.initializers.constant(0.3))(inputs[:, :, 0])[:, 0]
        poisoned = jnp.max(inputs, axis=(1, 2)) > POISON / 2
        return jnp.where(poisoned, jnp.nan, outputs)


MODEL = models.from_flax(Linear(), jnp.zeros((2, 12, 1)))


@functools.cache
def small_fleet(clients=7, days=75):
    return data.build_fleet(synthetic_fleet(clients, days))


def settings(**changes) -> Config:
    base = {
        "agg": "hk_cosine", "opinion": "update", "tau": 0.5, "rounds": ROUNDS, "epochs": 1,
        "clients_per_round": 5, "devices": 1, "learning_rate": 0.01, "report": False,
    }  # fmt: skip
    base |= changes
    return Config(**{name: value for name, value in base.items() if value is not None})


@functools.cache
def prepared_for(config: Config) -> simulation.Prepared:
    return simulation.prepare(config, small_fleet(), MODEL)


def prepared_with(**changes) -> simulation.Prepared:
    """What is compiled does not depend on seed, rounds and numbers, so it is shared."""
    config = settings(**changes)
    base = prepared_for(dataclasses.replace(config, seed=0, rounds=ROUNDS, learning_rate=0.01))
    return simulation.reuse(base, config)


class Calls:
    """A callback that hands everything to a function."""

    def __init__(self, function):
        self.on_round_end = function


class Ran:
    """A run in a new folder, with all that it said."""

    def __init__(self, prepared, path, callbacks=(), resume=False):
        opened = run_folder.open_existing(path) if resume else run_folder.create(path)
        self.path, self.stream, self.seen = opened.path, io.StringIO(), []
        with opened as folder:
            if not resume:
                folder.write_config({})
            self.outcome = simulation.run(
                prepared,
                folder,
                resume=resume,
                callbacks=[Calls(lambda *seen: self.seen.append(seen)), *map(Calls, callbacks)],
                stream=self.stream,
            )

    def csv(self, name, **options):
        path = self.path / f"{name}.csv"
        return pd.read_csv(path, **EXACT, **options)

    @property
    def said(self):
        return self.stream.getvalue()

    @property
    def log(self):
        path = self.path / "log.txt"
        return path.read_text() if path.exists() else ""


def assert_same_run(one: Ran, other: Ran, but=()):
    """Bit for bit, but for the seconds that rounds took."""
    for name in ("coalitions.csv", "clients.csv", "summary.txt"):
        if name not in but:
            assert (one.path / name).read_bytes() == (other.path / name).read_bytes(), name
    pd.testing.assert_frame_equal(
        *(run.csv("rounds", dtype=str).drop(columns="seconds") for run in (one, other))
    )
    for a, b in zip(*(jax.tree.leaves(r.outcome.state) for r in (one, other)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The run that most tests look at."""
    return Ran(prepared_with(), tmp_path_factory.mktemp("runs") / "run")


# Tables


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
    forecast = jax.jit(prepared.engine.forecast)(
        ran.outcome.state, prepared.arrays, prepared.hparams
    )
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


# The same again


def test_same_seed_same_bits_and_another_seed_others(ran, tmp_path):
    assert_same_run(Ran(prepared_with(), tmp_path / "again"), ran)
    other = Ran(prepared_with(seed=1), tmp_path / "other")
    assert other.csv("coalitions")["client"].tolist() != ran.csv("coalitions")["client"].tolist()
    assert (other.csv("rounds")["train_loss"] != ran.csv("rounds")["train_loss"]).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": 2, "chunk": 2},
        pytest.param({"devices": 2}, marks=pytest.mark.slow),
        pytest.param({"chunk": 1}, marks=pytest.mark.slow),
    ],
)
def test_devices_and_chunks_change_rounding_only(changes, tmp_path):
    one = prepared_with()
    other = simulation.prepare(settings(**changes), small_fleet(), MODEL)
    state, info = simulation.step(one, one.state, 1)
    other_state, other_info = simulation.step(other, other.state, 1)
    scale = np.abs(state.params).max()
    np.testing.assert_allclose(other_state.params, state.params, rtol=1e-5, atol=1e-6 * scale)
    assert info.margin > 1e-3
    np.testing.assert_array_equal(info.labels_s, other_info.labels_s)
    np.testing.assert_array_equal(info.cohort_s, other_info.cohort_s)


def test_nothing_compiles_after_the_first_round(tmp_path):
    prepared = prepared_with()
    assert prepared.compilations == 1
    assert "compiled once" in simulation.describe_devices(prepared)
    counts = []
    Ran(prepared, tmp_path / "run", [lambda *_: counts.append(len(simulation._compilations))])
    assert counts == [counts[0]] * ROUNDS


# Interruption


def stop_at(round_number, number=signal.SIGTERM):
    def callback(now, row):
        if now == round_number:
            os.kill(os.getpid(), number)

    return callback


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_round(number, ran, tmp_path, capfd):
    name = signal.Signals(number).name
    stopped = Ran(prepared_with(), tmp_path / "run", [stop_at(2, number)])
    assert stopped.outcome.stopped == name
    assert stopped.outcome.clients is None
    assert stopped.outcome.text == ""
    assert len(stopped.outcome.rounds) == 2
    assert f"{name}: this round ends and is saved" in capfd.readouterr().err
    resumed = Ran(prepared_with(), stopped.path, resume=True)
    assert [number for number, _ in resumed.seen] == [3, 4]
    assert_same_run(resumed, ran)


def test_a_signal_in_the_last_round_does_not_stop_a_run_that_is_done(ran, tmp_path):
    run = Ran(prepared_with(), tmp_path / "run", [stop_at(ROUNDS)])
    assert run.outcome.stopped == ""
    assert_same_run(run, ran)


@pytest.mark.parametrize(
    "changes",
    [
        {"serve": "coalition", "client_opt_reset": False, "gradient_spread": True},
        pytest.param(
            {"agg": "fixed_k_cosine", "tau": None, "server_opt": "adam", "num_coalitions": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["clients' models and Adam", "centers and server Adam"],
)
def test_every_state_survives(changes, tmp_path):
    prepared = prepared_with(**changes)
    whole = Ran(prepared, tmp_path / "whole")
    stopped = Ran(prepared, tmp_path / "run", [stop_at(2)])
    assert_same_run(Ran(prepared, stopped.path, resume=True), whole)
    if "gradient_spread" in changes:
        assert (whole.csv("rounds")[["gradient_spread", "gradient_norm"]] > 0).all(axis=None)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.mark.parametrize("at", ["tables", "coalitions", "summary"])
@pytest.mark.parametrize("round_number", [3, ROUNDS])
def test_killed_between_the_tables_and_the_checkpoint(at, round_number, ran, tmp_path, monkeypatch):
    """At every step of writing a round down."""
    if at == "summary" and round_number < ROUNDS:
        pytest.skip("written in the last round only")

    def kill_at(owner, name, when):
        original = getattr(owner, name)

        def patched(*args):
            if when(*args):
                raise Killed
            return original(*args)

        monkeypatch.setattr(owner, name, patched)

    if at == "tables":  # all is written but the checkpoint
        kill_at(simulation.Checkpoints, "save", lambda self, number, state: number == round_number)
    elif at == "coalitions":  # coalitions.csv has the round, rounds.csv has not
        kill_at(
            run_folder.RunFolder,
            "append_rows",
            lambda self, table, rows: table == "rounds" and rows[0]["round"] == round_number,
        )
    else:
        kill_at(run_folder.RunFolder, "write_text", lambda self, name, text: name == "summary.txt")
    path = tmp_path / "run"
    with pytest.raises(Killed):
        Ran(prepared_with(), path)
    monkeypatch.undo()
    assert not main_lib._is_finished(path, settings())
    if at == "coalitions":
        with open(path / "rounds.csv", "ab") as file:
            file.write(b"3,5,5,0.0")  # and a torn row
    resumed = Ran(prepared_with(), path, resume=True)
    assert [number for number, _ in resumed.seen] == list(range(round_number, ROUNDS + 1))
    assert_same_run(resumed, ran)


def test_without_any_checkpoint_it_starts_at_round_one(ran, tmp_path):
    path = shutil.copytree(ran.path, tmp_path / "run")
    shutil.rmtree(path / "checkpoints")
    resumed = Ran(prepared_with(), path, resume=True)
    assert [number for number, _ in resumed.seen] == [1, 2, 3, 4]
    assert_same_run(resumed, ran)


def test_an_older_checkpoint_is_taken_if_the_newest_is_torn(ran, tmp_path):
    path = shutil.copytree(ran.path, tmp_path / "run")
    for file in (path / "checkpoints" / "4").rglob("*"):
        if file.is_file() and "metadata" not in file.name.lower():
            file.write_bytes(b"")
    resumed = Ran(prepared_with(), path, resume=True)
    assert [number for number, _ in resumed.seen] == [4]
    assert "checkpoint of round 4 left out" in resumed.log
    assert_same_run(resumed, ran)


def test_more_rounds_equal_a_longer_run(ran, tmp_path):
    longer = Ran(prepared_with(rounds=6), tmp_path / "longer")
    path = shutil.copytree(ran.path, tmp_path / "run")
    resumed = Ran(prepared_with(rounds=6), path, resume=True)
    assert [number for number, _ in resumed.seen] == [5, 6]
    assert_same_run(resumed, longer)


def test_a_stale_summary_is_not_taken_for_the_end(ran, tmp_path, monkeypatch):
    """A finished run goes on for more rounds and is killed before its new summary."""
    path = shutil.copytree(ran.path, tmp_path / "run")

    def killed(*_):
        raise Killed

    monkeypatch.setattr(simulation, "_finish", killed)
    with pytest.raises(Killed):
        Ran(prepared_with(rounds=6), path, resume=True)
    monkeypatch.undo()
    assert len(pd.read_csv(path / "rounds.csv")) == 6
    assert (path / "summary.txt").exists()
    assert not main_lib._is_finished(path, settings(rounds=6))
    resumed = Ran(prepared_with(rounds=6), path, resume=True)
    assert "after 6 rounds" in resumed.outcome.text


def test_resuming_a_finished_run_trains_nothing(ran, tmp_path):
    path = shutil.copytree(ran.path, tmp_path / "run")
    resumed = Ran(prepared_with(), path, resume=True)
    assert resumed.seen == []
    assert_same_run(resumed, ran)
    assert resumed.outcome.text == ran.outcome.text
    assert len(resumed.outcome.clients) == 7


# What is said


def test_a_grouping_that_changes_nothing_is_said_once(tmp_path):
    prepared = prepared_with(opinion=None, tau=None)  # the paper's: weights, 0.9
    run = Ran(prepared, tmp_path / "run")
    rounds = run.csv("rounds")
    assert rounds["changes_nothing"].all()
    for text in (run.said, run.log):
        assert text.count("the grouping changes nothing: all clients are one coalition") == 1
        assert "1 - cos of the pairs: min " in text
        assert "neighbors are within 0.1" in text
        assert "--opinion=update" in text
        assert "--tau_mode=quantile --tau=0.95" in text
        assert "--serve=coalition" in text
    tau = re.search(r"would change this round: --tau=(\S+)\n", run.said).group(1)
    _, info = simulation.step(prepared, prepared.state, 1)
    result = hk.interact_from_gram(info.grams["weights"], hk.cosine(float(tau)))
    assert len(set(np.asarray(result.weights_s).round(6))) > 1
    _, info = simulation.step(prepared_with(opinion=None, tau=float(tau)), prepared.state, 1)
    assert not info.changes_nothing
    assert "In 4 of 4 rounds the grouping changed nothing" in run.outcome.text
    # It is not said again by a run that goes on.
    resumed = Ran(prepared_with(opinion=None, tau=None, rounds=5), run.path, resume=True)
    assert len(resumed.seen) == 1
    assert "changes nothing" not in resumed.said


MEANINGS = {
    "cosine": hk.cosine,
    "radius": hk.unit_ball,
    "matched": lambda tau: hk.unit_ball(jnp.sqrt(2 * (1 - jnp.float32(tau)))),
    "linear": lambda tau: hk.unit_ball(2 * (1 - jnp.float32(tau))),
    "distance": hk.ball,
}


@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("spread", [pytest.param(0.3, marks=pytest.mark.slow), 1e-3])
def test_the_threshold_that_is_named_splits(meaning, spread):
    rng = np.random.default_rng(3)  # at a spread of 1e-3, 1 - cos is around 1e-6
    groups_sd = rng.standard_normal((3, 100))[[0] * 9 + [1] * 7 + [2] * 4]
    opinions_sd = 1 + spread * (groups_sd + 0.3 * rng.standard_normal((20, 100)))
    opinions_sd = opinions_sd.astype(np.float32)
    gram = hk.gram_matrix(opinions_sd)
    text = splitting_threshold(gram, np.ones(20, bool), thresholds.MEANINGS[meaning])
    assert text is not None
    assert len(text) <= 12
    exact = float(text)
    as_run = jnp.float32(exact)  # a run traces its thresholds in float32
    for threshold in (exact, as_run):
        found = hk.interact_from_gram(gram, MEANINGS[meaning](threshold))
        assert np.ptp(np.asarray(found.weights_s)) > 1e-5


def test_opinions_that_no_threshold_splits():
    gram = hk.gram_matrix(np.ones((5, 3), np.float32))
    assert splitting_threshold(gram, np.ones(5, bool), thresholds.MEANINGS["cosine"]) is None
    assert splitting_threshold(gram, np.arange(5) < 1, thresholds.MEANINGS["cosine"]) is None
    assert splitting_threshold(gram, np.zeros(5, bool), thresholds.MEANINGS["distance"]) is None


def test_coalition_map_equals_plain_calls():
    rng = np.random.default_rng(5)
    gram, mask = hk.gram_matrix(rng.standard_normal((12, 8)).astype(np.float32)), np.arange(12) < 11
    limits_t = pair_limits(gram, mask, "cosine", 9)
    assert (np.diff(limits_t) >= 0).all()
    found = coalition_map(gram, mask, "cosine", limits_t)
    for i, limit in enumerate(limits_t):
        near = hk.Neighborhood("cosine", jnp.float32(limit), jnp.float32(0))
        one = hk.interact_from_gram(gram, near, mask=mask)
        assert found.num_coalitions_t[i] == one.num_coalitions
        assert found.largest_t[i] == one.sizes_s.max()
        weights_s = np.asarray(one.weights_s)[mask]
        assert found.changes_t[i] == (np.abs(weights_s * 11 - 1).max() > 1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"tau_mode": "quantile"}, {"opinion": "centered"}, {"epochs": 2}, {"devices": 2},
     {"agg": "hk_euclidean", "epsilon": 1.0}, {"judge": "validation"}],
)  # fmt: skip
def test_what_needs_another_compilation_is_not_reused(changes):
    prepared = prepared_with()
    config = dataclasses.replace(prepared.config, **changes)
    with pytest.raises(ConfigError, match="needs another compilation"):
        simulation.reuse(prepared, config)


def test_what_is_traced_or_said_is_reused():
    prepared = prepared_with()
    config = dataclasses.replace(
        prepared.config, tau=0.7, seed=3, rounds=2, report=True, tensorboard=True
    )
    found = simulation.reuse(prepared, config)
    assert found.round is prepared.round and found.config == config
    assert float(found.hparams.tau) == pytest.approx(0.7)
    moved = dataclasses.replace(config, judge="validation")  # what other samples are read from
    assert simulation.reuse(prepared, moved, small_fleet()).config == moved


def on_fleet(prepared, fleet):
    """The same compiled round on other data of the same shape."""
    arrays = prepared.arrays._replace(train=fleet.train, test=fleet.test)
    arrays = parallel.place(arrays, prepared.engine.mesh)
    return prepared._replace(arrays=arrays, fleet=fleet)


def poisoned(prepared, clients):
    """The clients' training windows make the forecaster answer NaN."""
    inputs = np.array(prepared.fleet.train.inputs)
    inputs[clients] = POISON
    train = prepared.fleet.train._replace(inputs=inputs)
    return on_fleet(prepared, prepared.fleet._replace(train=train))


def test_a_diverged_client_is_named_everywhere(tmp_path):
    run = Ran(poisoned(prepared_with(), [2]), tmp_path / "run")
    name = small_fleet().client_ids[2]
    coalitions = run.csv("coalitions")
    rows = coalitions[coalitions["client"] == name]
    assert len(rows)
    assert (rows["status"] == "not finite").all()
    assert rows["coalition"].isna().all()
    assert (rows["weight"] == 0).all()
    assert (rows["size"] == 0).all()
    rounds = run.csv("rounds").set_index("round")
    hit = rounds.loc[rows["round"]]
    assert (hit["left_out"] == name).all()
    assert (hit["diverged_clients"] == 1).all()
    assert (hit["clients"] == 4).all()
    assert np.isfinite(rounds[["train_loss", "mae_units", "dispersion"]]).all(axis=None)
    first = rows["round"].iloc[0]
    for text in (run.said, run.log):
        assert f"in round {first} left out: {name} (not finite)" in text
    assert f"left out: {name}" in run.said
    assert f"left out {len(rows)} times" in run.outcome.text
    assert "--learning_rate" in run.outcome.text
    weights = coalitions.groupby("round")["weight"].sum()
    np.testing.assert_allclose(weights, 1, atol=1e-6)


def test_all_clients_left_out_the_model_stays(tmp_path):
    prepared = poisoned(prepared_with(), list(range(7)))
    run = Ran(prepared, tmp_path / "run")
    np.testing.assert_array_equal(run.outcome.state.params, prepared.state.params)
    rounds = run.csv("rounds")
    assert (rounds["clients"] == 0).all()
    assert (rounds["diverged_clients"] == 5).all()
    assert (rounds["num_coalitions"] == 0).all()
    assert np.isfinite(rounds["mae_units"]).all()
    for text in (run.said, run.log):
        assert "in round 1 nobody took part, left out: " in text
        assert "(not finite); the model stays as it was" in text
        assert "changes nothing" not in text
    assert "no coalition" in run.said
    assert "left out 20 times" in run.outcome.text
    assert run.csv("clients")["last_coalition"].isna().all()


def test_a_learning_rate_that_is_too_large_is_survived(tmp_path):
    run = Ran(prepared_with(learning_rate=1e30), tmp_path / "run")
    rounds = run.csv("rounds")
    assert (rounds["diverged_clients"] > 0).all()
    assert np.isfinite(run.outcome.state.params).all()
    assert "A smaller --learning_rate may help" in run.outcome.text
    assert "not finite" in run.said


def zeroed_fleet(clients, days):
    """A fleet some of whose clients read zero in the last `days`."""
    table = synthetic_fleet(7, 75)
    values_tn = table.values_tn.copy()
    values_tn[-days:, clients] = 0
    return data.build_fleet(table._replace(values_tn=values_tn))


def test_clients_that_consume_nothing_are_counted(tmp_path):
    run = Ran(on_fleet(prepared_with(rounds=2), zeroed_fleet([1, 4], 30)), tmp_path / "run")
    rounds, clients = run.csv("rounds"), run.csv("clients")
    named = ["mse", "mae", "mae_units", "rmse_units", "accuracy"]
    assert np.isfinite(rounds[named]).all(axis=None)
    assert (rounds["unscored_clients"] == 0).all()
    assert (rounds["unscored_accuracy"] == 2).all()
    empty = clients["accuracy"].isna()
    assert np.flatnonzero(empty).tolist() == [1, 4]
    assert np.isfinite(clients["mae_units"]).all()
    assert rounds["accuracy"].iloc[-1] == pytest.approx(clients["accuracy"].mean())
    assert "read zero throughout their test span: 2, such as h0001, h0004" in run.outcome.text
    assert "nan" not in run.outcome.text


def test_dead_clients_are_counted_and_said(ran, tmp_path):
    assert "dead" not in ran.said
    prepared = prepared_with()
    nothing = parallel.place(
        (jnp.zeros(13), prepared.hparams._replace(learning_rate=0.0)), prepared.engine.mesh
    )
    prepared = prepared._replace(
        state=prepared.state._replace(params=nothing[0]), hparams=nothing[1]
    )
    run = Ran(prepared, tmp_path / "run")
    assert (run.csv("rounds")["dead_clients"] == 7).all()
    assert run.csv("clients")["dead"].all()
    assert run.said.count("  7 dead") == ROUNDS
    assert "7 clients are forecast as zero throughout (dead output)" in run.outcome.text
    assert "--activation=softplus" in run.outcome.text


# Through the command, in this process


compiled = {}  # by the shape of the data; the tests run one rule only


@pytest.fixture
def command(monkeypatch, tmp_path, capfd):
    """The command with the small forecaster; returns code, output and error."""
    prepare, run = simulation.prepare, simulation.run
    monkeypatch.chdir(tmp_path)

    def prepare_small(config, fleet):
        shape = fleet.train.inputs.shape, fleet.test.inputs.shape
        if shape not in compiled:
            compiled[shape] = prepare(config, fleet, MODEL)
        return on_fleet(compiled[shape], fleet)._replace(config=config)

    monkeypatch.setattr(simulation, "prepare", prepare_small)

    def call(*flags, callback=None):
        callbacks = [] if callback is None else [Calls(callback)]
        monkeypatch.setattr(
            simulation, "run", lambda *args, **kw: run(*args, **{**kw, "callbacks": callbacks})
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


@pytest.mark.slow
def test_many_configurations_in_one_process_leave_nothing_behind():
    def resident_mib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    seen = []
    for number in range(50):
        # Another cohort is another program.
        config = settings(clients_per_round=2 + number % 5, tau=0.3, learning_rate=1e-3)
        prepared = simulation.prepare(config, small_fleet(), MODEL)
        state, info = simulation.step(prepared, prepared.state, 1)
        assert np.isfinite(info.errors.mae).all()
        del prepared, state, info
        gc.collect()
        seen.append((len(jax.live_arrays()), resident_mib()))
    arrays, memory = zip(*seen, strict=True)
    assert arrays[-1] == arrays[9]
    assert memory[-1] - memory[9] < 100  # 40 programs that stayed would hold several times that
