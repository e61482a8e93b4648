"""The real psql against the real SQL server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fix_pgwire import RunningServer, running_pgwire
from tierkv.sql.calls.functions import AI_FUNCTIONS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("psql") is None, reason="psql (postgresql-client) is missing"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        psql(
            running,
            "CREATE TABLE docs (id INTEGER PRIMARY KEY, body VARCHAR NOT NULL DEFAULT 'x', "
            "price DECIMAL(10,2) CHECK (price > 0));"
            "CREATE INDEX docs_price ON docs (price);"
            "CREATE VIEW cheap AS SELECT * FROM docs WHERE price < 5;"
            "CREATE TABLE orders (doc INTEGER REFERENCES docs (id));"
            "CREATE SCHEMA sales; CREATE TABLE sales.totals (id INTEGER PRIMARY KEY);"
            "CREATE SEQUENCE numbers START 7; CREATE TYPE mood AS ENUM ('sad', 'ok');"
            "CREATE MACRO add_one(x) AS x + 1;"
            "COMMENT ON TABLE docs IS 'papers'; COMMENT ON COLUMN docs.body IS 'the text';"
            "INSERT INTO docs VALUES (1, 'one', 1.5), (2, 'two', NULL)",
        )
        yield running


def psql(server: RunningServer, command: str, *flags: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        ["psql", "-X", "-w", *flags, *(() if stdin is not None else ("-c", command)), server.dsn],
        capture_output=True,
        text=True,
        timeout=30,
        input=stdin,
    )
    return done.stdout + done.stderr


def test_list_and_describe_tables(server: RunningServer) -> None:
    assert " public | docs   | table | tierkv" in psql(server, "\\dt")
    described = psql(server, "\\d docs")
    assert " price  | numeric(10,2) |           |          | " in described
    assert " body   | text          |           | not null | 'x'" in described
    assert '"docs_id_pkey" PRIMARY KEY, btree (id)' in described
    assert '"docs_price" btree (price)' in described
    assert '"docs_price_check" CHECK ((price > 0))' in described
    assert 'TABLE "orders" CONSTRAINT "orders_doc_id_fkey" FOREIGN KEY (doc)' in described
    assert "FOREIGN KEY (doc) REFERENCES docs(id)" in psql(server, "\\d orders")
    assert "Did not find any relation" in psql(server, "\\d nowhere")
    assert 'View "public.cheap"' in psql(server, "\\d cheap")
    assert "SELECT * FROM docs WHERE (price < 5)" in psql(server, "\\d+ cheap")
    assert " price  | numeric(10,2) | yes  | price" in psql(server, "\\d docs_price")
    assert " bigint |     7 |       1 |" in psql(server, "\\d numbers")
    assert " id     | integer |           | not null | " in psql(server, "\\d sales.totals")


def test_the_database_has_the_name_the_client_gave(server: RunningServer) -> None:
    dsn = server.dsn.replace("dbname=main", "dbname=shop")
    done = subprocess.run(
        ["psql", "-X", "-w", "-At", "-c", "\\l", "-c", "SELECT current_database()", dsn],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert [line.split("|")[0] for line in done.stdout.splitlines()] == ["shop", "shop"]


def test_the_ai_functions_are_listed(server: RunningServer) -> None:
    listed = psql(server, "\\df ai*", "-At").splitlines()
    names = {name for name in AI_FUNCTIONS if name.startswith("ai_")}
    assert {line.split("|")[1] for line in listed} == names
    generate = next(line for line in listed if line.split("|")[1] == "ai_generate")
    assert generate.startswith("public|ai_generate|text|prompt text, model text DEFAULT NULL, ")
    assert generate.endswith("|func")
    assert "|agg" in next(line for line in listed if line.split("|")[1] == "ai_agg")
    extract = next(line for line in listed if line.split("|")[1] == "ai_extract")
    assert extract.startswith("public|ai_extract|json|input text, schema json or text[], ")
    assert not any("jsonb" in line for line in listed), "docs/functions.md says json"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("\\l", "main"),
        ("\\l+", "pg_default"),
        ("\\dn", "public"),
        ("\\dt main.*", "docs"),
        ("\\d main.docs", "docs_price"),
        ("\\dn s*", "sales"),
        ("\\du", "Superuser"),
        ("\\du", "alice"),
        ("\\df", "add_one"),
        ("\\df+ add_one", "sql"),
        ("\\sf add_one", "CREATE FUNCTION add_one(x any)"),
        ("\\sv cheap", "SELECT * FROM docs"),
        ("\\dv", "cheap"),
        ("\\di", "docs_price"),
        ("\\ds", "numbers"),
        ("\\dt+", "papers"),
        ("\\dt sales.*", "totals"),
        ("\\dt *.*", "totals"),
        ("\\d+ docs", "the text"),
        ("\\dT", "mood"),
        ("\\dT+", "sad"),
        ("\\da", "ai_agg"),
        ("\\dconfig", "application_name"),
        ("\\conninfo", 'as user "alice"'),
        ("\\dt tierkv.*", "Did not find any relation"),
        ("\\dv tierkv.*", "stat_kvcache"),
    ],
)
def test_backslash_commands(server: RunningServer, command: str, expected: str) -> None:
    output = psql(server, command)
    assert expected in output
    assert "ERROR" not in output


OTHERS = (
    "d db dc dC dd dD ddp dE des det deu dew dF dFd dFp dFt dg dl dL dm do dO dp dP dPi drds dRp "
    "dRs dx dX dy dA dAc dAf dAo dAp z dn+ di+ dv+ ds+ df+ dT+ dfa dfn dft dfw dtS diS"
)


@pytest.mark.parametrize("command", OTHERS.split())
def test_commands_about_what_is_not_there_say_so(server: RunningServer, command: str) -> None:
    output = psql(server, f"\\{command}")
    assert "ERROR" not in output
    assert output.strip()


def test_errors_show_their_state(server: RunningServer) -> None:
    output = psql(
        server, "", stdin="\\set VERBOSITY verbose\nSELECT * FROM nowhere;\nSELECT 7 AS n;"
    )
    assert "ERROR:  42P01:" in output
    assert " 7" in output


def test_multi_statement_and_transactions(server: RunningServer) -> None:
    output = psql(server, "SELECT 1 AS a; SELECT 2 AS b")
    assert " a \n" in output
    assert " b \n" in output
    script = (
        "BEGIN;\nINSERT INTO docs VALUES (1, 'dup', 1);\nSELECT 1;\nROLLBACK;\n"
        "SELECT count(*) FROM docs;"
    )
    output = psql(server, "", "-At", stdin=script)
    assert "current transaction is aborted" in output
    assert "ROLLBACK\n2\n" in output


def test_copy_out_and_in(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "docs.csv"
    assert "COPY 2" in psql(server, f"\\copy docs to '{file}' csv header")
    assert file.read_text() == "id,body,price\n1,one,1.50\n2,two,\n"
    psql(server, "CREATE OR REPLACE TABLE back (id INTEGER, body VARCHAR, price DECIMAL(10,2))")
    assert "COPY 2" in psql(server, f"\\copy back from '{file}' with (format csv, header)")
    inline = "\\copy back from stdin\n7\ta\\tb\\\\\t\\N\n\\.\nSELECT * FROM back ORDER BY id;"
    output = psql(server, "", "-At", stdin=inline)
    assert "1|one|1.50\n2|two|\n7|a\tb\\|" in output
    bad = psql(
        server, "", stdin="\\copy back from stdin\nseven\tx\t1\n\\.\nSELECT count(*) FROM back;"
    )
    assert "ERROR" in bad
    assert "     3" in bad


def test_variables_and_prompt_facts(server: RunningServer) -> None:
    assert psql(server, "SELECT current_user", "-At") == "alice\n"
    assert psql(server, "SHOW server_version", "-At") == "16.0 (TierKV)\n"
    assert "WARNING:  there is no transaction in progress" in psql(server, "COMMIT")
