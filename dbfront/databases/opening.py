"""Opens a database, and handles the failures of opening."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

import duckdb

from tierkv.kvcore.errors import ConfigError

_log = logging.getLogger(__name__)
_UNREAD_LOG = "Failure while replaying WAL"


def connect(path: str | None) -> duckdb.DuckDBPyConnection:
    """Open a database file, or an in-memory database.

    After a kill DuckDB replays the log of changes missing from the file. While opening the file,
    DuckDB replays the log before most functions are registered, and fails if a constraint or
    default of a changed table calls a function. A database attached later is replayed with all
    functions.

    Raises:
        duckdb.Error: the database can't be opened.
    """
    try:
        return duckdb.connect(path or ":memory:")
    except duckdb.Error as error:
        if path is None or _UNREAD_LOG not in str(error):
            raise
        _log.warning("replaying what a kill left of %s, with all functions there", path)
    with closing(duckdb.connect(":memory:")) as beside:
        beside.execute("SELECT upper('a')")
        quoted = path.replace("'", "''")
        beside.execute(f"ATTACH '{quoted}' AS recovered")
        beside.execute("CHECKPOINT recovered")
        beside.execute("DETACH recovered")
    return duckdb.connect(path)


def open_already(path: str) -> ConfigError:
    """Return the error for a second opening of a database in the same process."""
    return ConfigError(
        f"the database {path} is open in this process already",
        hint="Use that connection, with a cursor for each thread, or close() it first.",
    )


@contextmanager
def closed_on_failure(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Close a connection on failure; its functions would keep the connection open forever."""
    try:
        yield
    except BaseException:
        connection.close()
        raise
