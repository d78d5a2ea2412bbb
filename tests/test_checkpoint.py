"""Checkpoints: bit-equal, whole after any kill, on any devices."""

import logging
import os
import pathlib
import random
import subprocess
import sys
import textwrap
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_hk.store.checkpoint import CheckpointError, Checkpoints


class Momentum(NamedTuple):
    trace: Any
    nothing: tuple = ()


def make_state(seed=0):
    """Every kind of leaf and node that a run's state may hold."""
    noise = np.random.default_rng(seed)
    return {
        "params": {
            "lstm/kernel.0": jnp.asarray(noise.normal(size=(16, 8)), jnp.float32),
            "half": jnp.asarray(noise.normal(size=3), jnp.bfloat16),
            "empty": jnp.zeros((0, 4)),
        },
        "momentum": (Momentum([jnp.float32(noise.normal()), np.array([True, False])]), None),
        "fleet": noise.normal(size=(5, 7)),  # float64 of NumPy, whatever jax's setting
        "odd": np.array([np.nan, -0.0, np.inf, 5e-324]),
        "key": jax.random.key_data(jax.random.key(seed)),
        "loss": float(noise.normal()),
        "steps": np.int32(seed),
        "round": seed,
        "done": False,
    }


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).shape == np.asarray(b).shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def checkpoints(tmp_path, lines):
    with Checkpoints(tmp_path / "checkpoints", log=lines.append) as opened:
        yield opened


def test_some_leaves_by_their_names_of_now_or_earlier(checkpoints, lines):
    like = {"loss": jnp.zeros(3), "fleet": np.zeros((5, 7)), "empty": jnp.zeros((0, 4))}
    names = {"['loss']": ("['half']",), "['fleet']": (), "['empty']": (), "['gone']": ("['a']",)}
    assert checkpoints.latest_leaves(like, names) is None
    state = {"half": jnp.arange(3.0), "fleet": np.ones((5, 7)), "empty": jnp.zeros((0, 4))}
    checkpoints.save(2, state | {"other": jnp.zeros(9)})
    number, found = checkpoints.latest_leaves(like, names)
    assert number == 2
    assert list(found) == ["['empty']", "['fleet']", "['loss']"]  # as jax orders the leaves
    assert_same(list(found.values()), [state[name] for name in ("empty", "fleet", "half")])
    with pytest.raises(
        ValueError, match=r"\['fleet'\]: expected float64\[4,7\], got float64\[5,7\]"
    ):
        checkpoints.latest_leaves(like | {"fleet": np.zeros((4, 7))}, names)
    with pytest.raises(ValueError, match=r"\['loss'\]: expected float32\[3\], got nothing"):
        checkpoints.latest_leaves(like, {"['loss']": ()})
    assert lines == []


def test_every_leaf_comes_back_bit_for_bit(checkpoints):
    assert checkpoints.latest() is None
    assert checkpoints.restore_latest(make_state()) is None
    checkpoints.save(7, make_state(7))
    assert checkpoints.latest() == 7
    assert_same(checkpoints.restore(7, make_state(0)), make_state(7))
    round_number, state = checkpoints.restore_latest(make_state(0))
    assert round_number == 7
    assert_same(state, make_state(7))


def test_two_newest_stay(checkpoints):
    for round_number in (1, 2, 5, 9):
        checkpoints.save(round_number, make_state(round_number))
    checkpoints.wait()
    assert checkpoints.rounds() == [5, 9]
    assert_same(checkpoints.restore(5, make_state()), make_state(5))
    with pytest.raises(CheckpointError, match=r"no checkpoint of round 2; it has \[5, 9\]"):
        checkpoints.restore(2, make_state())


def test_it_goes_on_in_another_process(tmp_path):
    with Checkpoints(tmp_path) as first:
        first.save(1, make_state(1))
    with Checkpoints(tmp_path) as second:
        assert second.latest() == 1
        assert_same(second.restore(1, make_state()), make_state(1))
        second.save(2, make_state(2))
    with Checkpoints(tmp_path) as third:
        assert third.rounds() == [1, 2]


def test_buffers_may_be_changed_and_donated_at_once(checkpoints):
    on_host = np.arange(1_000_000.0)
    on_device = jnp.arange(1_000_000, dtype=jnp.float32)
    expected = {"host": on_host.copy(), "device": jnp.array(on_device)}
    checkpoints.save(1, {"host": on_host, "device": on_device})
    on_host[:] = -1
    jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(on_device))
    assert_same(checkpoints.restore(1, expected), expected)


