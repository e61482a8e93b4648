"""dbt-postgres: seed, tables, a view, an incremental model twice, tests, docs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import psycopg2
from dbt.cli.main import dbtRunner
from steps import URL, step

PROJECT = Path(__file__).parent / "shop"


def dbt(folder: str, *command: str) -> object:
    """Run a command; give each node's end."""
    places = ["--project-dir", str(PROJECT), "--profiles-dir", str(PROJECT)]
    places += ["--target-path", folder, "--log-path", folder]
    done = dbtRunner().invoke([*command, *places, "--quiet"])
    if done.exception:
        return str(done.exception)
    results = getattr(done.result, "results", ())
    return sorted(
        [r.node.name, str(r.status), r.message if str(r.status) == "error" else ""] for r in results
    )


def rows(sql: str) -> object:
    """Read with another connection."""
    with psycopg2.connect(URL) as db, db.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()


with tempfile.TemporaryDirectory() as folder:
    step("build", lambda: dbt(folder, "build"))
    step("again", lambda: dbt(folder, "build"))
    step("rows", lambda: rows("SELECT * FROM answered ORDER BY id"))
    step("view", lambda: rows("SELECT * FROM later ORDER BY id"))
    step("growing", lambda: rows("SELECT * FROM growing ORDER BY id"))
    step("docs", lambda: dbt(folder, "docs", "generate"))
    catalogue = json.loads((Path(folder) / "catalog.json").read_text())
    step("catalogue", lambda: sorted(
        [name, n["metadata"]["type"], [(c["name"], c["type"]) for c in n["columns"].values()]]
        for name, n in catalogue["nodes"].items()))  # fmt: skip
