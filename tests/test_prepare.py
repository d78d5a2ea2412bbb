"""A run before its first round: what is compiled, and once."""

import dataclasses
import gc
import os

import jax
import numpy as np
import pytest
from small_run import MODEL, ROUNDS, Ran, prepared_with, settings, small_fleet

from fedjax_hk.run import prepare as prepare_lib
from fedjax_hk.settings.config import ConfigError


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
    other = prepare_lib.prepare(settings(**changes), small_fleet(), MODEL)
    state, info, _ = prepare_lib.step(one, one.state, 1)
    other_state, other_info, _ = prepare_lib.step(other, other.state, 1)
    scale = np.abs(state.params).max()
    np.testing.assert_allclose(other_state.params, state.params, rtol=1e-5, atol=1e-6 * scale)
    assert info.margin > 1e-3
    np.testing.assert_array_equal(info.labels_s, other_info.labels_s)
    np.testing.assert_array_equal(info.cohort_s, other_info.cohort_s)


def test_nothing_compiles_after_the_first_round(tmp_path):
    prepared = prepared_with()
    assert prepared.compilations == 1
    assert "compiled once" in prepare_lib.describe_devices(prepared)
    counts = []
    Ran(prepared, tmp_path / "run", [lambda *_: counts.append(len(prepare_lib._compilations))])
    assert counts == [counts[0]] * ROUNDS


def test_rounds_without_a_folder_are_those_of_a_run(tmp_path):
    prepared = prepared_with(rounds_per_sync=3)
    run = Ran(prepared, tmp_path / "run")
    found = list(prepare_lib.rounds(prepared))
    assert [number for number, _, _ in found] == [1, 2, 3, 4]
    for (_, info, seconds), mae in zip(found, run.csv("rounds")["mae"], strict=True):
        assert seconds > 0
        assert np.nanmean(info.errors.mae) == pytest.approx(mae, rel=1e-6)


@pytest.mark.slow
def test_many_configurations_in_one_process_leave_nothing_behind():
    def resident_mib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    seen = []
    for number in range(50):
        # Another cohort is another program.
        config = settings(clients_per_round=2 + number % 5, tau=0.3, learning_rate=1e-3)
        prepared = prepare_lib.prepare(config, small_fleet(), MODEL)
        state, info, _ = prepare_lib.step(prepared, prepared.state, 1)
        assert np.isfinite(info.errors.mae).all()
        del prepared, state, info
        gc.collect()
        seen.append((len(jax.live_arrays()), resident_mib()))
    arrays, memory = zip(*seen, strict=True)
    assert arrays[-1] == arrays[9]
    assert memory[-1] - memory[9] < 100  # 40 programs that stayed would hold several times that


@pytest.mark.parametrize(
    "changes",
    [{"tau_mode": "quantile"}, {"opinion": "centered"}, {"epochs": 2}, {"devices": 2},
     {"agg": "hk_euclidean", "epsilon": 1.0}, {"judge": "validation"}],
)  # fmt: skip
def test_what_needs_another_compilation_is_not_reused(changes):
    prepared = prepared_with()
    config = dataclasses.replace(prepared.config, **changes)
    with pytest.raises(ConfigError, match="needs another compilation"):
        prepare_lib.reuse(prepared, config)


def test_what_is_traced_or_said_is_reused():
    prepared = prepared_with()
    config = dataclasses.replace(
        prepared.config, tau=0.7, seed=3, rounds=2, report=True, tensorboard=True
    )
    found = prepare_lib.reuse(prepared, config)
    assert found.round is prepared.round and found.config == config
    assert float(found.hparams.tau) == pytest.approx(0.7)
    moved = dataclasses.replace(config, judge="validation")  # what other samples are read from
    assert prepare_lib.reuse(prepared, moved, small_fleet()).config == moved
