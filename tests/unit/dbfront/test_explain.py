"""What EXPLAIN, EXPLAIN (AI_ESTIMATE) and EXPLAIN ANALYZE tell: every number, and nobody asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fix_sql import TABLES, InstantGenerator, answer_text
from tierkv.dbfront.contracts import ClientInfo, PreparedCall, TextCall, TextEvent
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.explain import estimate
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore.errors import (
    NodeLostError,
    RowLevelError,
    SqlError,
    TierKVError,
    UdfArgumentError,
    UnknownModelError,
)

SAME_BEGINNING = "'the same instruction for all of them: ' || "


@dataclass
class SilentGenerator(InstantGenerator):
    """A model that must not be asked."""

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        pytest.fail(f"asked: {prepared.call}")
        yield TextEvent()


@dataclass
class FlakyGenerator(InstantGenerator):
    """A model whose node is lost under each call of ``lost``, once."""

    lost: set[str] = field(default_factory=set)

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        prompt = (prepared.call.messages or ())[-1].content
        if prompt in self.lost:
            self.lost.remove(prompt)
            raise NodeLostError("the node was lost")
        async for event in super().stream(prepared):
            yield event


@pytest.fixture
async def silent() -> AsyncIterator[DuckDbSession]:
    server = DuckDbSqlServer(DuckDbConfig(threads=2), SilentGenerator())
    session = await server.open_session(ClientInfo(user="ann"))
    for statement in session.split(TABLES):
        await session.execute(statement)
    yield session
    await server.close()


async def document(session: DuckDbSession, options: str, sql: str, *params: Any) -> dict[str, Any]:
    """Explain with FORMAT JSON; return the AI plan."""
    result = await session.execute(f"EXPLAIN ({options}, FORMAT JSON) {sql}", list(params))
    ((key, text),) = result.rows
    assert key == "json"
    told: dict[str, Any] = json.loads(text)
    assert told["Plan"]
    plan: dict[str, Any] = told["AI Plan"]
    return plan


async def text(session: DuckDbSession, explain: str, *params: Any) -> str:
    return str(dict((await session.execute(explain, list(params))).rows)["ai_plan"])


async def table(session: DuckDbSession, name: str = "docs") -> list[tuple[Any, ...]]:
    return list((await session.execute(f"SELECT * FROM {name} ORDER BY ALL")).rows)


async def prompt_tokens(generator: InstantGenerator, calls: list[TextCall]) -> int:
    return sum([len((await generator.prepare(call)).request.token_ids) for call in calls])


STATEMENTS = [
    "SELECT ai_generate(body) FROM docs",
    "SELECT ai_generate('constant')",
    "SELECT ai_generate(body) FROM docs WHERE false",
    "SELECT id FROM docs WHERE ai_generate(body) = 'yes' LIMIT 2",
    "SELECT CASE WHEN ai_generate(body) = 'yes' THEN ai_generate('a' || body) END FROM docs",
    "SELECT ai_generate(ai_generate(body)) FROM docs",
    "SELECT topic, count(*) FROM docs GROUP BY topic HAVING ai_generate('t' || topic) = 'yes'",
    "SELECT ai_filter('Is it?', body), ai_classify(body, ['a', 'b']) FROM docs",
    "SELECT ai_agg(body, 'Sum up') FROM docs GROUP BY topic",
    "SELECT ai_count_tokens(body) FROM docs",
    "INSERT INTO docs SELECT id + 100, 1, ai_generate(body) FROM docs",
    "INSERT INTO docs VALUES (200, 1, ai_generate('x')) RETURNING id",
    "UPDATE docs SET body = ai_generate(body) WHERE ai_generate('t' || topic) = 'yes'",
    "DELETE FROM docs WHERE ai_generate(body) = 'yes' RETURNING id",
    "CREATE TABLE made AS SELECT ai_generate(body) FROM docs",
    "CREATE TABLE IF NOT EXISTS made AS SELECT ai_generate(body) FROM docs",
]


@pytest.mark.parametrize("options", ["FORMAT TEXT", "FORMAT JSON"])
@pytest.mark.parametrize("explain", ["", "AI_ESTIMATE, "])
@pytest.mark.parametrize("statement", STATEMENTS)
async def test_no_model_is_asked_and_nothing_is_left_behind(
    silent: DuckDbSession, statement: str, explain: str, options: str
) -> None:
    before = await table(silent)
    for begin, end in ((None, None), ("BEGIN", "COMMIT")):
        if begin:
            await silent.execute(begin)
        result = await silent.execute(f"EXPLAIN ({explain}{options}) {statement}")
        assert result.command_tag == "EXPLAIN"
        assert [column.name for column in result.columns or ()] == ["explain_key", "explain_value"]
        assert await table(silent) == before
        assert ("made",) not in list((await silent.execute("SHOW TABLES")).rows)
        if end:
            assert (await silent.execute(end)).command_tag == "COMMIT"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT ai_generate(body) FROM docs",
        f"SELECT ai_generate({SAME_BEGINNING}body), ai_generate('x' || topic) FROM docs",
        "SELECT ai_generate(body), upper(ai_generate(body)) FROM docs",
        "SELECT id FROM docs WHERE ai_generate(body) = 'yes' AND topic = 1",
        f"SELECT d.id FROM docs d JOIN topics t ON t.id = topic "
        f"WHERE ai_generate({SAME_BEGINNING}name) = 'yes'",
        "SELECT ai_generate(body, model => m) FROM docs, (VALUES ('tiny'), ('other')) v(m)",
        "SELECT count(*) FROM docs GROUP BY ai_generate('t' || topic)",
        "SELECT ai_generate('constant'), ai_generate(NULL)",
        "SELECT ai_classify(body, ['a', 'b']) FROM docs",
    ],
)
async def test_an_estimate_of_one_stage_is_what_it_takes(
    session: DuckDbSession, generator: InstantGenerator, query: str
) -> None:
    told = await document(session, "AI_ESTIMATE", query)
    assert generator.calls == []
    assert told["Estimate"]["Complete"]
    took = await document(session, "ANALYZE", query)
    assert len(generator.calls) == took["Totals"]["Requests"]
    tokens = await prompt_tokens(generator, generator.calls)
    assert told["Estimate"]["Prompt Tokens"] == took["Totals"]["Prompt Tokens"] == tokens
    for name in ("Distinct Calls", "Requests", "Shared Tokens"):
        assert told["Estimate"][name] == took["Totals"][name], name
    for before, after in zip(told["Calls"], took["Calls"], strict=True):
        assert before.get("As Call") == after.get("As Call")
        if "As Call" in before:
            continue
        assert before["Known"]
        assert before["Rows"] == after["Rows"]
        assert before["Distinct Calls"] == after["Asked"]
        assert before["Requests"] == after["Requests"]
        assert before["Prompt Tokens"] == after["Prompt Tokens"]


@pytest.mark.parametrize(
    ("query", "bound"),
    [
        (
            "SELECT ai_generate('a' || id) FROM docs WHERE ai_generate(body) = 'yes' AND topic = 1",
            15,
        ),
        (
            "SELECT CASE WHEN ai_generate(body) = 'yes' THEN ai_generate('a' || id) END FROM docs",
            60,
        ),
        ("SELECT coalesce(ai_generate(body), ai_generate('b' || id)) FROM docs LIMIT 7", 60),
        ("SELECT ai_generate('a' || ai_generate(body)) FROM docs WHERE topic = ?", 15),
        (
            "SELECT topic FROM docs WHERE ai_generate(body) = 'yes' GROUP BY topic "
            "HAVING ai_generate('t' || topic) = 'no' ORDER BY topic LIMIT 2",
            60,
        ),
        (
            "WITH d AS (SELECT * FROM docs WHERE id < 9) SELECT ai_generate('a' || d.id) "
            "FROM d, docs WHERE ai_generate(d.body) = 'yes' AND d.id = docs.id "
            "AND docs.topic IN (1, 2)",
            4,
        ),
        (
            "SELECT ai_agg('a' || id, 'Sum up') FROM docs WHERE ai_generate(body) = '?' "
            "AND id > 59 OR ai_generate('x' || id) = '?'",
            60,
        ),
        (
            "SELECT unnest([ai_generate('a' || id), 'b']) FROM docs "
            "WHERE ai_generate(body) = 'yes'",
            None,
        ),
        (
            "SELECT id FROM docs WHERE ai_generate(body) = 'yes' UNION "
            "SELECT id FROM docs WHERE ai_generate('a' || ai_generate(body)) = 'yes'",
            None,
        ),
        (
            "SELECT id, (SELECT max(ai_generate(name || d.id)) FROM topics) FROM docs d "
            "WHERE ai_generate(body) = 'yes'",
            None,
        ),
        ("UPDATE docs SET body = ai_generate(body) WHERE ai_generate('t' || topic) = 'yes'", None),
    ],
)
async def test_calls_that_depend_on_answers_have_a_bound_or_are_unknown(
    session: DuckDbSession, generator: InstantGenerator, query: str, bound: int | None
) -> None:
    params = (1,) if "?" in query.replace("'?'", "") else ()
    told = await document(session, "AI_ESTIMATE", query, *params)
    assert not told["Estimate"]["Complete"]
    later = [call for call in told["Calls"] if not call.get("Known", True)]
    assert later
    assert {call["Calls at Most"] for call in later} == {bound}
    words = f"at most {bound} calls: how many is known" if bound else "    how many is known when"
    assert words in await text(session, f"EXPLAIN (AI_ESTIMATE) {query}", *params)
    took = await document(session, "ANALYZE", query, *params)
    for call in later:
        assert took["Calls"][call["Call"] - 1]["Asked"] <= (bound or 1000)


async def test_a_statement_of_two_stages_is_told_round_by_round(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    query = (
        "SELECT id, ai_generate('p' || body), ai_generate('p' || body) || '!' FROM docs "
        "WHERE ai_generate('t' || topic) <> 'no' ORDER BY 2"
    )
    told = await document(session, "ANALYZE", query)
    topics = [f"t{n}" for n in range(4)]
    kept = [n for n in range(4) if answer_text(f"t{n}") != "no"]
    bodies = [f"pbody {i % 30}" for i in range(60) if i % 10 != 7 and i % 4 in kept]
    assert sorted(generator.prompts) == sorted([*topics, *set(bodies)])
    assert told["Executor"] == "replay"
    assert told["Not Streamed"]
    first, second, third = told["Calls"]
    assert second["As Call"] == 1
    assert (first["Clause"], first["Stage"], third["Clause"], third["Stage"]) == (
        *("SELECT", 2),
        *("WHERE", 1),
    )
    of = {
        key: [call for call in generator.calls if (call.messages or ())[-1].content[0] == key]
        for key in "pt"
    }
    for call, key, rows, distinct in (
        (first, "p", len(bodies), len(set(bodies))),
        (third, "t", 60, 4),
    ):
        assert (call["Rows"], call["Distinct Calls"], call["Asked"]) == (rows, distinct, distinct)
        assert call["Dedup Ratio"] == pytest.approx(1 - distinct / rows, abs=1e-4)
        assert (call["Requests"], call["Errors"], call["Retries"]) == (distinct, 0, 0)
        assert call["Prompt Tokens"] == await prompt_tokens(generator, of[key])
        assert call["Completion Tokens"] == distinct
        assert call["Hit Tokens"] == {"L1": distinct, "L2": 2 * distinct, "L3": 0, "L4": 0}
        assert (call["TTFT p50 ms"], call["TTFT p95 ms"]) == (500.0, 500.0)
    asked = [[(a["Call"], a["Distinct Calls"]) for a in r["Asked"]] for r in told["Rounds"]]
    assert asked == [[(3, 4)], [(1, len(set(bodies)))], []]
    met = [sorted((m["Call"], m["Rows"]) for m in r["Met"]) for r in told["Rounds"]]
    assert met == [[(3, 60)], [(1, len(bodies)), (3, 60)], [(1, len(bodies)), (3, 60)]]
    totals = told["Totals"]
    assert totals["Rounds"] == 3
    assert totals["Rows"] == 60 + len(bodies)
    assert totals["Nodes"] == {"n1": totals["Requests"]}
    assert totals["Requests"] == totals["Distinct Calls"] == len(generator.calls)
    lines = await text(session, f"EXPLAIN ANALYZE {query}")
    assert f"rows {len(bodies)}, distinct {len(set(bodies))} (dedup" in lines
    assert "    as call 1" in lines
    assert "round 1: engine" in lines
    assert "met call 3 60 times; asked call 3 4 times, models" in lines


async def test_calls_that_several_places_ask_for_are_on_one_account(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    told = await document(
        session, "ANALYZE", "SELECT ai_generate(body), ai_generate(body || '') FROM docs"
    )
    first, second = told["Calls"]
    assert (first["Distinct Calls"], second["Distinct Calls"]) == (27, 27)
    assert (first["Asked"], second["Asked"]) == (27, 0)
    assert told["Totals"]["Distinct Calls"] == len(generator.calls) == 27


async def test_failures_are_counted_where_they_happen(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.failing["x1"] = RowLevelError("bad row")
    told = await document(
        session, "ANALYZE", "SELECT ai_generate(body), ai_generate('x' || topic) FROM docs"
    )
    assert [call["Errors"] for call in told["Calls"]] == [0, 1]
    assert told["Calls"][1]["Requests"] == 3
    assert told["Calls"][1]["Asked"] == 4
    assert told["Totals"]["Errors"] == 1


async def test_what_is_sent_again_is_counted() -> None:
    server = DuckDbSqlServer(DuckDbConfig(threads=2), FlakyGenerator(lost={"x1", "x3"}))
    session = await server.open_session(ClientInfo(user="ann"))
    told = await document(
        session,
        "ANALYZE",
        "SELECT ai_generate('x' || i, options => '{\"retries\": 2}') FROM range(4) r(i)",
    )
    assert (told["Calls"][0]["Retries"], told["Calls"][0]["Errors"]) == (2, 0)
    assert told["Totals"]["Retries"] == 2
    assert told["Totals"]["Requests"] == 4
    await server.close()


async def test_prompts_that_are_too_long_are_estimated_as_such(session: DuckDbSession) -> None:
    query = "SELECT ai_generate(CASE WHEN id < 2 THEN repeat('x', 30000) ELSE body END) FROM docs"
    told = await document(session, "AI_ESTIMATE", query)
    took = await document(session, "ANALYZE", query)
    (before,), (after,) = told["Calls"], took["Calls"]
    assert before["Too Long"] == after["Errors"] == 1
    assert before["Requests"] == after["Requests"] == before["Distinct Calls"] - 1


async def test_analyze_writes_and_says_what_it_took(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    update = "UPDATE docs SET body = ai_generate(body) WHERE topic = 1"
    told = await document(session, "AI_ESTIMATE", update)
    assert told["Calls"][0]["Known"]
    expected = [
        (i, i % 4, answer_text(body) if i % 4 == 1 else body) for i, _, body in await table(session)
    ]
    took = await document(session, "ANALYZE", update)
    assert await table(session) == expected
    assert took["Collected First"]
    assert told["Estimate"]["Distinct Calls"] == took["Totals"]["Distinct Calls"]
    assert took["Calls"][0]["Rows"] == told["Calls"][0]["Rows"]
    assert len(generator.calls) == took["Totals"]["Requests"]
    lines = await text(session, "EXPLAIN ANALYZE CREATE TABLE made AS SELECT ai_generate('a') AS x")
    assert "calls 1, distinct 1, errors 0" in lines
    assert await table(session, "made") == [(answer_text("a"),)]


async def test_analyze_of_a_write_that_fails_or_is_rolled_back_leaves_nothing(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    before = await table(session)
    await session.execute("BEGIN")
    await session.execute("EXPLAIN ANALYZE DELETE FROM docs WHERE ai_generate(body) IS NOT NULL")
    assert len(await table(session)) == 6
    await session.execute("ROLLBACK")
    assert await table(session) == before
    generator.failing["body 3"] = RowLevelError("bad row")
    with pytest.raises(RowLevelError):
        await session.execute("EXPLAIN ANALYZE UPDATE docs SET body = ai_generate('0' || body)")
    assert await table(session) == before


async def test_an_estimate_sees_the_transaction_and_leaves_it_as_it_is(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("BEGIN")
    await session.execute("INSERT INTO docs VALUES (100, 1, 'only here')")
    told = await document(session, "AI_ESTIMATE", "DELETE FROM docs WHERE ai_generate(body) = 'x'")
    assert told["Calls"][0]["Rows"] == 55
    assert session.transaction_status == "T"
    await session.execute("COMMIT")
    assert len(await table(session)) == 61
    assert generator.calls == []


async def test_an_explained_statement_is_no_change_of_the_transaction(
    session: DuckDbSession,
) -> None:
    # Its calls can't be collected first, so it must be able to begin the transaction anew.
    write = "CREATE TABLE IF NOT EXISTS made AS SELECT ai_generate(body) AS x FROM docs"
    await session.execute("BEGIN")
    for explain in ("EXPLAIN", "EXPLAIN (AI_ESTIMATE)"):
        await session.execute(f"{explain} DELETE FROM docs WHERE ai_generate(body) = 'yes'")
    await session.execute(write)
    await session.execute("ROLLBACK")
    await session.execute("BEGIN")
    await session.execute("EXPLAIN ANALYZE DELETE FROM docs WHERE ai_generate(body) = 'yes'")
    with pytest.raises(SqlError, match="inside a transaction with changes"):
        await session.execute(write)
    await session.execute("ROLLBACK")
    assert len(await table(session)) == 60


async def test_an_estimate_survives_an_engine_that_fails_on_missing_answers(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    query = "SELECT error(coalesce(ai_generate(body), 'none yet')) FROM docs WHERE id < 3"
    with pytest.raises(TierKVError):
        await session.execute(query)
    generator.calls.clear()
    told = await document(session, "AI_ESTIMATE", query)
    assert told["Calls"][0]["Distinct Calls"] >= 1
    assert generator.calls == []
    assert session.transaction_status == "I"
    assert len(await table(session)) == 60


async def test_what_would_be_refused_is_refused_or_told(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.max_calls = 5")
    query = "SELECT ai_generate(body) FROM docs"
    told = await document(session, "AI_ESTIMATE", query)
    assert (told["Estimate"]["Refused"], told["Estimate"]["Max Calls"]) == (True, 5)
    assert "it would be refused: tierkv.max_calls allows 5" in await text(
        session, f"EXPLAIN (AI_ESTIMATE) {query}"
    )
    with pytest.raises(SqlError, match="max_calls"):
        await session.execute(f"EXPLAIN ANALYZE {query}")
    with pytest.raises(UnknownModelError):
        await session.execute("EXPLAIN (AI_ESTIMATE) SELECT ai_generate('x', model => 'nope')")
    with pytest.raises(UdfArgumentError):
        await session.execute(
            "EXPLAIN (AI_ESTIMATE) SELECT ai_generate('x', options => o) "
            "FROM (VALUES ('{\"max_tokens\": 0}')) v(o)"
        )
    assert generator.calls == []


@pytest.mark.parametrize("query", [
    "SELECT id FROM docs WHERE ai_generate(body) = 'yes' LIMIT 1",
    "SELECT id FROM docs WHERE ai_generate(body) <> 'yes' LIMIT 3",
    "SELECT id FROM docs WHERE ai_generate(body) = 'yes' ORDER BY ai_generate(body || id) LIMIT 1",
])  # fmt: skip
async def test_analyze_makes_the_calls_that_the_statement_makes(
    session: DuckDbSession, generator: InstantGenerator, query: str
) -> None:
    await session.execute(query)
    alone = list(generator.prompts)
    generator.prompts.clear()
    told = await document(session, "ANALYZE", query)
    assert generator.prompts == alone
    assert told["Totals"]["Requests"] == len(alone)


async def test_streamed_and_replayed_statements_say_so(session: DuckDbSession) -> None:
    query = "SELECT id, ai_generate(body) FROM docs"
    for execution, told in (("stream", "stream"), ("replay", "replay")):
        await session.execute(f"SET tierkv.execution = {execution}")
        for options in ("AI_ESTIMATE", "ANALYZE", "ANALYZE off"):
            plan = await document(session, options, query)
            assert plan["Executor"] == told
            assert ("Not Streamed" in plan) == (execution == "replay")
    lines = await text(session, f"EXPLAIN {query}")
    assert "AI Plan: collect, evaluate, replay (not streamed: tierkv.execution is replay)" in lines
    await session.execute("SET tierkv.execution = auto")
    lines = await text(session, "EXPLAIN SELECT DISTINCT ai_generate(body) FROM docs")
    assert "(not streamed: DISTINCT needs all rows)" in lines


async def test_the_answer_cache_in_use_is_told(session: DuckDbSession) -> None:
    query = "SELECT ai_generate(body) FROM docs"
    assert (await document(session, "ANALYZE off", query))["Answer Cache"] == "off"
    assert "answer cache" not in await text(session, f"EXPLAIN {query}")
    await session.execute("SET tierkv.answer_cache = tenant")
    assert (await document(session, "AI_ESTIMATE", query))["Answer Cache"] == "tenant"
    assert "calls are reused: tenant (answer cache)" in await text(session, f"EXPLAIN {query}")
    estimated = await text(session, f"EXPLAIN (AI_ESTIMATE) {query}")
    assert "assumed: the answer cache has no answer" in estimated


@pytest.mark.parametrize("execution", ["replay", "stream"])
async def test_the_order_of_filters_is_told(session: DuckDbSession, execution: str) -> None:
    await session.execute(f"SET tierkv.execution = {execution}")
    await session.execute("CREATE TABLE big AS SELECT i AS id, 'p' || i AS p FROM range(600) r(i)")
    query = (
        "SELECT id FROM big WHERE ai_generate('a' || p) IS NOT NULL AND ai_generate(p) = 'maybe'"
    )
    told = await document(session, "ANALYZE", query)
    assert told["Executor"] == execution
    assert [one["Filter"] for one in told["Filters"]] == [2, 1]
    second, first = told["Filters"]
    assert first["Passed"] == first["Rows"] > 0
    assert 0 < second["Passed"] < second["Rows"]
    assert told["Calls"][0]["Asked"] < told["Calls"][1]["Asked"]
    assert "AI filters of WHERE in the order 2, 1: filter 1 passed " in await text(
        session, f"EXPLAIN ANALYZE {query}"
    )


@pytest.mark.parametrize("execution", ["replay", "stream"])
async def test_calls_are_never_fewer_than_distinct_calls(
    session: DuckDbSession, execution: str
) -> None:
    # The sample that orders the filters asks about rows which the statement itself never meets.
    await session.execute(f"SET tierkv.execution = {execution}")
    await session.execute("CREATE TABLE big AS SELECT i AS id, 'p' || i AS p FROM range(600) r(i)")
    first, second = "ai_generate('a' || p) > 'n'", "ai_generate(p) = 'maybe'"
    for query in (
        f"SELECT id FROM big WHERE {first} AND {second}",
        f"SELECT id FROM big WHERE {first} AND {second} LIMIT 3",
        f"SELECT id, ai_generate('c' || p) FROM big WHERE {second} AND {first} ORDER BY id LIMIT 1",
    ):
        totals = (await document(session, "ANALYZE", query))["Totals"]
        assert totals["Rows"] >= totals["Distinct Calls"] > 0
    told = await session.execute(
        "SELECT sum(ai_calls), sum(ai_calls_deduped) FROM tierkv.stat_statements "
        "WHERE query LIKE 'EXPLAIN%'"
    )
    ((calls, deduped),) = told.rows
    assert deduped == 0 < calls


async def test_many_prompts_are_sampled(
    session: DuckDbSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = "SELECT ai_generate('p' || (100 + id)) FROM docs"
    exact = await document(session, "AI_ESTIMATE", query)
    monkeypatch.setattr(estimate, "MOST_PREPARED", 20)
    sampled = await document(session, "AI_ESTIMATE", query)
    for name in ("Distinct Calls", "Requests", "Prompt Tokens", "Answer Tokens"):
        assert sampled["Estimate"][name] == exact["Estimate"][name]
    assert sampled["Calls"][0]["Rows"] == 60
    assert "every prompt that was made stands for 3.0" in sampled["Estimate"]["Assumed"]


async def test_an_aggregate_that_asks_in_pieces_is_a_lower_bound(session: DuckDbSession) -> None:
    query = "SELECT ai_agg(repeat(body, 100), 'Sum up') FROM docs"
    told = await document(session, "AI_ESTIMATE", query)
    took = await document(session, "ANALYZE", query)
    assert told["Calls"][0]["At Least"]
    assert not told["Estimate"]["Complete"]
    assert 1 < told["Estimate"]["Requests"] < took["Totals"]["Requests"]


async def test_without_ai_calls_there_is_nothing_to_estimate(session: DuckDbSession) -> None:
    rows = dict((await session.execute("EXPLAIN (AI_ESTIMATE) SELECT 1")).rows)
    assert rows["ai_plan"] == "AI Plan: no AI calls"
    plain = await session.execute("EXPLAIN SELECT 1")
    assert "ai_plan" not in dict(plain.rows)


@pytest.mark.parametrize(
    ("prompt", "head"),
    [
        (f"{SAME_BEGINNING}body", "the same instruction for all of them: "),
        ("ai_prompt('Sum up {0}', body)", "Sum up "),
        ("body || ' and this'", None),
        ("'nothing varies'", None),
        (f"{SAME_BEGINNING}body, documents => [body]", None),
    ],
)
async def test_the_constant_head_of_prompts_is_told(
    silent: DuckDbSession, prompt: str, head: str | None
) -> None:
    sql = f"SELECT ai_generate({prompt}) FROM docs"
    (call,) = (await document(silent, "AI_ESTIMATE", sql))["Calls"]
    assert call.get("Prompts Begin With") == head
    line = "every prompt begins with the same"
    told = await text(silent, f"EXPLAIN {sql}")
    assert (f'{line} {len(head)} characters: "{head}"' in told) if head else line not in told
