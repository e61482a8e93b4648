"""Installs schema ``tierkv`` in the database behind the front.

The front installs the schema at start, as the user of ``front.postgres``. If this user lacks the
right, the same text can be run by hand. If this version of the schema exists already, nothing is
changed.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from importlib import resources
from typing import Final

from tierkv.kvcore.errors import ConfigError
from tierkv.sql.calls.functions import RESULT_FIELDS
from tierkv.sql.jobs.job_tables import postgres_tables
from tierkv.sql.view_columns import VIEW_COLUMNS

_LOCK: Final = 0x746965726B76
"""Advisory lock, so that two fronts do not install at the same time."""


def install_sql() -> str:
    """Return the statements that create the schema; running them repeatedly is safe."""
    text = resources.files("tierkv.sql").joinpath("ddl/postgres.sql").read_text(encoding="utf-8")
    fields = ", ".join(f'"{name}" {type_name}' for name, type_name in RESULT_FIELDS.items())
    text = text.replace("/*ai_result*/", fields).replace("/*views*/", _views())
    text = text.replace("/*jobs*/", postgres_tables())
    version = blake2b(text.encode(), digest_size=8).hexdigest()
    return text.replace("/*version*/", version)


_TYPES: Final = {
    "VARCHAR": "text",
    "BIGINT": "bigint",
    "DOUBLE": "double precision",
    "BOOLEAN": "boolean",
    "TIMESTAMP": "timestamp",
    "VARCHAR[]": "text[]",
}
_VIEW: Final = """
DROP VIEW IF EXISTS tierkv.{view};
CREATE VIEW tierkv.{view} AS SELECT * FROM jsonb_to_recordset(
  coalesce(nullif(current_setting('tierkv.view_{view}', true), ''), '[]')::jsonb) AS t ({columns});
"""


def _views() -> str:
    """Return the admin views; each view unpacks a setting that the front fills just before."""
    texts = []
    for view, columns in VIEW_COLUMNS.items():
        listed = ", ".join(f'"{name}" {_TYPES[kind]}' for name, kind in columns.items())
        texts.append(_VIEW.format(view=view, columns=listed))
    return "".join(texts)


async def install(dsn: str) -> bool:
    """Install a missing schema, or replace another version; return True if the schema changed.

    Raises:
        ConfigError: the server is unreachable, or the user lacks the right; names the cure.
    """
    return await asyncio.to_thread(_install, dsn)


def _install(dsn: str) -> bool:
    import psycopg  # only with a PostgreSQL server behind the front

    text = install_sql()
    comment = text[text.rindex("'TierKV ") + 1 : text.rindex("'")]
    try:
        with psycopg.connect(dsn, connect_timeout=10) as connection:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            found = connection.execute(
                "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace "
                "WHERE nspname = 'tierkv'"
            ).fetchone()
            if found == (comment,):
                return False
            connection.execute(text.encode())
            return True
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigError(
            f"schema tierkv can't be created in PostgreSQL: {str(error).strip().splitlines()[0]}",
            hint="As a user with that privilege, run once: tierkv postgres-sql | psql DATABASE.",
        ) from None
    except psycopg.Error as error:
        raise ConfigError(
            f"front.postgres: {str(error).strip().splitlines()[0]}",
            hint="Check that the server is running and accepts this user.",
        ) from None
