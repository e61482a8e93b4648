"""Clients that others wrote, on every door: what they print on PostgreSQL, they print on ours.

Each program of ``programs/`` prints a line per step. It runs against a plain PostgreSQL server
whose SQL functions have our functions' names and answers, then against the relay and the embedded
database, where a model answers. ``make test-clients`` installs the clients; docs/clients.md is the
table for people.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.differential.doors import DuckDbFront, running_postgres_pair

pytestmark = [pytest.mark.clients, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
PACKAGES = Path(__file__).parent / "package.json"
INSTALLED = ROOT / ".venv-clients"
PYTHON = str(INSTALLED / "bin" / "python")

TABLES = """
CREATE TABLE notes (
  id INT PRIMARY KEY, body TEXT UNIQUE, price NUMERIC(10, 2), made TIMESTAMPTZ, tags TEXT[]);
CREATE TABLE lines (note INT REFERENCES notes (id), a INT, PRIMARY KEY (a, note));
INSERT INTO notes VALUES
  (1, 'one', 1.50, '2024-02-29 12:00:00+00', ARRAY['a', 'b']), (2, 'two', NULL, NULL, NULL),
  (3, NULL, 3, '2024-03-01 00:00:00+00', ARRAY['c']);
INSERT INTO lines VALUES (1, 1), (2, 1), (2, 2);
"""
VIEWS = "SELECT viewname FROM pg_views WHERE schemaname = 'public'"
ALL_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"


@dataclass(frozen=True, slots=True)
class Client:
    """A program and how it is run.

    Attributes:
        command: what runs it, without its file.
        program: a file of ``programs/``; empty where the command is all.
        arguments: behind the file.
    """

    command: tuple[str, ...]
    program: str = ""
    arguments: tuple[str, ...] = ()


ODBC = next(Path("/usr/lib").glob("*/odbc/psqlodbcw.so"), Path("psqlodbcw.so"))
CLIENTS = {
    "adbc": Client((PYTHON,), "adbc.py"),
    "connectorx": Client((PYTHON,), "connectorx_program.py"),
    "dbt": Client((PYTHON,), "run_dbt.py"),
    "go": Client((str(INSTALLED / "bin" / "go-clients"),)),
    "node-postgres": Client(("node",), "node_pg.js"),
    "odbc": Client((PYTHON,), "odbc.py", (str(ODBC), "")),
    "odbc-server-prepare-off": Client((PYTHON,), "odbc.py", (str(ODBC), "UseServerSidePrepare=0")),
    "perl": Client(("perl",), "perl_dbd.pl"),
    "pg8000": Client((PYTHON,), "pg8000_program.py"),
    "pgcli": Client((PYTHON,), "pgcli_program.py"),
    "php": Client(("php",), "php_pdo.php"),
    "polars-pandas": Client((PYTHON,), "polars_pandas.py"),
    "postgres.js": Client(("node",), "postgres_js.js"),
    "psycopg2": Client((PYTHON,), "psycopg2_program.py"),
    "ruby": Client(("ruby",), "ruby_pg.rb"),
    "typeorm": Client(("node",), "typeorm.js"),
}

# Steps in which the embedded database differs; docs/clients.md says why.
DIFFERENT = {
    ("node-postgres", "jsonb"),
    ("odbc", "primary keys"),
    ("odbc", "statistics"),
    ("odbc-server-prepare-off", "primary keys"),
    ("odbc-server-prepare-off", "statistics"),
    ("pgcli", r"\dt notes"),
}


@pytest.fixture(scope="module")
def doors() -> Iterator[dict[str, str]]:
    """Connection strings of a plain server, the relay and the embedded database."""
    with ExitStack() as stack:
        plain, relay, _ = stack.enter_context(running_postgres_pair())
        front = DuckDbFront()
        stack.callback(front.close)
        embedded = front.dsn.replace("dbname=main", "dbname=app password=x")
        yield {"plain": plain, "relay": relay, "embedded": embedded}


def drop_everything(db: psycopg.Connection) -> None:
    """Drop tables and views; DuckDB wants those that point at others to go first."""
    for (name,) in db.execute(VIEWS).fetchall():
        db.execute(f'DROP VIEW IF EXISTS "{name}" CASCADE')
    while names := db.execute(ALL_TABLES).fetchall():
        for (name,) in names:
            with contextlib.suppress(psycopg.errors.DependentObjectsStillExist):
                db.execute(f'DROP TABLE IF EXISTS "{name}" CASCADE')


def run(client: Client, dsn: str) -> list[dict[str, object]]:
    """Make the tables anew, run a program and read its lines."""
    with psycopg.connect(dsn, autocommit=True) as db:
        drop_everything(db)
        db.execute(TABLES)
    program = [str(PROGRAMS / client.program)] if client.program else []
    names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
    given = conninfo_to_dict(dsn)
    environment = os.environ | {f"PG{there}": str(given[here]) for here, there in names.items()}
    environment |= {
        "PGDATABASE": str(given["dbname"]),
        "PGSSLMODE": "disable",
        "TZ": "UTC",
        "NODE_PATH": str(INSTALLED / "node_modules"),
        "XDG_CONFIG_HOME": "/nonexistent",
    }
    done = subprocess.run(
        [*client.command, *program, *client.arguments],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.replace('"oracle"', '"app"').splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[dict[str, object]]]:
    """What each program printed on PostgreSQL itself, filled as they are run."""
    return {}


@pytest.mark.parametrize("door", ["relay", "embedded"])
@pytest.mark.parametrize("name", CLIENTS)
def test_it_prints_what_it_prints_on_postgres(
    name: str,
    door: str,
    doors: dict[str, str],
    expected: dict[str, list[dict[str, object]]],
) -> None:
    if name not in expected:
        expected[name] = run(CLIENTS[name], doors["plain"])
        assert len(expected[name]) > 3
    ours = {str(line["what"]): line for line in run(CLIENTS[name], doors[door])}
    plain = {str(line["what"]): line for line in expected[name]}
    differing = {what for what in plain | ours if plain.get(what) != ours.get(what)}
    allowed = (
        {what for client, what in DIFFERENT if client == name} if door == "embedded" else set()
    )
    assert differing == allowed, [(plain.get(what), ours.get(what)) for what in differing ^ allowed]


def test_the_table_for_people_has_every_client() -> None:
    table = (ROOT / "docs" / "clients.md").read_text()
    for client in CLIENTS.values():
        assert f"`{client.program or 'go/main.go'}`" in table
    for name, version in re.findall(r"^([\w-]+)==(.+)$", REQUIREMENTS.read_text(), re.MULTILINE):
        assert f"{name} {version}" in table
    for name, version in json.loads(PACKAGES.read_text())["dependencies"].items():
        assert f"{name} {version}" in table
    for _, step in DIFFERENT:
        assert f"`{step}`" in table
