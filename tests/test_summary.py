"""What a run says in words."""

import math

import numpy as np
import pandas as pd
import pytest

from fedjax_hk import data
from fedjax_hk.report import summary
from fedjax_hk.settings import thresholds
from fedjax_hk.settings.config import Config
from fedjax_hk.tasks import FORECAST, forecast_errors
from fedjax_hk.types import Excluded


@pytest.fixture(scope="module")
def fleet():
    return data.build_fleet(data.synthetic_fleet(6, 60))


def row_of(**changes):
    row = {
        "round": 3, "sampled_clients": 5, "clients": 5, "num_coalitions": 1, "mae_units": 12.345,
        "coalition_sizes": "5", "limit": 0.1, "dead_clients": 0, "left_out": "",
        "apart_min": 1e-6, "apart_q25": 2e-6, "apart_median": 3e-6, "apart_q75": 4e-6,
        "apart_max": 5e-6,
    }  # fmt: skip
    return row | changes


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "MAE 12.35 L  1 coalition (5)"),
        ({"coalition_sizes": "2 1 1 1"}, "MAE 12.35 L  4 coalitions (2, 1, 1, 1)"),
        ({"coalition_sizes": "1 1 1 1 1"}, "MAE 12.35 L  5 coalitions (1, 1, 1, 1, ...)"),
        ({"dead_clients": 2}, "MAE 12.35 L  1 coalition (5)  2 dead"),
        ({"clients": 4, "left_out": "h1"}, "MAE 12.35 L  1 coalition (5)  left out: h1"),
        ({"coalition_sizes": ""}, "MAE 12.35 L  no coalition"),
    ],
)
def test_line_of_a_round(changes, line):
    assert summary.round_line(row_of(**changes), "L", FORECAST) == line


def test_fleet_in_words(fleet):
    text = summary.describe_fleet(fleet)
    assert fleet.source in text
    assert "6 clients" in text
    assert "left out" not in text
    left = tuple(Excluded(f"m{i}", f"reason {i}") for i in range(5))
    text = summary.describe_fleet(fleet._replace(excluded=left))
    assert "5 left out (all in excluded.csv)" in text
    assert "m2: reason 2" in text
    assert "m3" not in text


@pytest.mark.parametrize(
    ("config", "row", "said", "not_said"),
    [
        (
            Config(tau=0.9),
            {},
            ["in round 3", "all clients are one coalition", "1 - cos of the pairs: min 1e-06",
             "median 3e-06", "neighbors are within 0.1", "--tau=0.5", "--opinion=update",
             "--tau_mode=quantile --tau=0.95", "--serve=coalition"],
            ["--tau_mode=absolute", "--epsilon"],
        ),
        (Config(), {"num_coalitions": 5}, ["every client is alone"], []),
        (Config(), {"num_coalitions": 2}, ["all 2 coalitions weigh as many clients"], []),
        (Config(opinion="update"), {}, ["--tau_mode=quantile"], ["--opinion"]),
        (
            Config(tau_mode="quantile", tau=0.0),
            {},
            ["--tau=0.5 --tau_mode=absolute"],
            ["--tau_mode=quantile"],
        ),
        (
            Config(agg="hk_euclidean", epsilon=2.0),
            {},
            ["distance of the pairs", "--epsilon=0.5", "--tau=0.95 without --epsilon"],
            ["1 - cos"],
        ),
        (Config(agg="hk_band"), {}, ["--eps_lower=0.5 --eps_upper=1"], ["--tau"]),
        (
            Config(between="size"),
            {},
            ["--within=uniform --between=size weigh every client alike",
             "Try: --opinion=update", "--within=uniform --between=equal"],
            ["--tau_mode"],
        ),
        (
            Config(agg="fixed_k_cosine", opinion="centered"),
            {"limit": math.nan},
            ["Try: --serve=coalition"],
            ["neighbors are within", "nan"],
        ),
    ],
)  # fmt: skip
def test_why_nothing_changes_and_what_to_try(config, row, said, not_said):
    text = summary.nothing_changed(row_of(**row), config, "0.5")
    assert all(part in text for part in said), text
    assert not any(part in text for part in not_said), text


def test_no_threshold_is_named_where_none_is_known():
    assert "threshold" not in summary.nothing_changed(row_of(), Config(), None)


def test_what_a_threshold_means():
    def outright(**settings):
        return thresholds.meaning_of(Config(**settings), outright=True)

    assert outright().name == outright(tau_mode="quantile").name == "cosine"
    assert outright(agg="hk_band").name == "band"
    assert outright(agg="hk_euclidean").name == "radius"
    assert outright(agg="hk_euclidean", euclid_tau="linear").name == "linear"
    assert outright(agg="hk_euclidean", epsilon=1.0).name == "distance"
    assert outright(agg="fedavg") is None


def rounds_table(**changes):
    rounds = pd.DataFrame(
        {
            "num_coalitions": [1, 3], "changes_nothing": [True, False], "converged": [True, False],
            "largest_weight": [0.2, 1 / 3], "agreement": [0.0, 0.5], "diverged_clients": [0, 0],
            "round": [1, 2], "mae_units": [40.0, 30.0], "clients": [6, 6],
        }
    )  # fmt: skip
    return rounds.assign(**changes)


