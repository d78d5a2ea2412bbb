"""What follows from the kinds of the settings: traced numbers, resuming, methods, reuse."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from fedjax_hk.settings import derived
from fedjax_hk.settings.config import SETTINGS, Config, ConfigError, from_stored, of_kind, value_of
from fedjax_hk.settings.earlier import translated
from fedjax_hk.types import HParams, Settings


def test_every_traced_setting_is_a_number_of_the_program():
    assert list(HParams._fields) == of_kind("traced")
    assert derived.traced_values(Config()) == HParams()._asdict()
    found = derived.traced_values(Config(agg="fedclust", mu=2, epsilon=3.0))
    assert (found["tau"], found["mu"], found["epsilon"]) == (0.5, 2.0, 3.0)
    assert all(type(value) is float for value in found.values())


def test_compiled_choices_of_the_rules():
    assert Settings._fields == (
        "tau_mode", "euclid_tau", "state_norm", "num_coalitions", "preference", "damping",
        "linkage", "distance_scale", "use_epsilon",
    )  # fmt: skip
    assert Settings(**derived.compiled_values(Config())) == Settings()
    found = Settings(**derived.compiled_values(Config(num_coalitions=4, epsilon=0.0)))
    assert found == Settings(num_coalitions=4, use_epsilon=True)


@pytest.mark.parametrize("record", [HParams, Settings])
def test_derived_records_travel(record):
    changed = record()._replace(**{record._fields[0]: 7})
    assert pickle.loads(pickle.dumps(changed)) == changed != record()
    assert record.__doc__.split(".")[0]


# Resume with other flags


def stored(**flags):
    return json.loads(json.dumps(flags))


def test_same_flags_have_no_differences():
    flags = {"tau": 0.9, "sizes": (1, 2), "agg": "hk", "rounds": 20, "lr": math.nan}
    assert derived.resume_problems(stored(**flags), flags) == []
    assert derived.resume_problems(stored(tau=1), {"tau": np.float32(1.0)}) == []


def test_differences_are_said_flag_by_flag():
    was = stored(tau=0.9, agg="hk", old=1)
    assert derived.resume_problems(was, {"tau": 0.8, "agg": "hk", "new": 2}) == [
        "flag --tau: run has 0.9, you gave 0.8",
        "flag --old: run has 1, this version has no such flag",
        "flag --new: run has no such flag, you gave 2",
    ]


@pytest.mark.parametrize(
    ("rounds", "message"),
    [(30, None), (20, None), (10, "flag --rounds: run is set for 20, you gave 10; rounds cannot")],
)
def test_rounds_may_grow_but_not_shrink(rounds, message):
    lines = derived.resume_problems(stored(rounds=20), {"rounds": rounds})
    assert len(lines) == (message is not None)
    assert message is None or lines[0].startswith(message)


def test_how_a_run_is_carried_out_may_change():
    assert derived.changeable() == [
        "data_cache", "tensorboard", "report", "chunk", "devices", "rounds_per_sync",
        "gradient_spread",
    ]  # fmt: skip
    for name in SETTINGS:
        lines = derived.resume_problems({name: 1}, {name: 2})
        assert bool(lines) == (name not in (*derived.changeable(), "rounds"))


def test_earlier_names_and_values():
    flags = {"task": "forecast", "align": "units", "gradient_dissimilarity": True, "gone": 1}
    assert translated(flags) == {
        "samples": "readings", "align": "neurons", "gradient_spread": True, "gone": 1,
    }  # fmt: skip
    assert from_stored(flags) == Config(align="neurons", gradient_spread=True)
    assert from_stored({"task": "digits"}).samples == "digits"
    today = dataclasses.asdict(Config(samples="npz", align="none", tau=0.3))
    assert translated(today) == today


# Methods, reuse, forecasts


def test_runs_of_one_method():
    plain = Config(agg="fedavg")
    for name, value in {
        "seed": 3,
        "tensorboard": True,
        "data_cache": False,
        "devices": 2,
        "output": "runs/a",
        "report": False,
        "gradient_spread": True,
    }.items():
        changed = dataclasses.replace(plain, **{name: value})
        assert derived.method_of(changed) == derived.method_of(plain), name
    for name, value in {"rounds": 3, "learning_rate": 0.1, "lookback": 3, "epochs": 1}.items():
        changed = dataclasses.replace(plain, **{name: value})
        assert derived.method_of(changed) != derived.method_of(plain), name


def test_what_is_reused():
    base = Config(agg="fedavg", local="prox")

    def taken(config, other_data=False):
        try:
            derived.check_reuse(base, config, other_data=other_data)
        except ConfigError as error:
            return str(error).split("=")[0]
        return True

    same = Config(agg="fedprox")  # another name of the same row
    assert taken(same) is True
    for name in (*of_kind("traced", "loop"), "report", "tensorboard", "output"):
        if not SETTINGS[name].switches:
            assert taken(dataclasses.replace(base, **{name: 1})) is True, name
    for name in (*of_kind("compiled"), "epsilon", "chunk", "devices", "gradient_spread"):
        known = SETTINGS[name]
        others = [one for one in known.choices if one != value_of(base, name)]
        value = others[0] if others else 7
        if name == "agg":
            value = "median"
        elif name in base.rule()._fields:
            value = next(one for one in known.choices if one != getattr(base.rule(), name))
        found = taken(dataclasses.replace(base, **{name: value}))
        assert found is not True, name
        assert name == "agg" or found.removeprefix("--").removeprefix("use_") == name
    for name in of_kind("data"):
        known = SETTINGS[name]
        value = known.choices[1] if known.choices else 7
        changed = dataclasses.replace(base, **{name: value})
        assert taken(changed) is not True, name
        assert name == "samples" or taken(changed, other_data=True) is True, name


def test_forecasts_keep_what_samples_and_local_objective_read():
    kept = derived.kept_for_forecasts(Config(agg="perfedavg_fo", alpha=0.3, scaler="mean"))
    assert {"alpha", "activation", "dropout", "lookback", "horizon", "scaler", "gaps"} <= set(kept)
    assert (kept["alpha"], kept["scaler"]) == (0.3, "mean")
    assert not {"epochs", "agg", "tau", "clients_per_round", "attack", "mu"} & set(kept)
