"""Settings as earlier versions stored them, in today's names and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Name of an earlier version to today's, and values that are called otherwise now.
RENAMED: dict[str, tuple[str, dict[Any, Any]]] = {
    "task": ("samples", {"forecast": "readings"}),
    "align": ("align", {"units": "neurons"}),
    "gradient_dissimilarity": ("gradient_spread", {}),
}


def translated(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The stored flags in today's words; what has no word today stays as it is."""
    found = {}
    for name, value in flags.items():
        now, values = RENAMED.get(name, (name, {}))
        found[now] = values.get(value, value) if values else value
    return found
