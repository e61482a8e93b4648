"""What a row of an admin view is, before sql/views.py makes columns of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

Row = dict[str, Any]
"""Values by column name; a column that is missing is NULL."""


def timestamp(unix_s: float) -> str:
    """Return a UTC timestamp as the views read it."""
    return datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None).isoformat(sep=" ")
