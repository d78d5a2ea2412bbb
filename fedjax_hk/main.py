"""`python -m fedjax_hk.main --agg=hk_cosine --tau=0.9`: flags, checks, one run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shlex
import signal
import sys
import textwrap
from typing import Any

from fedjax_hk.settings import checks, derived, earlier, flags
from fedjax_hk.settings import config as config_lib
from fedjax_hk.settings.config import SETTINGS, Config, ConfigError, value_of


def main(argv: list[str] | None = None) -> int:
    """Runs from command line arguments; returns the exit code."""
    try:
        parsed = flags.parse(sys.argv if argv is None else argv)
        if parsed is None:
            return 0
        config, given, resume = parsed
        if resume is not None:
            return _resume(resume, given)
        checks.check(config)
        return _start(config)
    except ConfigError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print("Stopped. Completed rounds are in the run folder.", file=sys.stderr)
        return 130


def _refuse(error: Exception) -> int:
    print(f"Error:\n{textwrap.indent(str(error), '  ')}", file=sys.stderr)
    return 2


def load_table(config: Config):
    """The readings that the settings ask for, of all clients that there are.

    Errors: DataError that names file, row, column and client.
    """
    from fedjax_hk import data

    if config.data:
        return data.read(
            config.data,
            data_format=config.data_format,
            clients=config.clients,
            unit=config.unit,
            resample=config.resample or "",
            timezone=config.timezone,
            cache=config.data_cache,
        )
    table = data.synthetic_fleet(config.fleet_clients, config.fleet_days)
    return table._replace(unit=config.unit) if config.unit else table


def load_fleet(config: Config):
    """The clients' data that the settings ask for.

    Errors: DataError that names file, row, column and client.
    """
    from fedjax_hk import data

    if config.samples != "readings":
        samples = _load_samples(config)
        if config.judge == "validation":
            samples = data.without_test_samples(samples)
        return data.split_samples(samples, _split_of(config))
    table = load_table(config)
    if config.data:
        table = data.choose_clients(table, config.active_factor, config.min_days)
    if config.judge == "validation":
        table = data.without_test_span(table)
    return data.build_fleet(
        table,
        lookback=config.lookback,
        horizon=config.horizon,
        scaler=config.scaler,
        scaler_scope=config.scaler_scope,
        scaler_fit=config.scaler_fit,
        gaps=config.gaps,
    )


def _load_samples(config: Config):
    from fedjax_hk import data

    shape = config_lib.image_shape_of(config)
    readers = {
        "digits": data.digits,
        "mnist5k": data.mnist5k,
        "npz": lambda: data.read_npz(
            config.data, image_shape=shape, max_samples=config.max_samples, seed=config.seed
        ),
        "leaf": lambda: data.read_leaf(config.data, image_shape=shape),
    }
    return readers[config.samples]()


def _split_of(config: Config):
    from fedjax_hk import data

    return data.Split(
        partition=value_of(config, "partition"),
        num_clients=value_of(config, "num_clients"),
        alpha=value_of(config, "alpha_dirichlet"),
        shards_per_client=value_of(config, "shards_per_client"),
        min_samples=value_of(config, "min_samples"),
        seed=config.seed,
    )


def _start(config: Config) -> int:
    from fedjax_hk.data import DataError
    from fedjax_hk.store import run_folder

    try:
        _check_installed(config)
        fleet = load_fleet(config)
        checks.check_fleet(config, len(fleet.client_ids))
        _use_devices(config)
        folder = run_folder.create(config.output, name=config.agg)
    except (DataError, run_folder.RunFolderError) as error:
        return _refuse(error)
    from fedjax_hk.run.simulation import describe_data

    with folder:
        if fleet.excluded:
            import pandas as pd

            folder.write_table("excluded", pd.DataFrame(fleet.excluded))
        if fleet.owners is not None:
            from fedjax_hk.report import partition_files

            partition_files.write(folder, fleet)
        folder.write_config(  # last, as it says that the folder can be resumed
            {
                "flags": dataclasses.asdict(config),
                "versions": run_folder.versions(),
                "device": _device(),
                "data": describe_data(fleet),
            }
        )
        return _train(config, fleet, folder, resume=False)


def _check_installed(config: Config) -> None:
    """Errors: ConfigError if a setting needs a package that is not there."""
    from fedjax_hk.integrations import tensorboard

    if config.tensorboard:
        try:
            tensorboard.check_installed()
        except ImportError as error:
            raise ConfigError(f"--tensorboard: {error}") from None


def _resume(path: str, given: dict[str, Any]) -> int:
    from fedjax_hk.data import DataError
    from fedjax_hk.store import run_folder

    try:
        folder = run_folder.open_existing(path)
    except run_folder.RunFolderError as error:
        return _refuse(error)
    with folder:
        try:
            stored = folder.read_config()
            config = _stored_config(stored["flags"], given)
            if _is_finished(folder.path, config):
                return _show_finished(folder.path)
            fleet = load_fleet(config)
            from fedjax_hk.run.simulation import describe_data

            _check_data(config, stored["data"], describe_data(fleet))
        except (DataError, run_folder.RunFolderError) as error:
            return _refuse(error)
        _use_devices(config)
        folder.write_config({**stored, "flags": dataclasses.asdict(config)})
        return _train(config, fleet, folder, resume=True)


def _stored_config(stored: dict[str, Any], given: dict[str, Any]) -> Config:
    """The settings of a run that goes on.

    Errors: ConfigError with the differences in what a resumed run keeps.
    """
    stored = earlier.translated(stored)
    flags_now = {
        name: given.get(name, stored.get(name, known.default)) for name, known in SETTINGS.items()
    }
    known = {name: flags_now[name] for name in SETTINGS if name in stored or name in given}
    problems = derived.resume_problems(stored, known)
    if problems:
        problems.append(
            "A resumed run keeps its flags; only --rounds may grow, and "
            f"{', '.join('--' + name for name in derived.changeable())} may change."
        )
        raise ConfigError("\n".join(problems))
    config = Config(**flags_now)
    checks.check(config)
    return config


def _is_finished(path: pathlib.Path, config: Config) -> bool:
    """The last round's checkpoint comes after its tables, so it vouches for them."""
    return (path / "checkpoints" / str(config.rounds)).is_dir()


