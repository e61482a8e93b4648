"""connectorx: Arrow tables over each of its protocols, and a query split by a column."""

from __future__ import annotations

import connectorx as cx
from steps import AI_SQL, URL, step


def read(sql: str, **settings: object) -> object:
    """Read a query as rows; connectorx gives them in no order where it splits."""
    table = cx.read_sql(URL, sql, return_type="arrow", **settings)
    rows = [tuple(row.values()) for row in table.to_pylist()]
    return [table.schema.names, sorted(rows, key=str)]


for protocol in ("binary", "csv", "cursor", "simple"):
    step(protocol, lambda p=protocol: read("SELECT id, body, price, made FROM notes", protocol=p))
    step(f"ai {protocol}", lambda p=protocol: read(AI_SQL.format(where="id < 9"), protocol=p))
step("split", lambda: read("SELECT id, body FROM notes", partition_on="id", partition_num=2))
step("error", lambda: read("SELECT * FROM nowhere") and "no error")
