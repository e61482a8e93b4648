"""The tables of schema ``tierkv_jobs``, which keep jobs beside the rows that the jobs write.

The rows and the checkpoint of a batch are a transaction, hence jobs live in the user's database. A
backup of the database has both, in step. PostgreSQL and DuckDB read the same texts. Times are
seconds since 1970; keys are text and are compared in the type of the key.
"""

from __future__ import annotations

from typing import Final

SCHEMA: Final = "tierkv_jobs"

_TABLES: Final = {
    "jobs": "owner text, job text, statement text, options text, key_type text, path text, "
    "total bigint, created_s float8",
    "parts": "owner text, job text, part bigint, low text, high text, last_key text, run text, "
    "state text, examined bigint, written bigint, failed bigint, calls bigint, "
    "prompt_tokens bigint, hit_tokens bigint, completion_tokens bigint, busy_s float8, "
    "updated_s float8, error text",
    "ai_tables": "owner text, name text, statement text, options text, key_type text, path text, "
    "refreshed_s float8, asked bigint, took_s float8, state text, error text",
    "ai_rows": "owner text, name text, key text, print text, error text",
    "kv_indexes": "owner text, name text, source text, source_name text, expression text, "
    "options text, path text, refreshed_s float8, took_s float8, indexed bigint, removed bigint, "
    "state text, error text",
    "kv_index_texts": "owner text, name text, digest text, body text, tokens bigint, error text",
    "kv_index_progress": "owner text, name text, left_texts bigint, told bigint",
    "kv_index_times": "owner text, name text, digest text, indexed_s float8, pinned_s float8, "
    "expired bigint",
    "failures": "owner text, job text, part bigint, key text, sqlstate text, message text, "
    "failed_s float8",
}

KEEPERS_LOCK: Final = 0x746B766B
"""Advisory lock of PostgreSQL of the front that listens, and refreshes what is due."""

CHANNEL: Final = "tierkv_changed"
"""Channel of PostgreSQL on which triggers tell that a table with an index was written to."""

TELL_CHANGE: Final = f"{SCHEMA}.tell_change"
_TELL_CHANGE: Final = f"""
CREATE OR REPLACE FUNCTION {TELL_CHANGE}() RETURNS trigger LANGUAGE plpgsql AS $tell$
BEGIN
  PERFORM pg_catalog.pg_notify('{CHANNEL}', TG_ARGV[0]);
  RETURN NULL;
END
$tell$;
"""

NEWEST: Final = "kv_index_times"
"""The table that was added last: where it is, all tables are."""

_INDEXES: Final = {
    "parts": "owner, job",
    "ai_rows": "owner, name, key",
    "kv_index_texts": "owner, name",
    "kv_index_times": "owner, name",
}

MAKE_TABLES: Final = (
    f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}",
    *(
        f"CREATE TABLE IF NOT EXISTS {SCHEMA}.{name} ({columns})"
        for name, columns in _TABLES.items()
    ),
)
"""Statements of the embedded database: for its first job, and when a file of an older release, with
fewer tables, is opened."""

PART_COLUMNS: Final = (
    "part", "low", "high", "last_key", "run", "state", "examined", "written", "failed", "calls",
    "prompt_tokens", "hit_tokens", "completion_tokens", "busy_s", "updated_s", "error",
)  # fmt: skip


def postgres_tables() -> str:
    """Return the statements of a PostgreSQL database, where each user sees own jobs only.

    The front installs them as the user of ``front.postgres``. Administrators, who bypass row-level
    security, see all jobs.
    """
    texts = [f"CREATE SCHEMA IF NOT EXISTS {SCHEMA};\nGRANT USAGE ON SCHEMA {SCHEMA} TO PUBLIC;\n"]
    for name, columns in _TABLES.items():
        table = f"{SCHEMA}.{name}"
        texts.append(
            f"CREATE TABLE IF NOT EXISTS {table} ({columns});\n"
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO PUBLIC;\n"
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;\n"
            f"DROP POLICY IF EXISTS own_jobs ON {table};\n"
            f"CREATE POLICY own_jobs ON {table} USING (owner = current_user);\n"
        )
    for name, columns in _INDEXES.items():
        texts.append(f"CREATE INDEX IF NOT EXISTS {name}_of ON {SCHEMA}.{name} ({columns});\n")
    texts.append(_TELL_CHANGE)
    return "".join(texts)
