"""Documents of AI calls beyond tests/sql/documents.test: parameters, limits, options, notices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.kvcore.request import BlendSelector
from tierkv.sql.plan.parameters import parameter_types


async def rows(session: DuckDbSession, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    return list((await session.execute(sql, params)).rows)


def asked(generator: InstantGenerator) -> list[tuple[tuple[str, ...], str]]:
    return sorted((call.documents, (call.messages or ())[-1].content) for call in generator.calls)


async def test_a_list_parameter(session: DuckDbSession, generator: InstantGenerator) -> None:
    assert await rows(session, "SELECT ai_generate($1, documents => $2)", "q", ["a", None]) == [
        (answer_text("a\nq"),)
    ]
    assert parameter_types("SELECT ai_generate($1, documents => $2), $3::text[]") == (
        "VARCHAR",
        "VARCHAR[]",
        "VARCHAR[]",
    )


async def test_a_list_of_too_many_documents(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    listed = f"[{'1,' * limits.MAX_CHUNKS}1]"
    with pytest.raises(UdfArgumentError, match="1025 documents") as raised:
        await session.execute(f"SELECT ai_generate(body, documents => {listed}) FROM docs")
    assert raised.value.position == 39
    assert generator.calls == []


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
