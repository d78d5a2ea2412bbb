"""Who was alone, and whether that says something."""

import itertools

import numpy as np
import pandas as pd
import pytest

from fedjax_hk.report import isolated
from fedjax_hk.tasks import FORECAST

TRAITS = FORECAST.words.traits


def table(use, alone, zeros=0.1, sampled=4):
    num = len(use)
    return pd.DataFrame(
        {"client": [f"c{i}" for i in range(num)], "mean_units": use,
         "zero_share": np.broadcast_to(zeros, num), "rounds_alone": alone,
         "rounds_sampled": np.broadcast_to(sampled, num), "mae_units": 1.0}
    )  # fmt: skip


def test_half_of_the_rounds_is_isolated():
    clients = table([1, 2, 3, 4, 5], [0, 1, 2, 4, 0], sampled=[4, 4, 4, 4, 0])
    found = isolated.isolated_clients(clients)
    assert found["client"].tolist() == ["c3", "c2"]
    assert found["share_alone"].tolist() == [1.0, 0.5]


def test_distance_from_the_middle():
    np.testing.assert_allclose(isolated.distance_from_middle([3, 1, 2, 5, 4]), [0, 1, 0.5, 1, 0.5])
    np.testing.assert_allclose(isolated.distance_from_middle([7, 7, 7]), 0)
    assert isolated.distance_from_middle([7.0]).shape == (1,)


def test_data_say_whether_the_isolated_are_unusual():
    use = np.linspace(100, 200, 40)
    ends = np.isin(np.arange(40), [0, 1, 38, 39])
    found = isolated.compare(table(use, np.where(ends, 4, 0)), TRAITS)
    assert [one.trait.words for one in found] == ["mean use", "share of zeros"]
    assert found[0].p_value < 0.01 and found[0].distance > 0.9
    assert found[1].p_value == 1.0  # all have the same share of zeros
    assert found[0].isolated == 150 and found[0].others == 150  # medians would not have told
    middle = np.isin(np.arange(40), [18, 19, 20, 21])
    assert isolated.compare(table(use, np.where(middle, 4, 0)), TRAITS)[0].p_value > 0.9
    text = " ".join(isolated.sentences(table(use, np.where(ends, 4, 0)), "L", TRAITS))
    assert "4 of 40 clients" in text
    assert "In mean use they are unusual: 150 L beside 150 L" in text
    assert "In share of zeros they are not unusual: 10 % beside 10 %" in text


def test_p_values_are_uniform_for_clients_picked_blindly():
    rng = np.random.default_rng(0)
    use = rng.lognormal(size=30)
    values = []
    for _ in range(60):
        alone = np.isin(np.arange(30), rng.choice(30, 6, replace=False))
        found = isolated.compare(table(use, np.where(alone, 4, 0)), TRAITS, resamples=400)
        values.append(found[0].p_value)
    assert 0.35 < np.mean(values) < 0.65
    assert np.mean(np.array(values) < 0.05) < 0.2


def test_p_value_of_few_clients_is_exact():
    use = np.array([1.0, 2, 4, 8, 16, 32, 64])
    found = isolated.compare(table(use, [4, 0, 0, 0, 0, 4, 4]), TRAITS)[0]
    far = isolated.distance_from_middle(use)
    picked = [far[list(three)].mean() for three in itertools.combinations(range(7), 3)]
    assert found.distance == pytest.approx(far[[0, 5, 6]].mean())
    assert found.p_value == pytest.approx(np.mean(np.array(picked) >= found.distance - 1e-12))


def test_words_for_nobody_everybody_and_few():
    assert isolated.sentences(table([1, 2], [0, 0]), "L", TRAITS) == []
    assert "All 2 clients" in isolated.sentences(table([1, 2], [4, 4]), "L", TRAITS)[0]
    text = isolated.sentences(table([1, 2, 3, 4], [4, 0, 0, 0]), "", TRAITS)
    assert "1 of 4 clients, c0 (4 of 4)." in text[0] and "Too few" in text[1]
