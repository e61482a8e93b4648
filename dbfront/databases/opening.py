"""Opening a database, and what can go wrong with that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

import duckdb

from tierkv.kvcore.errors import ConfigError

_log = logging.getLogger(__name__)
_UNREAD_LOG = "Failure while replaying WAL"


def connect(path: str | None) -> duckdb.DuckDBPyConnection:
    """Open a database file, or one in memory.

    After a kill DuckDB replays what was not yet in the file. Opening it, DuckDB does so before it
    knows most of its functions, and fails where a changed table's constraints or defaults call one;
    a database that is attached later is replayed with all of them.

    Raises:
        duckdb.Error: it can't be opened.
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
