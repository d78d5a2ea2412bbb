"""Dealing samples out to clients: all of them, to one client each, or a refusal that ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_hk.data import DataError, Partition
from fedjax_hk.data.samples.partitioners import PARTITIONERS, apportion, deal, deal_alike


def labels_of(num=300, classes=5, seed=0):
    return np.random.default_rng(seed).integers(0, classes, num)


@given(
    kind=st.sampled_from(sorted(PARTITIONERS)),
    num=st.integers(1, 120),
    classes=st.integers(1, 6),
    num_clients=st.integers(1, 12),
    alpha=st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0, 10.0, 1e6]),
    shards=st.integers(1, 4),
    least=st.integers(1, 10),
    seed=st.integers(0, 5),
)
def test_every_sample_has_one_client_or_there_is_an_error(
    kind, num, classes, num_clients, alpha, shards, least, seed
):
    labels = labels_of(num, classes, seed)
    partition = Partition(kind, num_clients, alpha, shards, least, seed)
    try:
        owners = deal(labels, partition)
    except DataError as error:
        assert kind != "iid" or num < num_clients * least
        assert "--min_samples" in str(error) and "--num_clients" in str(error)
        return
    assert owners.shape == (num,) and owners.dtype == np.int32
    sizes = np.bincount(owners, minlength=num_clients)  # negative ones would raise
    assert len(sizes) == num_clients and sizes.min() >= least
    np.testing.assert_array_equal(deal(labels, partition), owners)

    test_labels = labels_of(37, classes + 1, seed + 1)  # one class that nobody trains on
    test_owners = deal_alike(test_labels, labels, owners, partition)
    assert test_owners.shape == (37,)
    assert ((test_owners >= 0) & (test_owners < num_clients)).all()


@pytest.mark.parametrize("kind", PARTITIONERS)
def test_seeds_differ(kind):
    first, second = (deal(labels_of(), Partition(kind, 6, seed=seed)) for seed in (0, 1))
    assert (first != second).any()


def test_draws_that_never_succeed_end_with_what_to_change():
    labels = labels_of(500, 10)
    with pytest.raises(DataError) as error:
        deal(labels, Partition(num_clients=200, alpha=0.01, min_samples=1))
    for part in ("100 draws", "200 clients", "500 training samples", "at best with 0",
                 "--alpha_dirichlet=0.01", "--num_clients", "--min_samples=1"):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(DataError, match=r"--num_clients=200: .*need 2000 .*there are 500"):
        deal(labels, Partition(num_clients=200, alpha=0.01))


def test_shards_cannot_be_helped_by_alpha():
    with pytest.raises(DataError) as error:
        deal(labels_of(10), Partition("shards", 10, shards_per_client=4, min_samples=1))
    assert "--alpha_dirichlet" not in str(error.value)
    assert "--shards_per_client=4" in str(error.value)


def test_alpha_sets_how_uneven_classes_are():
    labels = np.repeat(np.arange(10), 400)

    def mean_share_of_commonest(alpha):
        owners = deal(labels, Partition(num_clients=20, alpha=alpha, min_samples=1))
        held = np.array([np.bincount(labels[owners == n], minlength=10) for n in range(20)])
        return (held.max(axis=1) / held.sum(axis=1)).mean()

    shares = [mean_share_of_commonest(alpha) for alpha in (0.1, 0.5, 1, 10, 1e5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5 and shares[-1] < 0.105  # evenly, a class has 0.1


def test_dirichlet_has_its_moments():
    """Client 0's share of a class: mean 1 / N, variance (N - 1) / (N^2 (N alpha + 1))."""
    labels, alpha, num = np.repeat(np.arange(400), 200), 0.7, 5
    owners = deal(labels, Partition(num_clients=num, alpha=alpha))
    share = (owners.reshape(400, 200) == 0).mean(axis=1)
    assert abs(share.mean() - 1 / num) < 0.04
    assert abs(share.var() - (num - 1) / (num**2 * (num * alpha + 1))) < 0.01


def test_iid_sizes_and_classes_are_even():
    labels = np.repeat(np.arange(3), 200)
    owners = deal(labels, Partition("iid", 7))
    sizes = np.bincount(owners)
    assert sizes.max() - sizes.min() <= 1
    held = np.array([np.bincount(labels[owners == n], minlength=3) for n in range(7)])
    assert held.min() > 15  # 28.6 on average


def test_quantity_is_uneven_in_size_alone():
    labels = np.repeat(np.arange(2), 5000)
    owners = deal(labels, Partition("quantity", 5, alpha=0.5))
    sizes = np.bincount(owners)
    assert sizes.max() > 2 * sizes.min()
    for client in np.flatnonzero(sizes > 300):
        assert abs(labels[owners == client].mean() - 0.5) < 0.1


def test_shards_hold_few_classes():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    owners = deal(labels, Partition("shards", 10, shards_per_client=2))
    assert (np.bincount(owners) == 60).all()
    assert max(len(np.unique(labels[owners == n])) for n in range(10)) <= 2


def test_test_samples_follow_the_training_samples():
    labels = np.repeat(np.arange(4), 500)
    partition = Partition(num_clients=8, alpha=0.3)
    owners = deal(labels, partition)
    test_labels = np.repeat(np.arange(4), 125)
    test_owners = deal_alike(test_labels, labels, owners, partition)
    for label in range(4):
        held = np.bincount(owners[labels == label], minlength=8)
        judged = np.bincount(test_owners[test_labels == label], minlength=8)
        assert abs(judged - held / 4).max() < 1


@given(total=st.integers(0, 500), shares=st.lists(st.floats(0.001, 1), min_size=1, max_size=9))
def test_largest_remainders(total, shares):
    shares = np.array(shares)
    counts = apportion(total, shares)
    assert counts.sum() == total and counts.min() >= 0
    assert (abs(counts - total * shares / shares.sum()) < 1).all()


def test_largest_remainders_by_hand():
    np.testing.assert_array_equal(apportion(10, np.array([0.47, 0.16, 0.37])), [5, 1, 4])
    np.testing.assert_array_equal(apportion(3, np.array([1, 1, 1, 1])), [1, 1, 1, 0])
