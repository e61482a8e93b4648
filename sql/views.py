"""The admin views of schema ``tierkv``: their DDL, and who reads them.

Each view unpacks a JSON text that the front puts into a session variable just before a statement
that reads the view; so a view is always as fresh as its statement and costs nothing otherwise.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from tierkv.sql.text.lexer import Token, name_value
from tierkv.sql.view_columns import (
    VIEW_COLUMNS as VIEW_COLUMNS,  # for those who read the views, too
)

SCHEMA: Final = "tierkv"
SESSION_VARIABLE: Final = "tierkv_session"
"""Session variable with a number by which a statement's simulations end with it, and no more."""

_VIEW: Final = """
CREATE OR REPLACE VIEW tierkv.{view} AS
SELECT unnest(from_json(line, '{columns}')) FROM (
    SELECT unnest(from_json(coalesce(getvariable('tierkv_{view}'), '[]'), '["JSON"]')) AS line
);
"""
"""Rows are cut apart first: for many rows that is several times as fast as all at once."""


def view_ddl() -> str:
    """Return the statements that make the schema, its views, and ``tierkv.stat_reset``."""
    made = "".join(_VIEW.format(view=view, columns=_structure(view)) for view in VIEW_COLUMNS)
    return f"CREATE SCHEMA IF NOT EXISTS {SCHEMA};\n{made}{_ddl('stat_reset')}"


def _structure(view: str) -> str:
    """Name the columns of a view the way from_json takes them."""
    columns = (f'"{name}":"{kind}"' for name, kind in VIEW_COLUMNS[view].items())
    return "{" + ",".join(columns) + "}"


def _ddl(name: str) -> str:
    return resources.files("tierkv.sql").joinpath(f"ddl/{name}.sql").read_text(encoding="utf-8")


def simulate_ddl() -> str:
    """Return the statement that makes the table function ``tierkv.simulate``."""
    return _ddl("simulate")


def view_variable(view: str) -> str:
    """Name the session variable that a view unpacks."""
    return f"{SCHEMA}_{view}"


def admin_views_in(tokens: list[Token]) -> frozenset[str]:
    """Find which admin views a statement names, written ``tierkv.name``."""
    found = set()
    for index, token in enumerate(tokens[:-2]):
        if tokens[index + 1].text == "." and name_value(token) == SCHEMA:
            name = name_value(tokens[index + 2])
            if name in VIEW_COLUMNS:
                found.add(name)
    return frozenset(found)
