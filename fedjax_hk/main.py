"""`python -m fedjax_hk.main --agg=hk_cosine --tau=0.9`: flags, checks, one run."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import pathlib
import shlex
import sys
import textwrap
from typing import Any

from absl import flags

from fedjax_hk.settings import checks
from fedjax_hk.settings.config import Config, ConfigError

EXAMPLES = """\
Examples:
  python -m fedjax_hk.main --agg=hk_cosine --tau=0.9
  python -m fedjax_hk.main --agg=hk_cosine --opinion=update --tau=0.5 --serve=coalition
  python -m fedjax_hk.main --data=daily_litres.csv --unit=L --agg=fedavg
  python -m fedjax_hk.main --data=swm_trialA_1K.csv --active_factor=1.6 --min_days=730
  python -m fedjax_hk.main --samples=digits --agg=fedavg --alpha_dirichlet=0.1
  python -m fedjax_hk.main --flagfile=experiments/presets/fedhk_paper.flags
  python -m fedjax_hk.main --resume=runs/20260101-120000-hk_cosine"""


def define_flags() -> flags.FlagValues:
    """One flag a field of `Config`, and `--resume`, `--help`."""
    values = flags.FlagValues()
    definers = {
        "str": flags.DEFINE_string,
        "int": flags.DEFINE_integer,
        "float": flags.DEFINE_float,
        "bool": flags.DEFINE_boolean,
    }
    for item in dataclasses.fields(Config):
        text, choices = item.metadata["help"], item.metadata["choices"]
        if choices:
            flags.DEFINE_enum(item.name, item.default, list(choices), text, flag_values=values)
        else:
            definers[item.type.split(" ")[0]](item.name, item.default, text, flag_values=values)
    flags.DEFINE_string("resume", "", "run folder to go on with", flag_values=values)
    flags.DEFINE_boolean("help", False, "this text", short_name="h", flag_values=values)
    return values


def help_text() -> str:
    """All flags by group."""
    lines = ["Federated learning with coalitions of clients.", "", EXAMPLES]
    groups: dict[str, list[str]] = {}
    for item in dataclasses.fields(Config):
        text = item.metadata["help"]
        if item.metadata["choices"]:
            text += ": " + ", ".join(item.metadata["choices"])
        default = "" if item.default in (None, "") else f" [{item.default}]"
        groups.setdefault(item.metadata["group"], []).append(
            _help_entry(f"--{item.name}", text + default)
        )
    groups["Run"].append(_help_entry("--resume", "run folder to go on with"))
    groups["Run"].append(_help_entry("--flagfile", "file with one flag a line"))
    for group, entries in groups.items():
        lines += ["", f"{group}:", *entries]
    return "\n".join(lines)


def _help_entry(name: str, text: str) -> str:
    return textwrap.fill(
        text,
        width=96,
        initial_indent=f"  {name:<26}",
        subsequent_indent=" " * 28,
        break_on_hyphens=False,
    )


def parse(argv: list[str]) -> tuple[Config, dict[str, Any], str | None] | None:
    """Settings, those that were given, and the folder to resume if any; None after `--help`.

    Errors: ConfigError for a flag that is unknown or has no such value.
    """
    values = define_flags()
    try:
        rest = values(argv)
    except flags.Error as error:
        raise ConfigError(_explain(str(error))) from None
    if len(rest) > 1:
        raise ConfigError(f"{rest[1]!r} is no flag; write flags as --name=value (see --help).")
    if values.help:
        print(help_text())
        return None
    names = [item.name for item in dataclasses.fields(Config)]
    given = {name: values[name].value for name in names if values[name].present}
    resume = values.resume if values["resume"].present else None
    if resume == "":  # as from a shell variable that is not set
        raise ConfigError("--resume=: give the folder of an earlier run, or leave it out.")
    return Config(**{name: values[name].value for name in names}), given, resume


# What absl and Python say of a value, and what helps.
_FIXES = {
    ": invalid literal for int()": "give a whole number.",
    ": could not convert string to float": "give a number.",
    ": ('Non-boolean argument": "give true or false.",
}


def _explain(message: str) -> str:
    """absl's message with the fix, and close names where a flag or a choice is unknown."""
    for reason, fix in _FIXES.items():
        if reason in message:
            return f"{message.split(reason)[0].removeprefix('flag ')}: {fix}"
    if ": value should be one of <" in message:
        given, choices = message.split(": value should be one of <")
        choices = choices.rstrip(">").split("|")
        close = difflib.get_close_matches(given.split("=", 1)[1], choices, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        given = given.removeprefix("flag ")
        return f"{given}: not known; {hint}choose one of {', '.join(choices)}."
    if message.startswith("Missing value for flag "):
        flag = message.removeprefix("Missing value for flag ")
        return f"{flag}: it has no value; write {flag}=VALUE."
    if "Unable to open flagfile" in message:
        return f"--flagfile: cannot read it ({message.split('flagfile: ')[1]}); give a file."
    if "Unknown command line flag" not in message:
        return message.removeprefix("flag ")
    name = message.split("'")[1]
    names = [item.name for item in dataclasses.fields(Config)] + ["resume", "flagfile"]
    close = difflib.get_close_matches(name.removeprefix("no"), names, n=3)
    hint = f"did you mean {' or '.join('--' + one for one in close)}?" if close else "see --help."
    return f"--{name}: there is no such flag; {hint}"


def main(argv: list[str] | None = None) -> int:
    """Runs from command line arguments; returns the exit code."""
    try:
        parsed = parse(sys.argv if argv is None else argv)
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
