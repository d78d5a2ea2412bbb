"""The one exception of this package, and what its messages share."""

from __future__ import annotations

from collections.abc import Sequence

from fedjax_hk.types import Excluded


class DataError(ValueError):
    """Data that cannot be used; the message says where, what was found, and the fix."""


def first_reasons(excluded: Sequence[Excluded]) -> str:
    """The first ten clients left out and why, each on a line of its own below a message."""
    return "".join(f"\n  {one.client}: {one.reason}" for one in excluded[:10])
