"""`python -m fedjax_hk.main --agg=hk_cosine --tau=0.9`: flags, checks, one run."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shlex
import sys
import textwrap
from typing import Any

from fedjax_hk.settings import checks, flags
from fedjax_hk.settings.config import Config, ConfigError


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


def _start(config: Config) -> int:
    from fedjax_hk.data import DataError
    from fedjax_hk.run import contents, devices
    from fedjax_hk.run.load import load_fleet
    from fedjax_hk.store import run_folder

    try:
        _check_installed(config)
        fleet = load_fleet(config)
        checks.check_fleet(config, len(fleet.client_ids))
        devices.use(config)
        folder = run_folder.create_folder(config.output, name=config.agg)
    except (DataError, run_folder.RunFolderError) as error:
        return _refuse(error)
    with folder:
        contents.begin(folder, config, fleet)
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
    from fedjax_hk.run import contents, devices, resume
    from fedjax_hk.run.load import load_fleet
    from fedjax_hk.store import run_folder

    try:
        folder = run_folder.open_folder(path)
    except run_folder.RunFolderError as error:
        return _refuse(error)
    with folder:
        try:
            stored = folder.read_config()
            config = resume.stored_config(stored["flags"], given)
            if resume.is_finished(folder.path, config):
                return _show_finished(folder.path)
            fleet = load_fleet(config)
            resume.check_data(config, stored["data"], contents.describe_data(fleet))
        except (DataError, run_folder.RunFolderError) as error:
            return _refuse(error)
        devices.use(config)
        folder.write_config({**stored, "flags": dataclasses.asdict(config)})
        return _train(config, fleet, folder, resume=True)


def _show_finished(path: pathlib.Path) -> int:
    print(f"{path} is finished; this is what it found:\n")
    summary = path / "summary.txt"
    print(summary.read_text() if summary.exists() else "summary.txt is gone; see the tables.")
    if (path / "report.html").exists():
        print(f"Report: {path / 'report.html'}")
    else:
        print(f"For a report: python -m fedjax_hk.report --run={shlex.quote(str(path))}")
    return 0


def _train(config: Config, fleet, folder, resume: bool) -> int:
    from fedjax_hk.integrations.tensorboard import TensorBoard
    from fedjax_hk.report import summary
    from fedjax_hk.run import loop
    from fedjax_hk.run import prepare as prepare_lib
    from fedjax_hk.run.terminal import StopRequest
    from fedjax_hk.store.checkpoint import CheckpointError
    from fedjax_hk.store.run_folder import RunFolderError

    print(summary.describe_fleet(fleet), flush=True)
    print(f"Run folder: {folder.path}", flush=True)
    with StopRequest(then="the round is compiled first") as stop:
        try:
            prepared = prepare_lib.prepare(config, fleet)
        except ValueError as error:
            if not resume:
                folder.discard()
            return _refuse(error)
    if stop.requested:
        return _say_stopped(stop.requested, "while the round was compiled", folder)
    print(prepare_lib.describe_devices(prepared), flush=True)
    try:
        with contextlib.ExitStack() as stack:
            callbacks = []
            if config.tensorboard:
                callbacks = [stack.enter_context(TensorBoard(folder.path / "tensorboard"))]
            outcome = loop.simulate(prepared, folder, resume=resume, callbacks=callbacks)
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
    from fedjax_hk.run.terminal import exit_code

    print(
        f"Stopped by {name} {when}; go on with\n"
        f"  python -m fedjax_hk.main --resume={shlex.quote(str(folder.path))}"
    )
    return exit_code(name)


if __name__ == "__main__":
    sys.exit(main())
