"""Groups as the engine gathers them: their order, DISTINCT, windows, and calls within calls."""

from __future__ import annotations

import pytest

from tests.fix_sql import InstantGenerator
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore import limits
from tierkv.kvcore.errors import SqlError
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.plan import plan_statement


async def rows(session: DuckDbSession, sql: str) -> list[tuple[object, ...]]:
    return list((await session.execute(sql)).rows)


@pytest.mark.parametrize(
    ("dialect", "order"),
    [
        (Dialect.DUCKDB, "list(CAST(b AS VARCHAR) ORDER BY k DESC, CAST(b AS VARCHAR))"),
        (
            Dialect.POSTGRES,
            "pg_catalog.array_agg(CAST(b AS pg_catalog.text) "
            "ORDER BY k DESC, CAST(b AS pg_catalog.text))",
        ),
    ],
)
def test_rows_with_equal_keys_come_in_the_same_order_in_each_round(
    dialect: Dialect, order: str
) -> None:
    plan = plan_statement("SELECT ai_agg(b, 'q' ORDER BY k DESC) FROM t", dialect=dialect)
    assert order in plan.engine_sql.text


@pytest.mark.parametrize(
    ("window", "unordered"),
    [
        ("", True),
        (" OVER ()", True),
        (" OVER (PARTITION BY g)", True),
        (" OVER (PARTITION BY g ORDER BY k)", False),
        (" OVER w", False),
        (" OVER (w)", False),
        (" FILTER (WHERE k > 1) OVER ()", True),
    ],
)
def test_a_group_without_an_order_is_asked_about_in_any(window: str, unordered: bool) -> None:
    (form,) = plan_statement(f"SELECT ai_agg(b, 'q'){window} FROM t").forms
    assert form.unordered is unordered


def nested(depth: int, name: str = "ai_generate") -> str:
    return f"SELECT {f'{name}(' * depth}'x'{')' * depth}"


async def test_calls_in_calls_are_answered_down_to_a_limit(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.texts = {"x": "1"} | {str(n): str(n + 1) for n in range(limits.MAX_NESTED_CALLS)}
    deepest = nested(limits.MAX_NESTED_CALLS)
    assert await rows(session, deepest) == [(str(limits.MAX_NESTED_CALLS),)]
    for depth in (limits.MAX_NESTED_CALLS + 1, 5_000):
        with pytest.raises(SqlError, match="nested more than") as raised:
            await rows(session, nested(depth))
        assert raised.value.sqlstate == "54001"
    with pytest.raises(SqlError, match="nested more than"):
        await rows(session, f"SELECT {'''ai_prompt('{0}', ''' * 500}'x'{')' * 500}")
