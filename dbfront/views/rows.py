"""Rows of the admin views, before sql/views.py converts rows to columns."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

Row = dict[str, Any]
"""Values by column name; a missing column is NULL."""


def timestamp(unix_s: float) -> str:
    """Return a UTC timestamp in the format of the views."""
    return datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None).isoformat(sep=" ")
