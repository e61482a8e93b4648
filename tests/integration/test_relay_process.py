"""`tierkv up --postgres`: the shipped model answers AI calls of a real PostgreSQL database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.fix_cluster import free_port
from tests.fix_postgres import PASSWORD, USER, PostgresServer
from tierkv import connect

pytestmark = pytest.mark.integration

NOTES = (
    "Customer: Jonas Ortiz. Product: blender. Order: 9313. City: Vienna.",
    "Customer: Mia Brandt. Product: kettle. Order: 2207. City: Porto.",
    "Customer: Jonas Ortiz. Product: blender. Order: 9313. City: Vienna.",
    None,
)
QUESTION = (
    "SELECT id, ai_generate(body || E'\\nQuestion: What did the customer buy?', "
    "options => '{\"max_tokens\": 12}') FROM notes ORDER BY id"
)


@contextmanager
def cluster(folder: Path, postgres: PostgresServer) -> Iterator[dict[str, str]]:
    """Run `tierkv up` with PostgreSQL behind; yields the front's addresses."""
    argv = [sys.executable, "-m", "tierkv", "up", "--postgres", postgres.dsn]
    for setting in (
        f"cluster.run_dir={folder}",
        f"front.pg_port={free_port()}",
        f"front.http_port={free_port()}",
        f"dmp.segment_dir={folder}",
        "dmp.capacity=64MiB",
        "compute.l1_capacity=64MiB",
        "compute.threads=1",
    ):
        argv += ["--set", setting]
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            told = []
            while line := process.stdout.readline():
                told.append(line)
                if "Ctrl-C" in line:
                    break
            else:
                raise AssertionError("".join(told) + (folder / "up.log").read_text())
            assert f"postgresql://{USER}@" in "".join(told) and "/app" in "".join(told)
            state = json.loads((folder / "cluster.json").read_text())
            yield state["nodes"]["front"]
        finally:
            process.terminate()
            process.communicate(timeout=60)


@pytest.mark.timeout(300)
def test_answers_equal_those_of_the_other_door(tmp_path: Path, postgres: PostgresServer) -> None:
    with connect() as embedded:
        cursor = embedded.cursor()
        cursor.execute("CREATE TABLE notes (id INTEGER, body VARCHAR)")
        for number, body in enumerate(NOTES):
            cursor.execute("INSERT INTO notes VALUES (?, ?)", (number, body))
        cursor.execute(QUESTION)
        expected = cursor.fetchall()
    assert "blender" in expected[0][1]
    with cluster(tmp_path, postgres) as front:
        host, _, port = front["pg"].rpartition(":")
        with psycopg.connect(
            host=host, port=port, user=USER, password=PASSWORD, dbname="app"
        ) as connection:
            connection.execute("CREATE TEMP TABLE notes (id int, body text)")
            connection.cursor().executemany(
                "INSERT INTO notes VALUES (%s, %s)", list(enumerate(NOTES))
            )
            assert connection.execute(QUESTION).fetchall() == expected
            roles = connection.execute("SELECT DISTINCT role FROM tierkv.nodes ORDER BY 1")
            assert [role for (role,) in roles] == ["compute", "dmp", "front", "meta"]
            # What was computed is loaded now, and gives the same tokens.
            assert connection.execute(QUESTION).fetchall() == expected
            for scope in ("tenant", "session"):
                connection.execute(f"SET tierkv.answer_cache = {scope}")
                for _ in range(2):
                    assert connection.execute(QUESTION).fetchall() == expected
            hits = connection.execute("SELECT hits, misses FROM tierkv.answer_cache").fetchone()
            assert hits == (4, 4), "two distinct questions for each scope"
            detail = connection.execute(
                "SELECT (r).cached, (r).value FROM (SELECT ai_generate_detail("
                "body || E'\nQuestion: What did the customer buy?', "
                "options => '{\"max_tokens\": 12}') AS r FROM notes WHERE id = 0) t"
            ).fetchone()
            assert detail == (True, expected[0][1])


def test_connection_strings_are_secrets() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", "config", "show", "--set", "front.postgres=pw-in-it",
         "--set", "meta.database=postgresql://ann:pw-in-it@db/app",
         "--set", "front.answer_cache=postgresql://ann:pw-in-it@db/app"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "front.postgres" in done.stdout and "pw-in-it" not in done.stdout


def test_a_server_that_is_away_is_told_at_the_start() -> None:
    argv = [sys.executable, "-m", "tierkv", "serve", "front", "--postgres"]
    argv += [f"host=127.0.0.1 port={free_port()} user=x", "--set", "cluster.meta_address=[::1]:1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "front.postgres: connection failed" in done.stderr
