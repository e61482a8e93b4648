"""psqlODBC under pyodbc: the catalogue functions of ODBC, prepared statements, transactions."""

from __future__ import annotations

import sys

import pyodbc
from steps import AI_SQL, DATABASE, HOST, PASSWORD, PORT, TYPES_SQL, USER, step

TARGET = f"Server={HOST};Port={PORT};Database={DATABASE};UID={USER};PWD={PASSWORD};{sys.argv[2]}"
db = pyodbc.connect(f"DRIVER={sys.argv[1]};{TARGET}", autocommit=True)
cursor = db.cursor()


def rows(sql: str, *parameters: object) -> object:
    """Run a statement."""
    cursor.execute(sql, *parameters)
    if cursor.description is None:
        return cursor.rowcount
    return [[c[0] for c in cursor.description], [tuple(row) for row in cursor.fetchall()]]


def savepoint() -> object:
    """Let the driver roll one statement back."""
    db.autocommit = False
    cursor.execute("INSERT INTO notes (id, body) VALUES (90, 'kept')")
    try:
        cursor.execute("INSERT INTO notes (id) VALUES (90)")
    except pyodbc.Error as error:
        state = error.args[0]
    db.commit()
    db.autocommit = True
    return [state, rows("SELECT body FROM notes WHERE id = 90")]


step("tables", lambda: [tuple(r)[1:4] for r in cursor.tables(schema="public", table="notes")])
step("columns", lambda: [(r.column_name, r.type_name, r.nullable) for r in cursor.columns("notes")])
step("primary keys", lambda: [tuple(r)[2:6] for r in cursor.primaryKeys("lines")])
step("foreign keys", lambda: [tuple(r)[2:8] for r in cursor.foreignKeys(foreignTable="lines")])
step("statistics", lambda: [tuple(r)[3:9] for r in cursor.statistics("lines")])
step("row id", lambda: [tuple(r)[1:3] for r in cursor.rowIdColumns("notes")])
step("types", lambda: rows(TYPES_SQL.format(more="true f, 'x'::text g")))
step("parameters", lambda: rows("SELECT body FROM notes WHERE id = ? AND body <> ?", 2, "x"))
step("insert", lambda: rows("INSERT INTO notes (id, body, price) VALUES (?, ?, ?)", 91, "it's", 2))
step("error", lambda: rows("SELECT * FROM nowhere"))
step("savepoint", savepoint)
step("ai", lambda: rows(AI_SQL.format(where="id <= ?"), 3))