def _show_finished(path: pathlib.Path) -> int:
    print(f"{path} is finished; this is what it found:\n")
    summary = path / "summary.txt"
    print(summary.read_text() if summary.exists() else "summary.txt is gone; see the tables.")
    if (path / "report.html").exists():
        print(f"Report: {path / 'report.html'}")
    else:
        print(f"For a report: python -m fedjax_hk.report --run={shlex.quote(str(path))}")
    return 0


def _check_data(config: Config, stored: dict[str, Any], found: dict[str, Any]) -> None:
    """Errors: ConfigError if the data are not those that the run was started with."""
    if found["fingerprint"] != stored["fingerprint"]:
        raise ConfigError(
            f"--data={config.data}: its content is not what the run was started with; "
            "restore the file, or start a new run."
        )
    if found["clients_fingerprint"] != stored["clients_fingerprint"]:
        raise ConfigError(
            f"--clients={config.clients}: it names {found['clients']} clients that are not the "
            f"{stored['clients']} the run was started with; restore the list, or start a new run."
        )
    if found.get("partition_fingerprint") != stored.get("partition_fingerprint"):
        raise ConfigError(
            f"--partition={config.partition}: samples are dealt out otherwise than when the run "
            "was started, as another version of numpy may; install that version, or start a new "
            "run."
        )


def _use_devices(config: Config) -> None:
    """Splits a CPU into one device a core, before jax starts.

    Two devices of one core each are nearly twice as fast as one device of two cores. What is
    stored of a run is what was asked for: how many devices there are is a property of the
    machine.

    Errors: ConfigError if there are fewer devices than asked for.
    """
    import jax

    cores = config.devices or num_cores()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Too late in a process where jax runs already, whose devices are then taken.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cores)
    from fedjax_hk.run.simulation import make_mesh

    make_mesh(config)


def num_cores() -> int:
    """Cores that this process may use; where the system does not tell, as macOS, all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device() -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    return {"platform": device.platform, "kind": device.device_kind, "count": len(jax.devices())}


def _train(config: Config, fleet, folder, resume: bool) -> int:
    from fedjax_hk.integrations.tensorboard import TensorBoard
    from fedjax_hk.report import summary
    from fedjax_hk.run import simulation
    from fedjax_hk.run.terminal import StopRequest
    from fedjax_hk.store.checkpoint import CheckpointError
    from fedjax_hk.store.run_folder import RunFolderError

    print(summary.describe_fleet(fleet), flush=True)
    print(f"Run folder: {folder.path}", flush=True)
    with StopRequest(then="the round is compiled first") as stop:
        try:
            prepared = simulation.prepare(config, fleet)
        except ValueError as error:
            if not resume:
                folder.discard()
            return _refuse(error)
    if stop.requested:
        return _say_stopped(stop.requested, "while the round was compiled", folder)
    print(simulation.describe_devices(prepared), flush=True)
    try:
        with contextlib.ExitStack() as stack:
            callbacks = []
            if config.tensorboard:
                callbacks = [stack.enter_context(TensorBoard(folder.path / "tensorboard"))]
            outcome = simulation.run(prepared, folder, resume=resume, callbacks=callbacks)
    except (CheckpointError, RunFolderError) as error:  # the folder's files were altered
        return _refuse(error)
    if outcome.stopped:
        stopped = _say_stopped(outcome.stopped, f"after round {len(outcome.rounds)}", folder)
        path = shlex.quote(str(folder.path))
        print(f"or look at what is there:\n  python -m fedjax_hk.report --run={path}")
        return stopped
    print(f"\n{outcome.text}\n\nTables: {folder.path}")
    if (folder.path / "report.html").exists():
        print(f"Report: {folder.path / 'report.html'}")
    return 0


def _say_stopped(name: str, when: str, folder) -> int:
    print(
        f"Stopped by {name} {when}; go on with\n"
        f"  python -m fedjax_hk.main --resume={shlex.quote(str(folder.path))}"
    )
    return 128 + signal.Signals[name]


if __name__ == "__main__":
    sys.exit(main())
