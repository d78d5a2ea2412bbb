"""The operator inside other people's JAX: each composition equals the plain call."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import COMPILE_LESS
from jax import lax

from fedjax_hk import hk
from fedjax_hk.hk import dynamics

FOLDER = pathlib.Path(hk.__file__).parent


pytestmark = pytest.mark.usefixtures("strict")


def cohort(seed=0, num_clients=9, dim=6):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(3, dim))
    member = np.arange(num_clients) % 3
    noise = 0.3 * rng.normal(size=(num_clients, dim))
    return jnp.asarray(centers[member] + noise, jnp.float32)


TAUS = jnp.asarray([-1.0, 0.5, 0.8, 0.95, 0.999], jnp.float32)


def same(one, other):
    """Equal but for the last digits: a batched product may sum in another order."""

    def leaf(a, b):
        assert a.dtype == b.dtype
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype == np.float32:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)

    jax.tree.map(leaf, one, other)


def operator(opinions, tau):
    """Grouping and one model, as an aggregation rule would."""
    result = hk.interact(opinions, hk.cosine(tau))
    return result, hk.average(opinions, result.weights_s)


@functools.cache
def plain(seed, index):
    return operator(cohort(seed), TAUS[index])


def stacked(seeds, indices):
    outs = [plain(s, i) for s in seeds for i in indices]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def test_types_do_not_leak_float64():
    result, model = plain(0, 1)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves((result, model))}
    assert kinds == {"float32", "int32", "bool"}
    assert hk.gram_matrix(cohort()).dtype == jnp.float64
    assert hk.dissimilarity(hk.gram_matrix(cohort())).dtype == jnp.float32


def test_jit():
    same(jax.jit(operator)(cohort(), TAUS[2]), plain(0, 2))


def test_vmap_of_jit_over_tau():
    out = jax.vmap(jax.jit(operator), in_axes=(None, 0))(cohort(), TAUS)
    same(out, stacked([0], range(5)))


def test_vmap_of_jit_over_opinions():
    batch = jnp.stack([cohort(0), cohort(1)])
    same(jax.vmap(jax.jit(operator), in_axes=(0, None))(batch, TAUS[2]), stacked([0, 1], [2]))


def test_jit_of_vmap_over_tau_and_opinions():
    batch = jnp.stack([cohort(0), cohort(1)])
    both = jax.vmap(jax.vmap(operator, in_axes=(None, 0)), in_axes=(0, None))
    out = jax.jit(both)(batch, TAUS)
    same(jax.tree.map(lambda x: x.reshape(10, *x.shape[2:]), out), stacked([0, 1], range(5)))


@pytest.mark.slow
def test_nested_vmap_and_jit():
    batch = jnp.stack([cohort(0), cohort(1)])
    inner = jax.jit(jax.vmap(jax.jit(operator), in_axes=(None, 0)))
    out = jax.vmap(inner, in_axes=(0, None))(batch, TAUS)
    same(jax.tree.map(lambda x: x.reshape(10, *x.shape[2:]), out), stacked([0, 1], range(5)))


def test_vmap_over_neighborhoods_shares_the_gram_matrix():
    gram = hk.gram_matrix(cohort())
    sweep = jax.vmap(hk.interact_from_gram, in_axes=(None, 0))
    expected = stacked([0], range(5))[0]
    same(sweep(gram, hk.cosine(TAUS)), expected)
    same(jax.jit(sweep)(gram, hk.cosine(TAUS)), expected)
    same(
        jax.vmap(jax.jit(hk.interact_from_gram), in_axes=(None, 0))(gram, hk.cosine(TAUS)), expected
    )
    same(sweep(gram, hk.cosine(np.asarray(TAUS))), expected)
    same(lax.map(lambda tau: hk.interact_from_gram(gram, hk.cosine(tau)), TAUS), expected)
    grams = jax.vmap(jax.jit(hk.gram_matrix))(jnp.stack([cohort(0), cohort(1)]))
    both = jax.vmap(hk.interact_from_gram, in_axes=(0, None))
    same(both(grams, hk.cosine(TAUS[2])), stacked([0, 1], [2])[0])


def test_vmap_over_mask_and_limits():
    masks = jnp.asarray(np.random.default_rng(0).random((4, 9)) < 0.7)
    steps = jnp.asarray([1, 2, 3, 50], jnp.int32)

    def run(mask, max_steps):
        return hk.interact(cohort(), hk.cosine(0.8), mask=mask, max_steps=max_steps)

    out = jax.vmap(jax.jit(run))(masks, steps)
    for k in range(4):
        same(jax.tree.map(lambda x, k=k: x[k], out), run(masks[k], steps[k]))


def test_scan():
    def round_(carry, tau):
        _, model = operator(carry, tau)
        return carry + 0.1 * (model[None, :] - carry), hk.interact(carry, hk.cosine(tau)).labels_s

    end, labels = jax.jit(lambda x: lax.scan(round_, x, TAUS))(cohort())
    carry = cohort()
    for k in range(5):
        carry, one = round_(carry, TAUS[k])
        np.testing.assert_array_equal(labels[k], one)
    np.testing.assert_allclose(end, carry, rtol=1e-5, atol=1e-6)


def loss(opinions, tau):
    result = hk.interact(opinions, hk.cosine(tau))
    model = hk.average(opinions, result.weights_s)
    centers = hk.barycenters(opinions, result.labels_s)
    return jnp.sum(model * jnp.arange(6, dtype=jnp.float32)) + jnp.sum(centers[0])


def test_grad_and_jvp_are_those_of_fixed_coalitions():
    result, _ = plain(0, 2)
    labels, weights = np.asarray(result.labels_s), np.asarray(result.weights_s)
    first = (labels == labels[0]) / np.sum(labels == labels[0])
    expected = weights[:, None] * np.arange(6) + first[:, None]
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        np.testing.assert_allclose(grad(cohort(), TAUS[2]), expected, rtol=1e-5)
    tangent = cohort(3)
    value, slope = jax.jvp(lambda x: loss(x, TAUS[2]), (cohort(),), (tangent,))
    np.testing.assert_allclose(slope, np.sum(expected * tangent), rtol=1e-4)
    np.testing.assert_allclose(value, loss(cohort(), TAUS[2]), rtol=1e-6)
    mapped = jax.vmap(jax.jit(jax.grad(loss)), in_axes=(None, 0))(cohort(), TAUS)
    np.testing.assert_allclose(mapped[2], expected, rtol=1e-5)
    assert jax.grad(loss, argnums=1)(cohort(), TAUS[2]) == 0  # thresholds are constants
    second = jax.hessian(lambda x: loss(x, TAUS[2]))(cohort())
    assert not np.any(second)


def test_gradients_are_finite_where_opinions_coincide():
    opinions = jnp.concatenate([jnp.ones((3, 6)), jnp.zeros((3, 6)), -jnp.ones((3, 6))])
    for tau in (-1.0, 0.0, 0.5, 1.0):
        assert np.all(np.isfinite(jax.grad(loss)(opinions, jnp.float32(tau))))

    def every_step(x):
        result = hk.interact(x, hk.ball(0.5), state_norm="every_step", trajectory_steps=2)
        return jnp.sum(result.influence_ss @ x) + jnp.sum(result.trajectory @ x)

    assert np.all(np.isfinite(jax.grad(every_step)(opinions)))


@pytest.mark.slow
def test_checkpoint_inside_a_differentiated_scan():
    def total(x):
        step = jax.checkpoint(lambda c, tau: (c + operator(c, tau)[1][None, :], None))
        return jnp.sum(lax.scan(step, x, TAUS)[0])

    assert np.all(np.isfinite(jax.grad(total)(cohort())))


def test_elements_that_need_few_and_many_steps():
    few = np.zeros((30, 1), np.float32)
    few[15:] = 100.0
    few[:, 0] += np.linspace(0, 0.5, 30)
    many = np.arange(30, dtype=np.float32)[:, None]
    batch = jnp.asarray(np.stack([few, many]))
    ball = hk.ball(1.0)
    for mapped in (jax.vmap(hk.interact, (0, None)), jax.jit(jax.vmap(hk.interact, (0, None)))):
        out = mapped(batch, ball)
        assert out.num_steps.tolist() == [1, 26]
        for k in range(2):
            same(jax.tree.map(lambda x, k=k: x[k], out), hk.interact(batch[k], ball))


@pytest.mark.slow
def test_slow_and_fast_under_a_cap_of_forty():
    pentagon_angle = 2 * np.pi * np.arange(5) / 5
    pentagon = np.stack([np.cos(pentagon_angle), np.sin(pentagon_angle)], 1).astype(np.float32)
    slow = np.asarray([[1, 0], [0.6, 0.8], [-1, 0.1], [0.1, -1], [0.2, -1]], np.float32)
    batch = jnp.asarray(np.stack([slow, pentagon]))
    run = functools.partial(hk.interact, max_steps=40, tol=0.0)
    out = jax.vmap(run, (0, None))(batch, hk.band(-0.9, -0.7))
    for k in range(2):
        one = run(batch[k], hk.band(-0.9, -0.7))
        assert out.num_steps[k] == one.num_steps
        np.testing.assert_array_equal(out.labels_s[k], one.labels_s)


@pytest.mark.parametrize("num_clients", [1, 2])
@pytest.mark.parametrize("state_norm", ["none", "every_step"])
def test_one_and_two_clients(num_clients, state_norm):
    opinions = cohort(num_clients=num_clients)
    alone = hk.interact(opinions, hk.cosine(1.0), state_norm=state_norm)
    assert alone.num_coalitions == num_clients and alone.num_steps == 0
    together = hk.interact(opinions, hk.cosine(-1.0), state_norm=state_norm)
    assert together.num_coalitions == 1 and together.num_steps == num_clients - 1
    np.testing.assert_allclose(together.weights_s, 1 / num_clients)
    assert bool(alone.converged) and bool(together.converged)
    if num_clients == 1:
        assert np.isinf(alone.margin)
    swept = jax.vmap(jax.jit(operator), in_axes=(None, 0))(opinions, TAUS)
    assert swept[0].labels_s.shape == (5, num_clients)


@pytest.mark.parametrize("use_float64", [True, False])
def test_masked_rows_have_no_influence_at_all(use_float64):
    mask = np.asarray([True, False, True, True, False, True, True, True, True])
    clean = np.asarray(cohort())
    run = jax.jit(lambda x: hk.interact(x, hk.cosine(0.8), mask=mask, use_float64=use_float64))
    results = []
    for junk in (0.0, np.nan, np.inf, -np.inf, 1e30):
        dirty = clean.copy()
        dirty[~mask] = junk
        result = run(dirty)
        centers = hk.barycenters(dirty, result.labels_s)
        model = hk.average(dirty, result.weights_s)
        results.append(jax.device_get((result, centers, model)))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    result, centers, model = results[0]
    assert result.labels_s[1] == result.labels_s[4] == -1
    assert not centers[~mask].any() and np.isfinite(model).all()
    without = hk.interact(clean[mask], hk.cosine(0.8), use_float64=use_float64)
    kept = np.flatnonzero(mask)
    np.testing.assert_array_equal(result.labels_s[mask], kept[np.asarray(without.labels_s)])
    np.testing.assert_allclose(result.weights_s[mask], without.weights_s, rtol=1e-6)


def test_mask_on_a_shared_gram_matrix_that_holds_nan():
    dirty = np.asarray(cohort()).copy()
    dirty[4] = np.nan
    mask = np.arange(9) != 4
    late = hk.interact_from_gram(hk.gram_matrix(dirty), hk.cosine(0.8), mask=mask)
    early = hk.interact(dirty, hk.cosine(0.8), mask=mask)
    jax.tree.map(np.testing.assert_array_equal, late, early)


@pytest.mark.parametrize("state_norm", ["none", "init", "every_step"])
def test_all_masked(state_norm):
    opinions = jnp.full((4, 3), jnp.nan)
    mask = np.zeros(4, bool)
    result = hk.interact(opinions, hk.cosine(0.5), mask=mask, state_norm=state_norm)
    assert result.num_coalitions == 0 and result.labels_s.tolist() == [-1] * 4
    assert not result.weights_s.any() and not result.sizes_s.any()
    assert bool(result.converged) and result.num_steps == 0 and result.residual == 0
    assert not hk.average(opinions, result.weights_s).any()
    assert not hk.barycenters(opinions, result.labels_s).any()


def test_unmasked_nan_is_not_reported_as_converged():
    opinions = cohort().at[2, 0].set(jnp.nan)
    result = hk.interact(opinions, hk.cosine(0.8))
    assert not result.converged


def test_client_order():
    order = np.random.default_rng(5).permutation(9)
    result, model = plain(0, 2)
    permuted, other = operator(cohort()[order], TAUS[2])
    labels = np.asarray(result.labels_s)[order]
    assert np.array_equal(
        labels[:, None] == labels[None, :],
        permuted.labels_s[:, None] == permuted.labels_s[None, :],
    )
    np.testing.assert_allclose(model, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        permuted.influence_ss, np.asarray(result.influence_ss)[np.ix_(order, order)], atol=1e-6
    )


def test_pytree_equals_its_flat_array():
    flat = cohort(dim=12)
    tree = {
        "a": flat[:, :6].reshape(9, 2, 3),
        "b": [flat[:, 6], flat[:, 7:12]],
        "none": None,
        "empty": jnp.zeros((9, 0, 3)),
    }
    one, other = hk.interact(flat, hk.cosine(0.7)), hk.interact(tree, hk.cosine(0.7))
    same(one, other)
    centers = hk.barycenters(tree, one.labels_s)
    np.testing.assert_allclose(
        centers["a"].reshape(9, 6), hk.barycenters(flat, one.labels_s)[:, :6], rtol=1e-5
    )
    assert jax.tree.structure(centers) == jax.tree.structure(tree)
    assert hk.average(tree, one.weights_s)["empty"].shape == (0, 3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_leaves(dtype):
    opinions = cohort().astype(dtype)
    result = hk.interact(opinions, hk.cosine(0.8))
    assert result.influence_ss.dtype == jnp.float32
    assert hk.average(opinions, result.weights_s).dtype == dtype
    assert hk.barycenters(opinions, result.labels_s).dtype == dtype


def test_under_a_global_float64_flag():
    expected, _ = plain(0, 2)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else _old_x64():
        result = hk.interact(np.asarray(cohort(), np.float64), hk.cosine(0.8))
        swept = jax.vmap(jax.jit(operator), in_axes=(None, 0))(cohort(), TAUS)
        kinds = {str(leaf.dtype) for leaf in jax.tree.leaves((result, swept[0]))}
    assert kinds == {"float32", "int32", "bool"}
    np.testing.assert_array_equal(result.labels_s, expected.labels_s)


def _old_x64():
    from jax.experimental import enable_x64

    return enable_x64(True)


def test_trajectory_has_a_fixed_length_and_ends_at_rest():
    opinions = cohort()
    for length in (0, 1, 2, 6):
        result = hk.interact(opinions, hk.cosine(0.8), trajectory_steps=length)
        assert result.trajectory.shape == (length + 1, 9, 9)
        np.testing.assert_array_equal(result.trajectory[0], np.eye(9))
        if length >= result.num_steps:
            np.testing.assert_array_equal(result.trajectory[-1], result.influence_ss)
    assert hk.interact(opinions, hk.cosine(0.8)).trajectory is None
    unit = hk.interact(opinions, hk.cosine(0.8), state_norm="init", trajectory_steps=1)
    start = unit.trajectory[0] @ opinions
    np.testing.assert_allclose(jnp.linalg.norm(start, axis=1), 1, rtol=1e-5)


def test_nothing_goes_to_the_host():
    # A guard against transfers never fires on a CPU, so the programs themselves are looked at.
    host = re.compile("callback|infeed|outfeed|SendToHost|RecvFromHost")
    traced = str(jax.make_jaxpr(operator)(cohort(), TAUS[2]))
    compiled = jax.jit(operator).lower(cohort(), TAUS[2]).compile().as_text()
    for text in (traced, compiled):
        assert "while" in text and not host.search(text)
    assert host.search(str(jax.make_jaxpr(lambda x: jax.debug.callback(print, x))(1.0)))


def test_plain_calls_compile_once():
    opinions = cohort(num_clients=7)
    hk.interact(opinions, hk.cosine(0.5))

    before = dynamics._interact._cache_size()
    for tau in (0.6, 0.7):
        hk.interact(opinions + 1, hk.cosine(tau), max_steps=7, tol=1e-5)
    assert dynamics._interact._cache_size() == before


def shapes(jaxpr):
    """Shapes of every intermediate, inner programs included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield getattr(variable.aval, "shape", ())
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from shapes(inner)