def clients_table(fleet, mae_units=30.0, **changes):
    num = len(fleet.client_ids)
    table = pd.DataFrame({"client": fleet.client_ids, "mae_units": np.full(num, mae_units)})
    table = table.assign(rmse_units=40.0, accuracy=0.5, mse=0.1, dead=False)
    table = table.assign(rounds_alone=0, rounds_sampled=2)
    for name, errors in forecast_errors.naive_errors(fleet).items():
        for field in ("mae_units", "rmse_units", "accuracy", "mse"):
            table[f"{name}_{field}"] = getattr(errors, field)
    return table.assign(**changes)


def test_summary_of_a_run(fleet):
    text = summary.summarize(
        Config(), fleet.unit, rounds_table(), clients_table(fleet, rounds_alone=[0, 2, 0, 0, 1, 0])
    )
    assert "hk_cosine after 2 rounds, 6 clients" in text
    assert "Coalitions a round: 1 to 3 (median 2); largest weight of one client 0.333" in text
    assert "In 1 of 2 rounds the grouping changed nothing" in text
    assert "In 1 rounds opinions were still moving" in text
    assert "chance): 0.25 on average" in text
    assert "Alone in at least half of their rounds: 2 of 6 clients, h0001 (2 of 2), h0004" in text
    assert "Too few on one side to say whether they are unusual." in text
    said = summary.progress(rounds_table(), "", FORECAST)
    assert "40 units after round 1, 30 units after round 2; the best was 30 units" in said
    for silent in ("dead", "not finite", "read zero", "nan"):
        assert silent not in text


def test_verdict_names_the_best_naive_forecast(fleet):
    naive = {k: np.nanmean(e.mae_units) for k, e in forecast_errors.naive_errors(fleet).items()}
    best = min(naive, key=naive.get)
    good = summary.summarize(Config(), fleet.unit, rounds_table(), clients_table(fleet, 0.0))
    assert f"The model beats the best naive forecast ({FORECAST.words.naive_names[best]})" in good
    assert f"{naive[best]:.3g} L less on average (95 % interval over clients -" in good
    assert "it is better for 6 of 6 clients" in good
    near = clients_table(fleet)
    near["mae_units"] = near[f"{best}_mae_units"] + [1, -1, 1, -1, 1, -1]
    same = summary.summarize(Config(), fleet.unit, rounds_table(), near)
    assert "The model cannot be told apart from the best naive forecast" in same
    one = summary.verdict(clients_table(fleet, 0.0).head(1), "L", FORECAST)
    assert "beats" in one and "interval" not in one
    bad = summary.summarize(Config(), fleet.unit, rounds_table(), clients_table(fleet, 1e4))
    assert "The model does NOT beat" in bad
    assert "better for 0 of 6" in bad


def test_rules_without_coalitions_say_nothing_of_them(fleet):
    for agg in ("fedavg", "local"):
        text = summary.summarize(Config(agg=agg), fleet.unit, rounds_table(), clients_table(fleet))
        assert "Coalitions" not in text
        assert "changed nothing" not in text


def test_where_attackers_sat_is_said(fleet):
    rounds = rounds_table(attackers_mixed=[np.nan, 0.25])
    config = Config(attack="scale")
    said = " ".join(summary.coalition_sentences(config, rounds))
    assert "Attackers (scale) sat in a coalition with honest clients 25 % of the time." in said
    assert "weighs as much as a coalition" in said
    lone = " ".join(summary.coalition_sentences(Config(attack="scale", min_coalition=2), rounds))
    assert "Attackers" in lone and "weighs as much" not in lone
    assert "Attackers" not in " ".join(summary.coalition_sentences(Config(), rounds))
    calm = rounds_table(attackers_mixed=np.nan)
    assert "Attackers" not in " ".join(summary.coalition_sentences(config, calm))


def test_troubles_are_said(fleet):
    mae = [np.inf, np.nan, 3.0, 3.0, 3.0, 3.0]
    accuracy = [np.nan, np.nan, np.nan, 0.5, 0.5, 0.5]
    dead = [False] * 4 + [True] * 2
    text = summary.summarize(
        Config(),
        fleet.unit,
        rounds_table(diverged_clients=[1, 2]),
        clients_table(fleet, mae, accuracy=accuracy, dead=dead),
    )
    assert "not finite, left out of the means: 2, such as h0000, h0001." in text
    assert "read zero throughout their test span: 1, such as h0002." in text
    assert "2 clients are forecast as zero throughout" in text
    assert "left out 3 times" in text
    assert "the federated model" in text
    assert "nan" not in text
    assert "for 4 of 4 clients" in text


def test_a_model_that_cannot_be_judged_at_all(fleet):
    text = summary.summarize(Config(), fleet.unit, rounds_table(), clients_table(fleet, np.inf))
    assert "No client's errors are finite" in text
    assert "inf L" not in text


def test_fleet_without_unit_or_truth(fleet):
    rounds = rounds_table(agreement=[math.nan] * 2)
    text = summary.summarize(Config(), "", rounds, clients_table(fleet))
    assert "MAE units" in text
    assert "planted" not in text
