"""Rows of the tables from what a round returned."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedjax_hk import data
from fedjax_hk.round.state import RoundInfo
from fedjax_hk.store import records
from fedjax_hk.tasks import forecast_errors


@pytest.fixture(scope="module")
def fleet():
    return data.build_fleet(data.synthetic_fleet(6, 60))


def info_of(fleet, **changes) -> RoundInfo:
    """A round of clients 0, 2, 3, 5: {0, 3} and {5}; client 2 diverged."""
    num = len(fleet.client_ids)
    forecast_nw = np.full(fleet.test.targets.shape, 0.25, np.float32)
    values = {name: np.float32(0.5) for name in RoundInfo._fields} | {
        "cohort_s": np.array([0, 2, 3, 5]),
        "present_s": np.array([True, False, True, True]),
        "finite_s": np.array([True, False, True, True]),
        "labels_s": np.array([0, -1, 0, 3]),
        "weights_s": np.array([0.25, 0, 0.25, 0.5], np.float32),
        "loss_s": np.array([1.0, math.nan, 2.0, 6.0], np.float32),
        "num_coalitions": np.int32(2),
        "num_steps": np.int32(3),
        "converged": np.bool_(True),
        "changes_nothing": np.bool_(False),
        "dissimilarity_q": np.linspace(0, 1, 5, dtype=np.float32),
        "dead_n": np.zeros(num, bool),
        "sampled_s": np.ones(4, bool),
        "reported_s": np.ones(4, bool),
        "attacker_s": np.zeros(4, bool),
        "steps_s": np.array([10, 10, 10, 5], np.int32),
        "finetuned_errors": (),
        "errors": forecast_errors.client_errors(forecast_nw, fleet.test),
    }
    errors = values["errors"]
    values["errors"] = type(errors)(*map(np.asarray, errors))
    return RoundInfo(**(values | changes))


def test_row_of_a_round(fleet):
    row = records.round_row(7, info_of(fleet), fleet, 1.23456)
    assert row["round"] == 7
    assert row["sampled_clients"] == 4
    assert row["clients"] == 3
    assert row["train_loss"] == 3.0  # of those who took part
    assert row["num_coalitions"] == 2
    assert row["coalition_sizes"] == "2 1"
    assert row["largest_weight"] == 0.5
    assert row["effective_clients"] == pytest.approx(1 / 0.375)
    assert row["diverged_clients"] == 1
    assert row["left_out"] == fleet.client_ids[2]
    assert row["seconds"] == 1.2346
    assert [row[f"apart_{name}"] for name in records.QUANTILE_NAMES] == [0, 0.25, 0.5, 0.75, 1]
    assert all(isinstance(value, int | float | str) for value in row.values())  # bool is an int


def test_errors_are_means_over_those_who_can_be_scored(fleet):
    errors = info_of(fleet).errors
    mae, accuracy = errors.mae_units.copy(), errors.accuracy.copy()
    mae[1], accuracy[[1, 4]] = np.inf, np.nan
    changed = errors._replace(mae_units=mae, accuracy=accuracy)
    row = records.round_row(1, info_of(fleet, errors=changed), fleet, 0.0)
    assert row["mae_units"] == pytest.approx(np.delete(mae, 1).mean())
    assert row["accuracy"] == pytest.approx(np.delete(accuracy, [1, 4]).mean())
    assert row["unscored_clients"] == 1
    assert row["unscored_accuracy"] == 2


def test_row_of_a_round_without_anybody(fleet):
    nobody = np.zeros(4, bool)
    info = info_of(
        fleet, present_s=nobody, labels_s=np.full(4, -1), weights_s=np.zeros(4, np.float32)
    )
    row = records.round_row(1, info, fleet, 0.0)
    assert row["clients"] == 0
    assert row["coalition_sizes"] == ""
    assert math.isnan(row["train_loss"])
    assert math.isnan(row["largest_weight"])
    assert row["effective_clients"] == 0
    assert math.isnan(row["agreement"])
    assert row["left_out"].split() == [fleet.client_ids[i] for i in (0, 2, 3, 5)]


def test_rows_of_the_clients(fleet):
    rows = records.coalition_rows(7, info_of(fleet), fleet)
    names = [fleet.client_ids[i] for i in (0, 2, 3, 5)]
    assert [row["client"] for row in rows] == names
    assert [row["coalition"] for row in rows] == [names[0], "", names[0], names[3]]
    assert [row["size"] for row in rows] == [2, 0, 2, 1]
    assert [row["weight"] for row in rows] == [0.25, 0, 0.25, 0.5]
    assert [row["status"] for row in rows] == ["took part", "not finite", "took part", "took part"]
    assert {row["round"] for row in rows} == {7}


def test_who_was_left_out_and_why(fleet):
    assert records.describe_left_out(info_of(fleet, present_s=np.ones(4, bool)), fleet) == ""
    info = info_of(fleet, present_s=np.array([False, False, False, True]))
    names = fleet.client_ids
    assert records.describe_left_out(info, fleet) == (
        f"{names[0]}, {names[3]} (unavailable or empty); {names[2]} (not finite)"
    )


def test_agreement_needs_the_truth(fleet):
    assert math.isnan(records.agreement(info_of(fleet), fleet._replace(planted=None)))
    planted = np.array([0, 9, 9, 0, 9, 1])
    assert records.agreement(info_of(fleet), fleet._replace(planted=planted)) == 1.0


@given(
    hnp.arrays(np.int32, st.integers(1, 12), elements=st.integers(-1, 4)).flatmap(
        lambda labels_s: st.tuples(st.just(labels_s), hnp.arrays(bool, len(labels_s)))
    )
)
def test_who_sat_with_whom(drawn):
    labels_s, attacker_s = drawn
    sat = {True: [], False: []}  # by attackers: (with an honest client, with an attacker)
    for i in np.flatnonzero(labels_s >= 0):
        others = [j for j in range(len(labels_s)) if j != i and labels_s[j] == labels_s[i]]
        kinds = {bool(attacker_s[j]) for j in others}
        sat[bool(attacker_s[i])].append((False in kinds, True in kinds))

    def share(found):
        return sum(found) / len(found) if found else math.nan

    expected = (
        share([honest for honest, _ in sat[True]]),
        share([not honest and not attacker for honest, attacker in sat[True]]),
        share([attacker for _, attacker in sat[False]]),
    )
    np.testing.assert_allclose(records.seating(labels_s, attacker_s), expected)


def test_attackers_of_a_round(fleet):
    # Coalitions {0, 3} and {5}; client 2 is left out.
    def mixed(*attacker_s):
        info = info_of(fleet, attacker_s=np.array(attacker_s))
        return records.round_row(1, info, fleet, 0.0)["attackers_mixed"]

    assert mixed(True, True, False, False) == 1
    assert mixed(True, False, False, True) == 0.5
    assert mixed(True, False, True, True) == 0
    assert math.isnan(mixed(False, True, False, False))


def test_coalition_sizes_are_largest_first():
    assert records.coalition_sizes(np.array([0, 1, 1, 1, -1, 5, 5])) == [3, 2, 1]
    assert records.coalition_sizes(np.array([-1, -1])) == []


def test_table_of_the_clients(fleet):
    rows = records.coalition_rows(1, info_of(fleet), fleet)
    rows += records.coalition_rows(2, info_of(fleet), fleet)
    table = records.client_table(info_of(fleet), fleet, pd.DataFrame(rows))
    names = fleet.client_ids
    assert table["client"].tolist() == list(names)
    assert table["rounds_sampled"].tolist() == [2, 0, 0, 2, 0, 2]
    assert table["rounds_alone"].tolist() == [0, 0, 0, 0, 0, 2]
    assert table["last_coalition"].tolist() == [names[0], "", "", names[0], "", names[5]]
    assert table["test_windows"].tolist() == fleet.test.mask.sum(axis=1).tolist()
    naive = forecast_errors.naive_errors(fleet)["yesterday"]
    np.testing.assert_array_equal(table["yesterday_mae_units"], naive.mae_units)


def test_table_of_the_clients_when_nobody_ever_took_part(fleet):
    rows = records.coalition_rows(1, info_of(fleet), fleet)
    table = records.client_table(
        info_of(fleet), fleet, pd.DataFrame(rows).assign(status="not finite")
    )
    assert (table["rounds_sampled"] == 0).all()
    assert (table["last_coalition"] == "").all()
