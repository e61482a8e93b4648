"""Statements about AI tables, and what their rows depend on."""

from __future__ import annotations

import json

import pytest

from tierkv.dbfront.jobs.keepers import due_tables, following_tables
from tierkv.kvcore.errors import TierKVError
from tierkv.sql.jobs.ai_table_command import (
    MANUAL,
    ON_CHANGE,
    AiTableOptions,
    ai_table_command,
    ai_table_options,
    source_tables,
)
from tierkv.sql.jobs.job_statement import read_job_statement
from tierkv.sql.text.lexer import tokenize


def command(text: str):  # type: ignore[no-untyped-def]
    return ai_table_command(tokenize(text), text)


def test_statements_about_ai_tables() -> None:
    made = command("CREATE AI TABLE v AS SELECT id FROM d WITH (key = d.id, refresh = '2 hours')")
    assert (made.name, made.query, made.offset) == ("v", "SELECT id FROM d", 21)
    assert ai_table_options(made) == AiTableOptions(key="d.id", refresh_s=7200.0)
    changed = command("ALTER AI TABLE v SET (refresh = manual, batch = 7)")
    old = AiTableOptions(key="id", refresh_s=60.0)
    followed = ai_table_options(command("ALTER AI TABLE v SET (refresh = 'On change')"), old)
    assert followed.refresh_s == ON_CHANGE
    assert ai_table_options(changed, old) == AiTableOptions(key="id", batch=7, refresh_s=MANUAL)
    assert ai_table_options(command("ALTER AI TABLE v SUSPEND"), old).suspended
    assert command('REFRESH AI TABLE "V"').name == "V"
    assert command("DROP AI TABLE IF EXISTS v").tolerant
    for other in ("CREATE TABLE ai (a int)", "REFRESH MATERIALIZED VIEW v", "DROP TABLE ai"):
        assert command(other) is None


@pytest.mark.parametrize("text", [
    "CREATE AI TABLE v AS WITH (key = id)",
    "CREATE AI TABLE v AS INSERT INTO t SELECT 1 WITH (key = id)",
    "ALTER AI TABLE v",
    "REFRESH AI TABLE v now",
    "DROP AI TABLE",
])  # fmt: skip
def test_malformed_statements_are_refused(text: str) -> None:
    with pytest.raises(TierKVError) as refused:
        command(text)
    assert refused.value.sqlstate == "42601"


@pytest.mark.parametrize("given", ["0.5s", "soon", "-1s", "3 months"])
def test_periods_are_times(given: str) -> None:
    with pytest.raises(TierKVError) as refused:
        ai_table_options(command(f"ALTER AI TABLE v SET (refresh = '{given}')"), AiTableOptions())
    assert refused.value.sqlstate == "22023"


@pytest.mark.parametrize(("select", "inputs"), [
    ("id, ai_generate(body)", "id, body"),
    ("id, upper(x) AS u, ai_generate(a || n.b, options => '{\"max_tokens\": 3}') AS c",
     "id, upper(x) AS u, a, n.b"),
    ("*", "*"),
    ("id, CASE WHEN NOT ai_filter('q', body) THEN p ELSE \"Q x\" END", 'id, body, p, "Q x"'),
    ("id, ai_classify(ai_generate(t), ['a', 'b'])", "id, t"),
])  # fmt: skip
def test_rows_depend_on_the_columns_of_their_calls(select: str, inputs: str) -> None:
    read = read_job_statement(f"CREATE TABLE v AS SELECT {select} FROM n")
    assert set(read.inputs.split(", ")) == set(inputs.split(", "))


def test_conditions_with_calls_are_inputs_and_others_are_conditions() -> None:
    read = read_job_statement(
        "CREATE TABLE v AS SELECT id FROM n WHERE k < 3 AND (y OR ai_filter('q', z))"
    )
    assert set(read.inputs.split(", ")) == {"id", "y", "z"}
    assert "k < 3" in read.fingerprints("id") and "ai_filter" not in read.fingerprints("id")


def test_tables_are_due_a_period_after_their_last_try() -> None:
    def row(name: str, at_s: float, **options: object):  # type: ignore[no-untyped-def]
        return "", name, "main", json.dumps({"suspended": False, "made_by": "ann", **options}), at_s

    rows = [row("a", 100, refresh_s=60), row("b", 0, refresh_s=10), row("c", 0, refresh_s=0),
            row("d", 0, refresh_s=1, suspended=True)]  # fmt: skip
    assert [(t.name, t.user, t.due_s) for t in due_tables(rows, {("ann", "b"): 200.0}, {})] == [
        ("a", "ann", 160.0), ("b", "ann", 210.0),
    ]  # fmt: skip
    following = [row("e", 100, refresh_s=-1, sources=['main."Docs"', "other"]),
                 row("f", 0, refresh_s=-1, suspended=True, sources=["docs"])]  # fmt: skip
    assert due_tables(following, {}, {}) == []
    told = {("ann", "e"): 7.0, ("ann", "f"): 7.0}
    assert [(t.name, t.due_s) for t in due_tables(following, {}, told)] == [("e", 7.0)]
    names = following_tables(rows + following)
    assert set(names) == {("ann", "e"), ("ann", "f")}
    assert {"docs", "other"} < names["ann", "e"] and len(names["ann", "e"]) == 3


@pytest.mark.parametrize(("query", "tables"), [
    ("SELECT a FROM docs d JOIN main.\"Notes\" n USING (id)", ("docs", 'main."Notes"')),
    ("SELECT a FROM docs WHERE id IN (SELECT id FROM chosen) OR a IN (SELECT a FROM docs)",
     ("docs", "chosen")),
    ("WITH docs AS (SELECT * FROM docs), o AS (SELECT 1 FROM docs) SELECT 1 FROM docs, o",
     ("docs",)),
    ("WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t) SELECT n FROM t, s",
     ("s",)),
    ("SELECT i, x.v FROM generate_series(1, 3) t(i), x", ("x",)),
    ("SELECT data ->> 'k' FROM docs, jsonb_array_elements(docs.tags) e", ("docs",)),
    ("SELECT a FROM docs, read_csv('f.csv') r", ()),
    ("SELECT a FROM docs WHERE ((", ()),
])  # fmt: skip
def test_the_tables_of_a_query(query: str, tables: tuple[str, ...]) -> None:
    assert sorted(source_tables(query)) == sorted(tables)
