"""A function that a user may not call is refused before any call, in every kind of statement."""

from __future__ import annotations

import pytest

from tests.fix_sql import InstantGenerator
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore.access import EVERYTHING, NOTHING, NameSet, Rights, RoleRights
from tierkv.kvcore.errors import RightMissingError


@pytest.mark.parametrize("execution", ["stream", "replay", "auto"])
@pytest.mark.parametrize(
    "statement",
    [
        "SELECT ai_generate(body) FROM docs",
        "SELECT ai_count_tokens(ai_generate(body)) FROM docs ORDER BY id LIMIT 2",
        "SELECT ai_count_tokens(body), ai_filter('Is it?', body) FROM docs WHERE id > 1000",
        "CREATE TABLE made AS SELECT ai_generate(body) AS b FROM docs",
        "UPDATE docs SET body = ai_generate(body)",
        "EXPLAIN ANALYZE SELECT ai_generate(body) FROM docs",
        "EXPLAIN (AI_ESTIMATE) SELECT ai_generate(body) FROM docs",
        'SELECT "AI_GENERATE"(body) FROM docs',
    ],
)
async def test_it_is_refused(
    session: DuckDbSession, generator: InstantGenerator, statement: str, execution: str
) -> None:
    only = NameSet(names=frozenset({"ai_count_tokens"}))
    generator.rights.rights = Rights({"public": RoleRights(only, EVERYTHING)})
    await session.execute(f"SET tierkv.execution = {execution}")
    with pytest.raises(RightMissingError, match="permission denied for function"):
        await session.execute(statement)
    assert generator.calls == []
    assert (await session.execute("SELECT ai_count_tokens('x')")).rows
    generator.rights.rights = Rights({"public": RoleRights(NOTHING, NOTHING), "ann": RoleRights()})
    with pytest.raises(RightMissingError):
        await session.execute("SELECT ai_count_tokens('x')")
