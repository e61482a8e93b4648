"""The AI function family behind PostgreSQL: the same answers and types as behind DuckDB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.fix_postgres import RunningRelay
from tests.fix_sql import InstantGenerator, answer_text, embedding
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore.errors import RowLevelError

pytestmark = pytest.mark.integration


@pytest.fixture
def connection(ai_relay: RunningRelay) -> Iterator[psycopg.Connection]:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        yield connection


SAME = [
    "SELECT id, ai_filter('Good?', body) FROM docs ORDER BY id",
    "SELECT id FROM docs WHERE ai_if('Good?', body) AND NOT ai_filter('Is ' || id || ' odd?') "
    "ORDER BY id",
    "SELECT id, ai_classify(body, {list}) FROM docs ORDER BY id",
    "SELECT ai_classify(body, {list}, instruction => 'Which?') AS c, count(*) FROM docs "
    "GROUP BY c ORDER BY c NULLS LAST",
    "SELECT id, ai_classify_multi(body, {list}) FROM docs ORDER BY id",
    "SELECT id, ai_score('Nice?', body) FROM docs ORDER BY ai_score('Nice?', body), id LIMIT 9",
    "SELECT id, ai_similarity(body, 'body 1') FROM docs ORDER BY id",
    "SELECT id, ai_count_tokens(body) FROM docs ORDER BY id",
    "SELECT id, ai_extract(body, '[\"x\", \"y\"]') ->> 'y' FROM docs ORDER BY id",
    "SELECT topic, ai_agg(body, 'q' ORDER BY id) FROM docs GROUP BY topic ORDER BY topic",
    "SELECT ai_summarize_agg(DISTINCT body ORDER BY body) FILTER (WHERE id > 9) FROM docs",
    "SELECT id, ai_agg(body, 'q ' || topic) OVER (PARTITION BY topic ORDER BY id ROWS 1 PRECEDING) "
    "FROM docs ORDER BY id",
    "SELECT ai_generate(ai_prompt('{{0}} and {{1}}', body, name)) FROM docs JOIN topics "
    "ON topic = topics.id ORDER BY docs.id",
    "SELECT ai_generate('Praise ' || (ai_extract(body, '[\"p\"]') ->> 'p')) FROM docs ORDER BY id",
    "SELECT (ai_generate_detail(body)).value, (ai_generate_detail(body)).prompt_tokens FROM docs "
    "ORDER BY id",
]


@pytest.mark.parametrize("statement", SAME)
async def test_both_engines_answer_the_same(
    connection: psycopg.Connection, session: DuckDbSession, statement: str
) -> None:
    expected = await session.execute(statement.format(list="['a', 'b', 'c']"))
    got = connection.execute(statement.format(list="ARRAY['a', 'b', 'c']").encode())
    assert got.fetchall() == list(expected.rows)


def test_results_have_their_types(connection: psycopg.Connection) -> None:
    cursor = connection.execute(
        "SELECT ai_generate('p'), ai_generate_json('p', '{\"type\": \"integer\"}'), "
        "ai_filter('p'), ai_classify_multi('p', ARRAY['a']), ai_extract('p', '[\"x\"]'), "
        "ai_score('p'), ai_embed('p'), ai_count_tokens('p'), ai_generate_detail('p')"
    )
    row: Any = cursor.fetchone()
    assert cursor.description is not None
    names = [connection.adapters.types.get(column.type_code) for column in cursor.description[:-1]]
    assert [None if info is None else info.name for info in names] == [
        "text", "jsonb", "bool", "text", "jsonb", "float8", "float4", "int4",
    ]  # fmt: skip
    assert row[1] == len("p")
    assert row[6] == pytest.approx(embedding("p"), abs=1e-6)
    assert [column.name for column in cursor.description][:3] == [
        "ai_generate", "ai_generate_json", "ai_filter",
    ]  # fmt: skip


def test_a_detail_is_made_json_by_to_json(connection: psycopg.Connection) -> None:
    row = connection.execute("SELECT to_json(ai_generate_detail('p'))").fetchone()
    assert row is not None and row[0]["value"] and row[0]["error"] is None


def test_parameters_may_be_arguments_of_every_kind(connection: psycopg.Connection) -> None:
    row = connection.execute(
        "SELECT ai_classify(%s, %s), ai_extract(%s, %s), ai_agg(body, %s), "
        "ai_generate('p', options => %s) FROM docs WHERE id = 1",
        ("t", ["a", "b"], "t", json.dumps(["x"]), "q", json.dumps({"max_tokens": 3})),
    ).fetchone()
    assert row is not None
    assert row[0] in ("a", "b")
    assert row[1:] == (
        {"x": answer_text("t\nQuestion: Extract the x.")},
        answer_text("body 1\nQuestion: q"),
        answer_text("p"),
    )


def test_answers_with_nul_do_not_break_a_statement(
    connection: psycopg.Connection, generator: InstantGenerator
) -> None:
    generator.texts |= {"p": "a\0b", "t\nQuestion: Extract the x.": "c\0\ud800"}
    row = connection.execute(
        "SELECT ai_generate('p'), ai_extract('t', '[\"x\"]'), (ai_generate_detail('p')).value"
    ).fetchone()
    assert row == ("a\ufffdb", {"x": "c\ufffd\ufffd"}, "a\ufffdb")


@pytest.mark.parametrize(
    ("statement", "sqlstate", "at"),
    [
        ("SELECT ai_classify(body, ARRAY['x', 'x']) FROM docs", "22023", "ARRAY"),
        ("SELECT ai_classify(body, ARRAY[body, body]) FROM docs", "22023", "ARRAY"),
        ("SELECT ai_extract(body, '{') FROM docs", "22023", "'{"),
        ("SELECT ai_generate_json(body, '{\"unsupported\": 1}') FROM docs", "22023", "'{"),
        ("SELECT ai_generate(body, model => 'gpt') FROM docs", "42704", "'gpt'"),
        ("SELECT id FROM docs WHERE ai_agg(body, 'q') = 'x'", "42803", "ai_agg"),
        ("SELECT ai_agg(ai_agg(body, 'q'), 'q') FROM docs", "42803", "ai_agg(body"),
        ("SELECT ai_agg(body, 'q' || topic) FROM docs", "42803", "topic"),
    ],
)
def test_wrong_calls_are_refused_where_they_stand(
    connection: psycopg.Connection, statement: str, sqlstate: str, at: str
) -> None:
    with pytest.raises(psycopg.Error) as caught:
        connection.execute(statement.encode())
    assert caught.value.diag.sqlstate == sqlstate
    assert caught.value.diag.statement_position == str(statement.index(at) + 1)
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_row_that_fails_keeps_a_write_from_happening(
    connection: psycopg.Connection, generator: InstantGenerator
) -> None:
    generator.failing["body 11"] = RowLevelError("broken")
    with pytest.raises(psycopg.Error, match="broken"):
        connection.execute("DELETE FROM docs WHERE NOT ai_filter('Good?', body)")
    assert connection.execute("SELECT count(*) FROM docs").fetchone() == (60,)
    got = connection.execute(
        "SELECT (ai_generate_detail(body)).error FROM docs WHERE id = 11"
    ).fetchone()
    assert got == ("broken",)


def test_budgets_and_dry_runs_hold_here_too(
    connection: psycopg.Connection, generator: InstantGenerator
) -> None:
    notices: list[str] = []
    connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    connection.execute("SET tierkv.max_prompt_tokens = 20")
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded):
        connection.execute("SELECT ai_filter('Good?', body) FROM docs")
    connection.execute("SET tierkv.dry_run = on")
    cursor = connection.execute("SELECT ai_filter('Good?', body) FROM docs WHERE id < 3")
    assert cursor.fetchall() == [(None,)] * 3
    assert notices[0].startswith("dry run: 3 AI calls with ")
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        connection.execute("UPDATE docs SET body = ai_generate(body)")
    assert generator.calls == []
