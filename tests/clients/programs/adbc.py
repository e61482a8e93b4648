"""ADBC: Arrow tables out of binary COPY, ingest, the driver's view of the catalogue."""

from __future__ import annotations

import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa
from steps import AI_SQL, URL, step

TYPES = """
SELECT 1::int2 AS a, 2::int AS b, 3::int8 AS c, 1.5::float4 AS d, 2.5::float8 AS e,
       1.25::numeric(10, 2) AS f, true AS g, 'x'::text AS h, DATE '2024-02-29' AS i,
       TIMESTAMP '2024-02-29 12:00:00' AS j, ARRAY[1, 2] AS k, NULL::int AS l, '\\x01ff'::bytea AS m
"""

with adbc.connect(URL) as db, db.cursor() as cursor:

    def table(sql: str, parameters: tuple[object, ...] | None = None) -> object:
        cursor.execute(sql, parameters)
        found = cursor.fetch_arrow_table()
        return [str(found.schema), found.to_pylist()]

    def ingest(mode: str) -> object:
        rows = pa.table({"i": [1, 2], "t": ["a", None], "f": [0.5, 1.5], "b": [True, None]})
        count = cursor.adbc_ingest("ingested", rows, mode=mode)
        db.commit()
        return count

    def tables() -> object:
        found = db.adbc_get_objects(depth="tables", table_name_filter="notes").read_all()
        return [
            (table["table_name"], table["table_type"])
            for catalogue in found.to_pylist()
            for schema in catalogue["catalog_db_schemas"]
            for table in schema["db_schema_tables"]
        ]

    step("types", lambda: table(TYPES))
    step("parameters", lambda: table("SELECT body FROM notes WHERE id = $1", (2,)))
    step("create", lambda: ingest("create"))
    step("append", lambda: ingest("append"))
    step("replace", lambda: ingest("replace"))
    step("ingested", lambda: table("SELECT * FROM ingested ORDER BY i"))
    step("schema", lambda: str(db.adbc_get_table_schema("notes")))
    step("tables", tables)
    step("error", lambda: table("SELECT * FROM nowhere"))
    db.rollback()
    step("after it", lambda: table("SELECT 1::int AS one"))
    step("ai", lambda: table(AI_SQL.format(where="id <= $1"), (3,)))
    step("ai without parameters", lambda: table(AI_SQL.format(where="id < 9")))
