"""The numbers behind the pictures, against loops."""

import numpy as np
import pandas as pd
import pytest
import reference_hk
from made_run import opinions_of

from fedjax_hk import hk
from fedjax_hk.report import numbers
from fedjax_hk.tasks import CLASSIFICATION, FORECAST

NUM, LIMIT, STEPS = 8, 0.5, 3


def opinions_named(present=None, kind="cosine", limit=LIMIT):
    vectors = opinions_of(NUM) * np.linspace(1, 3, NUM)[:, None]
    present = np.ones(NUM, bool) if present is None else present
    grams = {space: (k + 1.0) * vectors @ vectors.T for k, space in enumerate(numbers.SPACES)}
    labels = np.where(present, np.where(np.arange(NUM) % 2 == 0, 0, 1), -1)
    labels[-1] = NUM - 1 if present[-1] else -1
    names = [f"h{i}" for i in range(NUM)]
    return vectors, numbers.Opinions(1, names, present, labels, limit, 0.0, kind, grams)


def test_trajectory_is_the_projected_movement_of_the_opinions():
    vectors, opinions = opinions_named()
    found = numbers.trajectory(opinions, "weights", "none", STEPS)
    assert found.positions_tsa.shape == (STEPS + 1, NUM, 2)
    # The same with the opinions themselves: moves one by one, principal axes by SVD.
    centered = vectors - vectors.mean(axis=0)
    _, lengths, axes = np.linalg.svd(centered, full_matrices=False)
    np.testing.assert_allclose(found.share_a, (lengths**2 / (lengths**2).sum())[:2], rtol=1e-6)
    for step in range(STEPS + 1):
        moved = vectors
        if step:
            moved = reference_hk.interact(vectors, "cosine", LIMIT, max_steps=step).positions
        expected = (moved - vectors.mean(axis=0)) @ axes[:2].T
        for axis in range(2):
            mine = found.positions_tsa[step, :, axis]
            sign = np.sign(np.dot(found.positions_tsa[0, :, axis], centered @ axes[axis]))
            np.testing.assert_allclose(sign * mine, expected[:, axis], atol=1e-5)


def test_no_trajectory_without_a_threshold_or_a_pair():
    _, opinions = opinions_named(limit=np.nan)
    assert numbers.trajectory(opinions, "weights", "none", 1) is None
    _, opinions = opinions_named(present=np.arange(NUM) == 0)
    assert numbers.trajectory(opinions, "weights", "none", 1) is None
    assert numbers.dissimilarity(opinions, "weights") is None
    assert numbers.coalition_maps(opinions, "none")[0] == {}


def test_coalition_maps_cover_the_whole_range():
    vectors, opinions = opinions_named()
    maps, num = numbers.coalition_maps(opinions, "none")
    assert list(maps) == ["weights", "update", "centered"] and num == NUM
    found = maps["weights"]
    assert (np.diff(found.limits_t) >= 0).all() and found.limits_t[-1] == 2
    assert found.num_coalitions_t[0] == NUM and found.num_coalitions_t[-1] == 1
    assert (found.sizes_ts.sum(axis=1) == NUM).all()
    for t in range(0, len(found.limits_t), 7):
        expected = reference_hk.interact(vectors, "cosine", float(found.limits_t[t]))
        sizes = sorted(np.unique(expected.labels, return_counts=True)[1], reverse=True)
        assert [size for size in found.sizes_ts[t] if size] == sizes
        assert found.num_coalitions_t[t] == len(sizes) and found.largest_t[t] == sizes[0]


def test_a_large_fleet_is_mapped_by_a_sample(monkeypatch):
    _, opinions = opinions_named()
    monkeypatch.setattr(numbers, "MAP_CLIENTS", 4)
    monkeypatch.setattr(numbers, "limits_of", lambda gram_ss, mask_s: np.ones(3))
    monkeypatch.setattr(numbers, "coalition_map", lambda gram_ss, *args, **options: gram_ss)
    maps, num = numbers.coalition_maps(opinions, "none")
    assert num == 4 and maps["update"].shape == (4, 4)
    assert set(np.asarray(maps["update"]).ravel()) <= set(opinions.grams["update"].ravel())


def test_dissimilarity_is_ordered_by_coalition():
    vectors, opinions = opinions_named(present=np.arange(NUM) != 2)
    found = numbers.dissimilarity(opinions, "centered")
    assert found.sizes == [3, 3, 1] and found.names[-1] == "h7" and "h2" not in found.names
    assert len({int(name[1]) % 2 for name in found.names[:3]}) == 1
    place = [int(name[1]) for name in found.names]
    expected = reference_hk.dissimilarities(vectors, "cosine")
    np.testing.assert_allclose(found.apart_ss, expected[np.ix_(place, place)], atol=1e-6)
    assert len(found.pairs) == 7 * 6 / 2
    pairs = [expected[i, j] for i in place for j in place if i < j]
    np.testing.assert_allclose(np.sort(found.pairs), np.sort(pairs), atol=1e-6)


