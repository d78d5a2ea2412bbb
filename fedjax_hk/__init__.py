"""Federated learning over fleets of meters, with coalitions from opinion dynamics.

What a user imports is here or in the folders named here; the rest may change. Importing the
package imports neither jax nor anything heavy: a name is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Name to the module that it is from; folders stand for themselves.
_PUBLIC = {
    # Settings and rules
    "Config": "settings.config",
    "ConfigError": "settings.config",
    "RULES": "rules",
    "Rule": "rules",
    "HParams": "types",
    # A run
    "load_fleet": "run.load",
    "prepare": "run.prepare",
    "reuse": "run.prepare",
    "rounds": "run.prepare",
    "simulate": "run.loop",
    "create_folder": "store.run_folder",
    "open_folder": "store.run_folder",
    # What it found
    "load_run": "report.load",
    "write_report": "report.build",
    # The parts of a round
    "make_trainer": "round.training",
    "make_engine": "round.engine",
    "make_server": "round.server",
    "upload": "round.state",
}
_FOLDERS = ("data", "hk", "integrations", "metrics", "models", "rules", "tasks")

__all__ = [
    "RULES",
    "Config",
    "ConfigError",
    "HParams",
    "Rule",
    "__version__",
    "create_folder",
    "data",
    "hk",
    "integrations",
    "load_fleet",
    "load_run",
    "make_engine",
    "make_server",
    "make_trainer",
    "metrics",
    "models",
    "open_folder",
    "prepare",
    "reuse",
    "rounds",
    "rules",
    "simulate",
    "tasks",
    "upload",
    "write_report",
]

if TYPE_CHECKING:
    from fedjax_hk import data, hk, integrations, metrics, models, rules, tasks
    from fedjax_hk.report.build import write_report
    from fedjax_hk.report.load import load_run
    from fedjax_hk.round.engine import make_engine
    from fedjax_hk.round.server import make_server
    from fedjax_hk.round.state import upload
    from fedjax_hk.round.training import make_trainer
    from fedjax_hk.rules import RULES, Rule
    from fedjax_hk.run.load import load_fleet
    from fedjax_hk.run.loop import simulate
    from fedjax_hk.run.prepare import prepare, reuse, rounds
    from fedjax_hk.settings.config import Config, ConfigError
    from fedjax_hk.store.run_folder import create_folder, open_folder
    from fedjax_hk.types import HParams


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f"fedjax_hk.{_PUBLIC[name]}"), name)
    elif name in _FOLDERS:
        value = importlib.import_module(f"fedjax_hk.{name}")
    else:
        raise AttributeError(f"module 'fedjax_hk' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
