"""What a run says once."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_run import ROUNDS, Ran, on_fleet, poisoned, prepared_with, small_fleet

from fedjax_hk import data, hk, parallel
from fedjax_hk.data import synthetic_fleet
from fedjax_hk.run import prepare as prepare_lib


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The run that most tests look at."""
    return Ran(prepared_with(), tmp_path_factory.mktemp("runs") / "run")


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
    _, _, snapshot = prepare_lib.step(prepared, prepared.state, 1)
    gram_ss = prepare_lib.gram(prepared, snapshot, "weights")
    result = hk.interact_from_gram(gram_ss, hk.cosine(float(tau)))
    assert len(set(np.asarray(result.weights_s).round(6))) > 1
    _, info, _ = prepare_lib.step(prepared_with(opinion=None, tau=float(tau)), prepared.state, 1)
    assert not info.changes_nothing
    assert "In 4 of 4 rounds the grouping changed nothing" in run.outcome.text
    # It is not said again by a run that goes on.
    resumed = Ran(prepared_with(opinion=None, tau=None, rounds=5), run.path, resume=True)
    assert len(resumed.seen) == 1
    assert "changes nothing" not in resumed.said


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
    prepared = prepared._replace(state=prepared.state.with_params(nothing[0]), hparams=nothing[1])
    run = Ran(prepared, tmp_path / "run")
    assert (run.csv("rounds")["dead_clients"] == 7).all()
    assert run.csv("clients")["dead"].all()
    assert run.said.count("  7 dead") == ROUNDS
    assert "7 clients are forecast as zero throughout (dead output)" in run.outcome.text
    assert "--activation=softplus" in run.outcome.text
