"""Small runs with a linear forecaster, in this process."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedjax_hk import data, models, parallel
from fedjax_hk.data import synthetic_fleet
from fedjax_hk.run import loop
from fedjax_hk.run import prepare as prepare_lib
from fedjax_hk.settings.config import Config
from fedjax_hk.store import run_folder

POISON = 1e6  # the forecaster answers NaN to windows that hold a reading above half of it
ROUNDS = 4

# pandas reads floats to the last bit by itself from 3.1 on, where the option is deprecated.
EXACT = {} if pd.__version__ >= "3.1" else {"float_precision": "round_trip"}


class Linear(nn.Module):
    """13 parameters."""

    @nn.compact
    def __call__(self, inputs):
        outputs = nn.Dense(1, bias_init=nn.initializers.constant(0.3))(inputs[:, :, 0])[:, 0]
        poisoned = jnp.max(inputs, axis=(1, 2)) > POISON / 2
        return jnp.where(poisoned, jnp.nan, outputs)


MODEL = models.from_flax(Linear(), jnp.zeros((2, 12, 1)))


@functools.cache
def small_fleet(clients=7, days=75):
    return data.build_fleet(synthetic_fleet(clients, days))


def settings(**changes) -> Config:
    base = {
        "agg": "hk_cosine", "opinion": "update", "tau": 0.5, "rounds": ROUNDS, "epochs": 1,
        "clients_per_round": 5, "devices": 1, "learning_rate": 0.01, "report": False,
    }  # fmt: skip
    base |= changes
    return Config(**{name: value for name, value in base.items() if value is not None})


@functools.cache
def prepared_for(config: Config) -> prepare_lib.Prepared:
    return prepare_lib.prepare(config, small_fleet(), MODEL)


def prepared_with(**changes) -> prepare_lib.Prepared:
    """What is compiled depends neither on the seed, rounds and report nor on traced numbers."""
    config = settings(**changes)
    same = {"seed": 0, "rounds": ROUNDS, "learning_rate": 0.01, "report": False}
    if config.agg == "hk_cosine":
        same["tau"] = 0.5
    return prepare_lib.reuse(prepared_for(dataclasses.replace(config, **same)), config)


class Calls:
    """A callback that hands everything to a function."""

    def __init__(self, function):
        self.on_round_end = function


class Ran:
    """A run in a new folder, with all that it said."""

    def __init__(self, prepared, path, callbacks=(), resume=False):
        opened = run_folder.open_folder(path) if resume else run_folder.create_folder(path)
        self.path, self.stream, self.seen = opened.path, io.StringIO(), []
        with opened as folder:
            self.outcome = loop.simulate(
                prepared,
                folder,
                resume=resume,
                callbacks=[Calls(lambda *seen: self.seen.append(seen)), *map(Calls, callbacks)],
                stream=self.stream,
            )

    def csv(self, name, **options):
        path = self.path / f"{name}.csv"
        return pd.read_csv(path, **EXACT, **options)

    @property
    def said(self):
        return self.stream.getvalue()

    @property
    def log(self):
        path = self.path / "log.txt"
        return path.read_text() if path.exists() else ""


def assert_same_run(one: Ran, other: Ran, but=()):
    """Bit for bit, but for the seconds that rounds took."""
    for name in ("coalitions.csv", "clients.csv", "summary.txt"):
        if name not in but:
            assert (one.path / name).read_bytes() == (other.path / name).read_bytes(), name
    pd.testing.assert_frame_equal(
        *(run.csv("rounds", dtype=str).drop(columns="seconds") for run in (one, other))
    )
    for a, b in zip(*(jax.tree.leaves(r.outcome.state) for r in (one, other)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def on_fleet(prepared, fleet):
    """The same compiled round on other data of the same shape."""
    arrays = prepared.arrays._replace(train=fleet.train, test=fleet.test)
    arrays = parallel.place(arrays, prepared.engine.mesh)
    return prepared._replace(arrays=arrays, fleet=fleet)


def poisoned(prepared, clients):
    """The clients' training windows make the forecaster answer NaN."""
    inputs = np.array(prepared.fleet.train.inputs)
    inputs[clients] = POISON
    train = prepared.fleet.train._replace(inputs=inputs)
    return on_fleet(prepared, prepared.fleet._replace(train=train))


def stop_at(round_number, number=signal.SIGTERM):
    def callback(now, row):
        if now == round_number:
            os.kill(os.getpid(), number)

    return callback


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""
