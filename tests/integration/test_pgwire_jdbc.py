"""PostgreSQL's JDBC driver, on which DBeaver, Metabase and others stand, against the server."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psycopg
import pytest

from tests.fix_pgwire import running_pgwire
from tests.integration.pgwire_tools import SETUP

PROBE = Path(__file__).parent / "jdbc" / "Probe.java"


def driver() -> Path | None:
    """Where Debian's libpostgresql-jdbc-java or Maven puts the driver."""
    packaged = Path("/usr/share/java/postgresql.jar")
    repository = Path.home() / ".m2" / "repository" / "org" / "postgresql" / "postgresql"
    found = [packaged] if packaged.exists() else sorted(repository.glob("*/postgresql-*.jar"))
    return found[-1] if found else None


pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        shutil.which("javac") is None or driver() is None,
        reason="a JDK or PostgreSQL's JDBC driver is missing",
    ),
]

EXPECTED = """\
catalog shop
schema sales
table docs TABLE papers
table lines TABLE null
table cheap VIEW null
column id int4 10 0 NO null null
column body text 2147483647 0 NO 'x' the text
column price numeric 10 2 YES null null
column tags _text 2147483647 0 YES null null
column made timestamptz 35 6 YES null null
primary a 1 lines_a_b_pkey
primary b 2 lines_a_b_pkey
imported doc docs id docs_id_pkey
exported lines doc
index docs_body_price_key f 1 body
index docs_body_price_key f 2 price
index docs_id_pkey f 1 id
index docs_price t 1 price
index docs_price t 2 body
best id
function public ai_classify
function public ai_classify_multi
argument returnValue float8
argument a text
argument b text
argument model text
privilege DELETE
privilege INSERT
privilege REFERENCES
privilege SELECT
privilege TRIGGER
privilege TRUNCATE
privilege UPDATE
types true keywords true
names 63 user alice
"""
ROW = (
    "row {0} n{0} 12.34 2024-02-29 01:02:03.456 2024-02-28T23:02:03Z 1999-12-31 [0, 1, -1] "
    '00000000-0000-0000-0000-000000000007 [1, 2, null] {{"a": 1}} 1.5 23:59:58 true 1099511627776\n'
)
AFTER = """\
batch 50
fetched 4950
refused 42P01
copied 2
valid true shop public
"""


def test_a_jdbc_tools_session(tmp_path: Path) -> None:
    with running_pgwire() as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            for statement in SETUP:
                conn.execute(statement)
        url = f"jdbc:postgresql://127.0.0.1:{server.port}/shop?user=alice"
        done = subprocess.run(
            ["java", f"-Djava.io.tmpdir={tmp_path}", "-cp", str(driver()), str(PROBE), url],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "TZ": "Asia/Tokyo"},  # timestamps without zone must not move
        )
    rows = "".join(ROW.format(number) for number in range(1, 8))
    assert (done.stdout, done.stderr) == (EXPECTED + rows + AFTER, "")
