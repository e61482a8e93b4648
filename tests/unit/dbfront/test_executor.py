"""Which calls a statement makes, what its failures lead to, and what EXPLAIN shows."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence

import duckdb
import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.calls.question_runner import Sent
from tierkv.dbfront.contracts import CallPlan, ClientInfo, PreparedCall
from tierkv.dbfront.databases.duckdb_errors import to_tierkv_error
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement_results import StatementResult
from tierkv.kvcore.errors import (
    CancelledByUserError,
    NoNodeError,
    OverloadedError,
    RowLevelError,
    TierKVError,
    UnknownModelError,
)


async def rows(session: DuckDbSession, sql: str, *params: object) -> list[tuple[object, ...]]:
    return list((await session.execute(sql, list(params))).rows)


@pytest.mark.parametrize(
    "condition",
    [
        "ai_generate(p) = 'yes'",
        "NOT (ai_generate(p) <> 'yes')",
        "ai_generate(p) IS NOT NULL AND ai_generate(p) NOT LIKE 'no%' AND ai_generate(p) = 'yes'",
    ],
)
async def test_limit_stops_early(
    session: DuckDbSession, generator: InstantGenerator, condition: str
) -> None:
    await session.execute("CREATE TABLE big AS SELECT i AS id, 'p' || i AS p FROM range(5000) r(i)")
    found = await rows(session, f"SELECT id FROM big WHERE {condition} LIMIT 5")
    expected = [(i,) for i in range(5000) if answer_text(f"p{i}") == "yes"][:5]
    assert found == expected
    assert len(generator.prompts) <= 32
    await session.execute("SET tierkv.execution = replay")
    generator.prompts.clear()
    assert await rows(session, f"SELECT id FROM big WHERE {condition} LIMIT 5") == expected
    assert len(generator.prompts) == 64


async def test_limit_with_answers_in_the_select_list(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("CREATE TABLE big AS SELECT i AS id, 'p' || i AS p FROM range(5000) r(i)")
    found = await rows(
        session,
        "SELECT id, ai_generate('s' || p) FROM big WHERE lower(ai_generate(p)) = 'yes' LIMIT 40",
    )
    ids = [i for i in range(5000) if answer_text(f"p{i}") == "yes"][:40]
    assert found == [(i, answer_text(f"sp{i}")) for i in ids]
    selected = [prompt for prompt in generator.prompts if prompt.startswith("s")]
    assert len(selected) < 80
    assert len(generator.prompts) < 1000


async def test_limit_stops_an_unnest_of_answers(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("CREATE TABLE big AS SELECT i AS id, 'p' || i AS p FROM range(5000) r(i)")
    query = "SELECT id, unnest(ai_classify_multi(p, ['red', 'blue'])) FROM big"
    found = await rows(session, f"{query} LIMIT 4")
    assert len(generator.prompts) == 64 * 2
    assert len(found) == 4 and found == (await rows(session, f"{query} WHERE id < 64"))[:4]


def test_no_misspelt_table_is_one_of_the_engines_own() -> None:
    said = 'Catalog Error: Table with name nosuch does not exist!\nDid you mean "pg_sequences"?'
    told = to_tierkv_error(duckdb.CatalogException(said), "TABLE nosuch", lambda at: at)
    assert (told.message, told.hint) == ("Table with name nosuch does not exist!", "")


async def test_limit_zero_makes_no_call(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    assert await rows(session, "SELECT id FROM docs WHERE ai_generate(body) = 'x' LIMIT 0") == []
    assert generator.prompts == []


@pytest.mark.parametrize(
    "query",
    [
        "SELECT id FROM docs WHERE ai_generate(body) = 'yes' ORDER BY id DESC LIMIT 2",
        "SELECT count(*) FROM docs WHERE ai_generate(body) = 'yes' LIMIT 1",
        "SELECT mode(topic) FROM docs WHERE ai_generate(body) = 'yes' LIMIT 1",
        "SELECT id FROM docs WHERE ai_generate(body) IS NULL LIMIT 6",
        "SELECT id FROM docs WHERE coalesce(ai_generate(body), 'yes') = 'yes' LIMIT 6",
        "SELECT DISTINCT topic FROM docs WHERE ai_generate(body) = 'yes' LIMIT 4",
        "SELECT id FROM docs WHERE NOT (ai_generate(body) <> 'yes') LIMIT 3",
        "SELECT id FROM docs WHERE ai_generate(body) IS NOT NULL LIMIT 3",
        "SELECT id FROM docs WHERE NOT (ai_generate(body) IS NULL) LIMIT 9",
        "SELECT id FROM docs WHERE NOT (ai_generate(body) IS NOT NULL) LIMIT 9",
    ],
)
async def test_limit_never_changes_the_answer(session: DuckDbSession, query: str) -> None:
    got = await rows(session, query)
    await session.execute(
        "CREATE TABLE answers AS SELECT DISTINCT body, ai_generate(body) a FROM docs"
    )
    plain = query.replace(
        "ai_generate(body)", "(SELECT a FROM answers s WHERE s.body IS NOT DISTINCT FROM docs.body)"
    )
    if "DISTINCT topic" in query:
        assert sorted(got) == sorted(await rows(session, plain))
    elif "IS NULL" in query or "coalesce" in query or "NOT" in query:
        assert set(got) <= set(await rows(session, plain.split(" LIMIT")[0]))
        assert len(got) == len(await rows(session, plain))
    else:
        assert got == await rows(session, plain)


async def test_case_branch_is_called_only_for_its_rows(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute(
        "SELECT CASE WHEN ai_generate(body) = 'yes' THEN ai_generate('then ' || body) "
        "ELSE ai_generate('else ' || body) END FROM docs"
    )
    bodies = {p for p in generator.prompts if p.startswith("body")}
    yes = {body for body in bodies if answer_text(body) == "yes"}
    thens = {p for p in generator.prompts if p.startswith("then")}
    elses = {p for p in generator.prompts if p.startswith("else body")}
    assert thens == {f"then {body}" for body in yes}
    assert elses == {f"else {body}" for body in bodies - yes}


async def test_coalesce_and_or_call_the_right_side_only_when_needed(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SELECT coalesce(ai_generate(body), ai_generate('none' || id)) FROM docs")
    assert sum(p.startswith("none") for p in generator.prompts) == 6
    generator.prompts.clear()
    await session.execute(
        "SELECT id FROM docs WHERE ai_generate(body) = 'yes' OR ai_generate('or ' || body) = 'no'"
    )
    yes = {p for p in generator.prompts if p.startswith("body") and answer_text(p) == "yes"}
    assert not {f"or {body}" for body in yes} & set(generator.prompts)


async def test_filter_is_evaluated_above_joins_and_semijoins(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("CREATE TABLE big AS SELECT i AS id, 'p' || i AS p FROM range(5000) r(i)")
    for query in (
        "SELECT t.id FROM topics t JOIN big b ON t.id = b.id WHERE ai_generate(b.p) = 'yes'",
        "SELECT id FROM topics t WHERE EXISTS (SELECT 1 FROM big b WHERE b.id = t.id "
        "AND ai_generate(b.p) = 'yes')",
        "SELECT id, (SELECT ai_generate(b.p || t.id) FROM big b WHERE b.id = t.id) FROM topics t",
    ):
        generator.prompts.clear()
        await session.execute(query)
        assert len(generator.prompts) <= 6, query  # not 5,000; topics go up to 5


async def test_explain_never_calls_the_model(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    result = await session.execute(
        "EXPLAIN SELECT ai_generate(body, model => 'other'), ai_generate('constant') FROM docs "
        "WHERE ai_generate(body) = 'yes' LIMIT 3"
    )
    assert result.command_tag == "EXPLAIN"
    text = dict(result.rows)["ai_plan"]
    assert "call 1: ai_generate in SELECT, stage 2, model other" in text
    assert "call 3: ai_generate in WHERE, stage 1, model default" in text
    assert "stops after 3 rows" in text
    await session.describe("SELECT ai_generate('constant')")
    assert generator.prompts == []


async def test_explain_analyze_runs_and_counts(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    result = await session.execute("EXPLAIN ANALYZE SELECT ai_generate(body) FROM docs")
    distinct = len(set(generator.prompts))
    text = dict(result.rows)["ai_plan"]
    assert f"calls 54, distinct {distinct}, errors 0, rounds 2" in text


async def test_explain_analyze_says_what_was_planned(session: DuckDbSession) -> None:
    statement = "EXPLAIN ANALYZE SELECT ai_generate('sixteen tokens: ' || body) FROM docs"
    planned = dict((await session.execute(statement)).rows)["ai_plan"]
    assert re.search(r"  plan: [1-9]\d* runs?, [1-9]\d* prompt tokens in common", planned)
    await session.execute("SET tierkv.plan = off")
    sorted_only = dict((await session.execute(statement)).rows)["ai_plan"]
    assert "plan: " not in sorted_only


async def test_arguments_reach_the_model(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.system_prompt = 'be brief'")
    await session.execute("SET tierkv.max_tokens = 7")
    await session.execute(
        "SELECT ai_generate(model := 'other', prompt => 'p', options => "
        '\'{"temperature": 0.5, "stop": ["x"], "cache": false}\'::json)'
    )
    call = generator.calls[-1]
    assert [m.content for m in call.messages or ()] == ["be brief", "p"]
    asked = call.options
    assert (call.model, asked.temperature, asked.stop, asked.max_tokens) == (
        "other",
        0.5,
        ("x",),
        7,
    )
    assert (asked.cache, call.tenant) == (False, "ann")


async def test_arguments_per_row(session: DuckDbSession, generator: InstantGenerator) -> None:
    got = await rows(
        session,
        "SELECT ai_generate('p', model => m, options => {'max_tokens': n}) FROM (VALUES "
        "('tiny', 1), ('other', 2), ('tiny', 1), (NULL, 1)) v(m, n)",
    )
    tiny, other = answer_text("p"), answer_text("p", "other")
    assert got == [(tiny,), (other,), (tiny,), (tiny,)]
    assert sorted((c.model or "", c.options.max_tokens) for c in generator.calls) == [
        ("", 1),
        ("other", 2),
        ("tiny", 1),
    ]
    await session.execute(
        "SELECT ai_generate('q', options => o) FROM (VALUES ('{\"seed\": 3}')) v(o)"
    )
    assert generator.calls[-1].options.seed == 3


async def test_parameters(session: DuckDbSession, generator: InstantGenerator) -> None:
    assert await rows(session, "SELECT ai_generate(?), ? + 1", "hello", 4) == [
        (answer_text("hello"), 5)
    ]
    got = await rows(
        session, "SELECT $2, ai_generate(model => $1, prompt => $2) AS a", "other", "p"
    )
    assert got == [("p", answer_text("p", "other"))]
    result = await session.execute(
        "UPDATE docs SET body = ai_generate($1) WHERE id = $2", {"1": "hi", "2": 3}
    )
    assert result.command_tag == "UPDATE 1"


async def test_failed_calls_give_null_and_one_warning(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.failing = {
        "body 3": RowLevelError("refused"),
        "body 4": RowLevelError("refused"),
        "body 5": RowLevelError("too odd"),
    }
    result = await session.execute("SELECT id, ai_generate(body) FROM docs WHERE id IN (3,4,5,6)")
    assert list(result.rows) == [(3, None), (4, None), (5, None), (6, answer_text("body 6"))]
    (warning,) = result.notices
    assert warning.severity == "WARNING"
    assert "3 of 4 AI calls failed" in warning.message
    assert warning.message.count("refused") == 1
    assert "too odd" in warning.message
    assert session.last_ai_stats.errors == 3


async def test_call_timeout_is_a_row_error(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.gate = asyncio.Event()
    await session.execute("SET tierkv.request_timeout = '10ms'")
    result = await session.execute("SELECT ai_generate('slow')")
    assert list(result.rows) == [(None,)]
    assert "no answer within 0.01 s" in result.notices[0].message


@pytest.mark.parametrize("error", [NoNodeError("no node"), UnknownModelError("gone")])
async def test_fatal_errors_end_the_statement(
    session: DuckDbSession, generator: InstantGenerator, error: TierKVError
) -> None:
    generator.failing = {"body 3": error}
    with pytest.raises(type(error)):
        await session.execute("SELECT ai_generate(body) FROM docs")
    generator.failing = {}
    assert len(await rows(session, "SELECT ai_generate(body) FROM docs")) == 60


async def test_overload_is_retried(session: DuckDbSession, generator: InstantGenerator) -> None:
    generator.failing = {"hi": OverloadedError("full", retry_after_ms=1)}
    with pytest.raises(OverloadedError):
        await session.execute("SELECT ai_generate('hi')")
    assert len(generator.prompts) > 2


async def test_many_calls_are_planned_beside_the_event_loop(
    session: DuckDbSession, generator: InstantGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released, plan = threading.Event(), threading.Event(), generator.plan

    def wait_and_plan(calls: Sequence[PreparedCall], *, max_in_flight: int) -> CallPlan:
        begun.set()
        assert released.wait(10), "the event loop stood still"
        return plan(calls, max_in_flight=max_in_flight)

    monkeypatch.setattr(generator, "plan", wait_and_plan)
    await session.execute("SET tierkv.max_calls = 0")
    sql = "SELECT ai_generate('p' || i) FROM range(1000) r(i)"
    asked = asyncio.create_task(rows(session, sql))
    async with asyncio.timeout(10):
        while not begun.is_set():
            await asyncio.sleep(0.001)
    released.set()
    assert len(await asked) == 1000


async def test_room_that_comes_when_the_time_is_over_is_room() -> None:
    sent = Sent()
    waiting = asyncio.create_task(sent.room(0))
    await asyncio.sleep(0)
    sent.make_room()  # Its timer fires in the same turn of the loop.
    await waiting
    assert not sent.refused


async def test_who_no_longer_waits_for_room_gets_none() -> None:
    sent = Sent()
    gone, waiting = (asyncio.create_task(sent.room(60)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    sent.make_room()
    async with asyncio.timeout(10):
        await waiting


async def test_batch_is_ordered_by_prefix_and_bounded(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.max_concurrency = 3")
    await session.execute("SELECT ai_generate(repeat('w', 40) || id % 13) FROM docs")
    assert generator.prompts == sorted(generator.prompts)
    assert generator.most_running <= 3


async def test_statistics_and_progress(session: DuckDbSession) -> None:
    seen: list[tuple[str, int, int]] = []
    session.on_progress = lambda p: seen.append((p.phase, p.calls_done, p.calls_total))
    await session.execute("SELECT ai_generate(body) FROM docs")
    stats = session.last_ai_stats
    assert (stats.calls, stats.distinct_calls, stats.rounds) == (54, 27, 2)
    assert (stats.hit_tokens.l1, stats.hit_tokens.l2, stats.mean_ttft_s) == (27, 54, 0.5)
    assert seen[0] == ("collect", 0, 0)
    assert ("llm", 13, 27) in seen
    assert seen[-1] == ("done", 27, 27)
    await session.execute("SELECT ai_generate('one more')")
    assert session.total_ai_stats.distinct_calls == 28


async def test_cancel_stops_calls_and_leaves_the_session_usable(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute("SELECT ai_generate(body) FROM docs"))
    await generator.started.wait()
    await session.cancel()
    with pytest.raises(CancelledByUserError) as raised:
        await running
    assert raised.value.sqlstate == "57014"
    assert generator.cancelled > 0
    generator.gate = None
    assert len(await rows(session, "SELECT ai_generate(body) FROM docs")) == 60


async def until_active(session: DuckDbSession) -> None:
    """Wait until the session works on a statement; a cancel from now on must end it."""
    async with asyncio.timeout(10):
        while session.activity.state != "active":
            await asyncio.sleep(0)


async def test_cancel_interrupts_the_engine(session: DuckDbSession) -> None:
    running = asyncio.create_task(
        session.execute("SELECT count(*) FROM range(1000000000) a, range(1000000000) b")
    )
    await until_active(session)
    await session.cancel()
    with pytest.raises(CancelledByUserError):
        await running
    assert await rows(session, "SELECT 1") == [(1,)]


async def test_cancelling_the_awaiting_task_interrupts_too(session: DuckDbSession) -> None:
    async def run() -> StatementResult:
        return await session.execute("SELECT count(*) FROM range(1000000000) a, range(1000000) b")

    running = asyncio.create_task(run())
    await until_active(session)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await rows(session, "SELECT 1") == [(1,)]


async def test_sessions_do_not_see_each_others_calls(
    server: DuckDbSqlServer, session: DuckDbSession, generator: InstantGenerator
) -> None:
    other = await server.open_session(ClientInfo(user="bob"))
    await asyncio.gather(
        session.execute("SELECT ai_generate(body) FROM docs"),
        other.execute("SELECT ai_generate('bob ' || body) FROM docs"),
    )
    assert {c.tenant for c in generator.calls if "bob" in (c.messages or ())[-1].content} == {"bob"}
    assert len(generator.calls) == 54
