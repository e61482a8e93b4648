"""pg8000: unnamed statements of the extended protocol with types left to the server."""

from __future__ import annotations

import datetime
import decimal

import pg8000.dbapi
import pg8000.native
from steps import AI_SQL, DATABASE, HOST, PASSWORD, PORT, TYPES_SQL, USER, step

db = pg8000.native.Connection(USER, HOST, DATABASE, PORT, PASSWORD)


def rows(sql: str, **parameters: object) -> object:
    """Run a statement; give its rows and the types' oids."""
    found = db.run(sql, **parameters)
    return [[(c["name"], c["type_oid"]) for c in db.columns or ()], found, db.row_count]


step("types", lambda: rows(TYPES_SQL.format(more="ARRAY[1,2] f, '{\"a\": 1}'::json g")))
step("int", lambda: rows("SELECT body FROM notes WHERE id = :i", i=2))
step("any", lambda: rows("SELECT body FROM notes WHERE id = ANY(:i)", i=[1, 3]))
noon = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
insert = "INSERT INTO notes (id, body, price, made) VALUES (:i, :b, :p, :m) RETURNING *"
step("insert", lambda: rows(insert, i=90, b="x'", p=decimal.Decimal("1.50"), m=noon))
step("error", lambda: rows("SELECT * FROM nowhere"))
step("ai", lambda: rows(AI_SQL.format(where="id <= :n"), n=3))
statement = db.prepare(AI_SQL.format(where="id = :n"))
step("prepared", lambda: [statement.run(n=i) for i in (1, 2)])
db.close()
old = pg8000.dbapi.connect(USER, HOST, DATABASE, PORT, PASSWORD)
cursor = old.cursor()
cursor.executemany("INSERT INTO lines (note, a) VALUES (%s, %s)", [(1, 70), (1, 71)])
step("many", lambda: cursor.rowcount)
old.commit()
cursor.execute("SELECT note, a FROM lines WHERE a >= %s ORDER BY a", (70,))
step("after many", lambda: cursor.fetchall())
