"""A run before its first round: model, engine, arrays and the compiled round; and its rounds."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_hk import keys, models, parallel
from fedjax_hk.round import engine as engine_lib
from fedjax_hk.round.state import FleetArrays, RoundInfo, RoundState, Snapshot
from fedjax_hk.round.training import make_trainer
from fedjax_hk.run.devices import make_mesh
from fedjax_hk.settings import checks, derived
from fedjax_hk.settings import config as config_lib
from fedjax_hk.settings.config import Config, value_of
from fedjax_hk.tasks import TASKS
from fedjax_hk.types import Array, Fleet, HParams, Params, Settings

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compilations: list[float] = []  # seconds of every compilation of this process


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _COMPILE_EVENT:
        _compilations.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_count)


class Prepared(NamedTuple):
    """All that the rounds of a run need; arrays lie on the devices.

    Attributes:
      round: `engine.chunk(config.rounds_per_sync)`, compiled.
      state: before the first round.
      compile_seconds: what compiling the round took.
      compilations: how many there were for it, by jax's count.
    """

    config: Config
    fleet: Fleet
    model: models.Model
    engine: engine_lib.Engine
    arrays: FleetArrays
    run_key: Array
    hparams: HParams
    round: Callable
    state: RoundState
    compile_seconds: float
    compilations: int


def settings_of(config: Config) -> Settings:
    """What is fixed for the rule when it is compiled."""
    return Settings(**derived.compiled_values(config))


def hparams_of(config: Config) -> HParams:
    """The numbers that are traced."""
    return HParams(**derived.traced_values(config))


class Assembled(NamedTuple):
    """What needs no compilation; `arrays` and `hparams` lie on the devices."""

    model: models.Model
    engine: engine_lib.Engine
    arrays: FleetArrays
    hparams: HParams


def assemble(config: Config, fleet: Fleet, model: models.Model | None = None) -> Assembled:
    """Puts model, trainer and engine together; arguments and errors are those of `prepare`."""
    checks.check(config)
    if config_lib.TASK_OF[config.samples] != fleet.task:
        raise config_lib.ConfigError(
            f"--samples={config.samples}: the fleet is one of {fleet.task}; give samples of that "
            "kind."
        )
    clients_per_round = checks.check_fleet(config, len(fleet.client_ids))
    mesh = make_mesh(config)
    probe, task = _probe(fleet), TASKS[fleet.task]
    model = model or task.judge.network(config, fleet, probe[:2])
    _check_outputs(model, fleet, probe[:2])
    rule = config.rule()
    if rule.grouping == "planted" and fleet.planted is None:
        raise config_lib.ConfigError(
            f"--agg={config.agg}: the true groups of these clients are not known; use the "
            "embedded fleet, or a rule that finds groups, such as --agg=hk_cosine."
        )

    def trainer_of(objective, epochs):
        return make_trainer(
            model,
            objective=objective,
            loss=task.judge.losses[value_of(config, "loss")],
            epochs=epochs,
            batch_size=config.batch_size,
        )

    trainer = trainer_of(rule.local, config.epochs)
    finetuner = trainer_of("plain", config.finetune_epochs) if config.finetune_epochs else None
    engine = engine_lib.make_engine(
        model,
        trainer,
        rule,
        task=task,
        num_clients=len(fleet.client_ids),
        clients_per_round=clients_per_round,
        settings=settings_of(config),
        opinion_leaves=config_lib.opinion_leaves(
            config, model.layers[-1][0] if model.layers else ""
        ),
        personal_layers=config.personal_layers,
        min_coalition=config.min_coalition,
        keep_optimizer=not config.client_opt_reset,
        gradient_spread=config.gradient_spread,
        attack=config.attack,
        finetuner=finetuner,
        chunk=config.chunk,
        mesh=mesh,
    )
    hparams = parallel.place(hparams_of(config), mesh)
    return Assembled(model, engine, _arrays(fleet, mesh), hparams)


def _arrays(fleet: Fleet, mesh: Mesh) -> FleetArrays:
    available_n = np.ones(len(fleet.client_ids), bool)
    ids_n = keys.stable_ids(fleet.client_ids)
    planted_n = () if fleet.planted is None else np.asarray(fleet.planted, np.int32)
    on_host = (fleet.train, fleet.test, available_n, ids_n, planted_n)
    return FleetArrays(*parallel.place(on_host, mesh))


def prepare(config: Config, fleet: Fleet, model: models.Model | None = None) -> Prepared:
    """Builds the engine, draws the first model, compiles the round.

    Args:
      model: by default the paper's LSTM for forecasts, a small CNN for classes of images.

    Errors: ConfigError for settings that do not fit the fleet, ValueError for a model that
      does not start alive or whose outputs do not fit the task.
    """
    model, engine, arrays, hparams = assemble(config, fleet, model)
    run_key, state = _start(engine, model, config.seed, _probe(fleet))
    jax.numpy.int32(0)  # the scalar that stands for the round's number has a program too
    start, counted_before = time.perf_counter(), len(_compilations)
    compiled = engine_lib.compile_chunk(
        engine, config.rounds_per_sync, state, arrays, run_key, hparams
    )
    seconds = time.perf_counter() - start
    counted = len(_compilations) - counted_before
    return Prepared(
        config, fleet, model, engine, arrays, run_key, hparams, compiled, state, seconds, counted
    )


def _check_outputs(model: models.Model, fleet: Fleet, example: np.ndarray) -> None:
    output_shape = TASKS[fleet.task].judge.output_shape(fleet)
    shape = (len(example), *output_shape)
    params = jax.ShapeDtypeStruct((model.num_parameters,), np.float32)
    found = jax.eval_shape(lambda x, y: model.apply(x, y, None), params, example).shape
    if found != shape:
        raise ValueError(
            f"Expected a model with outputs of shape {shape} for {len(example)} samples, got "
            f"{found}; wrap the module with models.from_flax(module, example, "
            f"output_shape={output_shape})."
        )


def reseed(prepared: Prepared, seed: int) -> Prepared:
    """The same run from another seed, without compiling again."""
    run_key, state = _start(prepared.engine, prepared.model, seed, _probe(prepared.fleet))
    config = dataclasses.replace(prepared.config, seed=seed)
    return prepared._replace(config=config, run_key=run_key, state=state)


def reuse(prepared: Prepared, config: Config, fleet: Fleet | None = None) -> Prepared:
    """A run with another seed, other traced numbers or other samples, without compiling again.

    Args:
      config: as the one that was compiled, but for seed, rounds, traced numbers and how the run
        is reported, and with a fleet what it is read from.
      fleet: with arrays of the same shapes; None keeps the samples.

    Errors: ConfigError if the settings need another compilation.
    """
    derived.check_reuse(prepared.config, config, other_data=fleet is not None)
    mesh = prepared.engine.mesh
    if fleet is not None:
        prepared = prepared._replace(fleet=fleet, arrays=_arrays(fleet, mesh))
    hparams = parallel.place(hparams_of(config), mesh)
    return reseed(prepared._replace(config=config, hparams=hparams), config.seed)


def _start(
    engine: engine_lib.Engine, model: models.Model, seed: int, probe: np.ndarray
) -> tuple[Array, RoundState]:
    run_key = jax.random.key(seed)
    key = keys.client_key(run_key, keys.INIT, 0, 0)
    state = engine.init(models.alive_params(model, key, probe))
    return parallel.place(run_key, engine.mesh), parallel.place(state, engine.mesh)


def _probe(fleet: Fleet) -> np.ndarray:
    """Some 4,096 training windows of all clients, fewer where these are over 256 bytes."""
    places = np.argwhere(fleet.train.mask)
    window = fleet.train.inputs[0, 0]
    most = min(4096, max(2, 2**20 // max(window.nbytes, 1)))
    places = places[:: max(1, len(places) // most)]
    return fleet.train.inputs[places[:, 0], places[:, 1]]


def step(prepared: Prepared, state: RoundState, round_number: int):
    """Round `round_number` (from 1), on the devices: `(state, RoundInfo, Snapshot)`."""
    state, infos, snapshot = _dispatch(prepared, state, round_number, 1)
    return state, jax.tree.map(lambda x: x[0], infos), snapshot


def _dispatch(prepared: Prepared, state: RoundState, first: int, count: int):
    numbers = np.int32(first), np.int32(count)
    return prepared.round(state, prepared.arrays, *numbers, prepared.run_key, prepared.hparams)


class Chunk(NamedTuple):
    """Rounds that stayed on the device together.

    Attributes:
      state: after the last of them, on the devices.
      infos: of each of them, as NumPy.
      snapshot: of the last of them, on the devices.
    """

    state: RoundState
    infos: list[RoundInfo]
    snapshot: Snapshot


def gram(prepared: Prepared, snapshot: Snapshot, space: str) -> Params:
    """Inner products of a round's opinions in a space, a value of `--opinion`."""
    return jax.jit(prepared.engine.gram, static_argnums=1)(snapshot, space)


