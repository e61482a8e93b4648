"""psycopg2: interpolated parameters, named cursors, COPY, savepoints, the pool that resets."""

from __future__ import annotations

import io

import psycopg2
import psycopg2.extras
import psycopg2.pool
from steps import AI_SQL, TYPES_SQL, URL, step

db = psycopg2.connect(URL)
cursor = db.cursor()


def rows(sql: str, parameters: object = None) -> object:
    """Run a statement; give its rows and the types' oids."""
    cursor.execute(sql, parameters)
    if cursor.description is None:
        return [cursor.statusmessage]
    return [[(c.name, c.type_code) for c in cursor.description], cursor.fetchall()]


def named(sql: str) -> object:
    """Read through a server-side cursor."""
    with db.cursor("far", cursor_factory=psycopg2.extras.DictCursor) as far:
        far.itersize = 2
        far.execute(sql)
        return [dict(row) for row in far]


def copied(sql: str, data: str = "") -> object:
    """COPY in or out."""
    pipe = io.StringIO(data)
    cursor.copy_expert(sql, pipe)
    return pipe.getvalue()


def many() -> object:
    """Insert rows in one statement."""
    sql = "INSERT INTO notes (id, body) VALUES %s RETURNING id"
    return psycopg2.extras.execute_values(cursor, sql, [(91, "a"), (92, "b")], fetch=True)


step("types", lambda: rows(TYPES_SQL.format(more="ARRAY['x'] f")))
step(
    "parameters",
    lambda: rows(
        "SELECT id FROM notes WHERE id = ANY(%s) AND body <> %s ORDER BY id", ([1, 2], "x")
    ),
)
step(
    "insert",
    lambda: rows("INSERT INTO notes (id, body) VALUES (%s, %s) RETURNING id", (90, "it's")),
)
step("many", many)
step("savepoint", lambda: rows("SAVEPOINT s"))
step("error", lambda: rows("INSERT INTO notes (id) VALUES (1)"))
step("failed", lambda: rows("SELECT 1"))
step("back", lambda: rows("ROLLBACK TO SAVEPOINT s"))
step("count", lambda: rows("SELECT count(*) FROM notes"))
step("cursor", lambda: named("SELECT id, body FROM notes ORDER BY id"))
step("ai cursor", lambda: named(AI_SQL.format(where="id < 99")))
step("copy in", lambda: copied("COPY notes (id, body) FROM STDIN WITH CSV", "95,c\n96,\n"))
step("copy out", lambda: copied("COPY (SELECT id, body FROM notes ORDER BY id) TO STDOUT"))
step("copy ai", lambda: copied(f"COPY ({AI_SQL.format(where='id < 4')}) TO STDOUT WITH CSV HEADER"))
db.rollback()
step("rolled back", lambda: rows("SELECT count(*) FROM notes"))
step("ai", lambda: rows(AI_SQL.format(where="id <= %s"), (3,)))
db.close()
pool = psycopg2.pool.SimpleConnectionPool(1, 2, URL)
db = pool.getconn()
cursor = db.cursor()
step(
    "pool",
    lambda: rows("SET application_name = 'pooled'; SHOW application_name"),
)
pool.putconn(db)
pool.closeall()
