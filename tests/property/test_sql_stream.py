"""Random statements of the streamed shape: stream, replay and a plain function agree."""

from __future__ import annotations

from typing import Any

import duckdb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fix_sql import SqlExamples, answer_text, short_texts
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement_results import Column, StatementResult
from tierkv.sql.plan.plan import plan_statement

texts = st.one_of(st.none(), st.sampled_from(["", "a", "b'b", "é\n", "yes"]), short_texts(5))
tables = st.lists(
    st.tuples(st.integers(0, 3), texts, st.one_of(st.none(), st.integers(-3, 3))),
    min_size=1,
    max_size=90,
)
words = st.sampled_from(["yes", "no", "maybe", "red", "blue"])
calls = st.sampled_from(
    ["ai_generate(p)", "ai_generate('q' || p)", "ai_generate(t.p, model => 'other')"]
)


@st.composite
def answers(draw: st.DrawFn) -> str:
    """An item with AI calls."""
    call, other, word = draw(calls), draw(calls), draw(words)
    return draw(
        st.sampled_from(
            [
                call,
                f"upper({call})",
                f"coalesce({call}, {other})",
                f"CASE WHEN {call} = '{word}' THEN d ELSE g END",
                f"CASE WHEN g > 1 THEN {call} ELSE p END",
                f"CASE {call} WHEN '{word}' THEN {other} END",
                f"{call} || '/' || i",
                f"length({call}) + f",
                f"({call} IS NULL OR {other} LIKE '%e%')",
                f"nullif({call}, '{word}')",
            ]
        )
    )


@st.composite
def filters(draw: st.DrawFn, *, ai: bool = True) -> str:
    """A conjunct of WHERE."""
    call, other, word = draw(calls), draw(calls), draw(words)
    plain = ["g > 1", "p IS NOT NULL", "g BETWEEN 1 AND 2", "i IN (SELECT max(i) FROM t)"]
    if not ai:
        return draw(st.sampled_from([*plain, "TRUE"]))
    return draw(
        st.sampled_from(
            [
                f"{call} = '{word}'",
                f"{call} IS NOT NULL",
                f"NOT ({call} = '{word}')",
                f"({call} = '{word}' OR {other} <> '{word}')",
                f"(g > 2 OR {call} = '{word}')",
                f"{call} IN ('yes', '{word}')",
                f"CASE WHEN g = 0 THEN {call} = '{word}' ELSE g < 3 END",
                f"f < length({call})",
            ]
        )
    )


@st.composite
def statements(draw: st.DrawFn) -> str:
    """A statement, without its LIMIT; ``#`` stands for that."""
    plain = draw(st.lists(st.sampled_from(["i", "t.g", "*", "p || '!' AS q", "d"]), max_size=2))
    wanted = draw(st.lists(answers(), max_size=2))
    if not wanted and not plain:
        plain = ["i"]
    items = draw(st.permutations([*plain, *wanted]))
    where = [draw(filters()) for _ in range(draw(st.integers(0, 2)) or not wanted)]
    where += [draw(filters(ai=False)) for _ in range(draw(st.integers(0, 1)))]
    text = f"SELECT {', '.join(items)} FROM t"
    if where:
        text += f" WHERE {' AND '.join(draw(st.permutations(where)))}"
    return text + draw(st.sampled_from(["", " ORDER BY t.i DESC", " ORDER BY f NULLS FIRST, t.i"]))


def run(
    examples: SqlExamples, rows: list[tuple[Any, ...]], text: str, execution: str
) -> tuple[list[tuple[Any, ...]], tuple[Column, ...] | None]:
    async def read(session: DuckDbSession) -> Any:
        await session.execute(f"SET tierkv.execution = {execution}")
        await session.execute("SET tierkv.max_concurrency = 7")
        await session.execute(TABLE)
        for row in rows:
            await session.execute("INSERT INTO t VALUES ($1, $2, $3, $4, $5)", row)
        opened = await session.execute_rows(text)
        if isinstance(opened, StatementResult):
            return list(opened.rows), opened.columns
        got: list[tuple[Any, ...]] = []
        while batch := await opened.next_rows():
            got += batch
        assert opened.result is not None
        assert opened.result.command_tag == f"SELECT {len(got)}"
        return got, opened.columns

    return examples.play(read)


TABLE = "CREATE TABLE t (i INT, g INT, p VARCHAR, f DOUBLE, d DECIMAL(7,2))"
limits = st.tuples(st.one_of(st.none(), st.integers(0, 8)), st.sampled_from([0, 0, 2]))


def make_plain_function(plain: duckdb.DuckDBPyConnection) -> None:
    plain.create_function(
        "plain_ai",
        lambda prompt, model: answer_text(prompt, model),
        ["VARCHAR", "VARCHAR"],
        "VARCHAR",
        null_handling="special",
    )
    plain.execute("CREATE MACRO ai_generate(prompt, model := 'tiny') AS plain_ai(prompt, model)")


def plain_rows(
    examples: SqlExamples, rows: list[tuple[Any, ...]], text: str
) -> list[tuple[Any, ...]]:
    plain = examples.plain(make_plain_function)
    plain.execute(TABLE)
    for row in rows:
        plain.execute("INSERT INTO t VALUES ($1, $2, $3, $4, $5)", row)
    return plain.execute(text.replace("model =>", "model :=")).fetchall()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(table=tables, text=statements(), limit=limits)
def test_a_stream_equals_replay_and_a_plain_function(
    examples: SqlExamples,
    table: list[tuple[int, str | None, int | None]],
    text: str,
    limit: tuple[int | None, int],
) -> None:
    rows = [(number, g, p, f, g) for number, (g, p, f) in enumerate(table)]
    most, offset = limit
    ending = ("" if most is None else f" LIMIT {most}") + (f" OFFSET {offset}" if offset else "")
    assert plan_statement(text + ending).stream is not None, "the shape is streamed"
    streamed, columns = run(examples, rows, text + ending, "stream")
    replayed, replayed_columns = run(examples, rows, text, "replay")
    assert replayed == plain_rows(examples, rows, text)
    assert streamed == replayed[offset:][:most]
    assert columns == replayed_columns


@st.composite
def top_statements(draw: st.DrawFn) -> str:
    """A statement ordered by answers; all its keys together tell rows apart."""
    call, item = draw(calls), draw(answers())
    key = draw(
        st.sampled_from([call, f"upper({call}) DESC", f"{call} NULLS FIRST", "v", "v DESC, g"])
    )
    where = draw(st.sampled_from(["", f" WHERE {draw(filters())}", " WHERE g > 0"]))
    return f"SELECT i, {call} AS v, {item} AS w FROM t{where} ORDER BY {key}, t.i"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    table=tables,
    text=top_statements(),
    most=st.integers(0, 6),
    offset=st.sampled_from([0, 3]),
)
def test_the_first_rows_by_answer_are_those_of_a_plain_function(
    examples: SqlExamples,
    table: list[tuple[int, str | None, int | None]],
    text: str,
    most: int,
    offset: int,
) -> None:
    rows = [(number, g, p, f, g) for number, (g, p, f) in enumerate(table)]
    ending = f" LIMIT {most}" + (f" OFFSET {offset}" if offset else "")
    got, columns = run(examples, rows, text + ending, "auto")
    whole, whole_columns = run(examples, rows, text, "replay")
    assert whole == plain_rows(examples, rows, text)
    assert got == whole[offset:][:most]
    assert columns == whole_columns
