"""Strict modes for all tests, and small federations to test with."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_hk import models, parallel
from fedjax_hk.round import engine as engine_lib
from fedjax_hk.round import training
from fedjax_hk.round.state import FleetArrays
from fedjax_hk.rules import RULES
from fedjax_hk.types import HParams, Samples, Settings

jax.config.update("jax_num_cpu_devices", 2)  # before any back end starts
jax.config.update("jax_numpy_rank_promotion", "raise")

# Programs of tests are small and run once: compiling them is nearly all of the time. The older
# emitters, in one part, compile a round of a tiny fleet in 1.2 s instead of 4 (jax 0.10.2).
jax.config.update("jax_disable_most_optimizations", True)
engine_lib.CPU_LEVEL = 0
COMPILE_LESS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
_flags = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{_flags or ''} {COMPILE_LESS}"
jax.devices()  # reads the flags
if _flags is None:  # processes that tests start are as users start them
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = _flags


def pytest_configure(config):
    """One cache of compiled programs for all workers, and for the next time."""
    if not hasattr(config, "cache"):  # -p no:cacheprovider
        return
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
    jax.config.update("jax_compilation_cache_max_size", 2**30)  # bounded, and so behind a lock
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


hypothesis.settings.register_profile("tests", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("tests")

SIZES = (5, 3, 8, 1, 4, 7)  # training windows of the tiny fleet's clients


class Line(nn.Module):
    """Two parameters: `slope * last input + offset`."""

    forward_layers = ()

    @nn.compact
    def __call__(self, inputs):
        slope = self.param("slope", nn.initializers.normal(1.0), ())
        offset = self.param("offset", nn.initializers.normal(1.0), ())
        return slope * inputs[:, -1, 0] + offset


@functools.cache
def model_named(name: str) -> models.Model:
    example = jnp.zeros((2, 3, 1))
    if name == "line":
        return models.from_flax(Line(), example)
    if name == "lstm":
        return models.lstm_forecaster(
            example, neurons=(3, 2), dense_neurons=2, dropout=0.0, output="linear"
        )
    return models.lstm_forecaster(example, neurons=(3, 2), dense_neurons=2, dropout=0.3)


def make_samples(sizes, seed=0, width=None, groups=3) -> Samples:
    """`[N, W]` windows of clients that follow one of a few lines, with noise."""
    rng = np.random.default_rng(seed)
    num, width = len(sizes), width or max(*sizes, 1)
    mask = np.arange(width)[None, :] < np.array(sizes)[:, None]
    # Drawn client by client, so that the width changes nothing of the valid windows.
    inputs = np.zeros((num, width, 3, 1), np.float32)
    targets = np.zeros((num, width), np.float32)
    for i, size in enumerate(sizes):
        inputs[i, :size] = rng.uniform(0.1, 1, (size, 3, 1))
        slope = (i % groups) - 0.9 + 0.1 * rng.standard_normal()
        targets[i, :size] = slope * inputs[i, :size, -1, 0] + 0.3 + 0.1 * rng.random(size)
    one, zero = np.ones_like(targets), np.zeros_like(targets)
    return Samples(inputs, targets, mask, one * np.float32(100), zero)


def make_fleet(sizes=SIZES, seed=0, width=None, groups=3) -> FleetArrays:
    return FleetArrays(
        make_samples(sizes, seed, width, groups),
        make_samples((3,) * len(sizes), seed + 1000, None, groups),
        np.ones(len(sizes), bool),
        np.arange(len(sizes), dtype=np.uint32),
        np.arange(len(sizes), dtype=np.int32) % groups,
    )


class Federation(NamedTuple):
    """An engine with its jitted round; `run` starts it from a seed."""

    model: models.Model
    trainer: training.Trainer
    engine: engine_lib.Engine
    round: object

    def start(self, seed=0):
        return self.place(self.engine.init(self.model.init(jax.random.key(seed))))

    def place(self, tree):
        """Where a round leaves its results, so that the next one is the same program."""
        return parallel.place(tree, self.engine.mesh)

    def run(self, fleet, *, rounds=1, seed=0, hparams=None, state=None, first=0):
        """Returns the last state, and the rounds' infos as NumPy."""
        state = self.start() if state is None else state
        hparams = HParams() if hparams is None else hparams
        hparams = jax.tree.map(np.float32, hparams)
        state, fleet, key, hparams = self.place((state, fleet, jax.random.key(seed), hparams))
        infos = []
        for number in range(first, first + rounds):
            state, info, _ = self.round(state, fleet, self.place(np.int32(number)), key, hparams)
            infos.append(jax.tree.map(np.asarray, info))
        return state, infos


@functools.cache
def _federation(
    agg, num_clients, cohort, model, epochs, batch_size, objective, devices, choices, options
):
    choices, options = dict(choices), dict(options)
    rule = RULES[agg]._replace(**choices)
    model = model_named(model)
    trainer = training.make_trainer(
        model, objective=objective or rule.local, epochs=epochs, batch_size=batch_size
    )
    settings = Settings(**{k: options.pop(k) for k in tuple(options) if k in Settings._fields})
    engine = engine_lib.make_engine(
        model,
        trainer,
        rule,
        num_clients=num_clients,
        clients_per_round=cohort or num_clients,
        settings=settings,
        mesh=Mesh(np.array(jax.devices()[:devices]), ("clients",)),
        **options,
    )
    # Tiny arrays: compiling is all that takes time, and level 0 halves it.
    compiled = jax.jit(engine.round, out_shardings=NamedSharding(engine.mesh, PartitionSpec()))
    return Federation(model, trainer, engine, compiled)


def make_federation(
    agg="fedavg",
    *,
    num_clients=6,
    cohort=0,
    model="line",
    epochs=2,
    batch_size=4,
    devices=1,
    choices=None,
    **options,
) -> Federation:
    """A compiled round, shared by all tests that ask for the same one.

    Args:
      choices: entries of the rule's row to replace.
      options: of `make_engine` and of `Settings`.
    """
    choices = choices or {}
    return _federation(
        agg,
        num_clients,
        cohort,
        model,
        epochs,
        batch_size,
        choices.get("local", ""),
        devices,
        tuple(sorted(choices.items())),
        tuple(sorted(options.items())),
    )


@pytest.fixture(scope="session")
def federation():
    return make_federation


@pytest.fixture(scope="session")
def fleet():
    """The tiny fleet's builder: `fleet(sizes, seed, width, groups)`."""
    return make_fleet


@pytest.fixture(scope="session")
def samples():
    return make_samples


@pytest.fixture(scope="session")
def tiny_model():
    """`line` (2 parameters), `lstm` (smooth), `dropout_lstm` (the paper's, but tiny)."""
    return model_named


@pytest.fixture
def strict():
    """No silent promotion of dtypes or ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
