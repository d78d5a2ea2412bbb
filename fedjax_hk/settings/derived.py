"""What follows from the kinds of the settings: who may change what, and where numbers go."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from fedjax_hk.settings.choices import TABLES
from fedjax_hk.settings.config import (
    SETTINGS,
    Config,
    ConfigError,
    choices_of,
    of_kind,
    reads,
    value_of,
)
from fedjax_hk.settings.rules import CHOICES, Rule

# A compiled choice for each traced number that chooses another program by being given.
SWITCHES = {f"use_{name}": name for name, known in SETTINGS.items() if known.switches}


def rule_settings() -> list[str]:
    """Compiled settings that some choice of a rule reads, which are no choices themselves."""
    of_rules = [choice for table in Rule._fields for choice in TABLES[table].values()]
    return [
        name
        for name in of_kind("compiled")
        if SETTINGS[name].group == "Rule" and any(reads(choice, name) for choice in of_rules)
    ]


def traced_values(config: Config) -> dict[str, float]:
    """The numbers of `types.HParams`."""
    return {name: float(value_of(config, name)) for name in of_kind("traced")}


def compiled_values(config: Config) -> dict[str, Any]:
    """The choices of `types.Settings`."""
    switched = {use: getattr(config, name) is not None for use, name in SWITCHES.items()}
    return {name: value_of(config, name) for name in rule_settings()} | switched


def resume_problems(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """How the flags of a resumed run differ from those it was started with.

    How a run is carried out may change, and rounds may grow.

    Args:
      stored: flags from config.json, in today's words (`earlier.translated`).
      given: flags of now.

    Returns:
      One line a difference; none if the run may go on.
    """
    given = json.loads(json.dumps(given, default=float))  # as the stored ones went through
    lines = []
    for flag in dict.fromkeys((*stored, *given)):
        if flag not in given:
            lines.append(f"flag --{flag}: run has {stored[flag]!r}, this version has no such flag")
        elif flag not in stored:
            lines.append(f"flag --{flag}: run has no such flag, you gave {given[flag]!r}")
        elif flag == "rounds":
            if given[flag] < stored[flag]:
                lines.append(
                    f"flag --rounds: run is set for {stored[flag]}, you gave {given[flag]}; "
                    "rounds cannot be taken back, give as many or more"
                )
        elif flag not in changeable() and not _same(stored[flag], given[flag]):
            lines.append(f"flag --{flag}: run has {stored[flag]!r}, you gave {given[flag]!r}")
    return lines


def changeable() -> list[str]:
    """Settings that a resumed run may have otherwise."""
    return [name for name in of_kind("run") if SETTINGS[name].resumable]


def _same(one: Any, other: Any) -> bool:
    return one == other or (one != one and other != other)  # NaN is NaN


def method_of(config: Config) -> Config:
    """The settings that make a method: equal for runs that differ in the seed, or in how they
    are carried out."""
    neutral = ["seed", *of_kind("run")]
    return dataclasses.replace(config, **{name: SETTINGS[name].default for name in neutral})


def check_reuse(compiled: Config, config: Config, *, other_data: bool) -> None:
    """Whether a compiled run can be started with other settings.

    Seed, rounds and traced numbers are free, and how a run is reported.

    Args:
      other_data: the samples are given anew.

    Errors: ConfigError that names the settings which need another compilation, or other data.
    """
    before, now = (_program(one, with_data=not other_data) for one in (compiled, config))
    other = [name for name in now if now[name] != before[name]]
    if other:
        lines = [f"--{name}={now[name]}: compiled was {before[name]}." for name in other]
        lines.append(
            "Such a run needs another compilation, or other data; use prepare(config, fleet)."
        )
        raise ConfigError("\n".join(lines))


def _program(config: Config, *, with_data: bool) -> dict[str, Any]:
    """What the compiled program of a run depends on, and on which data it runs."""
    found = dict(config.rule()._asdict())  # two names of one rule are one program
    for name, known in SETTINGS.items():
        fixed = known.kind == "compiled" or known.shapes_program
        if (fixed or (with_data and known.kind == "data")) and name not in ("agg", *CHOICES):
            found[name] = value_of(config, name)
    return found | {use: getattr(config, name) is not None for use, name in SWITCHES.items()}


def kept_for_forecasts(config: Config) -> dict[str, Any]:
    """What a client that the run did not know is served with: what the samples and the local
    objective read; of all else, the global model alone is left."""
    made = choices_of(config)
    used = [made[table][1] for table in ("samples", "local")]
    return {
        name: getattr(config, name)
        for name in SETTINGS
        if any(reads(choice, name) for choice in used)
    }
