"""Whether a run may go on: its settings, its data, and what it has left to do."""

from __future__ import annotations

import pathlib
from typing import Any

from fedjax_hk.settings import checks, derived, earlier
from fedjax_hk.settings.config import SETTINGS, Config, ConfigError


def stored_config(stored: dict[str, Any], given: dict[str, Any]) -> Config:
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


def is_finished(path: pathlib.Path, config: Config) -> bool:
    """The last round's checkpoint comes after its tables, so it vouches for them."""
    return (path / "checkpoints" / str(config.rounds)).is_dir()


def check_data(config: Config, stored: dict[str, Any], found: dict[str, Any]) -> None:
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
