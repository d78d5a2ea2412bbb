"""The one exception of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used; the message says where, what was found, and the fix."""
