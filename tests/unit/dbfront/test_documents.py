"""The documents argument of AI calls, from SQL text to what the model is asked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import SqlError, TierKVError, UdfArgumentError
from tierkv.kvcore.request import BlendSelector
from tierkv.sql.plan.parameters import parameter_types


async def rows(session: DuckDbSession, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    return list((await session.execute(sql, params)).rows)


def asked(generator: InstantGenerator) -> list[tuple[tuple[str, ...], str]]:
    return sorted((call.documents, (call.messages or ())[-1].content) for call in generator.calls)


@pytest.mark.parametrize(
    ("written", "documents"),
    [
        ("documents => ['a', 'b']", ("a", "b")),
        ("documents := ARRAY['a', 'b']", ("a", "b")),
        ("NULL, NULL, NULL, ['a']", ("a",)),
        ("documents => [' a ', NULL, '', 'b' || 'c']", ("a", "bc")),
        ("documents => NULL", ()),
        ("documents => []", ()),
        ("documents => [NULL, ' ']", ()),
        ("documents => [1, 2]", ("1", "2")),
        ("documents => list_value('a')", ("a",)),
        ("documents => (SELECT list(body ORDER BY id) FROM docs WHERE id < 3)",
         ("body 0", "body 1", "body 2")),
        ("documents => ['a'], model => lower('TINY')", ("a",)),
        ("documents => ['a'], options => {'max_tokens': 1 + 1}", ("a",)),
    ],
)  # fmt: skip
async def test_documents_of_a_call(
    session: DuckDbSession, generator: InstantGenerator, written: str, documents: tuple[str, ...]
) -> None:
    answer = answer_text("\n".join((*documents, "q")))
    assert await rows(session, f"SELECT ai_generate('q', {written})") == [(answer,)]
    assert asked(generator) == [(documents, "q")]


async def test_documents_per_row_run_once_per_distinct_list(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    got = await rows(
        session,
        "SELECT ai_generate(p, documents => d) FROM (VALUES ('q', ['a', 'b']), ('q', ['a']), "
        "('q', ['a', NULL]), ('q', NULL), (NULL, ['a']), ('r', ['a']), ('q', ['b', 'a'])) v(p, d)",
    )
    assert got == [
        (answer_text("a\nb\nq"),),
        (answer_text("a\nq"),),
        (answer_text("a\nq"),),
        (answer_text("q"),),
        (None,),
        (answer_text("a\nr"),),
        (answer_text("b\na\nq"),),
    ]
    assert len(generator.calls) == 5


async def test_documents_gathered_by_group(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    got = await rows(
        session,
        "SELECT topic, ai_generate('sum up', documents => list(body ORDER BY id)) "
        "FROM docs WHERE id IN (0, 1, 4, 7) GROUP BY topic ORDER BY topic",
    )
    assert got[0] == (0, answer_text("body 0\nbody 4\nsum up"))
    assert (("body 0", "body 4"), "sum up") in asked(generator)
    assert ((), "sum up") in asked(generator)  # row 7 has no body


async def test_documents_in_a_write_and_in_a_filter(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute(
        "CREATE TABLE answers AS SELECT id, ai_generate('q', documents => [body]) AS a "
        "FROM docs WHERE ai_generate('ok?', documents => [body]) IS NOT NULL AND id < 4"
    )
    expected = [(i, answer_text(f"body {i}\nq")) for i in range(4)]
    assert await rows(session, "SELECT * FROM answers ORDER BY id") == expected


async def test_a_list_parameter(session: DuckDbSession, generator: InstantGenerator) -> None:
    assert await rows(session, "SELECT ai_generate($1, documents => $2)", "q", ["a", None]) == [
        (answer_text("a\nq"),)
    ]
    assert parameter_types("SELECT ai_generate($1, documents => $2), $3::text[]") == (
        "VARCHAR",
        "VARCHAR[]",
        "VARCHAR[]",
    )


@pytest.mark.parametrize(
    ("written", "position", "says"),
    [
        ("documents => 'a'", 37, "must be a list of text"),
        ("documents => 3", 37, "must be a list of text"),
        ("documents => {'a': 1}", 37, "must be a list of text"),
        ("documents => [['a']]", 37, "must be a list of text"),
        (f"documents => [{'1,' * limits.MAX_CHUNKS}1]", 37, "1025 documents"),
        ("docments => ['a']", 24, "no argument"),
        ("options => {'recompute_ratio': 0}", 35, "must be in (0, 1]"),
        ("options => {'recompute_ratio': 1.5}", 35, "must be in (0, 1]"),
        ("options => {'selector': 'best'}", 35, "hkvd, query, boundary"),
        ("options => {'blend': 1}", 35, "must be true or false"),
    ],
)
async def test_what_is_refused_when_the_statement_is_planned(
    session: DuckDbSession, generator: InstantGenerator, written: str, position: int, says: str
) -> None:
    with pytest.raises(UdfArgumentError) as raised:
        await session.execute(f"SELECT ai_generate(body, {written}) FROM docs")
    assert says in raised.value.message
    assert raised.value.position == position + 2
    assert generator.calls == []


@pytest.mark.parametrize(
    ("documents", "error", "says"),
    [
        ("body", SqlError, r"VARCHAR\[\]"),
        ("id", SqlError, r"VARCHAR\[\]"),
        ("range(2000)", UdfArgumentError, "2000 documents"),
    ],
)
async def test_what_is_refused_per_row(
    session: DuckDbSession, documents: str, error: type[TierKVError], says: str
) -> None:
    with pytest.raises(error, match=says):
        await session.execute(f"SELECT ai_generate('q', documents => {documents}) FROM docs")


async def test_settings_and_options_reach_the_call(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    async def call(options: str = "NULL") -> CallOptions:
        await session.execute(f"SELECT ai_generate('q', documents => ['a'], options => {options})")
        return generator.calls[-1].options

    plain = await call()
    assert (plain.blend, plain.recompute_ratio, plain.selector) == (None, None, None)
    chosen = await call("{'blend': true, 'recompute_ratio': 0.5, 'selector': 'query'}")
    assert (chosen.blend, chosen.recompute_ratio) == (True, 0.5)
    assert chosen.selector is BlendSelector.QUERY
    await session.execute("SET tierkv.recompute_ratio = 0.25")
    await session.execute("SET tierkv.selector = boundary")
    await session.execute("SET tierkv.chunk_separator = '###'")
    session_wide = await call("{'max_tokens': 3}")
    assert (session_wide.recompute_ratio, session_wide.selector) == (0.25, BlendSelector.BOUNDARY)
    assert session_wide.chunk_separator == "###"
    await session.execute("SET tierkv.blend = off")
    assert (await call("{'max_tokens': 4}")).blend is False
    assert (await call("{'blend': true}")).blend is True


@pytest.mark.parametrize(
    "wrong", ["recompute_ratio = 0", "recompute_ratio = 1.1", "selector = best", "blend = maybe"]
)
async def test_settings_that_can_not_be(session: DuckDbSession, wrong: str) -> None:
    with pytest.raises(TierKVError, match="invalid value"):
        await session.execute(f"SET tierkv.{wrong}")


async def test_a_refusal_is_one_notice(session: DuckDbSession, generator: InstantGenerator) -> None:
    generator.blend_refusal = "namespace ann does not allow blending"
    sql = "SELECT ai_generate('q', documents => [body], options => {'blend': %s}) FROM docs"
    (notice,) = (await session.execute(sql % "true")).notices
    assert notice.severity == "NOTICE"
    assert notice.message == "documents were not blended: namespace ann does not allow blending"
    assert "--blend on" in notice.hint
    assert (await session.execute(sql % "false")).notices == ()


async def test_explain_shows_documents(session: DuckDbSession, generator: InstantGenerator) -> None:
    result = await session.execute(
        "EXPLAIN SELECT ai_generate('q', documents => ['a', 'b']), "
        "ai_generate('q', documents => [body]), ai_generate('q') FROM docs"
    )
    plan = dict(result.rows)["ai_plan"]
    assert "call 1: ai_generate in SELECT, stage 1, model default, documents 2\n" in plan
    assert "call 2: ai_generate in SELECT, stage 1, model default, documents per row\n" in plan
    assert plan.endswith("call 3: ai_generate in SELECT, stage 1, model default")
    assert generator.calls == []