def coalitions_table():
    rows = []
    groups = {1: "aabbc-", 2: "aabb-c", 3: "abbb-c"}
    for number, letters in groups.items():
        for i, letter in enumerate(letters):
            status = "took part" if letter != "-" else "not finite"
            coalition = None if letter == "-" else letter
            rows.append((number, f"m{i}", coalition, status))
    return pd.DataFrame(rows, columns=["round", "client", "coalition", "status"])


def test_who_sat_with_whom():
    table = coalitions_table()
    found = numbers.together(table)
    assert sorted(found.names) == [f"m{i}" for i in range(6)]
    by_key = {(r.round, r.client): r.coalition for r in table.itertuples()}
    for i, one in enumerate(found.names):
        for j, other in enumerate(found.names):
            pairs = [(by_key[k, one], by_key[k, other]) for k in (1, 2, 3)]
            joint = [pair for pair in pairs if not any(map(pd.isna, pair))]
            expected = np.mean([a == b for a, b in joint]) if joint else np.nan
            np.testing.assert_equal(found.share_nn[i, j], expected)
    assert abs(found.names.index("m2") - found.names.index("m3")) == 1  # always together


def test_two_clients_and_clients_that_never_met():
    table = coalitions_table()
    assert numbers.together(table[table["client"].isin(["m0", "m1"])]).names == ["m0", "m1"]
    apart = table[(table["client"] == "m4") & (table["round"] == 1)]
    apart = pd.concat([apart, table[(table["client"] == "m5") & (table["round"] == 2)]])
    assert np.isnan(numbers.together(apart).share_nn[0, 1])


def clients_table(mae, alone):
    num = len(mae)
    return pd.DataFrame(
        {"client": [f"c{i}" for i in range(num)], "mae_units": mae, "rounds_alone": alone,
         "rounds_sampled": [2] * num}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mae", "alone", "expected"),
    [
        ([1, 5, 3, 4, 2], [0, 0, 0, 2, 0],
         [("c2", "median error"), ("c1", "largest error"), ("c3", "most often alone")]),
        ([1, 5, 3], [0, 0, 0],
         [("c2", "median error"), ("c1", "largest error"), ("c0", "smallest error")]),
        ([1, 5, 3], [2, 2, 2],
         [("c2", "median error"), ("c1", "largest error"), ("c0", "smallest error")]),
        ([1, 5, 3], [0, 2, 0],
         [("c2", "median error"), ("c1", "largest error and most often alone")]),
        ([4], [2], [("c0", "median error and largest error and smallest error")]),
        ([np.nan, np.inf], [0, 0], []),
    ],
)  # fmt: skip
def test_telling_clients(mae, alone, expected):
    assert numbers.telling_clients(clients_table(mae, alone), FORECAST.headline) == expected


def test_telling_clients_where_more_is_better():
    table = clients_table([0.5, 0.9, 0.2], [0, 0, 0]).rename(columns={"mae_units": "accuracy"})
    assert numbers.telling_clients(table, CLASSIFICATION.headline) == [
        ("c0", "median accuracy"), ("c2", "smallest accuracy"), ("c1", "largest accuracy")
    ]  # fmt: skip


def test_last_forecasts_break_where_windows_are_missing():
    times = pd.date_range("2020-01-01", periods=100).delete([95, 96])
    table = pd.DataFrame({"client": "x", "time": times.astype(str), "actual": np.arange(98.0)})
    table = pd.concat([table, table.assign(client="y", actual=0.0)])
    found = numbers.last_forecasts(table, "x")
    assert len(found) == 60 and found["actual"].iloc[-1] == 97
    assert found["actual"].isna().sum() == 2
    assert list(found.columns) == ["actual"]
    hours = pd.date_range("2020-01-01", periods=500, freq="h").astype(str)
    hourly = pd.DataFrame({"client": "x", "time": hours, "actual": 1.0})
    assert len(numbers.last_forecasts(hourly, "x")) == 7 * 24
    assert len(numbers.last_forecasts(table.head(1), "x")) == 1


def test_stored_inner_products_keep_their_digits():
    vectors = 1 + 1e-4 * np.random.default_rng(0).standard_normal((5, 50))
    gram = hk.inner_products(hk.gram_matrix(vectors.astype(np.float32)))
    assert gram.dtype == np.float64
    found = np.asarray(hk.dissimilarity(numbers.float64(gram), "cosine"))
    expected = reference_hk.dissimilarities(vectors.astype(np.float32), "cosine")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-15)
    # The form of back ends without float64 means the same opinions.
    centered = hk.inner_products(hk.gram_matrix(vectors.astype(np.float32), use_float64=False))
    np.testing.assert_allclose(centered, gram, rtol=1e-5)
