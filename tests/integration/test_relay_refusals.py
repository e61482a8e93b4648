"""Errors through the relay: what was meant, and where it stands in the client's whole text."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from tests.fix_postgres import RunningRelay
from tests.fix_sql import InstantGenerator, answer_text

pytestmark = pytest.mark.integration

Run = Callable[[psycopg.Connection, str], object]
WAYS: dict[str, Run] = {
    "simple": lambda connection, sql: psycopg.ClientCursor(connection).execute(sql),
    "extended": lambda connection, sql: connection.execute(sql, prepare=True),
}


def refused(relay: RunningRelay, sql: str, way: str) -> psycopg.errors.Diagnostic:
    """Run a statement that fails; the session must go on."""
    with psycopg.connect(relay.dsn, autocommit=True) as connection:
        with pytest.raises(psycopg.Error) as caught:
            WAYS[way](connection, sql)
        assert connection.execute("SELECT 1").fetchone() == (1,)
        return caught.value.diag


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("sql", "hint"),
    [
        ("SELECT ai_summarise_agg(body) FROM docs", "Did you mean ai_summarize_agg?"),
        ("SELECT ai_generate(body), ai_fliter('x', body) FROM docs", "Did you mean ai_filter?"),
        ("SELECT ai_sentiment(body) FROM docs", "Use ai_classify("),
        ("SELECT public.ai_generate('x')", "without a schema"),
        ("SELECT ai_xyzzy(body) FROM docs", "No function matches"),
        ("SELECT lowr(body) FROM docs", "No function matches"),
    ],
)
def test_what_was_meant(ai_relay: RunningRelay, sql: str, hint: str, way: str) -> None:
    diagnostic = refused(ai_relay, sql, way)
    assert diagnostic.sqlstate == "42883"
    assert diagnostic.message_hint is not None
    assert hint in diagnostic.message_hint


def test_a_function_of_the_database_is_called(ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION pg_temp.ai_generat(text) RETURNS text LANGUAGE sql AS 'SELECT $1'"
        )
        row = connection.execute("SELECT pg_temp.ai_generat('x'), ai_generate('y') <> ''")
        assert row.fetchone() == ("x", True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", ["", "/* ai_classify('x', string_to_array('', ',')) */ "])
@pytest.mark.parametrize(
    ("sql", "state", "at"),
    [
        ("SELECT ai_classify('x', string_to_array('', ','))", "22023", "string_to_array"),
        ("SELECT ai_generate('x', options => '{\"a\": 1}')", "22023", "'{"),
        ("SELECT ai_generate('x'), nothing", "42703", "nothing"),
        ("SELECT 1 FROM docs WHERE ai_agg(body, 'x') = 'y'", "42803", "ai_agg"),
        ("CREATE VIEW v AS SELECT ai_generate('x')", "0A000", "ai_generate"),
        (
            "DECLARE c CURSOR WITH HOLD FOR SELECT ai_classify('x', string_to_array('', ','))",
            "22023",
            "string_to_array",
        ),
    ],
)
def test_where_it_stands(
    ai_relay: RunningRelay, before: str, sql: str, state: str, at: str, way: str
) -> None:
    text = before + sql
    diagnostic = refused(ai_relay, text, way)
    assert diagnostic.sqlstate == state
    assert diagnostic.statement_position == str(text.rindex(at) + 1)


def test_where_it_stands_among_several(ai_relay: RunningRelay) -> None:
    text = "SELECT ai_generate('ä'); SELECT ai_classify('x', string_to_array('', ','))"
    diagnostic = refused(ai_relay, text, "simple")
    assert diagnostic.statement_position == str(text.index("string_to_array") + 1)


def test_what_only_the_other_engine_does_is_refused_where_it_is_asked_for(
    ai_relay: RunningRelay,
) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("SET tierkv.execution = stream")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="PostgreSQL runs it whole"):
            connection.execute("SELECT ai_generate('x')")
        connection.execute("SET tierkv.execution = replay")
        assert connection.execute("SELECT ai_generate('x') <> ''").fetchone() == (True,)


def test_the_engine_does_not_compile_what_is_run_a_few_times(ai_relay: RunningRelay) -> None:
    """A price of ``tierkv.ai_call`` above jit_above_cost made each round wait for a compiler."""
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        sql = "SELECT ai_generate(body) FROM docs WHERE ai_filter('x', body) AND ai_filter('y', id)"
        plan = connection.execute(f"EXPLAIN (FORMAT JSON) {sql}").fetchone()
        limit = connection.execute("SHOW jit_above_cost").fetchone()
        assert plan is not None
        assert limit is not None
        document = plan[0]
        [document] = document if isinstance(document, list) else [document]
        assert "JIT" not in document
        assert 0 < document["Plan"]["Total Cost"] < float(limit[0])


@pytest.mark.parametrize(
    "call",
    ["pg_try_advisory_lock(id)", 'pg_catalog."pg_advisory_lock"(1)', "pg_advisory_unlock(1)"],
)
def test_locks_of_the_session_are_refused(ai_relay: RunningRelay, call: str) -> None:
    diagnostic = refused(ai_relay, f"SELECT {call}, ai_generate(body) FROM docs", "extended")
    assert diagnostic.sqlstate == "0A000"
    assert diagnostic.message_hint is not None
    assert "pg_try_advisory_xact_lock" in diagnostic.message_hint


@pytest.mark.parametrize(
    "default", ["serial", "uuid DEFAULT gen_random_uuid()", "timestamptz DEFAULT clock_timestamp()"]
)
def test_prompts_that_are_new_in_each_round_are_noticed_early(
    ai_relay: RunningRelay, generator: InstantGenerator, default: str
) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TEMP TABLE j (id {default}, v text, w int DEFAULT 7)")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="each time") as caught:
            connection.execute(
                "INSERT INTO j(v) VALUES ('x'), ('y') RETURNING id, ai_generate('row ' || id)"
            )
        assert "call the AI in a SELECT" in (caught.value.diag.message_hint or "")
        assert len(generator.prompts) <= 4
        row = connection.execute(
            "INSERT INTO j(v) VALUES ('x') RETURNING w, ai_generate(ai_generate('row ' || w) || w)"
        ).fetchone()
        assert row == (7, answer_text(f"{answer_text('row 7')}7"))


def test_a_prompt_over_a_clock_is_refused(ai_relay: RunningRelay) -> None:
    for call in ("statement_timestamp()", "timeofday()", '"random"()'):
        diagnostic = refused(ai_relay, f"SELECT ai_generate({call}::text)", "simple")
        assert diagnostic.sqlstate == "0A000"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hold", ["WITHOUT HOLD", ""])
def test_a_cursor_without_hold_needs_a_block(ai_relay: RunningRelay, hold: str, way: str) -> None:
    sql = f"DECLARE c CURSOR {hold} FOR SELECT ai_generate('threshold') AS household"
    assert refused(ai_relay, sql, way).sqlstate == "25P01"