def test_the_caller_goes_on_while_it_is_written(checkpoints):
    state = {"fleet": jnp.ones((184, 7_633)), "params": [jnp.ones(763)] * 10}  # 5.6 MB
    blocked = []
    for round_number in range(1, 8):
        start = time.perf_counter()
        checkpoints.save(round_number, state)
        blocked.append(time.perf_counter() - start)
        checkpoints.wait()
    # Typically 0.02 s; the bound leaves room for a machine that does other things too.
    assert min(blocked) < 0.05
    assert sorted(blocked)[3] < 0.25


def test_a_round_is_saved_once_and_in_order(checkpoints):
    checkpoints.save(3, make_state())
    for round_number in (3, 2):
        with pytest.raises(ValueError, match=f"after 3, the newest saved, got {round_number}"):
            checkpoints.save(round_number, make_state())


def test_typed_keys_and_text_are_refused_by_name(checkpoints):
    with pytest.raises(ValueError, match=r"raw uint32 keys at \['key'\].*jax.random.key_data"):
        checkpoints.save(1, {"key": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"got str at \['agg'\]"):
        checkpoints.save(1, {"agg": "hk"})
    assert checkpoints.latest() is None


def test_one_checkpoint_is_not_enough(tmp_path):
    with pytest.raises(ValueError, match="keep of at least 2, got 1"):
        Checkpoints(tmp_path, keep=1)


def test_another_structure_is_refused_with_the_leaves(checkpoints):
    checkpoints.save(1, {"a": jnp.zeros(3), "b": jnp.zeros((0, 2)), "n": 1})
    for like, message in [
        ({"a": jnp.zeros(3), "b": jnp.zeros((0, 2))}, r"\['n'\]: expected nothing, got int64\[\]"),
        (
            {"a": jnp.zeros(4), "b": jnp.zeros((0, 2)), "n": 1},
            r"\['a'\]: expected float32\[4\], got float32\[3\].*new run",
        ),
        (
            {"a": jnp.zeros(3, jnp.int32), "b": jnp.zeros((0, 2)), "n": 1},
            r"expected int32\[3\], got float32\[3\]",
        ),
        ({"a": jnp.zeros(3), "b": jnp.zeros((0, 3)), "n": 1}, r"expected float32\[0,3\]"),
        ([jnp.zeros(3)], r"\[0\]: expected float32\[3\], got nothing"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            checkpoints.restore_latest(like)
        assert not isinstance(caught.value, CheckpointError)
    assert checkpoints.rounds() == [1]


def largest_file(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def tear_data(folder):
    path = largest_file(folder / "default")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_data(folder):
    largest_file(folder / "default").unlink()


def tear_layout(folder):
    path = folder / "_CHECKPOINT_METADATA"
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("damage", [tear_data, lose_data, tear_layout])
def test_a_torn_one_falls_back_to_the_one_before(checkpoints, lines, tmp_path, damage):
    state = {"fleet": jnp.arange(50_000, dtype=jnp.float32)}
    checkpoints.save(1, state)
    checkpoints.save(2, jax.tree.map(lambda leaf: -leaf, state))
    checkpoints.wait()
    checkpoints.close()
    damage(tmp_path / "checkpoints" / "2")
    with Checkpoints(tmp_path / "checkpoints", log=lines.append) as again:
        with pytest.raises(CheckpointError, match=r"checkpoints/2 cannot be read"):
            again.restore(2, state)
        round_number, found = again.restore_latest(state)
        assert round_number == 1
        assert_same(found, state)
        assert len(lines) == 1 and lines[0].startswith("checkpoint of round 2 left out: ")
        assert again.rounds() == [1]
        again.save(2, state)  # the run goes through that round again
        assert again.restore_latest(state)[0] == 2


def test_what_a_cut_short_removal_left_is_removed(tmp_path, caplog):
    with Checkpoints(tmp_path, keep=3) as first:
        for round_number in (9, 10, 11):
            first.save(round_number, make_state())
    (tmp_path / "9" / "_CHECKPOINT_METADATA").unlink()
    with Checkpoints(tmp_path) as again:
        assert again.rounds() == [10, 11]
        again.save(12, make_state())
    assert not caplog.records


def test_if_none_can_be_read_nothing_is_removed(checkpoints, tmp_path):
    state = {"fleet": jnp.arange(50_000, dtype=jnp.float32)}
    checkpoints.save(1, state)
    checkpoints.wait()
    lose_data(tmp_path / "checkpoints" / "1")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read, tried \[1\]"):
        checkpoints.restore_latest(state)
    assert checkpoints.rounds() == [1]


def test_progress_notes_of_orbax_stay_quiet(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="absl"), Checkpoints(tmp_path) as opened:
        opened.save(1, make_state())
        opened.restore(1, make_state())
    assert not [record for record in caplog.records if record.levelno < logging.WARNING]


# Kill -9 in the middle of saves.

SAVE_FOREVER = """
    import sys
    import numpy as np
    from fedjax_hk.store.checkpoint import Checkpoints
    checkpoints = Checkpoints(sys.argv[1])
    found = checkpoints.restore_latest({"round": 0, "fleet": np.zeros(300_000, np.float32)})
    start = found[0] if found else 0
    if found:
        assert found[1]["round"] == start
        assert (found[1]["fleet"] == np.sin(np.arange(300_000, dtype=np.float32) + start)).all()
    print("restored", start, flush=True)
    for round_number in range(start + 1, 1_000_000):
        fleet = np.sin(np.arange(300_000, dtype=np.float32) + round_number)
        checkpoints.save(round_number, {"round": round_number, "fleet": fleet})
        checkpoints.wait()
        print("saved", round_number, flush=True)
"""


def test_killed_at_any_moment_it_goes_on_from_a_whole_save(tmp_path):
    moments = random.Random(0)
    at_least = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVE_FOREVER), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        word, restored = process.stdout.readline().split()
        assert word == "restored" and int(restored) >= at_least
        for _ in range(2):
            process.stdout.readline()
        time.sleep(moments.uniform(0, 0.1))  # a save takes about as long
        process.kill()
        said = process.communicate()[0].split()
        at_least = max([int(restored) + 2, *(int(word) for word in said if word.isdigit())])
    like = {"round": 0, "fleet": np.zeros(300_000, np.float32)}
    with Checkpoints(tmp_path) as opened:
        round_number, state = opened.restore_latest(like)
        assert round_number >= at_least
        fleet = np.sin(np.arange(300_000, dtype=np.float32) + round_number)
        assert_same(state, {"round": round_number, "fleet": fleet})
        opened.save(round_number + 1, like)
        opened.wait()
        assert {path.name for path in pathlib.Path(tmp_path).iterdir()} == {
            str(kept) for kept in opened.rounds()
        }


# On other devices.

SHARDED = """
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from fedjax_hk.store.checkpoint import Checkpoints

    assert "orbax.checkpoint" not in sys.modules  # imported when first used
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("clients",))
    split = NamedSharding(mesh, PartitionSpec("clients"))
    whole = NamedSharding(mesh, PartitionSpec())
    fleet = np.arange(8 * 1000, dtype=np.float32).reshape(8, 1000) / 3
    state = {
        "fleet": jax.device_put(fleet, split),
        "model": jax.device_put(fleet[0], whole),
        "one": jax.device_put(fleet[1], jax.devices()[-1]),
        "free": jnp.asarray(fleet[2]),
    }
    with Checkpoints(sys.argv[1]) as checkpoints:
        if checkpoints.latest():
            like = jax.tree.map(jnp.zeros_like, state)
            like = {name: jax.device_put(like[name], state[name].sharding)
                    if state[name].committed else like[name] for name in like}
            like["model"] = jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=whole)
            _, found = checkpoints.restore_latest(like)
            for name in state:
                assert found[name].sharding == state[name].sharding, name
                assert found[name].committed == state[name].committed, name
                assert np.asarray(found[name]).tobytes() == np.asarray(state[name]).tobytes()
            jax.jit(lambda a, b: a * b)(found["fleet"], found["free"])
        checkpoints.save((checkpoints.latest() or 0) + 1, state)
    print("devices", len(jax.devices()))
"""


def test_states_move_between_numbers_of_devices(tmp_path):
    for devices in (4, 2):
        flags = f"--xla_force_host_platform_device_count={devices}"
        said = subprocess.check_output(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(SHARDED), str(tmp_path)],
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        )
        assert said == f"devices {devices}\n"
