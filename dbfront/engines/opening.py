"""What can go wrong while a database is opened; duckdb_engine.py opens it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

from kvcore.errors import ConfigError


def open_already(path: str) -> ConfigError:
    """Say that two of this process can't open one database."""
    return ConfigError(
        f"the database {path} is open in this process already",
        hint="Use that connection, with a cursor for each thread, or close() it first.",
    )


@contextmanager
def closed_on_failure(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Close a connection that no engine will own: its functions would keep it for ever."""
    try:
        yield
    except BaseException:
        connection.close()
        raise