@pytest.mark.parametrize("use_float64", [True, False])
def test_nothing_is_as_large_as_clients_times_clients_times_parameters(use_float64):
    num_clients, dim = 20, 50_000

    def both(x):
        result = hk.interact(x, hk.cosine(0.9), use_float64=use_float64)
        return result, hk.average(x, result.weights_s), hk.barycenters(x, result.labels_s)

    jaxpr = jax.make_jaxpr(both)(jax.ShapeDtypeStruct((num_clients, dim), jnp.float32))
    sizes = [int(np.prod(shape)) for shape in shapes(jaxpr.jaxpr)]
    assert len(sizes) > 100
    assert max(sizes) <= num_clients * dim


REFUSED = {
    "integer": (lambda: hk.interact({"a": {"n": np.ones((3, 2), int)}}, hk.cosine(0.5)), "'n'"),
    "boolean": (lambda: hk.interact(np.ones((3, 2), bool), hk.cosine(0.5)), "floating"),
    "lengths": (
        lambda: hk.interact([np.ones((3, 2)), np.ones((4, 2))], hk.cosine(0.5)),
        r"Expected 3 clients .*opinions\[1\]",
    ),
    "scalar": (lambda: hk.interact({"a": np.float32(1)}, hk.cosine(0.5)), "leading client axis"),
    "nothing": (lambda: hk.interact({}, hk.cosine(0.5)), "at least one leaf"),
    "empty": (lambda: hk.interact(np.ones((3, 0), np.float32), hk.cosine(0.5)), "at least one"),
    "mask": (
        lambda: hk.interact(np.ones((3, 2)), hk.cosine(0.5), mask=np.ones(2, bool)),
        r"mask of shape \(3,\)",
    ),
    "mask type": (lambda: hk.interact(np.ones((3, 2)), hk.cosine(0.5), mask=np.ones(3)), "bool"),
    "steps": (lambda: hk.interact(np.ones((3, 2)), hk.cosine(0.5), max_steps=0), "max_steps"),
    "tol": (lambda: hk.interact(np.ones((3, 2)), hk.cosine(0.5), tol=-1.0), "tol"),
    "tol nan": (lambda: hk.interact(np.ones((3, 2)), hk.cosine(0.5), tol=np.nan), "tol"),
    "norm": (lambda: hk.interact(np.ones((3, 2)), hk.cosine(0.5), state_norm="l2"), "state_norm"),
    "trajectory": (
        lambda: hk.interact(np.ones((3, 2)), hk.cosine(0.5), trajectory_steps=-1),
        "trajectory_steps",
    ),
    "number": (lambda: hk.interact(np.ones((3, 2)), 0.5), "Neighborhood"),
    "gram": (lambda: hk.interact_from_gram(np.ones((3, 2)), hk.cosine(0.5)), "square"),
    "integer gram": (lambda: hk.interact_from_gram(np.ones((3, 3), int), hk.cosine(0.5)), "float"),
    "kind": (lambda: hk.dissimilarity(np.ones((3, 3)), "l1"), "kind"),
    "tau": (lambda: hk.cosine(1.5), r"-1.0 <= tau <= 1.0, got 1.5"),
    "tau nan": (lambda: hk.cosine(float("nan")), "nan"),
    "tau array": (lambda: hk.cosine(np.array([0.5, 2.0])), "tau"),
    "unit tau": (lambda: hk.unit_ball(-0.1), "tau"),
    "epsilon": (lambda: hk.ball(-1), "epsilon"),
    "epsilon nan": (lambda: hk.ball(np.nan), "epsilon"),
    "band": (lambda: hk.band(0.9, 0.5), "eps_lower <= eps_upper"),
    "band range": (lambda: hk.band(-2, 0.5), "eps_lower"),
    "weights": (lambda: hk.average(np.ones((3, 2)), np.ones(2)), "weights_s"),
    "average": (lambda: hk.average(np.ones((3, 2), int), np.ones(3)), "floating"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_mistakes_are_named_while_tracing():
    with pytest.raises(ValueError, match="floating"):
        jax.jit(lambda x: hk.interact(x, hk.cosine(0.5)))(np.ones((3, 2), np.int32))
    jax.jit(lambda t: hk.cosine(t).limit)(jnp.float32(7))  # a traced value cannot be seen


def test_the_folder_works_alone_under_another_name(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "opinions", ignore=shutil.ignore_patterns("__pycache__"))
    program = """
        import sys
        import numpy as np
        import opinions

        x = np.array([[1, 0], [1, 0.1], [0, 1]], np.float32)
        result = opinions.interact(x, opinions.cosine(0.9))
        assert result.labels_s.tolist() == [0, 0, 2]
        assert opinions.average(x, result.weights_s).shape == (2,)
        assert not any(name.split(".")[0] == "fedjax_hk" for name in sys.modules)
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env=environment,
        check=True,
    )


SHARDED = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax import shard_map
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from fedjax_hk import hk

    jax.config.update("jax_numpy_rank_promotion", "raise")
    num_devices = int(sys.argv[1])
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("params",))
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(3, 16))[np.arange(9) % 3] + 0.3 * rng.normal(size=(9, 16))
    flat = jnp.asarray(flat, jnp.float32)
    tree = {"a": flat[:, :8], "b": flat[:, 8:].reshape(9, 4, 2)}
    spec = {"a": P(None, "params"), "b": P(None, "params", None)}
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, spec)
    taus = jnp.asarray([0.5, 0.7, 0.95])

    def check(one, other):
        def leaf(a, b):
            if a.dtype == jnp.float32:
                # Without float64 the margin (of 1 - cos) is good to about 1e-5.
                atol = 1e-6 if use_float64 else 1e-4
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)
            else:
                np.testing.assert_array_equal(a, b)
        jax.tree.map(leaf, one, other)

    for use_float64 in (True, False):
        def rule(tree, tau, axis_name=None):
            result = hk.interact(tree, hk.cosine(tau), axis_name=axis_name, use_float64=use_float64)
            return result, hk.average(tree, result.weights_s)

        model_spec = {"a": P("params"), "b": P("params", None)}
        sharded = shard_map(
            lambda tree, tau: rule(tree, tau, "params"),
            mesh=mesh, in_specs=(spec, P()), out_specs=(P(), model_spec),
        )
        check(sharded(placed, taus[1]), rule(tree, taus[1]))
        expected = jax.vmap(rule, (None, 0))(tree, taus)
        check(jax.jit(jax.vmap(sharded, (None, 0)))(placed, taus), expected)
        if num_devices == 4 or not use_float64:
            continue
        check(jax.vmap(jax.jit(sharded), (None, 0))(placed, taus), expected)
        grad = lambda f: jax.grad(lambda t: jnp.sum(f(t, taus[1])[1]["a"]))
        check(grad(sharded)(placed), grad(rule)(tree))

        # opinions replicated, thresholds sharded: every device runs its own
        own = shard_map(
            lambda tree, taus: jax.vmap(rule, (None, 0))(tree, taus),
            mesh=mesh, in_specs=(P(), P("params")), out_specs=P("params"),
        )
        four = jnp.asarray([0.5, 0.7, 0.8, 0.95])
        check(jax.jit(own)(tree, four), jax.vmap(rule, (None, 0))(tree, four))
    print("sharded", num_devices)
"""


@pytest.mark.parametrize("num_devices", [2, 4])
def test_shard_map(num_devices, tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(textwrap.dedent(SHARDED))
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={num_devices} {COMPILE_LESS}"
    )
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    environment["PYTHONPATH"] = str(FOLDER.parents[1])
    out = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(num_devices)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert f"sharded {num_devices}" in out.stdout
