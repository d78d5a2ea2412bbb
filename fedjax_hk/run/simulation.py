"""A whole run: prepare, train round by round, write down, survive interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import pandas as pd
from jax.sharding import Mesh

from fedjax_hk import data, hk, keys, models, parallel
from fedjax_hk.models import classifiers
from fedjax_hk.report import summary
from fedjax_hk.report.coalition_map import splitting_threshold
from fedjax_hk.round import engine as engine_lib
from fedjax_hk.round.training import make_trainer
from fedjax_hk.run.terminal import Progress, StopRequest
from fedjax_hk.settings import checks, derived, thresholds
from fedjax_hk.settings import config as config_lib
from fedjax_hk.settings.choices import TABLES, implementation
from fedjax_hk.settings.config import Config, value_of
from fedjax_hk.store import records
from fedjax_hk.store.checkpoint import Checkpoints
from fedjax_hk.store.records import TEXT_COLUMNS
from fedjax_hk.store.run_folder import RunFolder
from fedjax_hk.tasks import TASKS
from fedjax_hk.types import Array, Fleet, HParams, Settings


class Callback(Protocol):
    """What `run` calls, such as `integrations.tensorboard.TensorBoard`."""

    def on_round_end(self, round_number: int, metrics: dict[str, Any]) -> None:
        """Takes the row of `rounds.csv` once a round is in the tables."""


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compilations: list[float] = []  # seconds of every compilation of this process
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: _compilations.append(seconds) if event == _COMPILE_EVENT else None
)


class Prepared(NamedTuple):
    """All that the rounds of a run need; arrays lie on the devices.

    Attributes:
      round: `(state, fleet, round_number, run_key, hparams) -> (state, info)`, compiled.
      state: before the first round.
      compile_seconds: what compiling the round took.
      compilations: how many there were for it, by jax's count.
    """

    config: Config
    fleet: Fleet
    model: models.Model
    engine: engine_lib.Engine
    arrays: engine_lib.FleetArrays
    run_key: Array
    hparams: HParams
    round: Callable
    state: engine_lib.ServerState
    compile_seconds: float
    compilations: int


class Outcome(NamedTuple):
    """Attributes:
    state: after the last round.
    rounds: `rounds.csv` as a table.
    clients: `clients.csv` as a table; None if the run was stopped before its end.
    text: the summary; empty if the run was stopped.
    stopped: name of the signal that stopped the run, or "".
    """

    state: engine_lib.ServerState
    rounds: pd.DataFrame
    clients: pd.DataFrame | None
    text: str
    stopped: str


def settings_of(config: Config) -> Settings:
    """The grouping's choices that are fixed at compile time."""
    return Settings(**derived.compiled_values(config))


def hparams_of(config: Config) -> HParams:
    """The numbers that are traced."""
    return HParams(**derived.traced_values(config))


def make_mesh(config: Config) -> Mesh:
    """The devices that clients are spread over.

    Errors: ConfigError if more are asked for than there are.
    """
    devices = jax.devices()
    if config.devices > len(devices):
        raise config_lib.ConfigError(
            f"--devices={config.devices}: there are {len(devices)} "
            f"({devices[0].platform}); give at most that, or 0 for all."
        )
    return Mesh(np.array(devices[: config.devices or None]), ("clients",))


# The network of each task where none is given: `(config, fleet, example_inputs) -> Model`.
DEFAULT_MODELS: dict[str, Callable[[Config, Fleet, np.ndarray], models.Model]] = {
    "forecast": lambda config, fleet, example: models.lstm_forecaster(
        example, dropout=config.dropout, output=config.activation
    ),
    "classification": lambda config, fleet, example: classifiers.classifier(
        example, len(fleet.classes), config.model
    ),
}


