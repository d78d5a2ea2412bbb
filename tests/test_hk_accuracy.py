"""Nearly parallel opinions: the operator decides as float64 differences do.

Float32 inner products get 28,297 of 499,500 pairs wrong in the first of these cases, and
centering in float32 fails in the others.
"""

import functools

import jax
import numpy as np
import pytest
import reference_hk as reference

from fedjax_hk import hk

DIM = 7633

interact = jax.jit(hk.interact)


@functools.cache
def case(name):
    """`[S, D]` float32 opinions with 1 - cos around 1e-6 among most of the clients."""
    rng = np.random.default_rng(0)
    num_clients = 1000 if name in ("parallel", "norms", "wild") else 200
    base = rng.normal(size=DIM)
    # Different amounts of noise, or all pairs would lie at one distance.
    noise = 1e-3 * np.exp(rng.normal(0, 0.5, size=(num_clients, 1)))
    opinions = base + noise * rng.normal(size=(num_clients, DIM))
    if name == "norms":
        opinions *= np.exp(rng.normal(0, 0.3, size=(num_clients, 1)))
    if name == "flipped":
        opinions[: num_clients // 5] *= -10
    if name == "wild":
        opinions[17] *= 1e4
    return opinions.astype(np.float32)


def some(name):
    """Clients whose pairs with all others are compared; all of them would take minutes."""
    return np.unique(np.r_[: len(case(name)) : 23, 17])


@functools.cache
def truth(name, kind):
    """`[R, S]` dissimilarities of some clients with all, from differences in float64."""
    return reference.fast_dissimilarities(case(name), kind, some(name))


def off_diagonal(x, rows):
    return x[np.arange(x.shape[1])[None, :] != rows[:, None]]


def compare_neighbors(name, kind, rows, x):
    threshold = np.quantile(off_diagonal(x, rows), 0.3)
    radius = np.sqrt(threshold)
    neighborhood = (
        hk.ball(radius)
        if kind == "ball"
        else hk.Neighborhood("cosine", np.float32(threshold), np.float32(0))
    )
    result = interact(case(name), neighborhood, max_steps=1)
    ours = np.asarray(result.influence_ss)[rows] > 0
    theirs = x <= threshold
    theirs[np.arange(len(rows)), rows] = True
    decided = np.abs(x / threshold - 1) > 1e-3
    assert 0.2 < theirs.mean() < 0.5
    assert not np.any((ours != theirs) & decided)


@pytest.mark.parametrize("kind", ["cosine", "ball"])
@pytest.mark.parametrize("name", ["parallel", "norms", "flipped", "wild"])
def test_neighbors_of_the_first_step(name, kind):
    compare_neighbors(name, kind, some(name), truth(name, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cosine", "ball"])
@pytest.mark.parametrize("name", ["parallel", "norms", "flipped", "wild"])
def test_all_neighbors_of_the_first_step(name, kind):
    rows = np.arange(len(case(name)))
    compare_neighbors(name, kind, rows, reference.fast_dissimilarities(case(name), kind, rows))


@pytest.mark.parametrize("name", ["parallel", "norms", "flipped", "wild"])
def test_dissimilarities(name):
    gram, rows = hk.gram_matrix(case(name)), some(name)
    for kind in ("cosine", "ball"):
        ours = off_diagonal(np.asarray(hk.dissimilarity(gram, kind))[rows], rows)
        np.testing.assert_allclose(ours, off_diagonal(truth(name, kind), rows), rtol=2e-6)


def test_without_float64_nearly_parallel_opinions_are_resolved():
    for name in ("parallel", "norms", "wild"):
        gram = hk.gram_matrix(case(name), use_float64=False)
        assert isinstance(gram, hk.UnitGram) and gram.inner_ss.dtype == np.float32
        rows = some(name)
        ours = off_diagonal(np.asarray(hk.dissimilarity(gram))[rows], rows)
        np.testing.assert_allclose(ours, off_diagonal(truth(name, "cosine"), rows), rtol=2e-4)


def test_without_float64_the_bound_is_absolute_when_directions_differ():
    gram = hk.gram_matrix(case("flipped"), use_float64=False)
    rows = some("flipped")
    ours = off_diagonal(np.asarray(hk.dissimilarity(gram))[rows], rows)
    np.testing.assert_allclose(ours, off_diagonal(truth("flipped", "cosine"), rows), atol=2e-5)


@pytest.mark.parametrize("make, threshold", [(hk.cosine, 0.6), (hk.ball, 1.0)])
@pytest.mark.parametrize("state_norm", ["none", "init", "every_step"])
def test_without_float64_the_run_is_the_same(make, threshold, state_norm):
    rng = np.random.default_rng(1)
    opinions = rng.normal(size=(3, 8))[np.arange(12) % 3] + 0.1 * rng.normal(size=(12, 8))
    opinions = np.concatenate([opinions, np.zeros((1, 8))]).astype(np.float32)
    run = functools.partial(hk.interact, state_norm=state_norm, trajectory_steps=4)
    one, other = (run(opinions, make(threshold), use_float64=flag) for flag in (True, False))
    assert one.converged and other.converged
    assert one.num_steps == other.num_steps
    np.testing.assert_array_equal(one.labels_s, other.labels_s)
    np.testing.assert_allclose(one.trajectory, other.trajectory, atol=1e-5)


def test_a_wild_client_does_not_end_the_run_early():
    opinions = np.concatenate([np.linspace(0, 3, 12)[:, None], [[1e7]]]).astype(np.float32)
    result = hk.interact(opinions, hk.ball(0.5))
    alone = hk.interact(opinions[:-1], hk.ball(0.5))
    assert result.num_steps == alone.num_steps
    np.testing.assert_array_equal(result.labels_s[:-1], alone.labels_s)


def test_blocks_of_any_length_add_up():
    rng = np.random.default_rng(2)
    for dim in (1, 4095, 4096, 4097, 12288, 12289):
        opinions = rng.normal(size=(3, dim)).astype(np.float32)
        exact = opinions.astype(np.float64) @ opinions.astype(np.float64).T
        np.testing.assert_allclose(np.asarray(hk.gram_matrix(opinions)), exact, rtol=1e-12)


@pytest.mark.slow
def test_ten_million_parameters():
    rng = np.random.default_rng(3)
    base = rng.normal(size=10_000_000).astype(np.float32)
    opinions = np.stack(
        [base + np.float32(1e-3 * (1 + k)) * np.roll(base, k + 1) for k in range(6)]
    )
    x = np.asarray(hk.dissimilarity(hk.gram_matrix(opinions)))
    rows = np.arange(6)
    expected = reference.fast_dissimilarities(opinions, "cosine", rows)
    np.testing.assert_allclose(off_diagonal(x, rows), off_diagonal(expected, rows), rtol=1e-5)