def outputs(prepared: Prepared, state: RoundState) -> Array:
    """`[N, W_test, ...]` what the model that everybody is served says of its test samples:
    scaled forecasts, or logits."""
    options = engine_lib.compiler_options(prepared.engine.mesh)  # as the round, to the bit
    program = jax.jit(prepared.engine.outputs, compiler_options=options)
    return program(state, prepared.arrays, prepared.hparams)


def chunks(
    prepared: Prepared, state: RoundState, done: int = 0
) -> Iterator[tuple[int, Chunk, float]]:
    """The rounds after `done`: number of the first of each chunk, chunk, seconds a round."""
    total, most = prepared.config.rounds, prepared.config.rounds_per_sync
    while done < total:
        count = min(most, total - done)
        start = time.perf_counter()
        state, infos, snapshot = jax.block_until_ready(_dispatch(prepared, state, done + 1, count))
        seconds = (time.perf_counter() - start) / count
        infos = jax.tree.map(np.asarray, infos)
        each = [jax.tree.map(operator.itemgetter(i), infos) for i in range(count)]
        yield done + 1, Chunk(state, each, snapshot), seconds
        done += count


def rounds(prepared: Prepared) -> Iterator[tuple[int, RoundInfo, float]]:
    """The rounds of a run from its start, without a folder: number, info as NumPy, seconds."""
    for first, chunk, seconds in chunks(prepared, prepared.state):
        for number, info in enumerate(chunk.infos, start=first):
            yield number, info, seconds


def describe_devices(prepared: Prepared) -> str:
    """One line on what computes and how long it took to compile."""
    devices = prepared.engine.mesh.devices.flat
    kind = devices[0].device_kind
    size = prepared.state.params.size
    times = "once" if prepared.compilations == 1 else f"{prepared.compilations} times"
    return (
        f"Model: {size:,} parameters. Devices: {len(devices)} x {kind}. "
        f"The round was compiled {times}, in {prepared.compile_seconds:.1f} s."
    )