class Assembled(NamedTuple):
    """What needs no compilation; `arrays` and `hparams` lie on the devices."""

    model: models.Model
    engine: engine_lib.Engine
    arrays: engine_lib.FleetArrays
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
    probe = _probe(fleet)
    model = model or DEFAULT_MODELS[fleet.task](config, fleet, probe[:2])
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
            loss=value_of(config, "loss"),
            epochs=epochs,
            batch_size=config.batch_size,
        )

    trainer = trainer_of(rule.local, config.epochs)
    finetuner = trainer_of("plain", config.finetune_epochs) if config.finetune_epochs else None
    engine = engine_lib.make_engine(
        model,
        trainer,
        rule,
        task=TASKS[fleet.task],
        num_clients=len(fleet.client_ids),
        clients_per_round=clients_per_round,
        batch_size=config.batch_size,
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


def _arrays(fleet: Fleet, mesh: Mesh) -> engine_lib.FleetArrays:
    available_n = np.ones(len(fleet.client_ids), bool)
    ids_n = keys.stable_ids(fleet.client_ids)
    planted_n = () if fleet.planted is None else np.asarray(fleet.planted, np.int32)
    arrays = engine_lib.FleetArrays(fleet.train, fleet.test, available_n, ids_n, planted_n)
    return parallel.place(arrays, mesh)


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
    compiled = engine_lib.compile_round(engine, state, arrays, run_key, hparams)
    seconds = time.perf_counter() - start
    counted = len(_compilations) - counted_before
    return Prepared(
        config, fleet, model, engine, arrays, run_key, hparams, compiled, state, seconds, counted
    )


def _check_outputs(model: models.Model, fleet: Fleet, example: np.ndarray) -> None:
    shape = (len(example), len(fleet.classes)) if fleet.classes else (len(example),)
    params = jax.ShapeDtypeStruct((model.num_parameters,), np.float32)
    found = jax.eval_shape(lambda x: model.apply(x, example, None), params).shape
    if found != shape:
        raise ValueError(
            f"Expected a model with outputs of shape {shape} for {len(example)} samples, got "
            f"{found}; wrap the module with models.from_flax(module, example, num_classes=...)."
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


def _start(engine, model, seed: int, probe) -> tuple[Array, engine_lib.ServerState]:
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


def step(prepared: Prepared, state: engine_lib.ServerState, round_number: int):
    """Round `round_number` (from 1), on the devices: `(state, RoundInfo)`."""
    return prepared.round(
        state, prepared.arrays, np.int32(round_number), prepared.run_key, prepared.hparams
    )


def rounds(prepared: Prepared):
    """The rounds of a run from its start, without a folder: number, info as NumPy, seconds."""
    state = prepared.state
    for round_number in range(1, prepared.config.rounds + 1):
        start = time.perf_counter()
        state, info = jax.block_until_ready(step(prepared, state, round_number))
        yield round_number, jax.tree.map(np.asarray, info), time.perf_counter() - start


def run(
    prepared: Prepared,
    folder: RunFolder,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    stream=None,
) -> Outcome:
    """Trains for `config.rounds` rounds and writes everything into the run folder.

    Every round is appended to the tables and then saved, so that a kill at any moment
    costs at most the round in progress. A signal ends the run after its round.

    Args:
      folder: of this run; with `resume`, holds what went before.
      callbacks: told of every round.
      stream: where progress goes; standard error if None.
    """
    config, fleet, rule = prepared.config, prepared.fleet, prepared.config.rule()
    state, done = prepared.state, 0
    if not (folder.path / "config.json").exists():  # main writes more of it, and earlier
        folder.write_config({"flags": dataclasses.asdict(config), "data": describe_data(fleet)})
    if len(fleet.shift_n):  # for forecasts of later readings
        scaling = {"client": fleet.client_ids, "shift": fleet.shift_n, "scale": fleet.scale_n}
        folder.write_table("scaling", pd.DataFrame(scaling))
    with (
        Checkpoints(folder.path / "checkpoints", log=folder.log) as checkpoints,
        StopRequest() as stop,
    ):
        if resume:
            found = checkpoints.restore_latest(prepared.state)
            done, state = found or (0, state)
            for table in ("rounds", "coalitions"):
                folder.truncate_after(table, "round", done)
        said = _Notes(prepared, folder.read_table("rounds", TEXT_COLUMNS) if done else None)
        clients, text = None, ""
        with Progress(config.rounds, done, stream) as progress:
            for round_number in range(done + 1, config.rounds + 1):
                start = time.perf_counter()
                state, info = jax.block_until_ready(step(prepared, state, round_number))
                seconds = time.perf_counter() - start
                # What only the end of a run reads stays on the device.
                light = info._replace(grams=None, outputs_nw=None)
                light = jax.tree.map(np.asarray, light)
                row = _write_round(
                    folder, round_number, light, fleet, seconds, prepared.engine.traffic
                )
                for callback in callbacks:
                    callback.on_round_end(round_number, row)
                line = summary.round_line(row, fleet.unit or "units", TASKS[fleet.task])
                progress.update(round_number, line)
                for note in said.about(row, light, info.grams[rule.opinion]):
                    folder.log(note)
                    progress.say(note)
                if round_number == config.rounds:
                    light = light._replace(grams=info.grams, outputs_nw=info.outputs_nw)
                    clients, text = _finish(folder, config, fleet, round_number, light)
                checkpoints.save(round_number, state)
                if stop.requested and round_number < config.rounds:
                    break
        checkpoints.wait()
    if clients is not None and config.report:
        _draw_report(folder, stream)
    rounds = folder.read_table("rounds", TEXT_COLUMNS)
    if done == config.rounds and (folder.path / "summary.txt").exists():  # nothing was left to do
        clients = folder.read_table("clients", ["client", "last_coalition"])
        text = (folder.path / "summary.txt").read_text().rstrip("\n")
    return Outcome(state, rounds, clients, text, stop.requested if clients is None else "")


def _write_round(folder, round_number, info, fleet, seconds, traffic) -> dict[str, Any]:
    row = records.round_row(round_number, info, fleet, seconds, traffic)
    folder.append_rows("coalitions", records.coalition_rows(round_number, info, fleet))
    folder.append_rows("rounds", [row])
    return row


def _finish(folder, config, fleet, round_number, info) -> tuple[pd.DataFrame, str]:
    """Final tables and summary; written before the last checkpoint, so that a run whose
    last checkpoint is there has them."""
    task = TASKS[fleet.task]
    folder.write_table(task.outputs_name, task.outputs_table(np.asarray(info.outputs_nw), fleet))
    arrays = records.opinion_arrays(round_number, info, fleet, _neighborhood(config, info))
    folder.write_arrays("opinions.npz", arrays)
    rounds = folder.read_table("rounds", TEXT_COLUMNS)
    coalitions = folder.read_table("coalitions", text=["client", "coalition", "status"])
    clients = records.client_table(info, fleet, coalitions)
    folder.write_table("clients", clients)
    text = summary.summarize(config, fleet.unit, rounds, clients)
    folder.write_text("summary.txt", text + "\n")
    return clients, text


def _neighborhood(config, info) -> hk.Neighborhood | None:
    """Whom clients listened to in the round, None if the grouping has no threshold."""
    rule = config.rule()
    near = implementation("grouping", rule.grouping)(settings_of(config)).neighborhood
    if near is None:
        return None
    return near(hparams_of(config), info.grams[rule.opinion], info.present_s)


def _draw_report(folder, stream) -> None:
    """Makes build.html. All results are on the disk already, so whatever fails here is said
    and costs the pictures alone."""
    try:
        from fedjax_hk.report import build  # loads matplotlib

        build.write_report(folder.path)
    except Exception as error:
        note = (
            f"Note: the report could not be made ({type(error).__name__}: {error}). All tables "
            f"are there; to try again: python -m fedjax_hk.report --run={folder.path}"
        )
        folder.log(note)
        print(note, file=stream or sys.stderr)


def describe_data(fleet: Fleet) -> dict[str, Any]:
    """What a resumed run must find again, and what a reader of the folder must know."""
    names = "\n".join(fleet.client_ids).encode()
    dealt = {}
    if fleet.owners is not None:
        dealt = {"partition_fingerprint": data.partition_digest(fleet.owners)}
    return {
        "source": fleet.source,
        "fingerprint": fleet.fingerprint,
        "unit": fleet.unit,
        "clients": len(fleet.client_ids),
        "clients_fingerprint": hashlib.sha256(names).hexdigest(),
        **dealt,
    }


class _Notes:
    """What is said once: a grouping that changes nothing, clients that were left out."""

    def __init__(self, prepared: Prepared, before: pd.DataFrame | None):
        self._prepared = prepared
        self._said_nothing, self._last_left_out = False, ""
        if before is not None:  # a resumed run does not say it again
            self._said_nothing = bool((before["changes_nothing"] & (before["clients"] > 1)).any())
            self._last_left_out = before["left_out"].iloc[-1] or ""

    def about(self, row, info, gram_ss):
        config = self._prepared.config
        rule = config.rule()
        looks = TABLES["grouping"][rule.grouping].looks
        left_out = records.describe_left_out(info, self._prepared.fleet)
        if row["clients"] == 0:
            yield (
                f"Note: in round {row['round']} nobody took part, left out: {left_out}; "
                "the model stays as it was."
            )
        elif left_out and row["left_out"] != self._last_left_out:
            yield (
                f"Note: in round {row['round']} left out: {left_out}; the average is over the "
                "others (all rounds: coalitions.csv)."
            )
        self._last_left_out = row["left_out"]
        idle = row["changes_nothing"] and rule.serve == "global" and row["clients"] > 1
        if looks and idle and not self._said_nothing:
            self._said_nothing = True
            threshold = None
            weighing = (rule.within, rule.between, config.min_coalition)
            if np.isfinite(row["limit"]) and weighing == ("uniform", "equal", 1):
                threshold = splitting_threshold(
                    gram_ss,
                    info.present_s,
                    thresholds.meaning_of(config, outright=True),
                    state_norm=config.state_norm,
                )
            yield summary.nothing_changed(row, config, threshold)


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
