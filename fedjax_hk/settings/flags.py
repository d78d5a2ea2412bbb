"""Flags of the command: one a setting, `--help`, and what is wrong with an argument."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable
from typing import Any

from absl import flags as absl_flags

from fedjax_hk.settings.config import SETTINGS, Config, ConfigError

EXAMPLES = """\
Examples:
  python -m fedjax_hk.main --agg=hk_cosine --tau=0.9
  python -m fedjax_hk.main --agg=hk_cosine --opinion=update --tau=0.5 --serve=coalition
  python -m fedjax_hk.main --data=daily_litres.csv --unit=L --agg=fedavg
  python -m fedjax_hk.main --data=swm_trialA_1K.csv --active_factor=1.6 --min_days=730
  python -m fedjax_hk.main --samples=digits --agg=fedavg --alpha_dirichlet=0.1
  python -m fedjax_hk.main --flagfile=experiments/presets/fedhk_paper.flags
  python -m fedjax_hk.main --resume=runs/20260101-120000-hk_cosine"""


def define_flags() -> absl_flags.FlagValues:
    """One flag a field of `Config`, and `--resume`, `--help`."""
    values = absl_flags.FlagValues()
    definers: dict[str, Callable[..., Any]] = {
        "str": absl_flags.DEFINE_string,
        "int": absl_flags.DEFINE_integer,
        "float": absl_flags.DEFINE_float,
        "bool": absl_flags.DEFINE_boolean,
    }
    for name, known in SETTINGS.items():
        given = (name, known.default)
        if known.choices:
            names = list(known.choices)
            absl_flags.DEFINE_enum(*given, names, known.help, flag_values=values)
        else:
            definers[known.type](*given, known.help, flag_values=values)
    absl_flags.DEFINE_string("resume", "", "run folder to go on with", flag_values=values)
    absl_flags.DEFINE_boolean("help", False, "this text", short_name="h", flag_values=values)
    return values


def help_text() -> str:
    """All flags by group."""
    lines = ["Federated learning with coalitions of clients.", "", EXAMPLES]
    groups: dict[str, list[str]] = {}
    for name, known in SETTINGS.items():
        text = known.help
        if known.choices:
            text += ": " + ", ".join(known.choices)
        default = "" if known.default in (None, "") else f" [{known.default}]"
        groups.setdefault(known.group, []).append(_help_entry(f"--{name}", text + default))
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
    except absl_flags.Error as error:
        raise ConfigError(_explain(str(error))) from None
    if len(rest) > 1:
        raise ConfigError(f"{rest[1]!r} is no flag; write flags as --name=value (see --help).")
    if values.help:
        print(help_text())
        return None
    given = {name: values[name].value for name in SETTINGS if values[name].present}
    resume = values.resume if values["resume"].present else None
    if resume == "":  # as from a shell variable that is not set
        raise ConfigError("--resume=: give the folder of an earlier run, or leave it out.")
    every: dict[str, Any] = {name: values[name].value for name in SETTINGS}
    return Config(**every), given, resume


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
        given, listed = message.split(": value should be one of <")
        choices = listed.rstrip(">").split("|")
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
    names = [*SETTINGS, "resume", "flagfile"]
    close = difflib.get_close_matches(name.removeprefix("no"), names, n=3)
    hint = f"did you mean {' or '.join('--' + one for one in close)}?" if close else "see --help."
    return f"--{name}: there is no such flag; {hint}"
