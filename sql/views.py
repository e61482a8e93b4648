"""The admin views of schema ``tierkv``: columns, DDL, and the statements that read the views.

Each view unpacks a JSON text. The front gathers the rows (dbfront/views/admin.py,
dbfront/views/statistics.py) and puts the text into a session variable just before a statement
reading the view. A view is therefore always as fresh as the statement and costs nothing otherwise.
Counters are cumulative; ``*_time`` is milliseconds, sizes are bytes, ratios are 0.0 to 1.0. Every
view ends with ``as_of``: the time of the row's numbers.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final

from tierkv.sql.text.lexer import Token, name_value
from tierkv.sql.view_columns import VIEW_COLUMNS

SCHEMA: Final = "tierkv"
SESSION_VARIABLE: Final = "tierkv_session"
"""Session variable with the session's number: the end of a statement ends exactly the simulations
with this number."""

Row = dict[str, Any]
"""A row of a view, by column name; a missing column is NULL."""

_VIEW: Final = """
CREATE OR REPLACE VIEW tierkv.{view} AS
SELECT unnest(from_json(line, '{columns}')) FROM (
    SELECT unnest(from_json(coalesce(getvariable('tierkv_{view}'), '[]'), '["JSON"]')) AS line
);
"""
"""Rows are split first: with many rows this is several times as fast as unpacking all at once."""


def timestamp(unix_s: float) -> str:
    """Return a UTC timestamp in the format of the views."""
    return datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None).isoformat(sep=" ")


def view_ddl() -> str:
    """Return the statements to create the schema, the views, and ``tierkv.stat_reset``."""
    made = "".join(_VIEW.format(view=view, columns=_structure(view)) for view in VIEW_COLUMNS)
    return f"CREATE SCHEMA IF NOT EXISTS {SCHEMA};\n{made}{_ddl('stat_reset')}"


def _structure(view: str) -> str:
    """Return the columns of a view in the form expected by from_json."""
    columns = (f'"{name}":"{kind}"' for name, kind in VIEW_COLUMNS[view].items())
    return "{" + ",".join(columns) + "}"


def _ddl(name: str) -> str:
    return resources.files("tierkv.sql").joinpath(f"ddl/{name}.sql").read_text(encoding="utf-8")


def simulate_ddl() -> str:
    """Return the statement to create the table function ``tierkv.simulate``."""
    return _ddl("simulate")


def view_variable(view: str) -> str:
    """Return the name of the session variable for a view."""
    return f"{SCHEMA}_{view}"


def admin_views_in(tokens: list[Token]) -> frozenset[str]:
    """Return the admin views named in a statement, written ``tierkv.name``."""
    found = set()
    for index, token in enumerate(tokens[:-2]):
        if tokens[index + 1].text == "." and name_value(token) == SCHEMA:
            name = name_value(tokens[index + 2])
            if name in VIEW_COLUMNS:
                found.add(name)
    return frozenset(found)
